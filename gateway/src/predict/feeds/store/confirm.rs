//! Asks the master for the pages of a request's prompt.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_wire::admin::KeyReplicas;
use mooncake_wire::key::BlockKeyHash;
use moongate_block_hash::{BlockDigest, HashedBlock};
use moongate_master_client::admin::AdminError;
use moongate_scheduler::StoreMedium;
use tokio::time::{Instant, timeout};

use super::StoreView;
use crate::predict::store_keys::StoreKeyNaming;

/// Pages asked for at first, and at most, at once: an answer about 64 takes the master 0.2 ms.
const INITIAL_PROBE: usize = 64;
const MAX_PROBE: usize = 512;
/// How long a page that was seen in the store is taken for there. The store evicts what was not used for longest, and a lease that an
/// engine takes when it reads lasts 10 s; a page just seen is not the first to go.
pub(super) const CONFIRMATION_TTL: Duration = Duration::from_secs(2);
/// How many confirmed pages are remembered.
pub(super) const MAX_CONFIRMED_BLOCKS: u64 = 1 << 20;
/// How long a request waits for the master: far less than what a wrong guess costs.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(20);
/// After a failure, requests do not ask for so long.
const FAILURE_BACKOFF: Duration = Duration::from_secs(1);

impl StoreView {
    /// Asks the master for pages of a prompt, in order, until one is not there. `pages` are the prompt's, `keys` the same in the index.
    pub(crate) async fn confirm(&self, layout: &StoreKeyNaming, pages: &[HashedBlock], keys: &[u64]) {
        if self.backoff_until.lock().is_some_and(|until| Instant::now() < until) {
            return;
        }
        match timeout(CONFIRM_TIMEOUT, self.query_blocks(layout, pages, keys)).await {
            Ok(Ok(())) => {
                self.metrics.confirmed.inc();
            }
            failure => {
                self.metrics.unconfirmed.inc();
                if let Ok(Err(error)) = failure {
                    tracing::debug!(%error, "the store's master could not be asked for a prompt's pages");
                }
                *self.backoff_until.lock() = Some(Instant::now() + FAILURE_BACKOFF);
            }
        }
    }

    async fn query_blocks(
        &self,
        layout: &StoreKeyNaming,
        pages: &[HashedBlock],
        keys: &[u64],
    ) -> Result<(), AdminError> {
        let confirmed = keys.iter().take_while(|key| self.confirmed.contains_key(*key)).count();
        // A full index may have displaced some of them since.
        let known = self.index.shared_prefix(&keys[..confirmed]);
        let (mut at, mut size) = (known, INITIAL_PROBE);
        while at < pages.len() {
            let end = pages.len().min(at + size);
            if !self.query_chunk(layout, &pages[at..end], &keys[at..end]).await? {
                return Ok(());
            }
            (at, size) = (end, MAX_PROBE.min(size * 2));
        }
        Ok(())
    }

    /// Returns whether all of these pages are there.
    async fn query_chunk(
        &self,
        layout: &StoreKeyNaming,
        pages: &[HashedBlock],
        keys: &[u64],
    ) -> Result<bool, AdminError> {
        let probes: Vec<[String; 2]> =
            pages.iter().filter_map(|page| Some(layout.probe_keys(hash(page)?))).collect();
        let mut asked: Vec<&str> = probes.iter().flatten().map(String::as_str).collect();
        asked.dedup();
        let mut answers = HashMap::with_capacity(asked.len());
        let told = |key: &str, replicas: &KeyReplicas<'_>| {
            answers
                .insert(key.to_owned(), replicas.ok.then(|| self.nodes.lock().location(replicas)).flatten());
        };
        self.admin.locate(&asked, told).await?;
        let mut complete = true;
        for ([first, last], &key) in probes.iter().zip(keys) {
            let places = [first, last].map(|key| answers.get(key).cloned().flatten());
            complete &= self.record_block(layout, key, places);
        }
        Ok(complete)
    }

    /// Enters what was found of one page. Returns whether it is there.
    pub(super) fn record_block(
        &self,
        layout: &StoreKeyNaming,
        key: u64,
        places: [Option<(String, StoreMedium)>; 2],
    ) -> bool {
        let mut nodes = self.nodes.lock();
        self.index.update(|pages| {
            let [first, last] =
                places.map(|place| place.and_then(|(at, medium)| Some((nodes.node_at(&at, pages)?, medium))));
            let (Some(first), Some(last)) = (first, last) else {
                layout.parts().for_each(|part| pages.remove_store_part(key, part));
                return false;
            };
            let count = layout.parts().count();
            for (number, part) in layout.parts().enumerate() {
                let (node, medium) = if number + 1 == count { last } else { first };
                pages.add_store_part(key, part, node, medium);
            }
            self.confirmed.insert(key, ());
            true
        })
    }
}

fn hash(page: &HashedBlock) -> Option<BlockKeyHash> {
    match &page.digest {
        BlockDigest::Sha256(digest) => BlockKeyHash::new(digest),
        BlockDigest::Unsigned(_) | BlockDigest::Signed(_) => None,
    }
}

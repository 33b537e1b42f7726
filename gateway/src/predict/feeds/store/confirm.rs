//! Queries the master for the blocks of a request's prompt.

use std::collections::HashMap;
use std::time::Duration;

use mooncake_wire::admin::KeyReplicas;
use moongate_block_hash::HashedBlock;
use moongate_master_client::admin::AdminError;
use moongate_scheduler::StoreMedium;
use tokio::time::{Instant, timeout};

use super::StoreView;
use crate::kv_index::StoreKeyNaming;
use crate::predict::stored_blocks::store_hash;

/// Blocks in the first query, and in the largest one: a response about 64 takes the master 0.2 ms.
const INITIAL_PROBE: usize = 64;
const MAX_PROBE: usize = 512;
/// How long a block that was found in the store is assumed to be there. The store evicts what was unused for longest, and a lease
/// that an engine takes when it reads lasts 10 s; a block just confirmed is not the first to be evicted.
pub(super) const CONFIRMATION_TTL: Duration = Duration::from_secs(2);
/// Most confirmed blocks in the cache.
pub(super) const MAX_CONFIRMED_BLOCKS: u64 = 1 << 20;
/// How long a request waits for the master: far less than the cost of a wrong prediction.
const CONFIRM_TIMEOUT: Duration = Duration::from_millis(20);
/// Pause of queries after a failure.
const FAILURE_BACKOFF: Duration = Duration::from_secs(1);

impl StoreView {
    /// Queries the master for the blocks of a prompt, in order, until one is missing. `blocks` are the prompt's, `keys` the same in
    /// the index.
    pub(crate) async fn confirm(&self, naming: &StoreKeyNaming, blocks: &[HashedBlock], keys: &[u64]) {
        if self.backoff_until.lock().is_some_and(|until| Instant::now() < until) {
            return;
        }
        match timeout(CONFIRM_TIMEOUT, self.query_blocks(naming, blocks, keys)).await {
            Ok(Ok(())) => {
                self.metrics.confirmed.inc();
            }
            failure => {
                self.metrics.unconfirmed.inc();
                if let Ok(Err(error)) = failure {
                    tracing::debug!(%error, "cannot query the store's master for a prompt's blocks");
                }
                *self.backoff_until.lock() = Some(Instant::now() + FAILURE_BACKOFF);
            }
        }
    }

    async fn query_blocks(
        &self,
        naming: &StoreKeyNaming,
        blocks: &[HashedBlock],
        keys: &[u64],
    ) -> Result<(), AdminError> {
        let confirmed = keys.iter().take_while(|key| self.confirmed.contains_key(*key)).count();
        // A full index may have evicted some of them since.
        let known = self.index.shared_prefix(&keys[..confirmed]);
        let (mut at, mut size) = (known, INITIAL_PROBE);
        while at < blocks.len() {
            let end = blocks.len().min(at + size);
            if !self.query_chunk(naming, &blocks[at..end], &keys[at..end]).await? {
                return Ok(());
            }
            (at, size) = (end, MAX_PROBE.min(size * 2));
        }
        Ok(())
    }

    /// Returns whether all of these blocks are in the store.
    async fn query_chunk(
        &self,
        naming: &StoreKeyNaming,
        blocks: &[HashedBlock],
        keys: &[u64],
    ) -> Result<bool, AdminError> {
        let probes: Vec<[String; 2]> =
            blocks.iter().filter_map(|block| Some(naming.probe_keys(store_hash(block)?))).collect();
        let mut queried: Vec<&str> = probes.iter().flatten().map(String::as_str).collect();
        queried.dedup();
        let mut locations = HashMap::with_capacity(queried.len());
        let record = |key: &str, replicas: &KeyReplicas<'_>| {
            locations
                .insert(key.to_owned(), replicas.ok.then(|| self.nodes.lock().location(replicas)).flatten());
        };
        self.admins.locate(&queried, record).await?;
        let mut complete = true;
        for ([first, last], &key) in probes.iter().zip(keys) {
            let locations = [first, last].map(|key| locations.get(key).cloned().flatten());
            complete &= self.record_block(naming, key, locations);
        }
        Ok(complete)
    }

    /// Records the locations of one block. Returns whether it is complete.
    pub(super) fn record_block(
        &self,
        naming: &StoreKeyNaming,
        key: u64,
        locations: [Option<(String, StoreMedium)>; 2],
    ) -> bool {
        let mut nodes = self.nodes.lock();
        self.index.update(|blocks| {
            let [first, last] = locations.map(|location| {
                location.and_then(|(endpoint, medium)| Some((nodes.node_at(&endpoint, blocks)?, medium)))
            });
            let (Some(first), Some(last)) = (first, last) else {
                naming.parts().for_each(|part| blocks.remove_store_part(key, part));
                return false;
            };
            let count = naming.parts().count();
            for (number, part) in naming.parts().enumerate() {
                let (node, medium) = if number + 1 == count { last } else { first };
                blocks.add_store_part(key, part, node, medium);
            }
            self.confirmed.insert(key, ());
            true
        })
    }
}

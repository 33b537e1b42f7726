//! A real Mooncake store for the engines' pages: objects are put, read and verified.
//!
//! An object's expected content follows from its key, so that every reader can verify it. Store errors never fail a
//! request: pages that cannot be read are computed.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use mooncake_wire::key::{AttentionKind, BlockKeyHash, KeyLayout, SglangKeyFormat};
use moongate_block_hash::{BlockDigest, BlockHashChain};
use moongate_store_client::{KvClient, KvError, PutOptions};
use tokio::sync::Semaphore;

use super::events::PromptPrefix;
use super::l3_store::WrittenPage;
use super::stats::SimStatsRecorder;
use super::tokens::{hash_bytes, mix};
use super::{SimEngineOptions, SimEngineState, SimProtocol};

/// Bytes per object; a real engine's page has far more.
pub(crate) const OBJECT_BYTES: usize = 4_096;
/// Objects of a page of an SGLang engine with one rank: keys and values.
pub(crate) const OBJECTS_PER_PAGE: u64 = 2;
/// Maximum number of prompts per process whose pages are being put. Pages of further prompts are not stored.
const MAX_PENDING_PUTS: usize = 256;

/// A real store, shared by all engines of a fleet.
#[derive(Clone)]
pub(crate) struct MooncakePageStore {
    client: KvClient,
    writes: Arc<Semaphore>,
}

impl fmt::Debug for MooncakePageStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore").finish_non_exhaustive()
    }
}

/// Objects of a prompt's pages.
#[derive(Debug)]
pub(crate) struct PageObjects {
    keys: Vec<String>,
    per_page: usize,
}

impl PageObjects {
    /// The objects that contain the full pages of a prefix. None if the pages have no hashes.
    pub(crate) fn of(config: &SimEngineOptions, prefix: &PromptPrefix<'_>) -> Self {
        let layout = layout(config);
        let per_page = usize::try_from(layout.parts_per_page()).unwrap_or(1).max(1);
        let page_tokens = u32::try_from(config.page_size).unwrap_or(u32::MAX);
        let mut pages = Vec::new();
        if let Ok(scheme) = prefix.namespace.store_hash_scheme(config.protocol, page_tokens) {
            BlockHashChain::new(scheme).extend(prefix.tokens, &mut pages);
        }
        let hashes = pages.iter().map_while(|page| match page.digest {
            BlockDigest::Sha256(bytes) => BlockKeyHash::new(&bytes),
            BlockDigest::Unsigned(_) | BlockDigest::Signed(_) => None,
        });
        let keys = hashes.flat_map(|hash| layout.keys(hash).map(|key| key.to_string()).collect::<Vec<_>>());
        Self { keys: keys.collect(), per_page }
    }

    /// Keeps only the objects of pages that are to be written.
    pub(crate) fn restrict_to(self, prefix: &PromptPrefix<'_>, written: &[WrittenPage]) -> Self {
        let written: HashSet<u128> = written.iter().map(|(page, _)| *page).collect();
        let per_page = self.per_page;
        let pages = prefix.chain.pages().iter().zip(self.keys.chunks(per_page));
        let keys = pages.filter(|(page, _)| written.contains(page)).flat_map(|(_, keys)| keys);
        Self { keys: keys.cloned().collect(), per_page }
    }

    /// The existing keys of a range of pages.
    fn keys_of(&self, pages: &Range<usize>) -> Vec<&str> {
        let keys = self.keys.chunks(self.per_page).skip(pages.start).take(pages.len());
        keys.flatten().map(String::as_str).collect()
    }

    /// Number of leading pages all of whose objects are intact.
    fn leading_pages(&self, good: impl Iterator<Item = bool>) -> usize {
        good.take_while(|good| *good).count() / self.per_page
    }
}

fn layout(config: &SimEngineOptions) -> KeyLayout {
    match config.protocol {
        SimProtocol::Sglang => KeyLayout::Sglang {
            prefix: KeyLayout::sglang_prefix(None, &config.model),
            attention: AttentionKind::Mha,
            tp_size: 1,
            pp_size: 1,
            form: SglangKeyFormat::V0_5_10,
        },
        SimProtocol::Vllm => KeyLayout::Vllm {
            namespace: config.model_path().rsplit('/').next().unwrap_or_default().to_owned(),
            tp_size: 1,
            pcp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            groups: 1,
        },
    }
}

/// Expected content of an object.
fn expected_content(key: &str) -> Vec<u8> {
    let seed = hash_bytes(key.as_bytes());
    (0..(OBJECT_BYTES / 8) as u64).flat_map(|word| mix(seed, word).to_le_bytes()).collect()
}

impl MooncakePageStore {
    pub(crate) fn new(client: KvClient) -> Self {
        Self { client, writes: Arc::new(Semaphore::new(MAX_PENDING_PUTS)) }
    }

    /// Number of leading `pages` that the store has without a gap.
    pub(crate) async fn lookup(
        &self,
        objects: &PageObjects,
        pages: &Range<usize>,
        stats: &SimStatsRecorder,
    ) -> usize {
        let keys = objects.keys_of(pages);
        if keys.is_empty() {
            return 0;
        }
        match self.client.exist(&keys).await {
            Ok(present) => {
                let found = present.iter().filter(|present| **present).count();
                stats.update(|stats| stats.store_misses += (keys.len() - found) as u64);
                objects.leading_pages(present.into_iter())
            }
            Err(error) => {
                tracing::debug!(%error, "store lookup failed");
                stats.update(|stats| stats.store_failures += keys.len() as u64);
                0
            }
        }
    }

    /// Reads pages. Returns how many leading ones are present and intact.
    pub(crate) async fn get(
        &self,
        objects: &PageObjects,
        pages: &Range<usize>,
        stats: &SimStatsRecorder,
    ) -> usize {
        let keys = objects.keys_of(pages);
        let got = self.client.get_batch(&keys).await;
        let outcomes: Vec<ObjectReadResult> =
            keys.iter().zip(got).map(|(key, got)| ObjectReadResult::of(key, got)).collect();
        let count = |expected: ObjectReadResult| {
            outcomes.iter().filter(|outcome| **outcome == expected).count() as u64
        };
        stats.update(|stats| {
            stats.store_hits += count(ObjectReadResult::Intact);
            stats.store_misses += count(ObjectReadResult::Missing);
            stats.store_corrupt += count(ObjectReadResult::Corrupt);
            stats.store_failures += count(ObjectReadResult::Failed);
        });
        objects.leading_pages(outcomes.iter().map(|outcome| *outcome == ObjectReadResult::Intact))
    }

    /// Puts the missing objects in the background.
    pub(crate) fn put_in_background(&self, engine: &Arc<SimEngineState>, objects: PageObjects) {
        let stats = Arc::clone(&engine.stats);
        let Ok(permit) = Arc::clone(&self.writes).try_acquire_owned() else {
            stats.update(|stats| stats.store_put_failures += objects.keys.len() as u64);
            return;
        };
        let (store, stop) = (self.clone(), engine.supervisor.token());
        engine.supervisor.spawn("sim-engine-store", async move {
            stop.run_until_cancelled(store.put(&objects, &stats)).await;
            drop(permit);
        });
    }

    async fn put(&self, objects: &PageObjects, stats: &SimStatsRecorder) {
        let keys: Vec<&str> = objects.keys.iter().map(String::as_str).collect();
        if keys.is_empty() {
            return;
        }
        // If the lookup fails, all objects are put.
        let present = self.client.exist(&keys).await.unwrap_or_else(|_| vec![false; keys.len()]);
        let missing = keys.into_iter().zip(present).filter(|(_, present)| !present);
        let contents: Vec<(&str, Vec<u8>)> = missing.map(|(key, _)| (key, expected_content(key))).collect();
        let puts: Vec<(&str, &[u8])> = contents.iter().map(|(key, bytes)| (*key, bytes.as_slice())).collect();
        let results = self.client.put_batch(&puts, &PutOptions::default()).await;
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            tracing::debug!(%error, "cannot store a page");
        }
        let failed = results.iter().filter(|result| result.is_err()).count() as u64;
        stats.update(|stats| {
            stats.store_puts += results.len() as u64 - failed;
            stats.store_put_failures += failed;
        });
    }
}

/// Result of reading one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectReadResult {
    Intact,
    Missing,
    Corrupt,
    Failed,
}

impl ObjectReadResult {
    fn of(key: &str, got: Result<bytes::Bytes, KvError>) -> Self {
        match got {
            Ok(bytes) if bytes == expected_content(key) => Self::Intact,
            Ok(_) => {
                tracing::error!(key, "the store returned other bytes than were put");
                Self::Corrupt
            }
            Err(KvError::NotFound { .. }) => Self::Missing,
            Err(error) => {
                tracing::debug!(%error, "cannot read a page; computing it");
                Self::Failed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::SimRole;
    use crate::engine::namespace::PromptNamespace;
    use crate::engine::tokens::PageHashChain;

    fn objects(protocol: SimProtocol, tokens: &[u32]) -> (PageObjects, PageHashChain) {
        let mut config = SimEngineOptions::new(SimRole::Plain, protocol);
        config.model = "some/model".to_owned();
        let chain = PageHashChain::of(tokens, config.page_size, 0);
        let namespace = PromptNamespace::default();
        let prefix = PromptPrefix { chain: &chain, tokens, namespace: &namespace };
        (PageObjects::of(&config, &prefix), chain)
    }

    #[test]
    fn keys_are_those_of_the_engines() {
        let tokens: Vec<u32> = (0..130).collect();
        let (sglang, chain) = objects(SimProtocol::Sglang, &tokens);
        assert_eq!((sglang.keys.len(), chain.pages().len()), (4, 2));
        assert!(sglang.keys[0].starts_with("some-model_") && sglang.keys[0].ends_with("_0_k"));
        assert!(sglang.keys[1].ends_with("_0_v"));
        assert_eq!(sglang.keys_of(&(1..2)), [&sglang.keys[2], &sglang.keys[3]]);
        assert!(sglang.keys_of(&(2..5)).is_empty());
        let (vllm, chain) = objects(SimProtocol::Vllm, &tokens);
        assert_eq!((vllm.keys.len(), chain.pages().len()), (8, 8));
        assert!(vllm.keys[0].starts_with("model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"), "{}", vllm.keys[0]);
    }

    #[test]
    fn a_page_counts_with_all_its_objects_only() {
        let (objects, chain) = objects(SimProtocol::Sglang, &(0..300).collect::<Vec<u32>>());
        assert_eq!(objects.leading_pages([true, true, true, false, true, true].into_iter()), 1);
        assert_eq!(objects.leading_pages([true; 4].into_iter()), 2);
        let second = objects.keys_of(&(1..2)).iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        let (tokens, namespace) = (Vec::new(), PromptNamespace::default());
        let prefix = PromptPrefix { chain: &chain, tokens: &tokens, namespace: &namespace };
        assert_eq!(objects.restrict_to(&prefix, &[(chain.pages()[1], None)]).keys, second);
    }

    #[test]
    fn corrupt_objects_are_detected() {
        let right = expected_content("a");
        assert_eq!((right.len(), expected_content("b") == right), (OBJECT_BYTES, false));
        assert_eq!(ObjectReadResult::of("a", Ok(right.clone().into())), ObjectReadResult::Intact);
        let mut wrong = right;
        wrong[4_095] ^= 1;
        assert_eq!(ObjectReadResult::of("a", Ok(wrong.into())), ObjectReadResult::Corrupt);
        assert_eq!(
            ObjectReadResult::of("a", Err(KvError::NotFound { key: "a".to_owned() })),
            ObjectReadResult::Missing
        );
    }
}

//! Where a prompt can be reused once its request has ended, for engines whose events do not say it.
//!
//! Rules of SGLang 0.5.23 with a cache of its own for layers with a sliding window (`mem_cache/unified_cache/components/swa.py`,
//! `mem_cache/common.py` `free_swa_out_of_window_slots`, `managers/schedule_batch.py` `maybe_evict_swa`):
//!
//! - After prefill, the window before the last token that could be reused is kept: a prompt of whole pages can be reused up to its last
//!   page, any other one up to its last whole page.
//! - If windows are missing in the middle of the cached prefix (it branches off another prompt), the prompt is kept only up to there, and
//!   the rest at the end of the request. Until then decoding frees what has left the window, in steps of [`EVICTION_INTERVAL`] tokens.
//! - A request that ends with its first token keeps nothing after such a branch.

use std::sync::{Arc, Weak};

use moongate_block_hash::HashedBlock;
use moongate_scheduler::index::EngineCacheTier;

use super::block_keyspace::BlockKeyspace;
use super::cache_groups::CHECKPOINTS;
use super::index::EngineSlotGuard;

/// Decoded tokens between two evictions from the cache of sliding windows: SGLang's default `SGLANG_SWA_EVICTION_INTERVAL`.
const EVICTION_INTERVAL: u32 = 128;

/// What an engine had cached of a prompt when the request was sent, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CachedPrefix {
    /// In layers with full attention.
    pub(crate) full: u32,
    /// That it could reuse.
    pub(crate) reusable: u32,
    /// The most that it could reuse, if all of the prompt were cached.
    pub(crate) limit: u32,
}

/// Keys of the last blocks of a prompt, in the group of checkpoints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LastBlockKeys {
    /// The last one that the same prompt can reuse: at least one token is always computed.
    pub(crate) reusable: Option<u64>,
    /// The last one.
    pub(crate) whole: Option<u64>,
}

impl LastBlockKeys {
    /// Keys for a prompt with these blocks, of which `reusable` can be reused.
    pub(crate) fn of(blocks: &[HashedBlock], reusable: usize, keyspace: &BlockKeyspace) -> Self {
        let namespace = keyspace.namespace().in_group(CHECKPOINTS);
        let key = |block: &HashedBlock| namespace.key(block.event_hash);
        Self {
            reusable: reusable.checked_sub(1).and_then(|last| blocks.get(last)).map(key),
            whole: blocks.last().map(key),
        }
    }
}

/// The checkpoints of one prompt on the engine that computes it.
#[derive(Debug, Clone)]
pub(crate) struct PromptCheckpoints {
    slot: Weak<EngineSlotGuard>,
    keys: LastBlockKeys,
    cached: CachedPrefix,
    block_tokens: u32,
    /// Whether another engine decodes.
    is_prefill: bool,
}

impl PromptCheckpoints {
    /// Checkpoints of a prompt that the engine with this slot computes.
    pub(crate) fn new(
        slot: &Arc<EngineSlotGuard>,
        keys: LastBlockKeys,
        cached: CachedPrefix,
        block_tokens: u32,
        is_prefill: bool,
    ) -> Self {
        Self { slot: Arc::downgrade(slot), keys, cached, block_tokens, is_prefill }
    }

    /// The request is complete. `response_tokens` and `found`, what the engine had cached of the prompt, are `None` if they are not reported.
    pub(crate) fn learn(&self, response_tokens: Option<u64>, found: Option<u64>) {
        let Some(slot) = self.slot.upgrade() else { return };
        let response_tokens = if self.is_prefill { Some(2) } else { response_tokens };
        let found = found.and_then(|found| u32::try_from(found).ok());
        let cached = CachedPrefix { reusable: found.unwrap_or(self.cached.reusable), ..self.cached };
        let (index, engine) = (slot.index(), slot.slot());
        let is_checkpoint = |key| index.holders(&[key]).has(engine, 0);
        let keys: Vec<u64> = match cached.kept(self.block_tokens, response_tokens) {
            KeptEnd::Whole => self.keys.reusable.into_iter().chain(self.keys.whole).collect(),
            KeptEnd::Reusable => self.keys.reusable.into_iter().collect(),
            KeptEnd::ReusableIfStored if self.keys.whole.is_some_and(is_checkpoint) => {
                self.keys.reusable.into_iter().collect()
            }
            KeptEnd::ReusableIfStored | KeptEnd::Unknown => return,
        };
        index.update_blocks(&keys, |index, keys| index.add_engine_blocks(engine, EngineCacheTier::L1, keys));
    }
}

/// Up to where the end of a prompt can be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeptEnd {
    /// The last whole block, and what the same prompt can reuse.
    Whole,
    /// What the same prompt can reuse.
    Reusable,
    /// What the same prompt can reuse, if an event shows that the prompt was kept before the response. It was not if a concurrent
    /// request has computed a common prefix in the meantime.
    ReusableIfStored,
    Unknown,
}

impl CachedPrefix {
    fn kept(self, block_tokens: u32, response_tokens: Option<u64>) -> KeptEnd {
        let block_tokens = block_tokens.max(1);
        // The last eviction before decoding has freed whole blocks, and left up to two of them more than a window.
        let until_eviction = u64::from(EVICTION_INTERVAL.saturating_sub(2 * block_tokens));
        let ends_early = response_tokens.is_some_and(|tokens| (2..=until_eviction).contains(&tokens));
        if ends_early {
            KeptEnd::Whole
        } else if self.full == self.limit / block_tokens * block_tokens {
            // If it is a branch, that is where the same prompt would be reused.
            KeptEnd::Reusable
        } else if self.full == self.reusable {
            KeptEnd::ReusableIfStored
        } else {
            KeptEnd::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_index::KvIndex;

    #[test]
    fn prompts_that_extend_reusable_ones_are_kept() {
        let cached = CachedPrefix { full: 64, reusable: 64, limit: 319 };
        assert_eq!(cached.kept(32, Some(2)), KeptEnd::Whole);
        for response in [None, Some(1), Some(1000)] {
            assert_eq!(cached.kept(32, response), KeptEnd::ReusableIfStored, "{response:?}");
        }
    }

    #[test]
    fn after_branches_only_short_responses_keep_the_end() {
        let kept = |full, response| CachedPrefix { full, reusable: 32, limit: 319 }.kept(32, response);
        assert_eq!(kept(64, Some(2)), KeptEnd::Whole);
        assert_eq!(kept(64, Some(64)), KeptEnd::Whole);
        for response in [None, Some(0), Some(1), Some(65)] {
            assert_eq!(kept(64, response), KeptEnd::Unknown, "{response:?}");
            assert_eq!(kept(288, response), KeptEnd::Reusable, "{response:?}: the branch is the last block");
        }
        let large_blocks = CachedPrefix { full: 64, reusable: 0, limit: 319 }.kept(64, Some(2));
        assert_eq!(large_blocks, KeptEnd::Unknown);
    }

    #[test]
    fn learned_checkpoints_are_blocks_of_the_engine() {
        let index = KvIndex::new(100);
        let slot = Arc::new(EngineSlotGuard::new(index.clone()));
        let has = || {
            let holders = index.holders(&[1, 2, 3]);
            [0, 1, 2].map(|block| holders.has(slot.slot(), block))
        };
        let keys = LastBlockKeys { reusable: Some(2), whole: Some(3) };
        let new = |cached, is_prefill| PromptCheckpoints::new(&slot, keys, cached, 32, is_prefill);
        let branch = CachedPrefix { full: 32, reusable: 0, limit: 95 };
        new(branch, false).learn(Some(500), None);
        new(CachedPrefix { reusable: 32, ..branch }, false).learn(Some(500), Some(0));
        assert_eq!(has(), [false; 3]);
        new(CachedPrefix { full: 64, ..branch }, false).learn(Some(500), None);
        assert_eq!(has(), [false, true, false], "the branch is the last block that can be reused");
        new(branch, true).learn(Some(500), None);
        assert_eq!(has(), [false, true, true], "another engine decodes");
    }

    #[test]
    fn long_responses_keep_the_end_only_if_it_was_stored_before() {
        let index = KvIndex::new(100);
        let slot = Arc::new(EngineSlotGuard::new(index.clone()));
        let has = || index.holders(&[1]).has(slot.slot(), 0);
        let keys = LastBlockKeys { reusable: Some(1), whole: Some(2) };
        let cached = CachedPrefix { full: 0, reusable: 0, limit: 63 };
        let checkpoints = PromptCheckpoints::new(&slot, keys, cached, 32, false);
        checkpoints.learn(Some(500), None);
        assert!(!has());
        index.update(|blocks| blocks.add_engine_blocks(slot.slot(), EngineCacheTier::L1, &[2]));
        checkpoints.learn(Some(500), None);
        assert!(has());
    }

    #[test]
    fn an_engine_that_is_gone_learns_nothing() {
        let slot = Arc::new(EngineSlotGuard::new(KvIndex::new(100)));
        let cached = CachedPrefix { full: 0, reusable: 0, limit: 10 };
        let checkpoints = PromptCheckpoints::new(&slot, LastBlockKeys::default(), cached, 32, false);
        drop(slot);
        checkpoints.learn(Some(2), None);
    }
}

//! What one engine has of a prompt.

use moongate_scheduler::TierHits;
use moongate_scheduler::index::{EngineHits, IndexLookup};

use super::prediction_query::HashedChunks;
use crate::fleet::EngineGroupMember;
use crate::kv_index::KvIndex;

/// Hits of one engine.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EngineHitsInGroup {
    pub(super) hits: TierHits,
    /// Cached tokens of a last block that the engine computes again.
    pub(super) dropped_tokens: u32,
    /// Tokens in the engine's own blocks of layers with full attention.
    pub(super) full_tokens: u32,
    /// Whether LMCache has more of the prompt than the engine's own blocks.
    pub(super) in_chunks: bool,
    /// Position of the engine's group among those with a prediction.
    pub(super) group: usize,
}

impl EngineHitsInGroup {
    /// Hits in the engine's own blocks and in the store.
    pub(super) fn of_blocks(
        engine: &EngineGroupMember,
        blocks: EngineHits,
        page_tokens: u32,
        group: usize,
    ) -> Self {
        Self { hits: engine.hits(blocks, page_tokens), group, ..Self::default() }
    }

    /// Adds what the engine's LMCache has beyond its own blocks: chunks from the beginning of the prompt on.
    pub(super) fn add_chunks(
        &mut self,
        index: &KvIndex,
        engine: &EngineGroupMember,
        chunks: &[HashedChunks],
        reusable_tokens: u32,
        lookup: &mut IndexLookup,
    ) {
        let Some(rule) = engine.chunk_rule.known().filter(|_| !engine.hit_history.misses_chunks()) else {
            return;
        };
        let Some(HashedChunks { keys, .. }) = chunks.iter().find(|chunks| chunks.rule == rule) else {
            return;
        };
        index.lookup(keys, lookup);
        let found = lookup.engine(engine.slot).local.saturating_mul(rule.chunk_tokens).min(reusable_tokens);
        let hits = &mut self.hits;
        let added = found.saturating_sub(hits.l1_tokens.saturating_add(hits.l2_tokens));
        self.in_chunks = added > 0;
        hits.l2_tokens += added;
        hits.l3_tokens = hits.l3_tokens.saturating_sub(added);
    }

    /// Removes the last block, if the engine computes it again. A connector or a store would restore it.
    pub(super) fn drop_last_block(&mut self, engine: &EngineGroupMember, page_tokens: u32) {
        let only_own_blocks = self.hits.total() == self.hits.l1_tokens;
        if only_own_blocks && engine.hit_history.drops_last_block() {
            self.dropped_tokens = page_tokens.min(self.hits.l1_tokens);
            self.hits.l1_tokens -= self.dropped_tokens;
        }
    }

    /// Adds the hits of another prompt of a batch.
    pub(super) fn add_prompt(&mut self, added: Self) {
        let Self { hits, dropped_tokens, full_tokens, in_chunks, group } = self;
        hits.l1_tokens = hits.l1_tokens.saturating_add(added.hits.l1_tokens);
        hits.l2_tokens = hits.l2_tokens.saturating_add(added.hits.l2_tokens);
        hits.l3_tokens = hits.l3_tokens.saturating_add(added.hits.l3_tokens);
        *dropped_tokens = dropped_tokens.saturating_add(added.dropped_tokens);
        *full_tokens = full_tokens.saturating_add(added.full_tokens);
        *in_chunks |= added.in_chunks;
        *group = added.group;
    }
}

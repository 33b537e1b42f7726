//! Hits of engines whose model has several kinds of attention.

use moongate_scheduler::index::{BlockHolders, CacheGroup, EngineHits, EngineSlot, reusable_tokens};

use super::prompt_tokens::HashedTokens;
use crate::kv_index::{BlockKeyspace, KvIndex, NumberedCacheGroup};

/// Hits of one prompt. Engines of one model have equal groups, so each group is looked up once.
pub(super) struct HybridHits<'a> {
    index: &'a KvIndex,
    keyspace: &'a BlockKeyspace,
    blocks: &'a HashedTokens,
    reusable_tokens: u32,
    looked_up: Vec<(NumberedCacheGroup, BlockHolders)>,
}

impl<'a> HybridHits<'a> {
    /// An engine takes at most `reusable_tokens` of the prompt from its cache.
    pub(super) fn new(
        index: &'a KvIndex,
        keyspace: &'a BlockKeyspace,
        blocks: &'a HashedTokens,
        reusable_tokens: u32,
    ) -> Self {
        Self { index, keyspace, blocks, reusable_tokens, looked_up: Vec::new() }
    }

    /// What an engine with these groups has in its own memory. Objects of a store are not counted: which groups it has
    /// is not known.
    pub(super) fn of(&mut self, engine: EngineSlot, groups: &[NumberedCacheGroup]) -> EngineHits {
        let Some(tables): Option<Vec<usize>> = groups.iter().map(|&group| self.look_up(group)).collect()
        else {
            return EngineHits::default();
        };
        let rules: Vec<CacheGroup> = groups.iter().map(|known| known.group).collect();
        let tokens = reusable_tokens(&rules, self.reusable_tokens, |group, block| {
            self.looked_up[tables[group]].1.has(engine, block as usize)
        });
        let blocks = tokens / self.keyspace.page_tokens().max(1);
        EngineHits { l1: blocks, local: blocks, shared: 0 }
    }

    /// Position in `looked_up` of a group's holders; `None` if its blocks do not consist of whole hashed blocks.
    fn look_up(&mut self, group: NumberedCacheGroup) -> Option<usize> {
        if let Some(position) = self.looked_up.iter().position(|(known, _)| *known == group) {
            return Some(position);
        }
        let hashed = self.keyspace.page_tokens().max(1);
        let scale = group.group.block_tokens / hashed;
        if scale == 0 || !group.group.block_tokens.is_multiple_of(hashed) {
            return None;
        }
        let namespace = self.keyspace.namespace().in_group(group.number);
        // A hash covers everything before its block, so the last one identifies a larger block.
        let last_of_each = self.blocks.blocks().iter().skip(scale as usize - 1).step_by(scale as usize);
        let keys: Vec<u64> = last_of_each.map(|block| namespace.key(block.event_hash)).collect();
        self.looked_up.push((group, self.index.holders(&keys)));
        Some(self.looked_up.len() - 1)
    }
}

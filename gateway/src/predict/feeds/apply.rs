//! Applies the events of one source to the index.

use std::sync::Arc;

use mooncake_wire::events::{
    BlockHashes, BlockRemoved, BlockStored, EngineEvent, EngineEventBatch, EventDecodeError, LoraAdapter,
    StorageMedium,
};
use moongate_discovery::PrefixCheckpoints;
use moongate_scheduler::index::{BlockHashNamespace, EngineCacheTier};

use crate::kv_index::{
    BlockKeyspace, ChunkHashRule, ChunkRuleStatus, EngineSlotGuard, HashRuleStatus, LeftOutBlocks, RankSlots,
};

/// Tokens that every sliding window has at least: engines do not report the size.
const SMALLEST_WINDOW: u32 = 128;

/// Blocks that are looked up before any is changed.
const BLOCK_BATCH: usize = 64;

/// The target of the events of one source: a rank of an engine, or several that publish on one socket.
#[derive(Debug, Clone)]
pub(crate) struct EngineEventApplier {
    /// Slots of all ranks of the engine.
    slots: RankSlots,
    /// The rank of events that name none.
    rank: usize,
    /// Number of the engine's first rank in its events: a node of a larger deployment may start at another than 0.
    first_number: u32,
    /// How predictions hash the engine's blocks.
    keyspace: Arc<BlockKeyspace>,
    /// Where the engine can reuse prefixes, if not after every block.
    checkpoints: Option<PrefixCheckpoints>,
    /// The ranks of this source, in ascending order, as far as known.
    published: Vec<usize>,
}

/// What was done with a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AppliedEvents {
    /// Events that could not be decoded.
    pub(crate) undecodable: u64,
    /// Stored blocks whose hashes follow another rule, and that could not be hashed again.
    pub(crate) left_out: LeftOutBlocks,
    /// What is now known of the engine's hashes, if that has changed.
    pub(crate) hash_rule: Option<HashRuleStatus>,
    /// What is now known of the chunks of its LMCache, if that has changed.
    pub(crate) chunk_rule: Option<ChunkRuleStatus>,
}

impl EngineEventApplier {
    /// The target of a source that publishes the events of the rank with this number. `None` if the engine has no such rank.
    pub(crate) fn new(
        slots: RankSlots,
        number: u32,
        first_number: u32,
        keyspace: Arc<BlockKeyspace>,
    ) -> Option<Self> {
        let rank = match slots.len() {
            1 => 0,
            _ => usize::try_from(number.checked_sub(first_number)?).ok()?,
        };
        (rank < slots.len()).then(|| Self {
            slots,
            rank,
            first_number,
            keyspace,
            checkpoints: None,
            published: vec![rank],
        })
    }

    /// For an engine that reuses prefixes only at checkpoints, if it does.
    pub(crate) fn with_checkpoints(self, checkpoints: Option<PrefixCheckpoints>) -> Self {
        Self { checkpoints, ..self }
    }

    /// Applies the batch in `payload`.
    pub(crate) fn apply(&mut self, payload: &[u8]) -> Result<AppliedEvents, EventDecodeError> {
        let batch = EngineEventBatch::decode(payload)?;
        let rank = batch.dp_rank.and_then(|number| self.rank_of(number)).unwrap_or(self.rank);
        if let Err(position) = self.published.binary_search(&rank) {
            self.published.insert(position, rank);
        }
        Ok(self.target(rank).map(|target| target.apply(&batch)).unwrap_or_default())
    }

    fn rank_of(&self, number: u32) -> Option<usize> {
        let rank = usize::try_from(number.checked_sub(self.first_number)?).ok()?;
        (rank < self.slots.len()).then_some(rank)
    }

    /// Removes everything known of an engine that has restarted, possibly with another model. Ranks of other sources keep their
    /// blocks.
    pub(super) fn restarted(&self) {
        for target in self.published.iter().filter_map(|rank| self.target(*rank)) {
            target.clear(None);
            target.slot.groups().clear();
            target.slot.hash_rule().clear();
            target.slot.chunk_rule().clear();
            target.slot.hit_history().clear();
            target.slot.adapters().clear();
        }
    }

    fn target(&self, rank: usize) -> Option<RankTarget<'_>> {
        let Self { keyspace, checkpoints, .. } = self;
        Some(RankTarget { slot: self.slots.get(rank)?, keyspace, checkpoints: *checkpoints })
    }
}

/// The target of events of one rank.
struct RankTarget<'a> {
    slot: &'a EngineSlotGuard,
    keyspace: &'a BlockKeyspace,
    checkpoints: Option<PrefixCheckpoints>,
}

impl RankTarget<'_> {
    fn apply(&self, batch: &EngineEventBatch<'_>) -> AppliedEvents {
        let mut applied = AppliedEvents::default();
        if self.slot.hash_rule().is_different() {
            self.rehash(batch);
        }
        for event in batch.events() {
            match event {
                Ok(EngineEvent::Stored(stored)) => self.stored(batch, &stored, &mut applied),
                Ok(EngineEvent::Removed(removed)) => self.removed(&removed),
                // The engine clears its own blocks; its LMCache keeps its chunks.
                Ok(EngineEvent::Cleared(None)) if self.slot.chunk_rule().has_chunks() => {
                    self.clear(Some(StorageMedium::Gpu));
                }
                Ok(EngineEvent::Cleared(medium)) => self.clear(medium),
                Err(_) => applied.undecodable += 1,
            }
        }
        applied
    }

    fn stored(&self, batch: &EngineEventBatch<'_>, stored: &BlockStored<'_>, applied: &mut AppliedEvents) {
        let chunk = self.slot.chunk_rule().read(self.keyspace, stored);
        applied.chunk_rule = chunk.status.or(applied.chunk_rule);
        if chunk.is_chunk {
            // Also while the rule is not known: it is learned from the first ones.
            self.apply_keys(self.chunks(), EngineCacheTier::L2, low_bits(stored.hashes), true);
            return;
        }
        if let Some(LoraAdapter::Name(name)) = stored.lora {
            self.slot.adapters().learn(name);
        }
        let was_different = self.slot.hash_rule().is_different();
        if let Some(status) = self.slot.hash_rule().check(self.keyspace, stored) {
            self.change_hashes(was_different, batch);
            applied.hash_rule = Some(status);
        }
        if let Some(kind) = self.checkpoints {
            self.add_checkpoints(kind, stored);
        }
        if let (Some(group), Some(tier)) = (self.slot.groups().learn(stored), tier(stored.medium)) {
            let namespace = self.keyspace.namespace().in_group(group);
            if self.slot.hash_rule().is_different() {
                let rehashed = self.slot.rehashed().stored(stored.hashes, group, tier);
                applied.left_out.add(rehashed.left_out);
                self.apply_keys(namespace, tier, rehashed.hashes.into_iter(), true);
            } else {
                self.apply_keys(namespace, tier, low_bits(stored.hashes), true);
            }
        }
    }

    /// Starts or stops hashing the engine's blocks again, if its rule turned out to be another one than before.
    fn change_hashes(&self, was_different: bool, batch: &EngineEventBatch<'_>) {
        let is_different = self.slot.hash_rule().is_different();
        if is_different != was_different {
            // Earlier blocks are indexed by the wrong hashes.
            self.clear(None);
        }
        if is_different && !was_different {
            self.rehash(batch);
        }
    }

    /// Computes the hashes of all blocks in the batch before any is indexed: events about a group with a sliding window, or about
    /// another tier, do not contain all tokens, and the blocks of all groups have the same hashes.
    fn rehash(&self, batch: &EngineEventBatch<'_>) {
        for event in batch.events() {
            if let Ok(EngineEvent::Stored(stored)) = event
                && tier(stored.medium).is_some()
                && self.slot.groups().learn(&stored).is_some()
            {
                self.slot.rehashed().learn(self.keyspace, &stored);
            }
        }
    }

    fn removed(&self, removed: &BlockRemoved<'_>) {
        self.slot.hit_history().record_removed(removed.hashes.len());
        if let (true, Some(tier)) = (self.checkpoints.is_some(), tier(removed.medium)) {
            let checkpoints = self.slot.groups().learn_checkpoints(self.keyspace.page_tokens());
            let namespace = self.keyspace.namespace().in_group(checkpoints);
            self.apply_keys(namespace, tier, low_bits(removed.hashes), false);
        }
        if removed.medium == Some(StorageMedium::StoreMemory) && self.slot.chunk_rule().has_chunks() {
            self.apply_keys(self.chunks(), EngineCacheTier::L2, low_bits(removed.hashes), false);
        } else if let (Some(group), Some(tier)) =
            (self.slot.groups().known(removed.group), tier(removed.medium))
        {
            let namespace = self.keyspace.namespace().in_group(group);
            if self.slot.hash_rule().is_different() {
                let hashes = self.slot.rehashed().removed(removed.hashes, group, tier);
                self.apply_keys(namespace, tier, hashes.into_iter(), false);
            } else {
                self.apply_keys(namespace, tier, low_bits(removed.hashes), false);
            }
        }
    }

    /// Adds the checkpoints that the blocks of a request imply: their last one, the one at which the request branched off, and all
    /// blocks if every window is larger. Of others it is not known whether what following tokens attend to is still cached.
    fn add_checkpoints(&self, kind: PrefixCheckpoints, stored: &BlockStored<'_>) {
        if tier(stored.medium) != Some(EngineCacheTier::L1) {
            return;
        }
        let (index, slot) = (self.slot.index(), self.slot.slot());
        let group = self.slot.groups().learn_checkpoints(self.keyspace.page_tokens());
        let namespace = self.keyspace.namespace().in_group(group);
        let has_windows = kind == PrefixCheckpoints::RequestEndsAndBranches;
        let branch = stored.parent.filter(|_| has_windows);
        let max_in_window = SMALLEST_WINDOW / stored.block_size.max(1);
        let are_in_window = has_windows && stored.hashes.len() <= max_in_window as usize;
        let before_end = if are_in_window { 0 } else { stored.hashes.len().saturating_sub(1) };
        let ends = branch.into_iter().chain(stored.hashes.iter().skip(before_end));
        let keys: Vec<u64> = ends.map(|hash| namespace.key(hash.low64())).collect();
        index.update_blocks(&keys, |index, keys| index.add_engine_blocks(slot, EngineCacheTier::L1, keys));
    }

    fn chunks(&self) -> BlockHashNamespace {
        ChunkHashRule::namespace(self.keyspace)
    }

    /// Removes the rank's blocks in a medium, or all of them.
    fn clear(&self, medium: Option<StorageMedium<'_>>) {
        let tiers = match medium {
            None => &[EngineCacheTier::L1, EngineCacheTier::L2][..],
            Some(medium) => match tier(Some(medium)) {
                Some(EngineCacheTier::L1) => &[EngineCacheTier::L1][..],
                Some(EngineCacheTier::L2) => &[EngineCacheTier::L2],
                None => &[],
            },
        };
        let (index, slot) = (self.slot.index(), self.slot.slot());
        for &tier in tiers {
            index.update(|blocks| blocks.clear_engine_tier(slot, tier));
            self.slot.rehashed().clear(tier);
        }
    }

    fn apply_keys(
        &self,
        namespace: BlockHashNamespace,
        tier: EngineCacheTier,
        hashes: impl Iterator<Item = u64>,
        stored: bool,
    ) {
        let (index, slot) = (self.slot.index(), self.slot.slot());
        let mut keys = hashes.map(|hash| namespace.key(hash));
        let mut batch = [0; BLOCK_BATCH];
        loop {
            let mut len = 0;
            for (target_key, key) in batch.iter_mut().zip(&mut keys) {
                *target_key = key;
                len += 1;
            }
            if len == 0 {
                return;
            }
            index.update_blocks(&batch[..len], |index, blocks| {
                if stored {
                    index.add_engine_blocks(slot, tier, blocks);
                } else {
                    index.remove_engine_blocks(slot, tier, blocks);
                }
            });
        }
    }
}

/// The parts of hashes that are indexed.
fn low_bits<'a>(hashes: BlockHashes<'a>) -> impl Iterator<Item = u64> + use<'a> {
    hashes.iter().map(|hash| hash.low64())
}

/// The tier of a medium; `None` if it is not the engine's own memory.
fn tier(medium: Option<StorageMedium<'_>>) -> Option<EngineCacheTier> {
    match medium {
        // Old engines name no medium and only have device memory.
        None | Some(StorageMedium::Gpu) => Some(EngineCacheTier::L1),
        Some(StorageMedium::Cpu | StorageMedium::CpuPinned) => Some(EngineCacheTier::L2),
        // The store's blocks are known from its master.
        Some(_) => None,
    }
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;

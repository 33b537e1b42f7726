//! Applies one engine's events to the index.

use std::sync::Arc;

use mooncake_wire::events::{BlockHashes, EngineEvent, EngineEventBatch, EventDecodeError, StorageMedium};
use moongate_scheduler::index::{BlockHashNamespace, EngineCacheTier, EngineSlot};

use crate::kv_index::{BlockKeyspace, EngineCacheGroups, EngineHashRule, HashRuleStatus, KvIndex};

/// Blocks that are looked up before any is changed.
const BLOCK_BATCH: usize = 64;

/// The target of one engine's events.
#[derive(Debug, Clone)]
pub(crate) struct EngineEventApplier {
    pub(crate) index: Arc<KvIndex>,
    pub(crate) slot: EngineSlot,
    pub(crate) namespace: BlockHashNamespace,
    pub(crate) groups: Arc<EngineCacheGroups>,
    pub(crate) hash_rule: Arc<EngineHashRule>,
    /// How predictions hash the engine's blocks.
    pub(crate) keyspace: Arc<BlockKeyspace>,
}

/// What was done with a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AppliedEvents {
    /// Events that could not be decoded.
    pub(crate) undecodable: u64,
    /// What is now known of the engine's hashes, if that has changed.
    pub(crate) hash_rule: Option<HashRuleStatus>,
}

impl EngineEventApplier {
    /// Applies the batch in `payload`.
    pub(crate) fn apply(&self, payload: &[u8]) -> Result<AppliedEvents, EventDecodeError> {
        let mut applied = AppliedEvents::default();
        for event in EngineEventBatch::decode(payload)?.events() {
            match event {
                Ok(EngineEvent::Stored(stored)) => {
                    applied.hash_rule = self.hash_rule.check(&self.keyspace, &stored).or(applied.hash_rule);
                    if let Some(group) = self.groups.learn(&stored) {
                        self.apply_blocks(group, stored.medium, stored.hashes, true);
                    }
                }
                Ok(EngineEvent::Removed(removed)) => {
                    if let Some(group) = self.groups.known(removed.group) {
                        self.apply_blocks(group, removed.medium, removed.hashes, false);
                    }
                }
                Ok(EngineEvent::Cleared(medium)) => self.clear(medium),
                Err(_) => applied.undecodable += 1,
            }
        }
        Ok(applied)
    }

    /// Removes everything known of an engine that has restarted, possibly with another model.
    pub(super) fn restarted(&self) {
        self.clear(None);
        self.groups.clear();
        self.hash_rule.clear();
    }

    /// Removes the engine's blocks in a medium, or all of them.
    pub(super) fn clear(&self, medium: Option<StorageMedium<'_>>) {
        let tiers = match medium {
            None => &[EngineCacheTier::L1, EngineCacheTier::L2][..],
            Some(medium) => match tier(Some(medium)) {
                Some(EngineCacheTier::L1) => &[EngineCacheTier::L1][..],
                Some(EngineCacheTier::L2) => &[EngineCacheTier::L2],
                None => &[],
            },
        };
        tiers.iter().for_each(|tier| self.index.update(|blocks| blocks.clear_engine_tier(self.slot, *tier)));
    }

    fn apply_blocks(
        &self,
        group: u32,
        medium: Option<StorageMedium<'_>>,
        hashes: BlockHashes<'_>,
        stored: bool,
    ) {
        let Some(tier) = tier(medium) else { return };
        let namespace = self.namespace.in_group(group);
        let mut keys = hashes.iter().map(|hash| namespace.key(hash.low64()));
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
            self.index.update_blocks(&batch[..len], |index, blocks| {
                if stored {
                    index.add_engine_blocks(self.slot, tier, blocks);
                } else {
                    index.remove_engine_blocks(self.slot, tier, blocks);
                }
            });
        }
    }
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
mod tests {
    use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind};
    use moongate_scheduler::index::IndexLookup;

    use super::*;
    use crate::kv_index::EngineSlotGuard;

    /// A recorded batch of SGLang: one block of 32 tokens stored in device memory, its hash -694835627279051526.
    const STORED: &str = include_str!("testdata/sglang-stored.hex");
    const HASH: i64 = -694_835_627_279_051_526;

    fn bytes(hex: &str) -> Vec<u8> {
        let hex = hex.trim();
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn a_recorded_event_makes_a_hit_and_a_clear_ends_it() {
        let index = KvIndex::new(100);
        let entry = EngineSlotGuard::new(index.clone());
        let namespace = BlockHashNamespace::new(&["sglang", "tiny"]);
        let facts = EngineFacts {
            models: vec!["tiny".to_owned()],
            page_size: Some(32),
            hashing: Some(EngineBlockHashing::Sglang { namespaced: None, bigrams: false }),
            ..EngineFacts::unreported(EngineKind::Sglang)
        };
        let keyspace = Arc::new(BlockKeyspace::from_facts(&facts).unwrap());
        let target = EngineEventApplier {
            index: index.clone(),
            slot: entry.slot(),
            namespace,
            groups: entry.groups().clone(),
            hash_rule: entry.hash_rule().clone(),
            keyspace,
        };
        let confirmed = AppliedEvents { hash_rule: Some(HashRuleStatus::Confirmed), undecodable: 0 };
        assert_eq!(target.apply(&bytes(STORED)).unwrap(), confirmed);
        let mut hits = IndexLookup::default();
        let key = namespace.key(HASH.cast_unsigned());
        index.lookup(&[key], &mut hits);
        assert_eq!(hits.engine(entry.slot()).l1, 1);
        target.clear(None);
        index.lookup(&[key], &mut hits);
        assert_eq!(hits.engine(entry.slot()).l1, 0);
        assert!(target.apply(b"garbage").is_err());
    }
}

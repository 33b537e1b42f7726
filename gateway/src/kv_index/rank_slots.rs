//! Slots in the index of one engine's data-parallel ranks, each with a cache of its own.

use std::sync::Arc;

use moongate_scheduler::index::EngineSlot;
use parking_lot::Mutex;

use super::hash_rule::HashRuleStatus;
use super::index::{EngineSlotGuard, KvIndex};

/// Slots of an engine's ranks, in their order. At least one.
pub(crate) type RankSlots = Arc<[Arc<EngineSlotGuard>]>;

/// The slots of an engine. They outlive fleet snapshots.
#[derive(Debug)]
pub(crate) struct EngineSlots {
    index: Arc<KvIndex>,
    /// Empty until the number of ranks is known.
    ranks: Mutex<RankSlots>,
}

impl EngineSlots {
    pub(crate) fn new(index: Arc<KvIndex>) -> Self {
        Self { index, ranks: Mutex::new(Arc::new([])) }
    }

    /// Slots of this many ranks: the existing ones first. The blocks of other ranks are removed with the last reference to their slots.
    pub(crate) fn of_ranks(&self, count: u32) -> RankSlots {
        let count = count.max(1) as usize;
        let mut ranks = self.ranks.lock();
        if ranks.len() != count {
            let added = (ranks.len()..count).map(|_| Arc::new(EngineSlotGuard::new(self.index.clone())));
            *ranks = ranks.iter().take(count).cloned().chain(added).collect();
        }
        ranks.clone()
    }

    /// The slot of the first rank; `None` if the engine has never been usable.
    pub(crate) fn first(&self) -> Option<EngineSlot> {
        self.ranks.lock().first().map(|slot| slot.slot())
    }

    /// The slots of all ranks; empty if the engine has never been usable.
    pub(crate) fn ranks(&self) -> RankSlots {
        self.ranks.lock().clone()
    }

    /// Whether the engine's hashes are those that predictions assume: the worst status of its ranks.
    pub(crate) fn hash_rule_status(&self) -> HashRuleStatus {
        let ranks = self.ranks.lock().clone();
        let statuses = ranks.iter().map(|slot| slot.hash_rule().status());
        let severity = |status: &HashRuleStatus| match status {
            HashRuleStatus::Unchecked => 0,
            HashRuleStatus::Confirmed => 1,
            HashRuleStatus::Different { .. } => 2,
        };
        statuses.max_by_key(severity).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::{EngineCacheTier, IndexLookup};

    use super::*;

    #[test]
    fn ranks_keep_their_slots_while_the_engine_has_them() {
        let index = KvIndex::new(100);
        let engine = EngineSlots::new(index.clone());
        assert_eq!(engine.first(), None);
        let two = engine.of_ranks(2);
        assert!(Arc::ptr_eq(&two, &engine.of_ranks(2)));
        let [first, second] = [two[0].slot(), two[1].slot()];
        assert_ne!(first, second);
        index.update(|blocks| {
            blocks.add_engine_blocks(first, EngineCacheTier::L1, &[1, 2]);
            blocks.add_engine_blocks(second, EngineCacheTier::L1, &[1]);
        });
        drop(two);
        let mut hits = IndexLookup::default();
        index.lookup(&[1, 2], &mut hits);
        assert_eq!((hits.engine(first).l1, hits.engine(second).l1), (2, 1));
        let one = engine.of_ranks(1);
        assert_eq!((one.len(), one[0].slot(), engine.first()), (1, first, Some(first)));
        index.lookup(&[1, 2], &mut hits);
        assert_eq!((hits.engine(first).l1, hits.engine(second).l1), (2, 0), "the second rank is gone");
    }
}

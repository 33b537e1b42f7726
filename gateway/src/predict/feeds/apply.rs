//! One engine's events, applied to the index.

use std::sync::Arc;

use mooncake_wire::events::{BlockHashes, EngineEvent, EngineEventBatch, EventDecodeError, StorageMedium};
use moongate_scheduler::index::{BlockHashNamespace, EngineCacheTier, EngineSlot};

use crate::predict::index::KvIndex;

/// Pages that are looked for before any is changed.
const BLOCK_BATCH: usize = 64;

/// Where one engine's events go.
#[derive(Debug, Clone)]
pub(super) struct EngineEventApplier {
    pub(super) index: Arc<KvIndex>,
    pub(super) slot: EngineSlot,
    pub(super) namespace: BlockHashNamespace,
}

impl EngineEventApplier {
    /// Applies the batch in `payload`. Returns how many of its events could not be read.
    pub(super) fn apply(&self, payload: &[u8]) -> Result<u64, EventDecodeError> {
        let mut unread = 0;
        for event in EngineEventBatch::decode(payload)?.events() {
            match event {
                Ok(EngineEvent::Stored(stored)) if counts(stored.group) => {
                    self.pages(stored.medium, stored.hashes, true);
                }
                Ok(EngineEvent::Removed(removed)) if counts(removed.group) => {
                    self.pages(removed.medium, removed.hashes, false);
                }
                Ok(EngineEvent::Cleared(medium)) => self.clear(medium),
                Ok(_) => {}
                Err(_) => unread += 1,
            }
        }
        Ok(unread)
    }

    /// Forgets the engine's pages in a medium, or all of them.
    pub(super) fn clear(&self, medium: Option<StorageMedium<'_>>) {
        let tiers = match medium {
            None => &[EngineCacheTier::L1, EngineCacheTier::L2][..],
            Some(medium) => match tier(Some(medium)) {
                Some(EngineCacheTier::L1) => &[EngineCacheTier::L1][..],
                Some(EngineCacheTier::L2) => &[EngineCacheTier::L2],
                None => &[],
            },
        };
        tiers.iter().for_each(|tier| self.index.update(|pages| pages.clear_engine_tier(self.slot, *tier)));
    }

    fn pages(&self, medium: Option<StorageMedium<'_>>, hashes: BlockHashes<'_>, stored: bool) {
        let Some(tier) = tier(medium) else { return };
        let mut keys = hashes.iter().map(|hash| self.namespace.key(hash.low64()));
        let mut batch = [0; BLOCK_BATCH];
        loop {
            let mut len = 0;
            for (place, key) in batch.iter_mut().zip(&mut keys) {
                *place = key;
                len += 1;
            }
            if len == 0 {
                return;
            }
            self.index.update_blocks(&batch[..len], |index, pages| {
                if stored {
                    index.add_engine_blocks(self.slot, tier, pages);
                } else {
                    index.remove_engine_blocks(self.slot, tier, pages);
                }
            });
        }
    }
}

/// The tier of a medium; `None` for what is not the engine's own memory.
fn tier(medium: Option<StorageMedium<'_>>) -> Option<EngineCacheTier> {
    match medium {
        // Old engines name none, and have nothing but device memory.
        None | Some(StorageMedium::Gpu) => Some(EngineCacheTier::L1),
        Some(StorageMedium::Cpu | StorageMedium::CpuPinned) => Some(EngineCacheTier::L2),
        // The store's pages are known from its master.
        Some(_) => None,
    }
}

/// Whether an event is about the blocks that decide on a hit. A hybrid model has groups with blocks of their own; the first is that
/// of its full attention.
fn counts(group: Option<u32>) -> bool {
    group.is_none_or(|group| group == 0)
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::index::IndexLookup;

    use super::*;
    use crate::predict::index::EngineSlotGuard;

    /// A recorded batch of SGLang: one page of 32 tokens stored in device memory, its hash -694835627279051526.
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
        let target = EngineEventApplier { index: index.clone(), slot: entry.slot(), namespace };
        assert_eq!(target.apply(&bytes(STORED)).unwrap(), 0);
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

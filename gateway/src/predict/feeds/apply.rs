//! One engine's events, applied to the index.

use std::sync::Arc;

use mooncake_wire::events::{Batch, DecodeError, Event, Hashes, Medium};
use moongate_scheduler::index::{EngineSlot, Namespace, Tier};

use crate::predict::index::KvIndex;

/// Pages that are looked for before any is changed.
const PAGES_AT_ONCE: usize = 64;

/// Where one engine's events go.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) index: Arc<KvIndex>,
    pub(super) slot: EngineSlot,
    pub(super) namespace: Namespace,
}

impl Target {
    /// Applies the batch in `payload`. Returns how many of its events could not be read.
    pub(super) fn apply(&self, payload: &[u8]) -> Result<u64, DecodeError> {
        let mut unread = 0;
        for event in Batch::decode(payload)?.events() {
            match event {
                Ok(Event::Stored(stored)) if counts(stored.group) => {
                    self.pages(stored.medium, stored.hashes, true);
                }
                Ok(Event::Removed(removed)) if counts(removed.group) => {
                    self.pages(removed.medium, removed.hashes, false);
                }
                Ok(Event::Cleared(medium)) => self.clear(medium),
                Ok(_) => {}
                Err(_) => unread += 1,
            }
        }
        Ok(unread)
    }

    /// Forgets the engine's pages in a medium, or all of them.
    pub(super) fn clear(&self, medium: Option<Medium<'_>>) {
        let tiers = match medium {
            None => &[Tier::L1, Tier::L2][..],
            Some(medium) => match tier(Some(medium)) {
                Some(Tier::L1) => &[Tier::L1][..],
                Some(Tier::L2) => &[Tier::L2],
                None => &[],
            },
        };
        tiers.iter().for_each(|tier| self.index.change(|pages| pages.cleared(self.slot, *tier)));
    }

    fn pages(&self, medium: Option<Medium<'_>>, hashes: Hashes<'_>, stored: bool) {
        let Some(tier) = tier(medium) else { return };
        let mut keys = hashes.iter().map(|hash| self.namespace.key(hash.low64()));
        let mut batch = [0; PAGES_AT_ONCE];
        loop {
            let mut len = 0;
            for (place, key) in batch.iter_mut().zip(&mut keys) {
                *place = key;
                len += 1;
            }
            if len == 0 {
                return;
            }
            self.index.change_pages(&batch[..len], |index, pages| {
                if stored {
                    index.stored(self.slot, tier, pages);
                } else {
                    index.removed(self.slot, tier, pages);
                }
            });
        }
    }
}

/// The tier of a medium; `None` for what is not the engine's own memory.
fn tier(medium: Option<Medium<'_>>) -> Option<Tier> {
    match medium {
        // Old engines name none, and have nothing but device memory.
        None | Some(Medium::Gpu) => Some(Tier::L1),
        Some(Medium::Cpu | Medium::CpuPinned) => Some(Tier::L2),
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
    use moongate_scheduler::index::Hits;

    use super::*;
    use crate::predict::index::EngineEntry;

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
        let entry = EngineEntry::new(index.clone());
        let namespace = Namespace::new(&["sglang", "tiny"]);
        let target = Target { index: index.clone(), slot: entry.slot(), namespace };
        assert_eq!(target.apply(&bytes(STORED)).unwrap(), 0);
        let mut hits = Hits::default();
        let key = namespace.key(HASH.cast_unsigned());
        index.lookup(&[key], &mut hits);
        assert_eq!(hits.of(entry.slot()).l1, 1);
        target.clear(None);
        index.lookup(&[key], &mut hits);
        assert_eq!(hits.of(entry.slot()).l1, 0);
        assert!(target.apply(b"garbage").is_err());
    }
}

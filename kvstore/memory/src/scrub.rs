//! Re-reads complete ranges, a few at a time, to detect bits that changed since they were written.

use crate::checksum::Crc32c;
use crate::ledger::{Ledger, LedgerEntry};
use crate::region::MappedRegion;

/// Bytes per checksum step between two checks of the budget.
const CHUNK: u64 = 1 << 20;

/// Progress of a scrub. The caller decides how often to continue, and so how much I/O it uses.
#[derive(Debug, Default)]
pub struct Scrubber {
    /// Minimum offset of the next entry.
    next: u64,
    current: Option<EntryScrub>,
}

#[derive(Debug)]
struct EntryScrub {
    entry: LedgerEntry,
    done: u64,
    crc: Crc32c,
}

#[derive(Debug, Default)]
pub struct ScrubStepResult {
    pub bytes: u64,
    /// Corrupt ranges. The ledger has dropped them.
    pub damaged: Vec<LedgerEntry>,
    /// Whether the end was reached: the next step starts over.
    pub reached_end: bool,
}

impl Scrubber {
    /// A scrubber at the first entry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks about `budget` more bytes, up to the end.
    pub fn step(&mut self, ledger: &Ledger, region: &MappedRegion, budget: u64) -> ScrubStepResult {
        let mut result = ScrubStepResult::default();
        while result.bytes < budget {
            let scrub = self.current.take().or_else(|| {
                let entry = *ledger.entries(self.next, 1).first()?;
                Some(EntryScrub { entry, done: 0, crc: Crc32c::new() })
            });
            let Some(mut scrub) = scrub else {
                self.next = 0;
                result.reached_end = true;
                break;
            };
            let len = CHUNK.min(scrub.entry.len - scrub.done);
            // An entry never exceeds its region; if one did, it would count as corrupt.
            let read = region.update(&mut scrub.crc, scrub.entry.offset + scrub.done, len);
            scrub.done += len;
            result.bytes += len;
            if read.is_ok() && scrub.done < scrub.entry.len {
                self.current = Some(scrub);
                continue;
            }
            self.next = scrub.entry.offset + 1;
            // Bytes rewritten meanwhile have a new entry, or none.
            if (read.is_err() || scrub.crc.value() != scrub.entry.crc) && ledger.remove_entry(&scrub.entry) {
                result.damaged.push(scrub.entry);
            }
        }
        result
    }

    /// Checks all entries without a pause.
    pub fn run_full(ledger: &Ledger, region: &MappedRegion) -> ScrubStepResult {
        Self::new().step(ledger, region, u64::MAX)
    }
}

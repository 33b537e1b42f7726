//! Reads whole parts again, some at a time, and finds bits that have changed since they were written.

use crate::checksum::Crc32c;
use crate::ledger::{Ledger, LedgerEntry};
use crate::region::MappedRegion;

/// Bytes checked between two looks at the budget.
const CHUNK: u64 = 1 << 20;

/// Where the check of a region stands. Its caller decides how often it goes on, and so how much of the machine it takes.
#[derive(Debug, Default)]
pub struct Scrubber {
    /// The next entry begins here or later.
    next: u64,
    /// An entry in the middle of its check.
    current: Option<EntryScrub>,
}

#[derive(Debug)]
struct EntryScrub {
    entry: LedgerEntry,
    done: u64,
    crc: Crc32c,
}

/// What a step has found.
#[derive(Debug, Default)]
pub struct ScrubStepResult {
    /// Bytes read.
    pub bytes: u64,
    /// Parts that are not what was written. The ledger has dropped them.
    pub damaged: Vec<LedgerEntry>,
    /// Whether the end was reached: the next step begins from the start.
    pub reached_end: bool,
}

impl Scrubber {
    /// At the start.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on for about `budget` bytes, or to the end.
    pub fn step(&mut self, ledger: &Ledger, region: &MappedRegion, budget: u64) -> ScrubStepResult {
        let mut found = ScrubStepResult::default();
        while found.bytes < budget {
            let part = self.current.take().or_else(|| {
                let entry = *ledger.entries(self.next, 1).first()?;
                Some(EntryScrub { entry, done: 0, crc: Crc32c::new() })
            });
            let Some(mut part) = part else {
                self.next = 0;
                found.reached_end = true;
                break;
            };
            let len = CHUNK.min(part.entry.len - part.done);
            // An entry never reaches beyond its region; if this one did, its bytes would not be what was written.
            let read = region.update(&mut part.crc, part.entry.offset + part.done, len);
            part.done += len;
            found.bytes += len;
            if read.is_ok() && part.done < part.entry.len {
                self.current = Some(part);
                continue;
            }
            self.next = part.entry.offset + 1;
            // Bytes that were written anew meanwhile have an entry of their own, or none.
            if (read.is_err() || part.crc.value() != part.entry.crc) && ledger.remove_entry(&part.entry) {
                found.damaged.push(part.entry);
            }
        }
        found
    }

    /// Checks everything from the start, without a pause.
    pub fn run_full(ledger: &Ledger, region: &MappedRegion) -> ScrubStepResult {
        Self::new().step(ledger, region, u64::MAX)
    }
}

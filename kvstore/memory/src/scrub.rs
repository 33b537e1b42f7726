//! Reads whole parts again, some at a time, and finds bits that have changed since they were written.

use crate::checksum::Crc32c;
use crate::ledger::{Entry, Ledger};
use crate::region::Region;

/// Bytes checked between two looks at the budget.
const PIECE: u64 = 1 << 20;

/// Where the check of a region stands. Its caller decides how often it goes on, and so how much of the machine it takes.
#[derive(Debug, Default)]
pub struct Scrubber {
    /// The next entry begins here or later.
    next: u64,
    /// An entry in the middle of its check.
    part: Option<Part>,
}

#[derive(Debug)]
struct Part {
    entry: Entry,
    done: u64,
    crc: Crc32c,
}

/// What a step has found.
#[derive(Debug, Default)]
pub struct Scrubbed {
    /// Bytes read.
    pub bytes: u64,
    /// Parts that are not what was written. The ledger has dropped them.
    pub damaged: Vec<Entry>,
    /// Whether the end was reached: the next step begins from the start.
    pub all: bool,
}

impl Scrubber {
    /// At the start.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Goes on for about `budget` bytes, or to the end.
    pub fn step(&mut self, ledger: &Ledger, region: &Region, budget: u64) -> Scrubbed {
        let mut found = Scrubbed::default();
        while found.bytes < budget {
            let part = self.part.take().or_else(|| {
                let entry = *ledger.entries(self.next, 1).first()?;
                Some(Part { entry, done: 0, crc: Crc32c::new() })
            });
            let Some(mut part) = part else {
                self.next = 0;
                found.all = true;
                break;
            };
            let len = PIECE.min(part.entry.len - part.done);
            // An entry never reaches beyond its region; if this one did, its bytes would not be what was written.
            let read = region.update(&mut part.crc, part.entry.offset + part.done, len);
            part.done += len;
            found.bytes += len;
            if read.is_ok() && part.done < part.entry.len {
                self.part = Some(part);
                continue;
            }
            self.next = part.entry.offset + 1;
            // Bytes that were written anew meanwhile have an entry of their own, or none.
            if (read.is_err() || part.crc.value() != part.entry.crc) && ledger.forget_entry(&part.entry) {
                found.damaged.push(part.entry);
            }
        }
        found
    }

    /// Checks everything from the start, without a pause.
    pub fn all(ledger: &Ledger, region: &Region) -> Scrubbed {
        Self::new().step(ledger, region, u64::MAX)
    }
}

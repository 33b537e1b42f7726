//! The search for objects to move: a walk over the table that continues where it stopped.
//!
//! A cycle has two passes. The first starts moves only of objects without a replica elsewhere: if the node ends early, these are
//! lost. The second starts all others and counts what is left.

use super::candidates::{DrainCandidate, DrainFilter, DrainMove};
use super::{DrainJobEntry, RETRY_INTERVAL_MS};
use crate::indices::{ShardIndex, SlabIndex};
use crate::object_table::ObjectTable;

/// Number of entries considered under one lock.
const ENTRIES_PER_LOCK: u32 = 1024;
/// Cost of locking a shard, in entries.
const LOCK_COST: u32 = 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DrainPass {
    #[default]
    SoleCopies,
    All,
}

/// Where a job's scan continues.
#[derive(Clone, Debug, Default)]
pub(super) struct DrainScan {
    pass: DrainPass,
    shard: usize,
    slot: u32,
    /// Moves started in this cycle.
    started: u64,
    /// Of the second pass.
    found: ScanEnd,
    not_before_ms: u64,
}

/// What a whole pass over the table has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScanEnd {
    /// Objects in the segments that can be moved later or are being moved.
    pub(super) remaining: u64,
    /// Those of them that cannot be moved now.
    pub(super) blocked: u64,
    /// Objects in the segments that were tried too often.
    pub(super) abandoned: u64,
}

impl ScanEnd {
    fn count(&mut self, candidate: &DrainCandidate) {
        match candidate {
            DrainCandidate::Elsewhere => {}
            DrainCandidate::Abandoned => self.abandoned += 1,
            DrainCandidate::InFlight | DrainCandidate::Movable(_) => self.remaining += 1,
            DrainCandidate::Blocked => {
                self.remaining += 1;
                self.blocked += 1;
            }
        }
    }
}

/// Result of a part of a scan.
pub(crate) struct ScannedMoves {
    pub(super) moves: Vec<DrainMove>,
    pub(super) scan: DrainScan,
    /// If a cycle has ended in this part.
    pub(super) end: Option<ScanEnd>,
}

impl DrainScan {
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        self.not_before_ms <= now_ms
    }

    /// Ends a pass. Returns what a cycle has found if it ends with it.
    fn end_pass(&mut self, now_ms: u64) -> Option<ScanEnd> {
        (self.shard, self.slot) = (0, 0);
        if self.pass == DrainPass::SoleCopies {
            self.pass = DrainPass::All;
            return None;
        }
        let not_before_ms = if self.started == 0 { now_ms.saturating_add(RETRY_INTERVAL_MS) } else { 0 };
        let found = self.found;
        *self = Self { not_before_ms, ..Self::default() };
        Some(found)
    }
}

/// Continues a job's scan until its free slots are used, a cycle ends, or `budget` entries were considered.
pub(crate) fn advance(objects: &ObjectTable, job: &DrainJobEntry, now_ms: u64, budget: u32) -> ScannedMoves {
    let filter = DrainFilter::new(job);
    let mut scanned = ScannedMoves { moves: Vec::new(), scan: job.scan.clone(), end: None };
    let mut budget = budget;
    while budget > 0 && scanned.moves.len() < job.free_slots() {
        if scanned.scan.shard < objects.shards.len() {
            let considered = consider_chunk(objects, &filter, job.free_slots(), &mut scanned);
            budget = budget.saturating_sub(considered + LOCK_COST);
        } else {
            scanned.end = scanned.scan.end_pass(now_ms);
            // The next pass must see the moves of this one.
            if scanned.end.is_some() || !scanned.moves.is_empty() {
                break;
            }
        }
    }
    scanned
}

/// Considers the next entries of one shard, until no slot is free. Returns their number.
fn consider_chunk(
    objects: &ObjectTable,
    filter: &DrainFilter<'_>,
    slots: usize,
    scanned: &mut ScannedMoves,
) -> u32 {
    let ScannedMoves { moves, scan, .. } = scanned;
    let shard = objects.lock(ShardIndex::new(scan.shard));
    let (indices, next) = shard.occupied(scan.slot, ENTRIES_PER_LOCK);
    let mut considered = 0;
    for index in indices {
        if moves.len() >= slots {
            scan.slot = index.slot();
            return considered;
        }
        considered += 1;
        let is_counted = scan.pass == DrainPass::All;
        if !is_counted && !filter.is_sole_copy(&shard, index) {
            continue;
        }
        let candidate = filter.classify(&shard, index);
        if is_counted {
            scan.found.count(&candidate);
        }
        if let DrainCandidate::Movable(planned) = candidate {
            scan.started += 1;
            moves.push(planned);
        }
    }
    match next {
        Some(next) => scan.slot = next,
        None => (scan.shard, scan.slot) = (scan.shard + 1, 0),
    }
    considered
}

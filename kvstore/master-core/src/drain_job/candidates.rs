//! The objects that a drain job can move.

use mooncake_wire::types::Uuid;

use super::{DrainJobEntry, InFlightMove, MAX_ATTEMPTS};
use crate::indices::{EntryIndex, SegmentIndex, SlabIndex};
use crate::locked_shard::LockedShard;
use crate::object::ObjectName;
use crate::object_table::ObjectTable;
use crate::split_mix::mix;

/// Number of entries scanned under one lock.
const ENTRIES_PER_LOCK: u32 = 1024;

/// A move that a job can start. Segments are named.
pub(crate) struct DrainMove {
    pub(super) object: InFlightMove,
    pub(super) source: String,
    pub(super) target: String,
    /// The node of the source segment.
    pub(super) client: Uuid,
}

/// Result of scanning the table for a job.
#[derive(Default)]
pub(crate) struct DrainCandidates {
    pub(super) moves: Vec<DrainMove>,
    pub(super) blocked: u64,
    pub(super) abandoned: u64,
    pub(super) remaining: u64,
}

/// The moves that a job can start now, and what keeps it from others.
pub(crate) fn find_moves(objects: &ObjectTable, job: &DrainJobEntry) -> DrainCandidates {
    let mut candidates = DrainCandidates::default();
    let mut free_slots = job.concurrency.saturating_sub(job.moves.len());
    for shard in objects.shard_indices() {
        let mut from = Some(0);
        while let Some(start) = from {
            let shard = objects.lock(shard);
            let (indices, next) = shard.occupied(start, ENTRIES_PER_LOCK);
            for index in indices {
                consider_entry(&shard, index, job, &mut free_slots, &mut candidates);
            }
            from = next;
        }
    }
    candidates
}

fn consider_entry(
    shard: &LockedShard<'_>,
    index: EntryIndex,
    job: &DrainJobEntry,
    free_slots: &mut usize,
    candidates: &mut DrainCandidates,
) {
    let entry = &shard.entries[index];
    let name_of =
        |segment: SegmentIndex| shard.segments.get(segment).map(|mounted| &*mounted.descriptor.name);
    let is_drained = |name: &str| job.segments.iter().any(|segment| segment == name);
    let Some(source) = entry.replicas().find(|replica| name_of(replica.segment).is_some_and(is_drained))
    else {
        return;
    };
    if job.moves.values().any(|object| *object.name.key == *shard.key(index)) {
        return;
    }
    let tenant = shard.objects.tenants.get(entry.tenant);
    let name = ObjectName::new(tenant.as_ref().map_or("", |tenant| &*tenant.name), shard.key(index));
    if job.attempts.get(&name).is_some_and(|attempts| *attempts >= MAX_ATTEMPTS) {
        candidates.abandoned += 1;
        return;
    }
    candidates.remaining += 1;
    let holders: Vec<&str> = entry.replicas().filter_map(|replica| name_of(replica.segment)).collect();
    let is_busy = entry.transfer().is_some() || entry.work().is_some();
    let is_free = entry.is_complete() && entry.pending().is_none() && !is_busy && shard.can_be_read(source);
    let target = drain_target(shard, job, &holders, mix(u64::from(index.slot())));
    let (true, Some(target), Some(mounted)) = (is_free, target, shard.segments.get(source.segment)) else {
        candidates.blocked += 1;
        return;
    };
    if *free_slots > 0 {
        *free_slots -= 1;
        candidates.moves.push(DrainMove {
            object: InFlightMove { name, size: entry.size },
            source: mounted.descriptor.name.to_string(),
            target,
            client: mounted.client,
        });
    }
}

/// The writable segment with the highest free share among the allowed targets without a replica.
fn drain_target(
    shard: &LockedShard<'_>,
    job: &DrainJobEntry,
    holders: &[&str],
    entropy: u64,
) -> Option<String> {
    let is_allowed = |name: &str| job.targets.is_empty() || job.targets.iter().any(|target| target == name);
    let fitting = shard.segments.iter().filter(|(_, segment)| {
        segment.is_writable()
            && is_allowed(&segment.descriptor.name)
            && !holders.contains(&&*segment.descriptor.name)
    });
    // Random choice among equals.
    let rank = |index: SegmentIndex, free: f64| (free, mix(entropy ^ index.get() as u64));
    fitting
        .map(|(index, segment)| (rank(index, segment.free_ratio()), segment))
        .max_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
        .map(|(_, segment)| segment.descriptor.name.to_string())
}

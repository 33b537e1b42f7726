//! The objects that a drain job can move.

use std::collections::{BTreeMap, HashSet};

use mooncake_wire::types::Uuid;

use super::{DrainJobEntry, InFlightMove, MAX_ATTEMPTS};
use crate::indices::{EntryIndex, SegmentIndex, SlabIndex};
use crate::locked_shard::LockedShard;
use crate::object::ObjectName;
use crate::segment::SegmentEntry;
use crate::split_mix::mix;

/// A move that a job can start. Segments are named.
pub(crate) struct DrainMove {
    pub(super) object: InFlightMove,
    pub(super) source: String,
    pub(super) target: String,
    /// The node of the source segment.
    pub(super) client: Uuid,
}

/// What a job can do with an object.
pub(super) enum DrainCandidate {
    /// It has no replica in the segments that are drained.
    Elsewhere,
    /// It is being moved.
    InFlight,
    /// It was tried too often.
    Abandoned,
    /// It cannot be moved now: it is written or copied, or no segment can take it.
    Blocked,
    Movable(DrainMove),
}

/// The parts of a job that each entry is compared with.
pub(super) struct DrainFilter<'a> {
    segments: HashSet<&'a str>,
    targets: HashSet<&'a str>,
    in_flight: HashSet<(&'a str, &'a str)>,
    attempts: &'a BTreeMap<ObjectName, u32>,
}

impl<'a> DrainFilter<'a> {
    pub(super) fn new(job: &'a DrainJobEntry) -> Self {
        let names = |names: &'a [String]| names.iter().map(String::as_str).collect();
        let in_flight = job.moves.values().map(|object| (&*object.name.tenant, &*object.name.key));
        Self {
            segments: names(&job.segments),
            targets: names(&job.targets),
            in_flight: in_flight.collect(),
            attempts: &job.attempts,
        }
    }

    /// Whether an object, which has a replica in these segments, has none elsewhere.
    pub(super) fn is_sole_copy(&self, shard: &LockedShard<'_>, index: EntryIndex) -> bool {
        shard.entries[index].replicas().all(|replica| self.is_drained(shard, replica.segment))
    }

    fn is_drained(&self, shard: &LockedShard<'_>, segment: SegmentIndex) -> bool {
        shard.segments.get(segment).is_some_and(|mounted| self.segments.contains(&*mounted.descriptor.name))
    }

    pub(super) fn classify(&self, shard: &LockedShard<'_>, index: EntryIndex) -> DrainCandidate {
        let entry = &shard.entries[index];
        let Some(source) = entry.replicas().find(|replica| self.is_drained(shard, replica.segment)) else {
            return DrainCandidate::Elsewhere;
        };
        let tenant = shard.objects.tenants.get(entry.tenant);
        let (tenant, key) = (tenant.as_ref().map_or("", |tenant| &*tenant.name), shard.key(index));
        if self.in_flight.contains(&(tenant, key)) {
            return DrainCandidate::InFlight;
        }
        let name = ObjectName::new(tenant, key);
        if self.attempts.get(&name).is_some_and(|attempts| *attempts >= MAX_ATTEMPTS) {
            return DrainCandidate::Abandoned;
        }
        let is_busy = entry.transfer().is_some() || entry.work().is_some();
        let is_free =
            entry.is_complete() && entry.pending().is_none() && !is_busy && shard.can_be_read(source);
        let target = self.target(shard, index);
        let (true, Some(target), Some(mounted)) = (is_free, target, shard.segments.get(source.segment))
        else {
            return DrainCandidate::Blocked;
        };
        DrainCandidate::Movable(DrainMove {
            object: InFlightMove { name, size: entry.size },
            source: mounted.descriptor.name.to_string(),
            target,
            client: mounted.client,
        })
    }

    /// The writable segment with the highest free share among the allowed targets without a replica. If all of them have
    /// one, any of them: the move then only removes the replica that is drained.
    fn target(&self, shard: &LockedShard<'_>, index: EntryIndex) -> Option<String> {
        let is_allowed = |name: &str| self.targets.is_empty() || self.targets.contains(name);
        let name_of =
            |segment: SegmentIndex| shard.segments.get(segment).map(|mounted| &*mounted.descriptor.name);
        let is_new = |name: &str| {
            !shard.entries[index].replicas().any(|replica| name_of(replica.segment) == Some(name))
        };
        let fitting = shard
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_writable() && is_allowed(&segment.descriptor.name));
        // Random choice among equals.
        let entropy = mix(u64::from(index.slot()));
        let rank = |index: SegmentIndex, segment: &SegmentEntry| {
            (is_new(&segment.descriptor.name), segment.free_ratio(), mix(entropy ^ index.get() as u64))
        };
        fitting
            .map(|(index, segment)| (rank(index, segment), segment))
            .max_by(|(a, _), (b, _)| (a.0).cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)))
            .map(|(_, segment)| segment.descriptor.name.to_string())
    }
}

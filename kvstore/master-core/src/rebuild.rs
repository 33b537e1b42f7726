//! Restoring objects from what nodes can prove, in a master whose log is damaged or missing.
//!
//! While the rebuild is open, a node that offers its inventory announces that before it mounts its segment. The segment takes no new
//! objects until its inventory has been offered, or a time limit is over; after that nothing of it is restored any more, since its
//! ranges may have been written again. What clients have written or removed meanwhile always wins.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::{ObjectState, RemoveCause, ReplicaLocation, StateChangeSink, StoreCause};
use crate::locked_shard::{KeyLocation, LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica, ObjectEntry};
use crate::query::ObjectCursor;
use crate::segment::SegmentEntry;

/// How long a segment takes no new objects while its inventory is awaited, counted from the latest batch.
const INVENTORY_TIMEOUT_MS: u64 = 30_000;
/// Segments whose inventory may be announced before they are mounted.
const MAX_ANNOUNCED: usize = 4096;
/// Keys of each shard that were removed during the rebuild. When there are more, the shard restores nothing any more.
const MAX_REMOVED: usize = 65_536;

/// Orders the versions of a key: by the master's epoch, then by the replica's number within it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectVersion {
    /// The epoch of the master that reported the object to the node.
    pub epoch: u64,
    /// The replica's number in that master.
    pub sequence: u64,
}

/// An object that a node can prove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InventoryRecord<'a> {
    /// Whose it is.
    pub tenant: &'a str,
    /// Its key.
    pub key: &'a str,
    /// Its group; empty for none.
    pub group: &'a str,
    /// Where it begins in the segment.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Which version of the key it is.
    pub version: ObjectVersion,
    /// The writer's checksum.
    pub checksum: Option<u64>,
    /// Whether it is never evicted.
    pub hard_pin: bool,
    /// The node's CRC-32C of its bytes.
    pub crc: u32,
}

/// What became of an object that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// It can be read again.
    Restored,
    /// Another node had offered the same bytes: it has one more replica.
    Merged,
    /// It was offered before.
    Present,
    /// Its range does not lie in the segment, or it has no key.
    OutsideSegment,
    /// Its range belongs to another object.
    Overlapping,
    /// Another node has a later version.
    OlderVersion,
    /// Its key has been removed since.
    RemovedSince,
    /// Its key has been written since.
    WrittenSince,
    /// There are too many tenants.
    TenantRefused,
    /// Nothing is restored any more.
    Closed,
}

impl RestoreOutcome {
    /// All, in the order of their numbers on the wire.
    pub const ALL: [Self; 10] = [
        Self::Restored,
        Self::Merged,
        Self::Present,
        Self::OutsideSegment,
        Self::Overlapping,
        Self::OlderVersion,
        Self::RemovedSince,
        Self::WrittenSince,
        Self::TenantRefused,
        Self::Closed,
    ];

    /// Its label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Restored => "restored",
            Self::Merged => "merged",
            Self::Present => "present",
            Self::OutsideSegment => "outside_segment",
            Self::Overlapping => "overlapping",
            Self::OlderVersion => "older_version",
            Self::RemovedSince => "removed_since",
            Self::WrittenSince => "written_since",
            Self::TenantRefused => "tenant_refused",
            Self::Closed => "closed",
        }
    }

    /// Whether the object is there, so that the node shall keep its record.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Restored | Self::Merged | Self::Present)
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|it| *it == self).unwrap_or(0)
    }
}

/// Objects that were offered, by what became of them.
#[derive(Debug, Default)]
pub(crate) struct RestoreCounters([AtomicU64; RestoreOutcome::ALL.len()]);

/// The rebuild as the master sees it.
#[derive(Debug, Default)]
pub(crate) struct RebuildWindow {
    /// Until when nodes may offer inventories; 0 when they may not.
    until_ms: u64,
    /// Segments that are not mounted yet, and until when they are waited for.
    announced: HashMap<Uuid, u64>,
}

/// The rebuild as a shard sees it, while it is open.
#[derive(Debug, Default)]
pub(crate) struct ShardRebuild {
    removed: HashSet<u64>,
    restored: HashMap<u64, RestoredObject>,
}

#[derive(Clone, Copy, Debug)]
struct RestoredObject {
    version: ObjectVersion,
    crc: u32,
}

impl ShardRebuild {
    /// A key has been removed. False when there are too many.
    fn remove(&mut self, hash: u64) -> bool {
        self.restored.remove(&hash);
        self.removed.insert(hash);
        self.removed.len() <= MAX_REMOVED
    }
}

impl MasterCore {
    /// Lets nodes offer their inventories until a time. To be called before anything is served, on a state that lacks what the log had.
    /// Segments that it has take nothing new at first, since their objects may be unknown.
    pub fn open_rebuild(&self, now_ms: u64, until_ms: u64) {
        for shard in 0..self.shards.len() {
            self.lock(shard).rebuild = Some(Box::default());
        }
        *self.rebuild.lock() = RebuildWindow { until_ms, announced: HashMap::new() };
        for (_, mounted) in self.segments.load().iter() {
            mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        }
    }

    /// Restores nothing from now on. False if that was so already.
    pub fn close_rebuild(&self) -> bool {
        let was_open = std::mem::take(&mut *self.rebuild.lock()).until_ms > 0;
        if was_open {
            (0..self.shards.len()).for_each(|shard| self.lock(shard).rebuild = None);
            for (_, mounted) in self.segments.load().iter() {
                end_inventory(mounted);
            }
        }
        was_open
    }

    /// Whether nodes may offer inventories.
    pub fn rebuild_is_open(&self) -> bool {
        self.rebuild.lock().until_ms > 0
    }

    /// Ends what is waited for in vain.
    pub(crate) fn expire_rebuild(&self, now_ms: u64) {
        let mut window = self.rebuild.lock();
        if window.until_ms == 0 {
            return;
        }
        window.announced.retain(|_, until| *until > now_ms);
        let is_over = window.until_ms <= now_ms;
        drop(window);
        if is_over {
            self.close_rebuild();
            return;
        }
        for (_, mounted) in self.segments.load().iter() {
            if mounted.inventory_until_ms().is_some_and(|until| until <= now_ms) {
                end_inventory(mounted);
            }
        }
    }

    /// A node announces that it will offer the inventory of a segment when it has mounted it. Returns whether the master accepts it: not for
    /// a segment that is mounted already.
    pub fn announce_inventory(&self, now_ms: u64, segment: Uuid) -> bool {
        let mounted = self.segments.load();
        if let Some(it) = mounted.index_of(segment).and_then(|at| mounted.get(at)) {
            return it.inventory_until_ms().is_some();
        }
        let mut window = self.rebuild.lock();
        if window.until_ms <= now_ms || window.announced.len() >= MAX_ANNOUNCED {
            return false;
        }
        window.announced.insert(segment, now_ms.saturating_add(INVENTORY_TIMEOUT_MS));
        true
    }

    /// A segment is about to be mounted: it takes nothing new if its inventory was announced.
    pub(crate) fn await_inventory(&self, mounted: &SegmentEntry, now_ms: u64) {
        let mut window = self.rebuild.lock();
        if window.announced.remove(&mounted.descriptor.id).is_some() {
            mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        }
    }

    /// Restores objects of a segment whose inventory was announced.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if it is another's, `INVALID_PARAMS` if its inventory is not awaited (any more).
    pub fn restore_inventory(
        &self,
        now_ms: u64,
        segment: Uuid,
        client: Uuid,
        records: &[InventoryRecord<'_>],
        fx: &mut dyn StateChangeSink,
    ) -> Result<Vec<RestoreOutcome>, ErrorCode> {
        // So that it does not go away meanwhile.
        let mut registry = self.registry.lock();
        let mounted = self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if mounted.inventory_until_ms().is_none_or(|until| until <= now_ms) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        if let Some(known) = registry.clients.get_mut(&client) {
            known.last_seen_ms = known.last_seen_ms.max(now_ms);
        }
        let place = self.segments.load().index_of(segment).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let source = InventorySource { client, segment_index: place, size: mounted.descriptor.size };
        let outcomes: Vec<RestoreOutcome> =
            records.iter().map(|record| self.restore_object(now_ms, &source, record, fx)).collect();
        for outcome in &outcomes {
            if let Some(counter) = self.restores.0.get(outcome.index()) {
                counter.fetch_add(1, Relaxed);
            }
        }
        Ok(outcomes)
    }

    /// A segment's inventory has been offered: it takes new objects from now on.
    ///
    /// # Errors
    /// As [`Self::restore_inventory`].
    pub fn finish_inventory(&self, segment: Uuid, client: Uuid) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let mounted = self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        end_inventory(&mounted);
        Ok(())
    }

    /// Whether a client's segment is mounted and no inventory of it is awaited any more.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if it is another's, `INVALID_PARAMS` while its inventory is awaited.
    pub fn check_inventory_complete(&self, segment: Uuid, client: Uuid) -> Result<(), ErrorCode> {
        let mounted = self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if mounted.inventory_until_ms().is_some() { Err(ErrorCode::INVALID_PARAMS) } else { Ok(()) }
    }

    /// Hands over objects of a part of the table that have a complete replica in a segment, with that replica's place; returns where to go
    /// on, nothing at the end. At most `limit` entries are visited under one lock.
    pub fn objects_in_segment(
        &self,
        from: ObjectCursor,
        limit: u32,
        segment: Uuid,
        mut each: impl FnMut(&ObjectState<'_>, ReplicaLocation),
    ) -> Option<ObjectCursor> {
        let place = self.segments.load().index_of(segment)?;
        self.scan(from, limit, |shard, at| {
            let entry = &shard.entries[at];
            let is_there = |it: &&MemoryReplica| it.ready && it.segment == place;
            let Some(replica) = entry.replicas().find(is_there).filter(|_| entry.is_complete()) else {
                return;
            };
            let place = ReplicaLocation { replica: replica.id, segment, offset: replica.offset };
            shard.with_state(at, |object| each(&object, place));
        })
    }

    /// Objects that nodes have offered, by what became of them.
    pub fn restore_counts(&self) -> [(RestoreOutcome, u64); RestoreOutcome::ALL.len()] {
        RestoreOutcome::ALL
            .map(|it| (it, self.restores.0.get(it.index()).map_or(0, |count| count.load(Relaxed))))
    }

    fn restore_object(
        &self,
        now_ms: u64,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let end = record.offset.checked_add(record.size);
        if record.key.is_empty() || record.size == 0 || end.is_none_or(|end| end > source.size) {
            return RestoreOutcome::OutsideSegment;
        }
        let tenant = match self.tenants.enabled() {
            true => self.tenants.register(record.tenant),
            false => Ok(0),
        };
        let Ok(tenant) = tenant else { return RestoreOutcome::TenantRefused };
        let spot = self.locate_key(tenant, record.key);
        let mut shard = self.lock(spot.shard);
        shard.restore_object(now_ms, spot, source, record, fx)
    }
}

/// A segment whose inventory is offered.
struct InventorySource {
    client: Uuid,
    segment_index: u16,
    size: u64,
}

fn end_inventory(mounted: &SegmentEntry) {
    if mounted.inventory_until_ms().is_some() {
        mounted.with_allocator(crate::allocator::SegmentAllocator::drop_offset_index);
        mounted.set_inventory_until(None);
    }
}

impl LockedShard<'_> {
    fn restore_object(
        &mut self,
        now_ms: u64,
        spot: KeyLocation,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let hash = self.master.hash(spot.tenant, record.key);
        let Some(rebuild) = self.rebuild.as_ref() else { return RestoreOutcome::Closed };
        if rebuild.removed.contains(&hash) {
            return RestoreOutcome::RemovedSince;
        }
        let known = rebuild.restored.get(&hash).copied();
        let at = self.lookup(spot, record.key);
        let replaced = match (at, known) {
            (None, _) => None,
            (Some(_), None) => return RestoreOutcome::WrittenSince,
            (Some(at), Some(known)) => {
                let entry = &self.entries[at];
                if entry.pending().is_some() {
                    return RestoreOutcome::WrittenSince;
                }
                if entry.size == record.size && known.crc == record.crc {
                    return self.merge_replica(at, source, record, fx);
                }
                if known.version >= record.version {
                    return RestoreOutcome::OlderVersion;
                }
                Some(at)
            }
        };
        let Some(replica) = self.claim(source.segment_index, record.offset, record.size) else {
            return RestoreOutcome::Overlapping;
        };
        if let Some(at) = replaced {
            // Somebody may be reading the older one.
            let until = self.entries[at].stamp;
            match self.entries[at].is_leased(now_ms) {
                true => self.remove_and_quarantine(at, until, RemoveCause::Replaced, fx),
                false => _ = self.remove_and_free(at, RemoveCause::Replaced, fx),
            }
        }
        let replica = MemoryReplica { id: self.master.new_replica_id(), ready: true, ..replica };
        self.master.tenants.count(spot.tenant, record.size);
        let group = Some(record.group).filter(|name| !name.is_empty());
        let fresh = NewObject {
            key: record.key,
            client: source.client,
            size: record.size,
            stamp: now_ms,
            replicas: &[replica],
            queue: if record.hard_pin { EvictionQueue::Unlisted } else { EvictionQueue::Unread },
            hard_pin: record.hard_pin,
            soft_pin_until_ms: None,
            checksum: record.checksum,
            group: group.map(|name| (self.master.group(record.tenant, name), name)),
        };
        let at = self.add(spot, &fresh);
        if let Some(rebuild) = &mut self.rebuild {
            rebuild.removed.remove(&hash);
            rebuild.restored.insert(hash, RestoredObject { version: record.version, crc: record.crc });
        }
        self.emit_state(at, StoreCause::Written, fx);
        RestoreOutcome::Restored
    }

    /// One more replica of an object that another node has offered with the same bytes.
    fn merge_replica(
        &mut self,
        at: u32,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let entry = &self.entries[at];
        if entry.replicas().any(|it| (it.segment, it.offset) == (source.segment_index, record.offset)) {
            return RestoreOutcome::Present;
        }
        if !entry.is_complete() || entry.transfer().is_some() || entry.work().is_some() {
            return RestoreOutcome::WrittenSince;
        }
        let Some(replica) = self.claim(source.segment_index, record.offset, record.size) else {
            return RestoreOutcome::Overlapping;
        };
        let replica = MemoryReplica { id: self.master.new_replica_id(), ready: true, ..replica };
        let replicas: Vec<MemoryReplica> = self.entries[at].replicas().copied().chain([replica]).collect();
        let tenant = self.entries[at].tenant;
        self.entries[at].set_replicas(&replicas);
        self.master.tenants.count(tenant, record.size);
        self.emit_state(at, StoreCause::Replicas, fx);
        RestoreOutcome::Merged
    }

    /// An object leaves the table, or is overwritten in place: what nodes offer under its key is older.
    pub(crate) fn record_departure(&mut self, entry: &ObjectEntry, cause: RemoveCause) {
        if self.rebuild.is_none() {
            return;
        }
        let hash = self.master.hash(entry.tenant, &entry.key);
        self.record_removed_key(hash, cause);
    }

    fn record_removed_key(&mut self, hash: u64, cause: RemoveCause) {
        let Some(rebuild) = &mut self.rebuild else { return };
        if cause == RemoveCause::SegmentLost {
            // It may be offered again.
            rebuild.restored.remove(&hash);
        } else if !rebuild.remove(hash) {
            // Too many to remember: this shard restores nothing any more.
            self.rebuild = None;
        }
    }

    /// An object is overwritten in place.
    pub(crate) fn record_rewritten(&mut self, at: u32) {
        if self.rebuild.is_none() {
            return;
        }
        let hash = self.master.hash(self.entries[at].tenant, &self.entries[at].key);
        if let Some(rebuild) = &mut self.rebuild {
            rebuild.restored.remove(&hash);
        }
    }

    /// A key that is not there is removed: nor shall it be restored.
    pub(crate) fn record_absent(&mut self, spot: KeyLocation, key: &str) {
        if self.rebuild.is_some() {
            let hash = self.master.hash(spot.tenant, key);
            self.record_removed_key(hash, RemoveCause::Removed);
        }
    }
}

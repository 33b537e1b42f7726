//! Restoring objects from the inventories of nodes, in a master whose log is damaged or missing.
//!
//! While the rebuild window is open, a node announces its inventory before it mounts its segment. The segment accepts no new objects
//! until its inventory is complete or a timeout expires; after that nothing of it is restored, since its ranges may have been
//! reused. Writes and removals by clients in the meantime always take precedence.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::{ObjectState, RemoveCause, ReplicaLocation, StateChangeSink, StoreCause};
use crate::locked_shard::ObjectCursor;
use crate::locked_shard::{LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica, ObjectEntry};
use crate::object_table::KeyLocation;
use crate::segment::SegmentEntry;

/// How long a segment accepts no new objects while its inventory is pending, counted from the latest batch.
const INVENTORY_TIMEOUT_MS: u64 = 30_000;
/// Maximum number of segments with an announced inventory that are not mounted yet.
const MAX_ANNOUNCED: usize = 4096;
/// Maximum number of keys per shard recorded as removed during the rebuild. Above it, the shard stops restoring.
const MAX_REMOVED: usize = 65_536;

/// Orders the versions of a key: by the master's epoch, then by the replica's number within that epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectVersion {
    /// Epoch of the master that registered the object with the node.
    pub epoch: u64,
    /// The replica's number within that epoch.
    pub sequence: u64,
}

/// One record of a node's inventory: an object whose bytes the node has verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InventoryRecord<'a> {
    pub tenant: &'a str,
    pub key: &'a str,
    /// The object's group; empty for none.
    pub group: &'a str,
    /// Offset of the object in the segment, in bytes.
    pub offset: u64,
    pub size: u64,
    /// Which version of the key it is.
    pub version: ObjectVersion,
    /// Checksum that the writer supplied, if any.
    pub checksum: Option<u64>,
    /// Whether the object is excluded from eviction.
    pub hard_pin: bool,
    /// CRC-32C of the object's bytes, computed by the node.
    pub crc: u32,
}

/// Result of restoring one inventory record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// The object is readable again.
    Restored,
    /// Another node has restored the same bytes: the object has one more replica.
    Merged,
    /// This replica was restored before.
    Present,
    /// The range lies outside the segment, or the key is empty.
    OutsideSegment,
    /// The range overlaps another object.
    Overlapping,
    /// Another node has restored a later version.
    OlderVersion,
    /// A client has removed the key since.
    RemovedSince,
    /// A client has written the key since.
    WrittenSince,
    /// The maximum number of tenants is reached.
    TenantRefused,
    /// The rebuild window is closed.
    Closed,
}

impl RestoreOutcome {
    /// All outcomes in the order of their numbers on the wire.
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

    /// Value of the `outcome` label in metrics.
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

    /// Whether the object is in the table, so that the node keeps its inventory record.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Restored | Self::Merged | Self::Present)
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|outcome| *outcome == self).unwrap_or(0)
    }
}

/// Number of inventory records by outcome.
#[derive(Debug, Default)]
pub(crate) struct RestoreCounters([AtomicU64; RestoreOutcome::ALL.len()]);

/// State of the rebuild, shared by all shards.
#[derive(Debug, Default)]
pub(crate) struct RebuildWindow {
    /// When the window closes; 0 when it is closed.
    until_ms: u64,
    /// Segments announced but not mounted yet, with the deadline for mounting them.
    announced: HashMap<Uuid, u64>,
}

/// State of the rebuild in one shard, while the window is open.
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
    /// Records the removal of a key. Returns false above the limit.
    fn remove(&mut self, hash: u64) -> bool {
        self.restored.remove(&hash);
        self.removed.insert(hash);
        self.removed.len() <= MAX_REMOVED
    }
}

impl MasterCore {
    /// Accepts inventories until `until_ms`. Must be called before requests are served, on a state that lacks the log's contents.
    /// Mounted segments accept no new objects at first, since they may contain unknown objects.
    pub fn open_rebuild(&self, now_ms: u64, until_ms: u64) {
        for shard in 0..self.objects.shards.len() {
            self.objects.lock(shard).rebuild = Some(Box::default());
        }
        *self.rebuild.lock() = RebuildWindow { until_ms, announced: HashMap::new() };
        for (_, mounted) in self.objects.segments.load().iter() {
            mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        }
    }

    /// Stops restoring objects. Returns false if the window was closed already.
    pub fn close_rebuild(&self) -> bool {
        let was_open = std::mem::take(&mut *self.rebuild.lock()).until_ms > 0;
        if was_open {
            (0..self.objects.shards.len()).for_each(|shard| self.objects.lock(shard).rebuild = None);
            for (_, mounted) in self.objects.segments.load().iter() {
                end_inventory(mounted);
            }
        }
        was_open
    }

    /// Whether inventories of nodes are accepted.
    pub fn rebuild_is_open(&self) -> bool {
        self.rebuild.lock().until_ms > 0
    }

    /// Drops announcements and pending inventories whose deadline has passed.
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
        for (_, mounted) in self.objects.segments.load().iter() {
            if mounted.inventory_until_ms().is_some_and(|until| until <= now_ms) {
                end_inventory(mounted);
            }
        }
    }

    /// Registers that a node will send the inventory of a segment after mounting it. Returns whether the master accepts it: not for a
    /// segment that was mounted without an announcement.
    pub fn announce_inventory(&self, now_ms: u64, segment: Uuid) -> bool {
        let mounted = self.objects.segments.load();
        if let Some(entry) = mounted.index_of(segment).and_then(|index| mounted.get(index)) {
            return entry.inventory_until_ms().is_some();
        }
        let mut window = self.rebuild.lock();
        if window.until_ms <= now_ms || window.announced.len() >= MAX_ANNOUNCED {
            return false;
        }
        window.announced.insert(segment, now_ms.saturating_add(INVENTORY_TIMEOUT_MS));
        true
    }

    /// Called before a segment is mounted: it accepts no new objects if its inventory was announced.
    pub(crate) fn await_inventory(&self, mounted: &SegmentEntry, now_ms: u64) {
        let mut window = self.rebuild.lock();
        if window.announced.remove(&mounted.descriptor.id).is_some() {
            mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        }
    }

    /// Restores one batch of a segment's announced inventory.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client owns the segment, `INVALID_PARAMS` if no inventory is pending.
    pub fn restore_inventory(
        &self,
        now_ms: u64,
        segment: Uuid,
        client: Uuid,
        records: &[InventoryRecord<'_>],
        fx: &mut dyn StateChangeSink,
    ) -> Result<Vec<RestoreOutcome>, ErrorCode> {
        // The registry lock prevents unmounting in the meantime.
        let mut registry = self.registry.lock();
        let mounted =
            self.objects.segments.load().own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if mounted.inventory_until_ms().is_none_or(|until| until <= now_ms) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        mounted.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
        if let Some(known) = registry.clients.get_mut(&client) {
            known.last_seen_ms = known.last_seen_ms.max(now_ms);
        }
        let segment_index =
            self.objects.segments.load().index_of(segment).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let source = InventorySource { client, segment_index, size: mounted.descriptor.size };
        let outcomes: Vec<RestoreOutcome> =
            records.iter().map(|record| self.restore_object(now_ms, &source, record, fx)).collect();
        for outcome in &outcomes {
            if let Some(counter) = self.restores.0.get(outcome.index()) {
                counter.fetch_add(1, Relaxed);
            }
        }
        Ok(outcomes)
    }

    /// Completes a segment's inventory: the segment accepts new objects again.
    ///
    /// # Errors
    /// As [`Self::restore_inventory`].
    pub fn finish_inventory(&self, segment: Uuid, client: Uuid) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let mounted =
            self.objects.segments.load().own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        end_inventory(&mounted);
        Ok(())
    }

    /// Checks that a client's segment is mounted and its inventory is no longer pending.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client owns the segment, `INVALID_PARAMS` while its inventory is pending.
    pub fn check_inventory_complete(&self, segment: Uuid, client: Uuid) -> Result<(), ErrorCode> {
        let mounted =
            self.objects.segments.load().own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if mounted.inventory_until_ms().is_some() { Err(ErrorCode::INVALID_PARAMS) } else { Ok(()) }
    }

    /// Calls `each` for objects with a complete replica in a segment, with that replica's location. Visits at most `limit` entries
    /// under one lock, starting at `from`, and returns the cursor for the next call, `None` at the end.
    pub fn objects_in_segment(
        &self,
        from: ObjectCursor,
        limit: u32,
        segment: Uuid,
        mut each: impl FnMut(&ObjectState<'_>, ReplicaLocation),
    ) -> Option<ObjectCursor> {
        let segment_index = self.objects.segments.load().index_of(segment)?;
        self.objects.scan(from, limit, |shard, index| {
            let entry = &shard.entries[index];
            let in_segment = |replica: &&MemoryReplica| replica.ready && replica.segment == segment_index;
            let Some(replica) = entry.replicas().find(in_segment).filter(|_| entry.is_complete()) else {
                return;
            };
            let location = ReplicaLocation { replica: replica.id, segment, offset: replica.offset };
            shard.with_state(index, |object| each(&object, location));
        })
    }

    /// Number of inventory records by outcome since the start.
    pub fn restore_counts(&self) -> [(RestoreOutcome, u64); RestoreOutcome::ALL.len()] {
        RestoreOutcome::ALL.map(|outcome| {
            (outcome, self.restores.0.get(outcome.index()).map_or(0, |count| count.load(Relaxed)))
        })
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
        let tenant = match self.objects.tenants.enabled() {
            true => self.objects.tenants.register(record.tenant),
            false => Ok(0),
        };
        let Ok(tenant) = tenant else { return RestoreOutcome::TenantRefused };
        let key_location = self.objects.locate_key(tenant, record.key);
        let mut shard = self.objects.lock(key_location.shard);
        shard.restore_object(now_ms, key_location, source, record, fx)
    }
}

/// The segment whose inventory is being restored.
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
        key_location: KeyLocation,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let hash = self.objects.hash(key_location.tenant, record.key);
        let Some(rebuild) = self.rebuild.as_ref() else { return RestoreOutcome::Closed };
        if rebuild.removed.contains(&hash) {
            return RestoreOutcome::RemovedSince;
        }
        let known = rebuild.restored.get(&hash).copied();
        let index = self.lookup(key_location, record.key);
        let replaced = match (index, known) {
            (None, _) => None,
            (Some(_), None) => return RestoreOutcome::WrittenSince,
            (Some(index), Some(known)) => {
                let entry = &self.entries[index];
                if entry.pending().is_some() {
                    return RestoreOutcome::WrittenSince;
                }
                if entry.size == record.size && known.crc == record.crc {
                    return self.merge_replica(index, source, record, fx);
                }
                if known.version >= record.version {
                    return RestoreOutcome::OlderVersion;
                }
                Some(index)
            }
        };
        let Some(replica) = self.claim(source.segment_index, record.offset, record.size) else {
            return RestoreOutcome::Overlapping;
        };
        if let Some(index) = replaced {
            // A reader may have a lease on the older version.
            let until = self.entries[index].stamp;
            match self.entries[index].is_leased(now_ms) {
                true => self.remove_and_quarantine(index, until, RemoveCause::Replaced, fx),
                false => _ = self.remove_and_free(index, RemoveCause::Replaced, fx),
            }
        }
        let replica = MemoryReplica { id: self.objects.new_replica_id(), ready: true, ..replica };
        self.objects.tenants.count(key_location.tenant, record.size);
        let group = Some(record.group).filter(|name| !name.is_empty());
        let new_object = NewObject {
            key: record.key,
            client: source.client,
            size: record.size,
            stamp: now_ms,
            replicas: &[replica],
            queue: if record.hard_pin { EvictionQueue::Unlisted } else { EvictionQueue::Unread },
            hard_pin: record.hard_pin,
            soft_pin_until_ms: None,
            checksum: record.checksum,
            group: group.map(|name| (self.objects.group(record.tenant, name), name)),
        };
        let index = self.add(key_location, &new_object);
        if let Some(rebuild) = &mut self.rebuild {
            rebuild.removed.remove(&hash);
            rebuild.restored.insert(hash, RestoredObject { version: record.version, crc: record.crc });
        }
        self.emit_state(index, StoreCause::Written, fx);
        RestoreOutcome::Restored
    }

    /// Adds a replica to an object that another node has restored with the same bytes.
    fn merge_replica(
        &mut self,
        index: u32,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let entry = &self.entries[index];
        if entry
            .replicas()
            .any(|replica| (replica.segment, replica.offset) == (source.segment_index, record.offset))
        {
            return RestoreOutcome::Present;
        }
        if !entry.is_complete() || entry.transfer().is_some() || entry.work().is_some() {
            return RestoreOutcome::WrittenSince;
        }
        let Some(replica) = self.claim(source.segment_index, record.offset, record.size) else {
            return RestoreOutcome::Overlapping;
        };
        let replica = MemoryReplica { id: self.objects.new_replica_id(), ready: true, ..replica };
        let replicas: Vec<MemoryReplica> = self.entries[index].replicas().copied().chain([replica]).collect();
        let tenant = self.entries[index].tenant;
        self.entries[index].set_replicas(&replicas);
        self.objects.tenants.count(tenant, record.size);
        self.emit_state(index, StoreCause::Replicas, fx);
        RestoreOutcome::Merged
    }
}

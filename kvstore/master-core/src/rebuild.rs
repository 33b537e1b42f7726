//! Restoring objects from the inventories of nodes, in a master whose log is damaged or missing.
//!
//! While the rebuild window is open, a node announces its inventory before it mounts its segment. The segment accepts no new objects
//! until its inventory is complete or a timeout expires; after that nothing of it is restored, since its ranges may have been
//! reused. Writes and removals by clients in the meantime always take precedence.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;
use moongate_retention::BlockClass;

use crate::change::{ObjectState, RemoveCause, ReplicaLocation, StateChangeSink, StoreCause};
use crate::indices::{EntryIndex, SegmentIndex, TenantIndex};
use crate::inventory::{InventoryRecord, RebuildWindow, RestoreOutcome, RestoredObject};
use crate::locked_shard::{LockedShard, NewObject, ObjectCursor};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica};
use crate::object_table::KeyLocation;
use crate::requests::ClientSegment;

impl MasterCore {
    /// Accepts inventories until `until_ms`. Must be called before requests are served, on a state that lacks the log's contents.
    /// Mounted segments accept no new objects at first, since they may contain unknown objects.
    pub fn open_rebuild(&self, now_ms: u64, until_ms: u64) {
        for shard in self.objects.shard_indices() {
            self.objects.lock(shard).rebuild = Some(Box::default());
        }
        *self.rebuild.lock() = RebuildWindow::new(until_ms);
        for (_, mounted) in self.objects.segments.load().iter() {
            mounted.await_inventory(now_ms);
        }
    }

    /// Stops restoring objects. Returns false if the window was closed already.
    pub fn close_rebuild(&self) -> bool {
        let was_open = std::mem::take(&mut *self.rebuild.lock()).is_open();
        if was_open {
            self.objects.shard_indices().for_each(|shard| self.objects.lock(shard).rebuild = None);
            for (_, mounted) in self.objects.segments.load().iter() {
                mounted.end_inventory();
            }
        }
        was_open
    }

    /// Whether inventories of nodes are accepted.
    pub fn rebuild_is_open(&self) -> bool {
        self.rebuild.lock().is_open()
    }

    /// Drops announcements and pending inventories whose deadline has passed.
    pub(crate) fn expire_rebuild(&self, now_ms: u64) {
        let mut window = self.rebuild.lock();
        if !window.is_open() {
            return;
        }
        let is_over = window.expire(now_ms);
        drop(window);
        if is_over {
            self.close_rebuild();
            return;
        }
        for (_, mounted) in self.objects.segments.load().iter() {
            if mounted.inventory_until_ms().is_some_and(|until| until <= now_ms) {
                mounted.end_inventory();
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
        self.rebuild.lock().announce(now_ms, segment)
    }

    /// Restores one batch of a segment's announced inventory.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client owns the segment, `INVALID_PARAMS` if no inventory is pending.
    pub fn restore_inventory(
        &self,
        now_ms: u64,
        segment: ClientSegment,
        records: &[InventoryRecord<'_>],
        fx: &mut dyn StateChangeSink,
    ) -> Result<Vec<RestoreOutcome>, ErrorCode> {
        // The registry lock prevents unmounting in the meantime.
        let mut registry = self.registry.lock();
        let mounted =
            self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if mounted.inventory_until_ms().is_none_or(|until| until <= now_ms) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        mounted.await_inventory(now_ms);
        if let Some(known) = registry.clients.get_mut(&segment.client) {
            known.last_seen_ms = known.last_seen_ms.max(now_ms);
        }
        let segment_index =
            self.objects.segments.load().index_of(segment.segment).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let source =
            InventorySource { now_ms, client: segment.client, segment_index, size: mounted.descriptor.size };
        let outcomes: Vec<RestoreOutcome> =
            records.iter().map(|record| self.restore_object(&source, record, fx)).collect();
        outcomes.iter().for_each(|outcome| self.restores.add(*outcome));
        Ok(outcomes)
    }

    /// Completes a segment's inventory: the segment accepts new objects again.
    ///
    /// # Errors
    /// As [`Self::restore_inventory`].
    pub fn finish_inventory(&self, segment: ClientSegment) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let mounted =
            self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        mounted.end_inventory();
        Ok(())
    }

    /// Checks that a client's segment is mounted and its inventory is no longer pending.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client owns the segment, `INVALID_PARAMS` while its inventory is pending.
    pub fn check_inventory_complete(&self, segment: ClientSegment) -> Result<(), ErrorCode> {
        let mounted =
            self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
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
        self.restores.read()
    }

    fn restore_object(
        &self,
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
            false => Ok(TenantIndex::DEFAULT),
        };
        let Ok(tenant) = tenant else { return RestoreOutcome::TenantRefused };
        let key_location = self.objects.locate_key(tenant, record.key);
        let mut shard = self.objects.lock(key_location.shard);
        shard.restore_object(key_location, source, record, fx)
    }
}

/// The segment whose inventory is being restored, and when.
struct InventorySource {
    now_ms: u64,
    client: Uuid,
    segment_index: SegmentIndex,
    size: u64,
}

impl LockedShard<'_> {
    fn restore_object(
        &mut self,
        key_location: KeyLocation,
        source: &InventorySource,
        record: &InventoryRecord<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> RestoreOutcome {
        let hash = self.objects.hash(key_location.tenant, record.key);
        let Some(rebuild) = self.rebuild.as_ref() else { return RestoreOutcome::Closed };
        if rebuild.is_removed(hash) {
            return RestoreOutcome::RemovedSince;
        }
        let known = rebuild.restored(hash);
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
            match self.entries[index].is_leased(source.now_ms) {
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
            stamp: source.now_ms,
            replicas: &[replica],
            queue: if record.hard_pin {
                EvictionQueue::Unlisted
            } else {
                EvictionQueue::Unread(BlockClass::default())
            },
            hard_pin: record.hard_pin,
            soft_pin_until_ms: None,
            checksum: record.checksum,
            group: group.map(|name| (self.objects.group(record.tenant, name), name)),
        };
        let index = self.add(key_location, &new_object);
        if let Some(rebuild) = &mut self.rebuild {
            rebuild.record_restored(hash, RestoredObject { version: record.version, crc: record.crc });
        }
        self.emit_state(index, StoreCause::Written, fx);
        RestoreOutcome::Restored
    }

    /// Adds a replica to an object that another node has restored with the same bytes.
    fn merge_replica(
        &mut self,
        index: EntryIndex,
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

//! Dropping segments and disks: the replicas in them leave the object table, with objects that have no other.

use std::sync::Arc;

use mooncake_wire::types::{SegmentStatus, Uuid};

use crate::allocator::SegmentAllocator;
use crate::change::{RemoveCause, StateChange, StateChangeSink, StoreCause, UnmountCause};
use crate::disk::{ActiveDiskTask, ClientDisk, DiskTask};
use crate::indices::{EntryIndex, SegmentIndex};
use crate::locked_shard::LockedShard;
use crate::object::MemoryReplica;
use crate::object_table::ObjectTable;
use crate::segment::SegmentTable;
use crate::statistics::MasterCounters;

impl ObjectTable {
    /// Drops the segments whose unmount time has passed. The caller must hold the registry lock.
    pub(crate) fn unmount_due_segments(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let segments = Arc::clone(&self.segments.load());
        for (_, segment) in segments.iter() {
            if segment.unmount_at_ms().is_some_and(|unmount_ms| unmount_ms <= now_ms) {
                self.drop_segment(segment.descriptor.id, UnmountCause::Unmounted, now_ms, fx);
            }
        }
    }

    /// Drops a segment and all objects without another replica. The caller must hold the registry lock, which serializes drops.
    pub(crate) fn drop_segment(
        &self,
        id: Uuid,
        cause: UnmountCause,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = Arc::clone(&self.segments.load());
        let Some((index, mounted)) =
            segments.index_of(id).and_then(|index| Some((index, segments.get(index)?)))
        else {
            return;
        };
        fx.record(StateChange::SegmentUnmounted { segment: id, cause });
        // From here on the segment allocates nothing and its replicas are not returned to readers. A put that has allocated space
        // before holds the lock of the object's shard until the entry exists, so the sweep below finds it.
        mounted.set_status(SegmentStatus::UNMOUNTING, None);
        mounted.set_silent(true);
        mounted.with_allocator(SegmentAllocator::close);
        for shard in self.shard_indices() {
            self.lock(shard).drop_segment_replicas(index, now_ms, fx);
        }
        let segments: &SegmentTable = &self.segments.load();
        self.segments.store(Arc::new(segments.with_segment(index, None)));
        self.capacity_changed();
    }

    /// Drops a disk and all objects without another replica. The caller must hold the registry lock.
    pub(crate) fn drop_disk(&self, client: Uuid, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(disk) = self.disk(client) else { return };
        fx.record(StateChange::DiskUnmounted { client });
        disk.set_unmounted();
        for shard in self.shard_indices() {
            self.lock(shard).drop_disk_copies(&disk, now_ms, fx);
        }
        self.update_disks(|disks| _ = disks.remove(&client));
    }
}

impl LockedShard<'_> {
    /// Removes the replicas in a segment from all objects of this shard.
    fn drop_segment_replicas(&mut self, segment: SegmentIndex, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.quarantined.retain(|range| range.segment != segment);
        self.drop_replicas(|replica, _| replica.segment == segment, now_ms, fx);
    }

    /// Removes lost replicas from all objects of this shard, and objects without another replica. `is_lost` gets the object's
    /// size in bytes as second argument. Returns the number of removed replicas.
    pub(crate) fn drop_replicas(
        &mut self,
        is_lost: impl Fn(&MemoryReplica, u64) -> bool,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        self.drop_pending_replicas(&is_lost, now_ms, fx);
        let indices = self.all_occupied();
        let is_affected = |index: &EntryIndex| {
            let entry = &self.entries[*index];
            entry.replicas().any(|replica| is_lost(replica, entry.size))
        };
        let affected: Vec<EntryIndex> = indices.filter(is_affected).collect();
        let mut count = 0;
        for index in affected {
            self.end_transfer(index, now_ms, fx);
            self.end_work(index, now_ms, fx);
            let entry = &self.entries[index];
            let (removed, remaining): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                entry.replicas().partition(|replica| is_lost(replica, entry.size));
            count += removed.len() as u64;
            if remaining.is_empty() && entry.copy().is_some() {
                self.drop_memory_replicas(index, fx);
                continue;
            }
            if remaining.is_empty() {
                MasterCounters::add(&self.objects.counters.lost_keys, 1);
                self.remove_and_free(index, RemoveCause::SegmentLost, fx);
                continue;
            }
            self.objects.tenants.discharge(entry.tenant, removed.len() as u64 * entry.size);
            self.report_vacated(removed.iter(), fx);
            self.entries[index].set_replicas(&remaining);
            self.emit_state(index, StoreCause::Replicas, fx);
            removed.iter().for_each(|replica| self.free(replica));
        }
        count
    }

    /// Removes the disk copy of an object, and the object if it has no memory replica.
    pub(crate) fn drop_disk_copy(
        &mut self,
        index: EntryIndex,
        now_ms: u64,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) {
        let is_promoted = |work: &ActiveDiskTask| matches!(work.task, DiskTask::Promotion { .. });
        if self.entries[index].work().is_some_and(is_promoted) {
            self.end_work(index, now_ms, fx);
        }
        if !self.entries[index].has_memory() {
            self.remove_and_free(index, cause, fx);
            return;
        }
        self.detach_copy(index);
        self.emit_state(index, StoreCause::DiskCopyLost, fx);
    }

    /// Removes the copies on a disk from all objects of this shard.
    fn drop_disk_copies(&mut self, disk: &Arc<ClientDisk>, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let indices = self.all_occupied();
        let uses_disk = |index: &EntryIndex| {
            let entry = &self.entries[*index];
            entry.copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk))
                || entry.work().is_some_and(|work| Arc::ptr_eq(&work.disk, disk))
        };
        let affected: Vec<EntryIndex> = indices.filter(uses_disk).collect();
        for index in affected {
            self.end_work(index, now_ms, fx);
            if self.entries[index].copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk)) {
                if !self.entries[index].has_memory() {
                    MasterCounters::add(&self.objects.counters.lost_keys, 1);
                }
                self.drop_disk_copy(index, now_ms, RemoveCause::SegmentLost, fx);
            }
        }
    }
}

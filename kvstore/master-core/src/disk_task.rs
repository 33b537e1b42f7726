//! Disk copies of objects, and the active offload or promotion of an object.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::ErrorCode;

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::disk::{ActiveDiskTask, DiskCopy, DiskTask, QueuedDiskTask};
use crate::indices::EntryIndex;
use crate::locked_shard::LockedShard;
use crate::object::{EvictionQueue, MemoryReplica};
use crate::object_table::ObjectTable;

impl ObjectTable {
    /// The locked shard and entry of a queued task, if the task is still active.
    pub(crate) fn find_work(&self, queued: &QueuedDiskTask) -> Option<(LockedShard<'_>, EntryIndex)> {
        let key_location = self.locate_key(queued.tenant, &queued.key);
        let shard = self.lock(key_location.shard);
        let index = shard.lookup(key_location, &queued.key)?;
        let is_active = shard.entries[index].work().is_some_and(|work| work.id == queued.work);
        is_active.then_some((shard, index))
    }
}

impl LockedShard<'_> {
    /// Queues an object for offloading by a node that has it in memory. Returns the id of the source replica.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` if it has a disk copy or an active task, `UNABLE_OFFLOADING` if none of its nodes has a disk with
    /// offloading enabled, `KEYS_ULTRA_LIMIT` if the queue is full.
    pub(crate) fn offload(&mut self, index: EntryIndex, now_ms: u64) -> Result<u64, ErrorCode> {
        let entry = &self.entries[index];
        if entry.work().is_some() || entry.copy().is_some() || entry.pending().is_some() {
            return Err(ErrorCode::OBJECT_ALREADY_EXISTS);
        }
        let limit = self.objects.settings.disks.map_or(0, |tier| tier.queue_limit);
        let disks = self.objects.disks.load();
        let mut result = Err(ErrorCode::UNABLE_OFFLOADING);
        for replica in entry.replicas().filter(|replica| self.can_be_read(replica)) {
            let client = self.segments.get(replica.segment).map(|segment| segment.client);
            let Some(disk) = client.and_then(|client| disks.get(&client)).filter(|disk| disk.is_responsive())
            else {
                continue;
            };
            let id = self.objects.new_replica_id();
            let queued = QueuedDiskTask { tenant: entry.tenant, key: self.key(index).into(), work: id };
            result = disk.add_offload(queued, limit).map(|()| (replica.id, id, Arc::clone(disk)));
            if result.is_ok() {
                break;
            }
        }
        let (source, id, disk) = result?;
        let task = DiskTask::Offload { source, fetched: false };
        self.begin_work(index, ActiveDiskTask { id, since_ms: now_ms, disk, task }, now_ms);
        Ok(source)
    }

    /// Removes all memory replicas of an object except one. Returns the freed bytes.
    pub(crate) fn retain_replica(
        &mut self,
        index: EntryIndex,
        replica: u64,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        let entry = &mut self.entries[index];
        let (remaining, removed): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|other| other.id == replica);
        if removed.is_empty() {
            return 0;
        }
        entry.set_replicas(&remaining);
        let (tenant, bytes) = (entry.tenant, entry.size * removed.len() as u64);
        self.objects.tenants.discharge(tenant, bytes);
        self.report_vacated(removed.iter(), fx);
        self.emit_state(index, StoreCause::Replicas, fx);
        removed.iter().for_each(|replica| self.free(replica));
        bytes
    }

    /// Sets the disk copy of an object, replacing the previous one.
    pub(crate) fn attach_copy(&mut self, index: EntryIndex, copy: DiskCopy) {
        self.detach_copy(index);
        copy.disk.add_copy(copy.size);
        self.entries[index].extra_mut().copy = Some(copy);
    }

    /// Removes the disk copy from an object's entry.
    pub(crate) fn detach_copy(&mut self, index: EntryIndex) -> Option<DiskCopy> {
        let copy = self.entries[index].extra.as_mut()?.copy.take()?;
        copy.disk.remove_copy(copy.size);
        self.entries[index].drop_empty_extras();
        Some(copy)
    }

    pub(crate) fn begin_work(&mut self, index: EntryIndex, work: ActiveDiskTask, now_ms: u64) {
        let totals = &self.objects.disk_task_totals;
        match work.task {
            DiskTask::Offload { .. } => _ = totals.offloading.fetch_add(self.entries[index].size, Relaxed),
            DiskTask::Promotion { .. } => _ = totals.promoting.fetch_add(1, Relaxed),
        }
        self.disk_tasks.insert((work.since_ms, index));
        self.entries[index].extra_mut().work = Some(Box::new(work));
        let queue = self.entries[index].target_queue(now_ms);
        self.enqueue(index, queue);
    }

    fn clear_work(&mut self, index: EntryIndex) -> Option<ActiveDiskTask> {
        let work = *self.entries[index].extra.as_mut()?.work.take()?;
        let totals = &self.objects.disk_task_totals;
        match work.task {
            DiskTask::Offload { .. } => _ = totals.offloading.fetch_sub(self.entries[index].size, Relaxed),
            DiskTask::Promotion { .. } => _ = totals.promoting.fetch_sub(1, Relaxed),
        }
        self.disk_tasks.remove(&(work.since_ms, index));
        Some(work)
    }

    /// Restarts the timeout of an object's disk task.
    pub(crate) fn restart_work_timer(&mut self, index: EntryIndex, now_ms: u64, task: DiskTask) {
        let extra = self.entries[index].extra.as_mut();
        let Some(work) = extra.and_then(|extra| extra.work.as_mut()) else { return };
        let before = std::mem::replace(&mut work.since_ms, now_ms);
        work.task = task;
        self.disk_tasks.remove(&(before, index));
        self.disk_tasks.insert((now_ms, index));
    }

    /// Drops the disk task of an object that is about to be removed or replaced; the node's report will be ignored.
    pub(crate) fn abandon_work(&mut self, index: EntryIndex) {
        let Some(work) = self.clear_work(index) else { return };
        if matches!(work.task, DiskTask::Offload { fetched: true, .. }) {
            work.disk.mark_outdated(self.entries[index].tenant, self.key(index));
        }
    }

    /// Ends the disk task of an object, if it has one, and frees the space allocated for it.
    pub(crate) fn end_work(&mut self, index: EntryIndex, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(work) = self.clear_work(index) else { return };
        if let DiskTask::Promotion { staged: Some(staged), .. } = work.task {
            let entry = &mut self.entries[index];
            let (removed, remaining): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                entry.replicas().partition(|replica| replica.id == staged && !replica.ready);
            entry.set_replicas(&remaining);
            let (tenant, bytes) = (entry.tenant, entry.size * removed.len() as u64);
            self.objects.tenants.discharge(tenant, bytes);
            for location in self.locations(removed.iter().copied()) {
                fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
            }
            removed.iter().for_each(|replica| self.free(replica));
        }
        self.requeue_idle(index, now_ms);
    }

    /// Inserts an idle entry into the eviction queue by its lease.
    pub(crate) fn requeue_idle(&mut self, index: EntryIndex, now_ms: u64) {
        self.entries[index].drop_empty_extras();
        let queue = self.entries[index].target_queue(now_ms);
        self.enqueue_by_stamp(index, queue);
    }

    /// Removes the memory replicas of an object with a disk copy. Returns the freed bytes.
    pub(crate) fn drop_memory_replicas(&mut self, index: EntryIndex, fx: &mut dyn StateChangeSink) -> u64 {
        let removed: Vec<MemoryReplica> = self.entries[index].replicas().copied().collect();
        self.report_vacated(removed.iter(), fx);
        let entry = &mut self.entries[index];
        let (tenant, bytes) = (entry.tenant, entry.size * removed.len() as u64);
        entry.set_replicas(&[]);
        self.enqueue(index, EvictionQueue::Unlisted);
        self.objects.tenants.discharge(tenant, bytes);
        self.emit_state(index, StoreCause::MemoryEvicted, fx);
        removed.iter().for_each(|replica| self.free(replica));
        bytes
    }
}

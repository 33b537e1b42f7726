//! Registering and unregistering nodes' disks.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::{RemoveCause, StateChange, StateChangeSink, StoreCause};
use crate::disk::{ActiveDiskTask, ClientDisk, ClientDisks, DiskTask, DiskUsage};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::slab::NIL;
use crate::statistics::MasterCounters;

impl MasterCore {
    pub(crate) fn disk(&self, client: Uuid) -> Option<Arc<ClientDisk>> {
        self.disks.load().get(&client).cloned()
    }

    /// The caller must hold the registry lock.
    pub(crate) fn update_disks(&self, change: impl FnOnce(&mut ClientDisks)) {
        let mut disks = ClientDisks::clone(&self.disks.load());
        change(&mut disks);
        self.disks.store(Arc::new(disks));
    }

    /// Registers a client's disk. `offloading` is whether it accepts objects. Repeating the call has no effect, except that a
    /// silent disk becomes readable again.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if disks are disabled in this master.
    pub fn mount_disk(
        &self,
        now_ms: u64,
        client: Uuid,
        offloading: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if self.settings.disks.is_none() {
            return Err(ErrorCode::UNABLE_OFFLOAD);
        }
        let mut registry = self.registry.lock();
        match self.disk(client) {
            Some(disk) if disk.is_responsive() => {}
            Some(disk) => {
                disk.set_silent(false);
                fx.record(StateChange::DiskMounted { client });
            }
            None => {
                self.update_disks(|disks| {
                    _ = disks.insert(client, Arc::new(ClientDisk::new(client, offloading)));
                });
                fx.record(StateChange::DiskMounted { client });
            }
        }
        match registry.clients.get_mut(&client) {
            // Its segments are not mounted again yet: the next heartbeat response requests that.
            Some(known) if known.silent => known.last_seen_ms = now_ms,
            _ => self.mark_alive(&mut registry, now_ms, client, fx),
        }
        Ok(())
    }

    /// Unregisters a client's disk with all copies on it. An unknown disk counts as unregistered already.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if disks are disabled in this master.
    pub fn unmount_disk(
        &self,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if self.settings.disks.is_none() {
            return Err(ErrorCode::UNABLE_OFFLOAD);
        }
        let _registry = self.registry.lock();
        self.drop_disk(client, now_ms, fx);
        Ok(())
    }

    /// Drops a disk and all objects without another replica. The caller must hold the registry lock.
    pub(crate) fn drop_disk(&self, client: Uuid, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(disk) = self.disk(client) else { return };
        fx.record(StateChange::DiskUnmounted { client });
        disk.set_unmounted();
        for shard in 0..self.shards.len() {
            self.lock(shard).drop_disk_copies(&disk, now_ms, fx);
        }
        self.update_disks(|disks| _ = disks.remove(&client));
    }

    /// Sets the capacity of a client's disk.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a negative number, `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn set_disk_capacity(&self, client: Uuid, bytes: i64) -> Result<(), ErrorCode> {
        let bytes = u64::try_from(bytes).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?.set_capacity(bytes);
        Ok(())
    }

    pub fn disk_usage(&self) -> DiskUsage {
        let promoting = self.disk_task_totals.promoting.load(Relaxed) as u64;
        let mut usage = DiskUsage { promoting, ..DiskUsage::default() };
        self.disks.load().values().for_each(|disk| disk.add_to(&mut usage));
        usage
    }

    /// Whether a client should clear its disk, because all objects were removed. Resets the request.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn request_remove_all(&self, client: Uuid) -> Result<bool, ErrorCode> {
        let disk = self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        Ok(disk.take_remove_all())
    }
}

impl LockedShard<'_> {
    /// Removes the disk copy of an object, and the object if it has no memory replica.
    pub(crate) fn drop_disk_copy(
        &mut self,
        index: u32,
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
        let (indices, _) = self.occupied(0, NIL);
        let uses_disk = |index: &u32| {
            let entry = &self.entries[*index];
            entry.copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk))
                || entry.work().is_some_and(|work| Arc::ptr_eq(&work.disk, disk))
        };
        let affected: Vec<u32> = indices.filter(uses_disk).collect();
        for index in affected {
            self.end_work(index, now_ms, fx);
            if self.entries[index].copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk)) {
                if !self.entries[index].has_memory() {
                    MasterCounters::add(&self.master.counters.lost_keys, 1);
                }
                self.drop_disk_copy(index, now_ms, RemoveCause::SegmentLost, fx);
            }
        }
    }
}

//! Disks that nodes have for objects, as they come and go.

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

    /// With the registry locked.
    pub(crate) fn update_disks(&self, change: impl FnOnce(&mut ClientDisks)) {
        let mut disks = ClientDisks::clone(&self.disks.load());
        change(&mut disks);
        self.disks.store(Arc::new(disks));
    }

    /// A client has a disk. `offloading` tells whether it wants objects for it. Doing so again changes nothing, except
    /// that it brings back what was silent.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks.
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
            // Its segments are not back yet: it will be told to mount them too.
            Some(known) if known.silent => known.last_seen_ms = now_ms,
            _ => self.mark_alive(&mut registry, now_ms, client, fx),
        }
        Ok(())
    }

    /// A client's disk is gone, and the copies on it. An unknown one is gone already.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks.
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

    /// Drops a disk with all that is only there. With the registry locked.
    pub(crate) fn drop_disk(&self, client: Uuid, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(disk) = self.disk(client) else { return };
        fx.record(StateChange::DiskUnmounted { client });
        disk.set_gone();
        for shard in 0..self.shards.len() {
            self.lock(shard).drop_disk_copies(&disk, now_ms, fx);
        }
        self.update_disks(|disks| _ = disks.remove(&client));
    }

    /// How large a client's disk is.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for less than nothing, `SEGMENT_NOT_FOUND` if it has none.
    pub fn set_disk_capacity(&self, client: Uuid, bytes: i64) -> Result<(), ErrorCode> {
        let bytes = u64::try_from(bytes).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?.set_capacity(bytes);
        Ok(())
    }

    /// What is on all disks.
    pub fn disk_usage(&self) -> DiskUsage {
        let promoting = self.disk_task_totals.promoting.load(Relaxed) as u64;
        let mut fill = DiskUsage { promoting, ..DiskUsage::default() };
        self.disks.load().values().for_each(|disk| disk.add_to(&mut fill));
        fill
    }

    /// Whether a client may empty its disk, because all objects were removed. Told once.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if it has none.
    pub fn request_remove_all(&self, client: Uuid) -> Result<bool, ErrorCode> {
        let disk = self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        Ok(disk.take_remove_all())
    }
}

impl LockedShard<'_> {
    /// The copy on a disk is gone, and with it the object if it is nowhere else.
    pub(crate) fn drop_disk_copy(
        &mut self,
        at: u32,
        now_ms: u64,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) {
        let is_promoted = |work: &ActiveDiskTask| matches!(work.task, DiskTask::Promotion { .. });
        if self.entries[at].work().is_some_and(is_promoted) {
            self.end_work(at, now_ms, fx);
        }
        if !self.entries[at].has_memory() {
            self.remove_and_free(at, cause, fx);
            return;
        }
        self.detach_copy(at);
        self.emit_state(at, StoreCause::DiskCopyLost, fx);
    }

    /// Takes a disk out of all objects of this shard.
    fn drop_disk_copies(&mut self, disk: &Arc<ClientDisk>, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let (places, _) = self.occupied(0, NIL);
        let is_there = |at: &u32| {
            let entry = &self.entries[*at];
            entry.copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk))
                || entry.work().is_some_and(|work| Arc::ptr_eq(&work.disk, disk))
        };
        let affected: Vec<u32> = places.filter(is_there).collect();
        for at in affected {
            self.end_work(at, now_ms, fx);
            if self.entries[at].copy().is_some_and(|copy| Arc::ptr_eq(&copy.disk, disk)) {
                if !self.entries[at].has_memory() {
                    MasterCounters::add(&self.master.counters.lost_keys, 1);
                }
                self.drop_disk_copy(at, now_ms, RemoveCause::SegmentLost, fx);
            }
        }
    }
}

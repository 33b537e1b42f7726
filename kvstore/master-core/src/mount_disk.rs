//! Registering and unregistering nodes' disks.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::{StateChange, StateChangeSink};
use crate::disk::{ClientDisk, DiskUsage};
use crate::master::MasterCore;

impl MasterCore {
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
        if self.objects.settings.disks.is_none() {
            return Err(ErrorCode::UNABLE_OFFLOAD);
        }
        let mut registry = self.registry.lock();
        match self.objects.disk(client) {
            Some(disk) if disk.is_responsive() => {}
            Some(disk) => {
                disk.set_silent(false);
                fx.record(StateChange::DiskMounted { client });
            }
            None => {
                self.objects.update_disks(|disks| {
                    _ = disks.insert(client, Arc::new(ClientDisk::new(client, offloading)));
                });
                fx.record(StateChange::DiskMounted { client });
            }
        }
        registry.record_mount(&self.objects, now_ms, client, fx);
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
        if self.objects.settings.disks.is_none() {
            return Err(ErrorCode::UNABLE_OFFLOAD);
        }
        let _registry = self.registry.lock();
        self.objects.drop_disk(client, now_ms, fx);
        Ok(())
    }

    /// Sets the capacity of a client's disk.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for a negative number, `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn set_disk_capacity(&self, client: Uuid, bytes: i64) -> Result<(), ErrorCode> {
        let bytes = u64::try_from(bytes).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.objects.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?.set_capacity(bytes);
        Ok(())
    }

    pub fn disk_usage(&self) -> DiskUsage {
        let promoting = self.objects.disk_task_totals.promoting.load(Relaxed) as u64;
        let mut usage = DiskUsage { promoting, ..DiskUsage::default() };
        self.objects.disks.load().values().for_each(|disk| disk.add_to(&mut usage));
        usage
    }

    /// Whether a client should clear its disk, because all objects were removed. Resets the request.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn request_remove_all(&self, client: Uuid) -> Result<bool, ErrorCode> {
        let disk = self.objects.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        Ok(disk.take_remove_all())
    }
}

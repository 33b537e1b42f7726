//! Offloading: nodes with disks fetch the objects to write to disk, and report when they are stored.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{OffloadTask, OffloadTasks, ReplicaType, Uuid};

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::disk::{DiskCopy, DiskTask};
use crate::indices::EntryIndex;
use crate::locked_shard::{LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::EvictionQueue;
use crate::object_table::KeyLocation;
use crate::requests::{CallContext, OffloadReport};
use crate::statistics::MasterCounters;

/// Result of recording a disk copy that a node reported.
enum OffloadOutcome {
    /// Recorded, or ignored as outdated.
    Recorded,
    /// The node has no registered disk.
    NoDisk,
}

impl MasterCore {
    /// The objects that a client should offload. With `offloading` false, its queued offloads are cancelled and no more are queued.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn fetch_offloads(
        &self,
        now_ms: u64,
        client: Uuid,
        offloading: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<OffloadTasks<String>, ErrorCode> {
        let disk = self.objects.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if disk.is_responsive() {
            let mut registry = self.registry.lock();
            if let Some(known) = registry.clients.get_mut(&client).filter(|known| !known.silent) {
                known.last_seen_ms = known.last_seen_ms.max(now_ms);
            }
        } else {
            self.mount_disk(now_ms, client, offloading, fx)?;
        }
        let mut tasks = Vec::new();
        for queued in disk.take_offloads(offloading) {
            let Some((mut shard, index)) = self.objects.find_work(&queued) else { continue };
            let Some(DiskTask::Offload { source, .. }) = shard.entries[index].work().map(|work| work.task)
            else {
                continue;
            };
            if !offloading {
                shard.end_work(index, now_ms, fx);
                continue;
            }
            shard.restart_work_timer(index, now_ms, DiskTask::Offload { source, fetched: true });
            let size = i64::try_from(shard.entries[index].size).unwrap_or(i64::MAX);
            tasks.push(OffloadTask {
                tenant_id: self.objects.tenant_name(queued.tenant),
                key: queued.key.into(),
                size,
            });
        }
        Ok(OffloadTasks(tasks))
    }

    /// A client reports objects stored on its disk. Objects without a task are recorded
    /// too: on startup, a client reports the contents of its disk.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks, `INVALID_PARAMS` for lists of different lengths,
    /// `SEGMENT_NOT_FOUND` if the client has no disk, `TENANT_NOT_REGISTERED`.
    pub fn offloaded<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        report: &OffloadReport<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let OffloadReport { tasks, stored } = report;
        if tasks.len() != stored.len() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if self.objects.settings.disks.is_none() {
            return if tasks.is_empty() { Ok(()) } else { Err(ErrorCode::UNABLE_OFFLOAD) };
        }
        let disk = self.objects.disk(client);
        let (mut endpoint, mut result) = (Arc::<str>::from(""), Ok(()));
        for (task, stored) in tasks.iter().zip(*stored) {
            if *endpoint != *stored.transport_endpoint.as_ref() {
                endpoint = Arc::from(stored.transport_endpoint.as_ref());
            }
            let context = CallContext { now_ms, client, tenant: task.tenant_id.as_ref() };
            let key = task.key.as_ref();
            let Ok(size) = u64::try_from(stored.data_size) else {
                self.not_offloaded(context, key, fx);
                continue;
            };
            let copy = disk.as_ref().map(|disk| DiskCopy {
                id: self.objects.new_replica_id(),
                size,
                disk: Arc::clone(disk),
                endpoint: Arc::clone(&endpoint),
            });
            if let OffloadOutcome::NoDisk = self.record_offloaded(context, key, copy, fx)? {
                result = Err(ErrorCode::SEGMENT_NOT_FOUND);
            }
        }
        result
    }

    fn not_offloaded(&self, context: CallContext<'_>, key: &str, fx: &mut dyn StateChangeSink) {
        let CallContext { now_ms, client, tenant } = context;
        let Ok(key_location) = self.objects.locate_reader_key(tenant, key) else { return };
        if self.objects.disk(client).is_some_and(|disk| disk.is_outdated(key_location.tenant, key)) {
            return;
        }
        let mut shard = self.objects.lock(key_location.shard);
        if let Some(index) = shard.lookup(key_location, key)
            && shard.is_offloaded_by(index, client)
        {
            shard.end_work(index, now_ms, fx);
        }
    }

    fn record_offloaded(
        &self,
        context: CallContext<'_>,
        key: &str,
        copy: Option<DiskCopy>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<OffloadOutcome, ErrorCode> {
        let CallContext { now_ms, tenant, .. } = context;
        if let Ok(key_location) = self.objects.locate_reader_key(tenant, key) {
            if copy.as_ref().is_some_and(|copy| copy.disk.is_outdated(key_location.tenant, key)) {
                return Ok(OffloadOutcome::Recorded);
            }
            let mut shard = self.objects.lock(key_location.shard);
            if let Some(index) = shard.lookup(key_location, key) {
                return Ok(shard.record_offloaded(index, context, copy, fx));
            }
        }
        let tenant = self.objects.tenants.index_for_writer(tenant)?;
        let Some(copy) = copy else { return Ok(OffloadOutcome::NoDisk) };
        if copy.size == 0 || key.is_empty() {
            return Ok(OffloadOutcome::Recorded);
        }
        let key_location = self.objects.locate_key(tenant, key);
        let mut shard = self.objects.lock(key_location.shard);
        Ok(match shard.lookup(key_location, key) {
            Some(index) => shard.record_offloaded(index, context, Some(copy), fx),
            None => shard.add_on_disk(key_location, key, now_ms, copy, fx),
        })
    }

    /// A client reports that it removed an object from its disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `INVALID_PARAMS` for replica types other than disk.
    pub fn evict_disk_copy(
        &self,
        context: CallContext<'_>,
        key: &str,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.evict_disk_copy_if(context, key, replica_type, |_| true, fx).map(drop)
    }

    /// A client reports that it removed a replica of an object from its disk. Returns false if the object has no such replica any
    /// more: the client's report concerns a replaced object.
    ///
    /// # Errors
    /// As [`Self::evict_disk_copy`].
    pub fn evict_current_disk_copy(
        &self,
        context: CallContext<'_>,
        key: &str,
        (replica_type, replica): (ReplicaType, u64),
        fx: &mut dyn StateChangeSink,
    ) -> Result<bool, ErrorCode> {
        self.evict_disk_copy_if(context, key, replica_type, |id| id == replica, fx)
    }

    /// Drops the client's disk copy of an object if its replica id matches. Returns whether it did.
    fn evict_disk_copy_if(
        &self,
        CallContext { now_ms, client, tenant }: CallContext<'_>,
        key: &str,
        replica_type: ReplicaType,
        is_wanted: impl Fn(u64) -> bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<bool, ErrorCode> {
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if !matches!(replica_type, ReplicaType::DISK | ReplicaType::LOCAL_DISK) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let copy = shard.entries[index].copy();
        let is_evicted = replica_type == ReplicaType::LOCAL_DISK
            && copy.is_some_and(|copy| copy.disk.client == client && is_wanted(copy.id));
        if is_evicted {
            shard.drop_disk_copy(index, now_ms, RemoveCause::Evicted, fx);
        }
        Ok(is_evicted)
    }
}

impl LockedShard<'_> {
    fn is_offloaded_by(&self, index: EntryIndex, client: Uuid) -> bool {
        self.entries[index]
            .work()
            .is_some_and(|work| work.disk.client == client && matches!(work.task, DiskTask::Offload { .. }))
    }

    /// Records that a client has stored an object on its disk.
    fn record_offloaded(
        &mut self,
        index: EntryIndex,
        context: CallContext<'_>,
        copy: Option<DiskCopy>,
        fx: &mut dyn StateChangeSink,
    ) -> OffloadOutcome {
        let CallContext { now_ms, client, .. } = context;
        if self.is_offloaded_by(index, client) {
            self.end_work(index, now_ms, fx);
        }
        let Some(copy) = copy.filter(|copy| !copy.disk.is_unmounted()) else { return OffloadOutcome::NoDisk };
        let entry = &self.entries[index];
        // A copy of another size belongs to another version; so does any copy while this object is being written.
        let is_accepted = match entry.copy() {
            None => true,
            Some(known) => known.disk.client == client || !known.disk.is_responsive(),
        };
        if entry.is_complete() && entry.size == copy.size && is_accepted {
            // A copy on the same disk keeps its id, so that it is not counted as new.
            let known = entry.copy().filter(|known| known.disk.client == client).map(|known| known.id);
            let id = known.unwrap_or(copy.id);
            self.attach_copy(index, DiskCopy { id, ..copy });
            if known.is_none() {
                MasterCounters::add(&self.objects.counters.offloaded_keys, 1);
            }
            self.emit_state(index, StoreCause::Offloaded, fx);
        }
        OffloadOutcome::Recorded
    }

    /// Adds an object that is only on a disk.
    fn add_on_disk(
        &mut self,
        key_location: KeyLocation,
        key: &str,
        now_ms: u64,
        copy: DiskCopy,
        fx: &mut dyn StateChangeSink,
    ) -> OffloadOutcome {
        if copy.disk.is_unmounted() {
            return OffloadOutcome::NoDisk;
        }
        let new_object = NewObject {
            key,
            client: copy.disk.client,
            size: copy.size,
            stamp: now_ms,
            replicas: &[],
            queue: EvictionQueue::Unlisted,
            hard_pin: false,
            soft_pin_until_ms: None,
            checksum: None,
            group: None,
        };
        let index = self.add(key_location, &new_object);
        self.attach_copy(index, copy);
        self.emit_state(index, StoreCause::Offloaded, fx);
        OffloadOutcome::Recorded
    }
}

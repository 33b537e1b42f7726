//! From memory to disk: nodes that have disks ask what to put there, and tell when it is there.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    DEFAULT_TENANT, OffloadTask, OffloadTasks, ReplicaType, StorageObjectMetadata, Uuid,
};

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::disk::{ActiveDiskTask, DiskCopy, DiskTask, QueuedDiskTask};
use crate::locked_shard::{KeyLocation, LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica};
use crate::statistics::MasterCounters;

/// What became of an object that a node has put on its disk.
enum OffloadOutcome {
    /// It is known, or need not be.
    Recorded,
    /// The node has no disk, as far as the master knows.
    NoDisk,
}

impl MasterCore {
    /// What a client shall put on its disk. If it does not want to, it is asked for nothing from now on.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if it has no disk.
    pub fn fetch_offloads(
        &self,
        now_ms: u64,
        client: Uuid,
        offloading: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<OffloadTasks<String>, ErrorCode> {
        let disk = self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        if disk.is_responsive() {
            let mut registry = self.registry.lock();
            if let Some(known) = registry.clients.get_mut(&client).filter(|known| !known.silent) {
                known.last_seen_ms = known.last_seen_ms.max(now_ms);
            }
        } else {
            self.mount_disk(now_ms, client, offloading, fx)?;
        }
        let mut tasks = Vec::new();
        for waiting in disk.take_offloads(offloading) {
            let Some((mut shard, at)) = self.find_work(&waiting) else { continue };
            let Some(DiskTask::Offload { source, .. }) = shard.entries[at].work().map(|it| it.task) else {
                continue;
            };
            if !offloading {
                shard.end_work(at, now_ms, fx);
                continue;
            }
            shard.restart_work_timer(at, now_ms, DiskTask::Offload { source, fetched: true });
            let size = i64::try_from(shard.entries[at].size).unwrap_or(i64::MAX);
            tasks.push(OffloadTask {
                tenant_id: self.tenant_name(waiting.tenant),
                key: waiting.key.into(),
                size,
            });
        }
        Ok(OffloadTasks(tasks))
    }

    pub(crate) fn tenant_name(&self, tenant: u16) -> String {
        self.tenants.get(tenant).map_or_else(|| DEFAULT_TENANT.to_owned(), |it| it.name.to_string())
    }

    /// The object that waits, if it still does.
    pub(crate) fn find_work(&self, waiting: &QueuedDiskTask) -> Option<(LockedShard<'_>, u32)> {
        let spot = self.locate_key(waiting.tenant, &waiting.key);
        let shard = self.lock(spot.shard);
        let at = shard.lookup(spot, &waiting.key)?;
        let is_it = shard.entries[at].work().is_some_and(|work| work.id == waiting.work);
        is_it.then_some((shard, at))
    }

    /// A client has put objects on its disk, or failed to where `data_size` is negative. What nobody asked for is noted
    /// too: a client tells what it finds on its disk when it starts.
    ///
    /// # Errors
    /// `UNABLE_OFFLOAD` if this master uses no disks, `INVALID_PARAMS` for lists of different lengths,
    /// `SEGMENT_NOT_FOUND` if the client has no disk, `TENANT_NOT_REGISTERED`.
    pub fn offloaded<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tasks: &[OffloadTask<S>],
        stored: &[StorageObjectMetadata<S>],
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if tasks.len() != stored.len() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if self.settings.disks.is_none() {
            return if tasks.is_empty() { Ok(()) } else { Err(ErrorCode::UNABLE_OFFLOAD) };
        }
        let disk = self.disk(client);
        let (mut endpoint, mut result) = (Arc::<str>::from(""), Ok(()));
        for (task, stored) in tasks.iter().zip(stored) {
            if *endpoint != *stored.transport_endpoint.as_ref() {
                endpoint = Arc::from(stored.transport_endpoint.as_ref());
            }
            let (tenant, key) = (task.tenant_id.as_ref(), task.key.as_ref());
            let Ok(size) = u64::try_from(stored.data_size) else {
                self.not_offloaded(now_ms, client, tenant, key, fx);
                continue;
            };
            let copy = disk.as_ref().map(|disk| DiskCopy {
                id: self.new_replica_id(),
                size,
                disk: Arc::clone(disk),
                endpoint: Arc::clone(&endpoint),
            });
            if let OffloadOutcome::NoDisk = self.record_offloaded(now_ms, client, (tenant, key), copy, fx)? {
                result = Err(ErrorCode::SEGMENT_NOT_FOUND);
            }
        }
        result
    }

    fn not_offloaded(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) {
        let Ok(spot) = self.locate_reader_key(tenant, key) else { return };
        if self.disk(client).is_some_and(|disk| disk.is_outdated(spot.tenant, key)) {
            return;
        }
        let mut shard = self.lock(spot.shard);
        if let Some(at) = shard.lookup(spot, key)
            && shard.is_offloaded_by(at, client)
        {
            shard.end_work(at, now_ms, fx);
        }
    }

    fn record_offloaded(
        &self,
        now_ms: u64,
        client: Uuid,
        (tenant, key): (&str, &str),
        copy: Option<DiskCopy>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<OffloadOutcome, ErrorCode> {
        if let Ok(spot) = self.locate_reader_key(tenant, key) {
            if copy.as_ref().is_some_and(|copy| copy.disk.is_outdated(spot.tenant, key)) {
                return Ok(OffloadOutcome::Recorded);
            }
            let mut shard = self.lock(spot.shard);
            if let Some(at) = shard.lookup(spot, key) {
                return Ok(shard.record_offloaded(at, now_ms, client, copy, fx));
            }
        }
        let tenant = self.tenants.index_for_writer(tenant)?;
        let Some(copy) = copy else { return Ok(OffloadOutcome::NoDisk) };
        if copy.size == 0 || key.is_empty() {
            return Ok(OffloadOutcome::Recorded);
        }
        let spot = self.locate_key(tenant, key);
        let mut shard = self.lock(spot.shard);
        Ok(match shard.lookup(spot, key) {
            Some(at) => shard.record_offloaded(at, now_ms, client, Some(copy), fx),
            None => shard.add_on_disk(spot, key, now_ms, copy, fx),
        })
    }

    /// A client has removed the copy of an object from its disk.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `INVALID_PARAMS` for replicas that are on no disk.
    pub fn evict_disk_copy(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        key: &str,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let spot = self.locate_reader_key(tenant, key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if !matches!(replica_type, ReplicaType::DISK | ReplicaType::LOCAL_DISK) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let is_there = shard.entries[at].copy().is_some_and(|copy| copy.disk.client == client);
        if replica_type == ReplicaType::LOCAL_DISK && is_there {
            shard.drop_disk_copy(at, now_ms, RemoveCause::Evicted, fx);
        }
        Ok(())
    }
}

impl LockedShard<'_> {
    /// Asks a node that has an object in memory to put it on its disk too. Returns the replica that it will read.
    ///
    /// # Errors
    /// `OBJECT_ALREADY_EXISTS` if it is on one or on its way, `UNABLE_OFFLOADING` if none of its nodes has a disk and
    /// wants it, `KEYS_ULTRA_LIMIT` if too many wait.
    pub(crate) fn offload(&mut self, at: u32, now_ms: u64) -> Result<u64, ErrorCode> {
        let entry = &self.entries[at];
        if entry.work().is_some() || entry.copy().is_some() || entry.pending().is_some() {
            return Err(ErrorCode::OBJECT_ALREADY_EXISTS);
        }
        let limit = self.master.settings.disks.map_or(0, |it| it.queue_limit);
        let disks = self.master.disks.load();
        let mut result = Err(ErrorCode::UNABLE_OFFLOADING);
        for replica in entry.replicas().filter(|it| self.can_be_read(it)) {
            let client = self.segments.get(replica.segment).map(|it| it.client);
            let Some(disk) = client.and_then(|it| disks.get(&it)).filter(|it| it.is_responsive()) else {
                continue;
            };
            let id = self.master.new_replica_id();
            let waiting = QueuedDiskTask { tenant: entry.tenant, key: entry.key.clone(), work: id };
            result = disk.add_offload(waiting, limit).map(|()| (replica.id, id, Arc::clone(disk)));
            if result.is_ok() {
                break;
            }
        }
        let (source, id, disk) = result?;
        let task = DiskTask::Offload { source, fetched: false };
        self.begin_work(at, ActiveDiskTask { id, since_ms: now_ms, disk, task }, now_ms);
        Ok(source)
    }

    fn is_offloaded_by(&self, at: u32, client: Uuid) -> bool {
        self.entries[at]
            .work()
            .is_some_and(|work| work.disk.client == client && matches!(work.task, DiskTask::Offload { .. }))
    }

    /// A client has an object on its disk.
    fn record_offloaded(
        &mut self,
        at: u32,
        now_ms: u64,
        client: Uuid,
        copy: Option<DiskCopy>,
        fx: &mut dyn StateChangeSink,
    ) -> OffloadOutcome {
        if self.is_offloaded_by(at, client) {
            self.end_work(at, now_ms, fx);
        }
        let Some(copy) = copy.filter(|copy| !copy.disk.is_gone()) else { return OffloadOutcome::NoDisk };
        let entry = &self.entries[at];
        // Of another size it is not this object; and while this is written, what is on the disk was before.
        let is_wanted = match entry.copy() {
            None => true,
            Some(known) => known.disk.client == client || !known.disk.is_responsive(),
        };
        if entry.is_complete() && entry.size == copy.size && is_wanted {
            // What was on the disk before keeps its name, so that nobody takes it for new.
            let known = entry.copy().filter(|known| known.disk.client == client).map(|known| known.id);
            let id = known.unwrap_or(copy.id);
            self.attach_copy(at, DiskCopy { id, ..copy });
            if known.is_none() {
                MasterCounters::add(&self.master.counters.offloaded_keys, 1);
            }
            self.emit_state(at, StoreCause::Offloaded, fx);
        }
        OffloadOutcome::Recorded
    }

    /// An object that is only on a disk.
    fn add_on_disk(
        &mut self,
        spot: KeyLocation,
        key: &str,
        now_ms: u64,
        copy: DiskCopy,
        fx: &mut dyn StateChangeSink,
    ) -> OffloadOutcome {
        if copy.disk.is_gone() {
            return OffloadOutcome::NoDisk;
        }
        let fresh = NewObject {
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
        let at = self.add(spot, &fresh);
        self.attach_copy(at, copy);
        self.emit_state(at, StoreCause::Offloaded, fx);
        OffloadOutcome::Recorded
    }

    /// Keeps just one replica of an object in memory. Returns the bytes that this freed.
    pub(crate) fn retain_replica(&mut self, at: u32, replica: u64, fx: &mut dyn StateChangeSink) -> u64 {
        let entry = &mut self.entries[at];
        let (left, gone): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|it| it.id == replica);
        if gone.is_empty() {
            return 0;
        }
        entry.set_replicas(&left);
        let (tenant, bytes) = (entry.tenant, entry.size * gone.len() as u64);
        self.master.tenants.discharge(tenant, bytes);
        self.report_vacated(gone.iter(), fx);
        self.emit_state(at, StoreCause::Replicas, fx);
        gone.iter().for_each(|it| self.free(it));
        bytes
    }
}

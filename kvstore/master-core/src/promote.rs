//! Promotion: the node that has an object on its disk copies it back to memory after repeated reads.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{OffloadTask, OffloadTasks, PromotionAllocation, ReplicaList, ReplicaMedium};

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::disk::{ActiveDiskTask, DiskTask, QueuedDiskTask};
use crate::indices::{EntryIndex, TenantIndex};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::object_table::KeyLocation;
use crate::placement::{PlacementRequest, PlacementSearch};
use crate::requests::{CallContext, PromotionRequest};
use crate::retention::KeyUse;
use crate::segment::AllocatedSpace;
use crate::statistics::MasterCounters;

impl MasterCore {
    pub(crate) fn is_promotion_enabled(&self) -> bool {
        self.objects.settings.disks.is_some_and(|tier| tier.promote_on_hit)
    }

    /// Counts a read, and queues the promotion of an object that is only on a disk.
    pub(crate) fn record_disk_read<S>(
        &self,
        now_ms: u64,
        key_location: KeyLocation,
        key: &str,
        list: &ReplicaList<S>,
    ) {
        let is_on_disk = |replica: &mooncake_wire::types::ReplicaDescriptor<S>| {
            matches!(replica.medium, ReplicaMedium::LocalDisk(_))
        };
        let Some(settings) = self.objects.settings.disks.filter(|tier| tier.promote_on_hit) else { return };
        if list.replicas.is_empty() || !list.replicas.iter().all(is_on_disk) {
            return;
        }
        let counters = &self.objects.counters;
        if self.sketch.count(self.objects.hash(key_location.tenant, key)) < settings.promotion_reads {
            return MasterCounters::add(&counters.promotions_rejected_frequency, 1);
        }
        let AllocatedSpace { used, capacity } = self.objects.segments.load().usage();
        if used as f64 >= self.objects.settings.high_watermark * capacity as f64 {
            return MasterCounters::add(&counters.promotions_rejected_watermark, 1);
        }
        if self.objects.disk_task_totals.promoting.load(Relaxed) >= settings.promotion_limit {
            return MasterCounters::add(&counters.promotions_rejected_cap, 1);
        }
        let mut shard = self.objects.lock(key_location.shard);
        if let Some(index) = shard.lookup(key_location, key)
            && shard.queue_promotion(index, now_ms)
        {
            MasterCounters::add(&counters.promotions, 1);
        }
    }

    /// The next objects that a client should promote from its disk.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the client has no disk.
    pub fn fetch_promotions(
        &self,
        client: mooncake_wire::types::Uuid,
    ) -> Result<OffloadTasks<String>, ErrorCode> {
        let disk = self.objects.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let limit = self.objects.settings.disks.map_or(0, |tier| tier.promotions_per_heartbeat);
        let mut tasks = Vec::new();
        while tasks.len() < limit
            && let Some(queued) = disk.take_promotion()
        {
            let Some((shard, index)) = self.objects.find_work(&queued) else { continue };
            let size = shard.entries[index].copy().map_or(0, |copy| copy.size);
            drop(shard);
            let size = i64::try_from(size).unwrap_or(i64::MAX);
            tasks.push(OffloadTask {
                tenant_id: self.objects.tenant_name(queued.tenant),
                key: queued.key.into(),
                size,
            });
        }
        Ok(OffloadTasks(tasks))
    }

    /// Allocates memory for an object that a client is promoting. Evicts nothing.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` if no promotion is queued or its space is allocated already, `INVALID_PARAMS` for
    /// the wrong client or size, `TENANT_QUOTA_EXCEEDED`, `NO_AVAILABLE_HANDLE`.
    pub fn promotion_start<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &PromotionRequest<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<PromotionAllocation<Arc<str>>, ErrorCode> {
        let CallContext { now_ms, client, tenant } = context;
        let PromotionRequest { key, size, preferred } = *request;
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[index];
        let task = entry.work().ok_or(ErrorCode::REPLICA_IS_NOT_READY)?;
        let DiskTask::Promotion { staged, is_prefetch } = task.task else {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        };
        if task.disk.client != client || entry.size != size {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if staged.is_some() || entry.has_memory() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if !self.objects.tenants.charge(entry.tenant, size) {
            return Err(ErrorCode::TENANT_QUOTA_EXCEEDED);
        }
        let preferred: Vec<&str> = preferred.iter().map(AsRef::as_ref).collect();
        let entropy = self.objects.hash(TenantIndex::DEFAULT, key) ^ now_ms.rotate_left(32);
        let request = PlacementRequest { size, replicas: 1, preferred: &preferred, host: "", entropy };
        // Not limited by filling segments: nothing is evicted for a promotion.
        let search = PlacementSearch::new(&shard.segments, &self.objects.settings, &request, now_ms);
        let replicas = search.run();
        let Some(mut staged) = replicas.into_iter().next() else {
            self.objects.tenants.discharge(key_location.tenant, size);
            return Err(ErrorCode::NO_AVAILABLE_HANDLE);
        };
        staged.id = self.objects.new_replica_id();
        let until_ms = now_ms.saturating_add(self.objects.settings.put_release_ms);
        for location in shard.locations(std::iter::once(staged)) {
            fx.record(StateChange::RangeQuarantined {
                segment: location.segment,
                offset: location.offset,
                size,
                until_ms,
            });
        }
        shard.entries[index].set_replicas(&[staged]);
        let task = DiskTask::Promotion { staged: Some(staged.id), is_prefetch };
        shard.restart_work_timer(index, now_ms, task);
        let memory = shard.to_descriptor(&staged, size).ok_or(ErrorCode::NO_AVAILABLE_HANDLE)?;
        Ok(PromotionAllocation { memory })
    }

    /// Completes a promotion: the object is readable from memory.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` if no promotion was started, `INVALID_PARAMS` for the wrong client.
    pub fn promotion_end(
        &self,
        context: CallContext<'_>,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let CallContext { now_ms, client, tenant } = context;
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let task = shard.entries[index].work().ok_or(ErrorCode::REPLICA_IS_NOT_READY)?;
        let DiskTask::Promotion { staged: Some(_), is_prefetch } = task.task else {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        };
        if task.disk.client != client {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        shard.finish_promotion(index, now_ms, fx);
        if is_prefetch {
            shard.lease(index, key_location, KeyUse::single(now_ms));
        }
        Ok(())
    }

    /// Registers that a client copies an object from its disk to memory because a reader expects it there. The client continues with
    /// [`Self::promotion_start`].
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` for an unknown client, `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`,
    /// `REPLICA_ALREADY_IN_MEMORY` also if the object is being copied there, `INVALID_PARAMS` if the client does not have it.
    pub fn register_prefetch(&self, context: CallContext<'_>, key: &str) -> Result<(), ErrorCode> {
        let CallContext { now_ms, client, tenant } = context;
        let is_known =
            self.objects.disk(client).is_some() || self.registry.lock().clients.contains_key(&client);
        if !is_known {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[index];
        if !entry.is_complete() || entry.pending().is_some() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if entry.has_memory() || entry.work().is_some() {
            return Err(ErrorCode::REPLICA_ALREADY_IN_MEMORY);
        }
        let copy = entry.copy().filter(|copy| copy.disk.client == client && copy.disk.is_responsive());
        let Some(disk) = copy.map(|copy| Arc::clone(&copy.disk)) else {
            return Err(ErrorCode::INVALID_PARAMS);
        };
        let id = self.objects.new_replica_id();
        let task = DiskTask::Promotion { staged: None, is_prefetch: true };
        shard.begin_work(index, ActiveDiskTask { id, since_ms: now_ms, disk, task }, now_ms);
        MasterCounters::add(&self.objects.counters.promotions, 1);
        Ok(())
    }

    /// Reports that a promotion failed. Repeating the call is not an error.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `INVALID_PARAMS` for the wrong client.
    pub fn promotion_revoke(
        &self,
        context: CallContext<'_>,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let CallContext { now_ms, client, tenant } = context;
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let task = shard.entries[index].work().filter(|work| matches!(work.task, DiskTask::Promotion { .. }));
        let Some(task) = task else { return Ok(()) };
        if task.disk.client != client {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        shard.end_work(index, now_ms, fx);
        MasterCounters::add(&self.objects.counters.promotions_failed, 1);
        Ok(())
    }
}

impl LockedShard<'_> {
    /// Queues the promotion of an object. Returns false if it is not eligible.
    fn queue_promotion(&mut self, index: EntryIndex, now_ms: u64) -> bool {
        let entry = &self.entries[index];
        let Some(copy) = entry.copy().filter(|copy| copy.disk.is_responsive()) else { return false };
        if !entry.is_complete() || entry.has_memory() || entry.work().is_some() || entry.pending().is_some() {
            return false;
        }
        let (id, disk) = (self.objects.new_replica_id(), Arc::clone(&copy.disk));
        disk.add_promotion(QueuedDiskTask { tenant: entry.tenant, key: self.key(index).into(), work: id });
        let task = DiskTask::Promotion { staged: None, is_prefetch: false };
        self.begin_work(index, ActiveDiskTask { id, since_ms: now_ms, disk, task }, now_ms);
        true
    }

    fn finish_promotion(&mut self, index: EntryIndex, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let entry = &mut self.entries[index];
        let mut new: Vec<MemoryReplica> = Vec::new();
        for replica in entry.replicas_mut().filter(|replica| !replica.ready) {
            replica.ready = true;
            new.push(*replica);
        }
        let bytes = entry.size;
        for location in self.locations(new.into_iter()) {
            fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
        }
        // Frees no space: the staged replica is ready by now.
        self.end_work(index, now_ms, fx);
        self.emit_state(index, StoreCause::Promoted, fx);
        MasterCounters::add(&self.objects.counters.promoted_keys, 1);
        MasterCounters::add(&self.objects.counters.promoted_bytes, bytes);
    }
}

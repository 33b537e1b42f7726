//! From disk to memory: what is read although it is only on a disk is brought back by the node that has it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{OffloadTask, OffloadTasks, PromotionAllocation, ReplicaList, ReplicaMedium};

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::disk::{ActiveDiskTask, DiskTask, QueuedDiskTask};
use crate::locked_shard::{KeyLocation, LockedShard};
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::placement::{PlacementRequest, PlacementSearch};
use crate::statistics::MasterCounters;
use crate::transfer::ClientObjectKey;

impl MasterCore {
    pub(crate) fn is_promotion_enabled(&self) -> bool {
        self.settings.disks.is_some_and(|it| it.promote_on_hit)
    }

    /// Counts a read, and asks for the object to be brought back if it is only on a disk.
    pub(crate) fn record_disk_read<S>(
        &self,
        now_ms: u64,
        spot: KeyLocation,
        key: &str,
        list: &ReplicaList<S>,
    ) {
        let is_on_disk = |it: &mooncake_wire::types::ReplicaDescriptor<S>| {
            matches!(it.medium, ReplicaMedium::LocalDisk(_))
        };
        let Some(settings) = self.settings.disks.filter(|it| it.promote_on_hit) else { return };
        if list.replicas.is_empty() || !list.replicas.iter().all(is_on_disk) {
            return;
        }
        let counters = &self.counters;
        if self.sketch.count(self.hash(spot.tenant, key)) < settings.promotion_reads {
            return MasterCounters::add(&counters.promotions_rejected_frequency, 1);
        }
        let (used, capacity) = self.segments.load().usage();
        if used as f64 >= self.settings.high_watermark * capacity as f64 {
            return MasterCounters::add(&counters.promotions_rejected_watermark, 1);
        }
        if self.disk_task_totals.promoting.load(Relaxed) >= settings.promotion_limit {
            return MasterCounters::add(&counters.promotions_rejected_cap, 1);
        }
        let mut shard = self.lock(spot.shard);
        if let Some(at) = shard.lookup(spot, key)
            && shard.queue_promotion(at, now_ms)
        {
            MasterCounters::add(&counters.promotions, 1);
        }
    }

    /// What a client shall bring back from its disk next.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if it has no disk.
    pub fn fetch_promotions(
        &self,
        client: mooncake_wire::types::Uuid,
    ) -> Result<OffloadTasks<String>, ErrorCode> {
        let disk = self.disk(client).ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let limit = self.settings.disks.map_or(0, |it| it.promotions_per_heartbeat);
        let mut tasks = Vec::new();
        while tasks.len() < limit
            && let Some(waiting) = disk.take_promotion()
        {
            let Some((shard, at)) = self.find_work(&waiting) else { continue };
            let size = shard.entries[at].copy().map_or(0, |copy| copy.size);
            drop(shard);
            let size = i64::try_from(size).unwrap_or(i64::MAX);
            tasks.push(OffloadTask {
                tenant_id: self.tenant_name(waiting.tenant),
                key: waiting.key.into(),
                size,
            });
        }
        Ok(OffloadTasks(tasks))
    }

    /// Takes space in memory for an object that a client shall bring back. Nothing is evicted for it.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` if it need not be brought back or is on its way, `INVALID_PARAMS` for
    /// another client or another size, `TENANT_QUOTA_EXCEEDED`, `NO_AVAILABLE_HANDLE`.
    pub fn promotion_start<S: AsRef<str>>(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        size: u64,
        preferred: &[S],
        fx: &mut dyn StateChangeSink,
    ) -> Result<PromotionAllocation<Arc<str>>, ErrorCode> {
        let spot = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[at];
        let task = entry.work().ok_or(ErrorCode::REPLICA_IS_NOT_READY)?;
        let DiskTask::Promotion { staged } = task.task else { return Err(ErrorCode::REPLICA_IS_NOT_READY) };
        if task.disk.client != work.client || entry.size != size {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if staged.is_some() || entry.has_memory() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if !self.tenants.charge(entry.tenant, size) {
            return Err(ErrorCode::TENANT_QUOTA_EXCEEDED);
        }
        let preferred: Vec<&str> = preferred.iter().map(AsRef::as_ref).collect();
        let entropy = self.hash(0, work.key) ^ now_ms.rotate_left(32);
        let wish = PlacementRequest { size, replicas: 1, preferred: &preferred, host: "", entropy };
        let found = PlacementSearch::new(&shard.segments, &self.settings, &wish, now_ms).run();
        let Some(mut staged) = found.into_iter().next() else {
            self.tenants.discharge(spot.tenant, size);
            return Err(ErrorCode::NO_AVAILABLE_HANDLE);
        };
        staged.id = self.new_replica_id();
        let until_ms = now_ms.saturating_add(self.settings.put_release_ms);
        for place in shard.locations(std::iter::once(staged)) {
            fx.record(StateChange::RangeQuarantined {
                segment: place.segment,
                offset: place.offset,
                size,
                until_ms,
            });
        }
        shard.entries[at].set_replicas(&[staged]);
        shard.restart_work_timer(at, now_ms, DiskTask::Promotion { staged: Some(staged.id) });
        let memory = shard.to_descriptor(&staged, size).ok_or(ErrorCode::NO_AVAILABLE_HANDLE)?;
        Ok(PromotionAllocation { memory })
    }

    /// An object is in memory again.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` if it was not to be brought back, `INVALID_PARAMS` for another client.
    pub fn promotion_end(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let spot = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let task = shard.entries[at].work().ok_or(ErrorCode::REPLICA_IS_NOT_READY)?;
        let DiskTask::Promotion { staged: Some(_) } = task.task else {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        };
        if task.disk.client != work.client {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        shard.finish_promotion(at, now_ms, fx);
        Ok(())
    }

    /// An object could not be brought back. Telling so again is no error.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `INVALID_PARAMS` for another client.
    pub fn promotion_revoke(
        &self,
        now_ms: u64,
        work: ClientObjectKey<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let spot = self.locate_reader_key(work.tenant, work.key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, work.key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let task = shard.entries[at].work().filter(|it| matches!(it.task, DiskTask::Promotion { .. }));
        let Some(task) = task else { return Ok(()) };
        if task.disk.client != work.client {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        shard.end_work(at, now_ms, fx);
        MasterCounters::add(&self.counters.promotions_failed, 1);
        Ok(())
    }
}

impl LockedShard<'_> {
    /// Asks the node that has an object on its disk to bring it back. False if that is not to be done.
    fn queue_promotion(&mut self, at: u32, now_ms: u64) -> bool {
        let entry = &self.entries[at];
        let Some(copy) = entry.copy().filter(|copy| copy.disk.is_responsive()) else { return false };
        if !entry.is_complete() || entry.has_memory() || entry.work().is_some() || entry.pending().is_some() {
            return false;
        }
        let (id, disk) = (self.master.new_replica_id(), Arc::clone(&copy.disk));
        disk.add_promotion(QueuedDiskTask { tenant: entry.tenant, key: entry.key.clone(), work: id });
        let task = DiskTask::Promotion { staged: None };
        self.begin_work(at, ActiveDiskTask { id, since_ms: now_ms, disk, task }, now_ms);
        true
    }

    fn finish_promotion(&mut self, at: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let entry = &mut self.entries[at];
        let mut new: Vec<MemoryReplica> = Vec::new();
        for replica in entry.replicas_mut().filter(|it| !it.ready) {
            replica.ready = true;
            new.push(*replica);
        }
        let bytes = entry.size;
        for place in self.locations(new.into_iter()) {
            fx.record(StateChange::RangeReleased { segment: place.segment, offset: place.offset });
        }
        // Nothing is given up: what was staged is ready by now.
        self.end_work(at, now_ms, fx);
        self.emit_state(at, StoreCause::Promoted, fx);
        MasterCounters::add(&self.master.counters.promoted_keys, 1);
        MasterCounters::add(&self.master.counters.promoted_bytes, bytes);
    }
}

//! Starting to write objects: PutStart and UpsertStart.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::SoftPinAction;

use crate::change::{RemoveCause, StateChange, StateChangeSink, StoreCause};
use crate::disk::ActiveDiskTask;
use crate::group::GroupId;
use crate::indices::{EntryIndex, TenantIndex};
use crate::locked_shard::{LockedShard, storage_tiers};
use crate::master::MasterCore;
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, PendingVersion};
use crate::object_table::KeyLocation;
use crate::placement::PlacementSearch;
use crate::put_request::{PreparedPut, PutBatch};
use crate::requests::{BatchPutStartRequest, CallContext, PutStartRequest};
use crate::segment::ReplicaDescriptors;
use crate::statistics::MasterCounters;

/// Rounds of eviction for a tenant whose quota is exhausted.
const QUOTA_RETRIES: u32 = 2;
/// Rounds of eviction for a write that may not use a filling segment in place of a full one. Afterwards it may: the freed ranges may be
/// too small for it, or in the filling segment.
const FILLING_RETRIES: u32 = 8;

/// The existing entry that conflicts with a put.
enum PutConflict {
    NoConflict,
    /// Its put exceeded the discard time, but a slow writer may still write: its ranges must be quarantined.
    Abandoned(EntryIndex),
    /// Its nodes send no heartbeats, so it cannot be read.
    Unreadable(EntryIndex),
    /// It is to be replaced by an upsert.
    Upsert(EntryIndex),
}

impl MasterCore {
    /// Allocates space for a new object.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, `OBJECT_ALREADY_EXISTS`, `NO_AVAILABLE_HANDLE` if no space can be allocated even after eviction,
    /// `TENANT_NOT_REGISTERED`, `TENANT_QUOTA_EXCEEDED`.
    pub fn put_start<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &PutStartRequest<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        let batch = PutBatch::new(context, request.config, false);
        self.start(&batch.prepare(&self.objects, 0, request.key, request.size), fx)
    }

    /// [`Self::put_start`] for several objects, in the keys' order.
    pub fn batch_put_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &BatchPutStartRequest<'_, K, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        self.batch_start(PutBatch::new(context, request.config, false), request, fx)
    }

    /// Allocates space for a new version of an object, or for a new object. A readable version stays until the new one has been
    /// written; if there is space for one version only, it is overwritten in place.
    ///
    /// # Errors
    /// As [`Self::put_start`], but an object that is readable or being written is not an error; `OBJECT_REPLICA_BUSY` while it
    /// is being copied, `OBJECT_HAS_REPLICATION_TASK` while its node offloads or promotes it.
    pub fn upsert_start<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &PutStartRequest<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        let batch = PutBatch::new(context, request.config, true);
        self.start(&batch.prepare(&self.objects, 0, request.key, request.size), fx)
    }

    /// [`Self::upsert_start`] for several objects, in the keys' order.
    pub fn batch_upsert_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        request: &BatchPutStartRequest<'_, K, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        self.batch_start(PutBatch::new(context, request.config, true), request, fx)
    }

    fn batch_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        mut batch: PutBatch<'_>,
        request: &BatchPutStartRequest<'_, K, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        let BatchPutStartRequest { keys, sizes, config } = request;
        let groups_fit = batch.groups.as_ref().is_none_or(|groups| groups.len() == keys.len());
        if keys.len() != sizes.len() || !groups_fit {
            return keys.iter().map(|_| Err(ErrorCode::INVALID_PARAMS)).collect();
        }
        if config.prefer_alloc_in_same_node {
            batch.batch_entropy =
                keys.first().map(|key| self.objects.hash(TenantIndex::DEFAULT, key.as_ref()));
        }
        let objects = keys.iter().zip(*sizes).enumerate();
        objects
            .map(|(position, (key, size))| {
                self.start(&batch.prepare(&self.objects, position, key.as_ref(), *size), fx)
            })
            .collect()
    }

    fn start(
        &self,
        put: &PreparedPut<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        let CallContext { now_ms, tenant, .. } = put.context;
        if put.key.is_empty() || put.size == 0 || put.placement.replicas == 0 {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let group = put.group.map(|name| (self.objects.group(tenant, name), name));
        let tenant = self.objects.tenants.index_for_writer(tenant)?;
        let key_location = self.objects.locate_key(tenant, put.key);
        let (mut quota_tries, mut filling_tries) = (0, 0);
        loop {
            let mut shard = self.objects.lock(key_location.shard);
            let conflict = shard.find_conflict(key_location, put)?;
            let segments = Arc::clone(&shard.segments);
            let mut search = PlacementSearch::new(&segments, &self.objects.settings, &put.placement, now_ms);
            if filling_tries < FILLING_RETRIES {
                search.limit_fallback(self.objects.fallback_share.get());
            }
            let avoids_filling = search.avoids_filling();
            let replicas = search.run();
            let bytes = put.size.saturating_mul(replicas.len() as u64);
            let charged = !replicas.is_empty() && self.objects.tenants.charge(tenant, bytes);
            if charged {
                if replicas.len() < put.placement.replicas {
                    MasterCounters::add(&self.objects.counters.partial_allocations, 1);
                }
                return Ok(shard.add_allocated(key_location, put, &conflict, replicas, group, fx));
            }
            replicas.iter().for_each(|replica| shard.free(replica));
            drop(shard);
            if replicas.is_empty() {
                filling_tries += 1;
                if !self.objects.evict_for_size(now_ms, put.size, fx) {
                    if avoids_filling {
                        filling_tries = FILLING_RETRIES;
                        continue;
                    }
                    if let Some(replicas) = self.rewrite_in_place(key_location, put, fx) {
                        return Ok(replicas);
                    }
                    MasterCounters::add(&self.objects.counters.allocation_failures, 1);
                    return Err(ErrorCode::NO_AVAILABLE_HANDLE);
                }
                continue;
            }
            quota_tries += 1;
            // Nothing is evicted for an object that never fits.
            let can_fit = self.objects.tenants.has_quota_for(tenant, bytes);
            if !can_fit
                || quota_tries > QUOTA_RETRIES
                || !self.objects.evict_for_tenant(now_ms, tenant, bytes, fx)
            {
                return self.rewrite_in_place(key_location, put, fx).ok_or(ErrorCode::TENANT_QUOTA_EXCEEDED);
            }
        }
    }

    /// Overwrites the present version of an object with the new one: used if there is space for one version only, even after
    /// eviction.
    fn rewrite_in_place(
        &self,
        key_location: KeyLocation,
        put: &PreparedPut<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Option<ReplicaDescriptors> {
        let mut shard = self.objects.lock(key_location.shard);
        match shard.find_conflict(key_location, put) {
            Ok(PutConflict::Upsert(index)) => shard.rewrite(index, put, fx),
            _ => None,
        }
    }
}

impl LockedShard<'_> {
    fn find_conflict(
        &self,
        key_location: KeyLocation,
        put: &PreparedPut<'_>,
    ) -> Result<PutConflict, ErrorCode> {
        let Some(index) = self.lookup(key_location, put.key) else { return Ok(PutConflict::NoConflict) };
        let entry = &self.entries[index];
        if !entry.is_complete() {
            // The previous writer's PutEnd will be rejected.
            if put.upsert {
                return Ok(PutConflict::Upsert(index));
            }
            let discard_at = entry.stamp.saturating_add(self.objects.settings.put_discard_ms);
            return if discard_at <= put.context.now_ms {
                Ok(PutConflict::Abandoned(index))
            } else {
                Err(ErrorCode::OBJECT_ALREADY_EXISTS)
            };
        }
        if !self.is_readable(entry) {
            return Ok(PutConflict::Unreadable(index));
        }
        match put.upsert {
            false => Err(ErrorCode::OBJECT_ALREADY_EXISTS),
            true if entry.transfer().is_some() => Err(ErrorCode::OBJECT_REPLICA_BUSY),
            // Its node is reading or writing its bytes.
            true if entry.work().is_some_and(ActiveDiskTask::is_fetched) => {
                Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK)
            }
            true => Ok(PutConflict::Upsert(index)),
        }
    }

    /// Adds an object, or a pending version of one, whose space has been allocated and charged.
    fn add_allocated(
        &mut self,
        key_location: KeyLocation,
        put: &PreparedPut<'_>,
        conflict: &PutConflict,
        mut replicas: Vec<MemoryReplica>,
        group: Option<(GroupId, &str)>,
        fx: &mut dyn StateChangeSink,
    ) -> ReplicaDescriptors {
        let CallContext { now_ms, client, .. } = put.context;
        let present = self.current_soft_pin(conflict);
        replicas.iter_mut().for_each(|replica| replica.id = self.objects.new_replica_id());
        let pin = self.soft_pin_deadline(put, present);
        if let PutConflict::Upsert(index) = *conflict
            && self.entries[index].is_complete()
        {
            let pending = PendingVersion {
                client,
                size: put.size,
                since_ms: now_ms,
                replicas,
                hard_pin: put.hard_pin,
                soft_pin_until_ms: pin,
                group: group.map(|(id, name)| (id, name.into())),
            };
            return self.begin_pending(index, pending, now_ms, fx);
        }
        self.resolve_conflict(conflict, fx);
        let index = self.add(key_location, &put.new_object(&replicas, pin, group));
        self.emit_started(index, fx)
    }

    fn resolve_conflict(&mut self, conflict: &PutConflict, fx: &mut dyn StateChangeSink) {
        match *conflict {
            PutConflict::NoConflict => {}
            PutConflict::Abandoned(index) => {
                MasterCounters::add(&self.objects.counters.discarded_puts, 1);
                self.remove_and_quarantine(index, self.write_deadline(index), RemoveCause::PutTimedOut, fx);
            }
            PutConflict::Unreadable(index) => _ = self.remove_and_free(index, RemoveCause::Replaced, fx),
            PutConflict::Upsert(index) => {
                self.remove_and_quarantine(index, self.write_deadline(index), RemoveCause::Replaced, fx);
            }
        }
    }

    /// Until when the ranges of an object being written must not be reused.
    fn write_deadline(&self, index: EntryIndex) -> u64 {
        self.entries[index].stamp.saturating_add(self.objects.settings.put_release_ms)
    }

    /// Reuses an object's ranges for a new version, if size and replica count match and it has no reader or writer.
    fn rewrite(
        &mut self,
        index: EntryIndex,
        put: &PreparedPut<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Option<ReplicaDescriptors> {
        let CallContext { now_ms, client, .. } = put.context;
        let entry = &self.entries[index];
        let fits = entry.size == put.size && entry.replicas().count() == put.placement.replicas;
        let is_in_use = !entry.is_complete() || entry.is_leased(now_ms) || entry.pending().is_some();
        let has_copy = entry.copy().is_some();
        if !fits || is_in_use || has_copy || !entry.replicas().all(|replica| self.is_responsive(replica)) {
            return None;
        }
        let tenant = self.objects.tenants.get(entry.tenant);
        let group = self.objects.groups.name(entry.group);
        fx.record(StateChange::Removed {
            tenant: tenant.as_ref().map_or("", |entry| &*entry.name).into(),
            key: put.key.into(),
            group: group.as_deref().map(Into::into),
            tiers: storage_tiers(entry),
            cause: RemoveCause::Replaced,
        });
        self.abandon_work(index);
        self.report_vacated(self.entries[index].replicas(), fx);
        self.record_rewritten(index);
        MasterCounters::add(&self.objects.counters.upserts_in_place, 1);
        let entry = &self.entries[index];
        let pin = self.soft_pin_deadline(put, entry.soft_pin_until_ms());
        let entry = &mut self.entries[index];
        entry.stamp = now_ms;
        if pin.is_some() || entry.extra.is_some() {
            let extra = entry.extra_mut();
            (extra.soft_pin_until_ms, extra.checksum) = (pin, None);
        }
        entry.drop_empty_extras();
        entry.replicas_mut().for_each(|replica| replica.ready = false);
        self.set_writer(index, client);
        self.enqueue(index, EvictionQueue::Writing);
        self.entries[index].flags = EntryFlags::new(EvictionQueue::Writing, put.hard_pin);
        Some(self.emit_started(index, fx))
    }

    fn emit_started(&self, index: EntryIndex, fx: &mut dyn StateChangeSink) -> ReplicaDescriptors {
        self.emit_state(index, StoreCause::Written, fx);
        let entry = &self.entries[index];
        entry.replicas().filter_map(|replica| self.to_descriptor(replica, entry.size)).collect()
    }

    /// The soft pin of the version that an upsert replaces.
    fn current_soft_pin(&self, conflict: &PutConflict) -> Option<u64> {
        match *conflict {
            PutConflict::Upsert(index) => self.entries[index].soft_pin_until_ms(),
            _ => None,
        }
    }

    fn soft_pin_deadline(&self, put: &PreparedPut<'_>, present: Option<u64>) -> Option<u64> {
        let settings = &self.objects.settings;
        match put.pin.action {
            SoftPinAction::ENABLE => {
                let ttl = put.pin.ttl_ms.unwrap_or(settings.soft_pin_ttl_ms);
                Some(put.context.now_ms.saturating_add(ttl.min(settings.max_soft_pin_ttl_ms)))
            }
            SoftPinAction::DISABLE => None,
            _ => present,
        }
    }
}

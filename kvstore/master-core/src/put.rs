//! The beginning of writing objects.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicateConfig, SoftPin, SoftPinAction, Uuid};

use crate::change::{RemoveCause, StateChange, StateChangeSink, StoreCause};
use crate::disk::ActiveDiskTask;
use crate::group::GroupId;
use crate::locked_shard::{KeyLocation, LockedShard, NewObject, storage_tiers};
use crate::master::MasterCore;
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, PendingVersion};
use crate::placement::{PlacementRequest, PlacementSearch};
use crate::read::ReplicaDescriptors;
use crate::statistics::MasterCounters;

/// The most replicas of one object.
const MAX_REPLICAS: u64 = 64;
/// Rounds of eviction for a tenant whose quota is used up.
const QUOTA_RETRIES: u32 = 2;

/// One object that somebody wants to write.
struct PutRequest<'a> {
    client: Uuid,
    tenant: &'a str,
    key: &'a str,
    size: u64,
    placement: PlacementRequest<'a>,
    pin: SoftPin,
    hard_pin: bool,
    group: Option<&'a str>,
    upsert: bool,
}

/// What all objects of a batch have in common.
struct PutBatch<'a> {
    client: Uuid,
    tenant: &'a str,
    preferred: Vec<&'a str>,
    host: &'a str,
    replicas: u64,
    pin: SoftPin,
    hard_pin: bool,
    groups: Option<Vec<&'a str>>,
    /// Makes all objects of the batch start their search for space at the same place.
    batch_entropy: Option<u64>,
    upsert: bool,
}

impl<'a> PutBatch<'a> {
    fn new<S: AsRef<str>>(
        client: Uuid,
        tenant: &'a str,
        config: &'a ReplicateConfig<S>,
        upsert: bool,
    ) -> Self {
        let one = Some(config.preferred_segment.as_ref()).filter(|name| !name.is_empty());
        let preferred = config.preferred_segments.iter().map(AsRef::as_ref).chain(one).collect();
        Self {
            client,
            tenant,
            preferred,
            host: config.host_id.as_ref(),
            replicas: config.replica_num,
            pin: config.soft_pin,
            hard_pin: config.with_hard_pin,
            groups: config.group_ids.as_ref().map(|groups| groups.iter().map(AsRef::as_ref).collect()),
            batch_entropy: None,
            upsert,
        }
    }

    fn request(
        &'a self,
        master: &MasterCore,
        now_ms: u64,
        index: usize,
        key: &'a str,
        size: u64,
    ) -> PutRequest<'a> {
        let entropy = self.batch_entropy.unwrap_or_else(|| master.hash(0, key)) ^ now_ms.rotate_left(32);
        let group = self.groups.as_ref().and_then(|groups| groups.get(index).copied());
        PutRequest {
            client: self.client,
            tenant: self.tenant,
            key,
            size,
            placement: PlacementRequest {
                size,
                replicas: self.replicas.min(MAX_REPLICAS) as usize,
                preferred: &self.preferred,
                host: self.host,
                entropy,
            },
            pin: self.pin,
            hard_pin: self.hard_pin,
            group: group.filter(|name| !name.is_empty()),
            upsert: self.upsert,
        }
    }
}

/// What stands in the way of a new object.
enum PutConflict {
    NoConflict,
    /// Nobody may be writing this, but its writer may be slow: its space must be kept for a while.
    Abandoned(u32),
    /// Its nodes are silent, so nobody can read it.
    Unreadable(u32),
    /// It is to be written anew.
    Upsert(u32),
}

impl MasterCore {
    /// Takes space for a new object.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, `OBJECT_ALREADY_EXISTS`, `NO_AVAILABLE_HANDLE` if there is no room although all that can be
    /// evicted has been, `TENANT_NOT_REGISTERED`, `TENANT_QUOTA_EXCEEDED`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of the RPC")]
    pub fn put_start<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        key: &str,
        size: u64,
        config: &ReplicateConfig<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        let plan = PutBatch::new(client, tenant, config, false);
        self.start(now_ms, &plan.request(self, now_ms, 0, key, size), fx)
    }

    /// [`Self::put_start`] for several objects, in the keys' order.
    #[expect(clippy::too_many_arguments, reason = "the arguments of the RPC")]
    pub fn batch_put_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        keys: &[K],
        sizes: &[u64],
        config: &ReplicateConfig<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        self.batch_start(now_ms, PutBatch::new(client, tenant, config, false), keys, sizes, config, fx)
    }

    /// Takes space for a new version of an object, or for a new object. A version that can be read stays until the new one has been
    /// written; only if there is space for one of them, it is overwritten in place.
    ///
    /// # Errors
    /// As [`Self::put_start`], but an object that can be read or is being written is no error;
    /// `OBJECT_REPLICA_BUSY` while it is being copied.
    #[expect(clippy::too_many_arguments, reason = "the arguments of the RPC")]
    pub fn upsert_start<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        key: &str,
        size: u64,
        config: &ReplicateConfig<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        let plan = PutBatch::new(client, tenant, config, true);
        self.start(now_ms, &plan.request(self, now_ms, 0, key, size), fx)
    }

    /// [`Self::upsert_start`] for several objects, in the keys' order.
    #[expect(clippy::too_many_arguments, reason = "the arguments of the RPC")]
    pub fn batch_upsert_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        keys: &[K],
        sizes: &[u64],
        config: &ReplicateConfig<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        self.batch_start(now_ms, PutBatch::new(client, tenant, config, true), keys, sizes, config, fx)
    }

    fn batch_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        now_ms: u64,
        mut plan: PutBatch<'_>,
        keys: &[K],
        sizes: &[u64],
        config: &ReplicateConfig<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        let groups_fit = plan.groups.as_ref().is_none_or(|groups| groups.len() == keys.len());
        if keys.len() != sizes.len() || !groups_fit {
            return keys.iter().map(|_| Err(ErrorCode::INVALID_PARAMS)).collect();
        }
        if config.prefer_alloc_in_same_node {
            plan.batch_entropy = keys.first().map(|key| self.hash(0, key.as_ref()));
        }
        let objects = keys.iter().zip(sizes).enumerate();
        objects
            .map(|(index, (key, size))| {
                self.start(now_ms, &plan.request(self, now_ms, index, key.as_ref(), *size), fx)
            })
            .collect()
    }

    fn start(
        &self,
        now_ms: u64,
        put: &PutRequest<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<ReplicaDescriptors, ErrorCode> {
        if put.key.is_empty() || put.size == 0 || put.placement.replicas == 0 {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let tenant = self.tenants.index_for_writer(put.tenant)?;
        let spot = self.locate_key(tenant, put.key);
        let group = put.group.map(|name| (self.group(put.tenant, name), name));
        let mut quota_tries = 0;
        loop {
            let mut shard = self.lock(spot.shard);
            let way = shard.find_conflict(spot, put, now_ms)?;
            let segments = Arc::clone(&shard.segments);
            let mut found = PlacementSearch::new(&segments, &self.settings, &put.placement, now_ms).run();
            let bytes = put.size.saturating_mul(found.len() as u64);
            let charged = !found.is_empty() && self.tenants.charge(tenant, bytes);
            if charged {
                if found.len() < put.placement.replicas {
                    MasterCounters::add(&self.counters.partial_allocations, 1);
                }
                let present = shard.current_soft_pin(&way);
                found.iter_mut().for_each(|it| it.id = self.new_replica_id());
                let pin = shard.soft_pin_deadline(put, present, now_ms);
                if let PutConflict::Upsert(at) = way
                    && shard.entries[at].is_complete()
                {
                    let pending = PendingVersion {
                        client: put.client,
                        size: put.size,
                        since_ms: now_ms,
                        replicas: found,
                        hard_pin: put.hard_pin,
                        soft_pin_until_ms: pin,
                        group: group.map(|(id, name)| (id, name.into())),
                    };
                    return Ok(shard.begin_pending(at, pending, now_ms, fx));
                }
                shard.resolve_conflict(&way, fx);
                return Ok(shard.begin(spot, put, (group, pin), &found, now_ms, fx));
            }
            found.iter().for_each(|it| shard.free(it));
            drop(shard);
            if found.is_empty() {
                if !self.evict_for_size(now_ms, put.size, fx) {
                    if let Some(replicas) = self.rewrite_in_place(now_ms, spot, put, fx) {
                        return Ok(replicas);
                    }
                    MasterCounters::add(&self.counters.allocation_failures, 1);
                    return Err(ErrorCode::NO_AVAILABLE_HANDLE);
                }
                continue;
            }
            quota_tries += 1;
            if quota_tries > QUOTA_RETRIES || !self.evict_for_tenant(now_ms, tenant, bytes, fx) {
                return self.rewrite_in_place(now_ms, spot, put, fx).ok_or(ErrorCode::TENANT_QUOTA_EXCEEDED);
            }
        }
    }

    /// Evicts the present version of an object and reuses its space for the new one: there is space for
    /// one version only, although all that can be evicted has been.
    fn rewrite_in_place(
        &self,
        now_ms: u64,
        spot: KeyLocation,
        put: &PutRequest<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Option<ReplicaDescriptors> {
        let mut shard = self.lock(spot.shard);
        match shard.find_conflict(spot, put, now_ms) {
            Ok(PutConflict::Upsert(at)) => shard.rewrite(at, put, now_ms, fx),
            _ => None,
        }
    }
}

impl LockedShard<'_> {
    fn find_conflict(
        &self,
        spot: KeyLocation,
        put: &PutRequest<'_>,
        now_ms: u64,
    ) -> Result<PutConflict, ErrorCode> {
        let Some(at) = self.lookup(spot, put.key) else { return Ok(PutConflict::NoConflict) };
        let entry = &self.entries[at];
        if !entry.is_complete() {
            // Whoever wrote it before can no longer end it.
            if put.upsert {
                return Ok(PutConflict::Upsert(at));
            }
            let discard_at = entry.stamp.saturating_add(self.master.settings.put_discard_ms);
            return if discard_at <= now_ms {
                Ok(PutConflict::Abandoned(at))
            } else {
                Err(ErrorCode::OBJECT_ALREADY_EXISTS)
            };
        }
        if !self.is_readable(entry) {
            return Ok(PutConflict::Unreadable(at));
        }
        match put.upsert {
            false => Err(ErrorCode::OBJECT_ALREADY_EXISTS),
            true if entry.transfer().is_some() => Err(ErrorCode::OBJECT_REPLICA_BUSY),
            // Its node reads or writes its bytes now.
            true if entry.work().is_some_and(ActiveDiskTask::is_fetched) => {
                Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK)
            }
            true => Ok(PutConflict::Upsert(at)),
        }
    }

    /// Takes out of the way what is there.
    fn resolve_conflict(&mut self, way: &PutConflict, fx: &mut dyn StateChangeSink) {
        match *way {
            PutConflict::NoConflict => {}
            PutConflict::Abandoned(at) => {
                MasterCounters::add(&self.master.counters.discarded_puts, 1);
                self.remove_and_quarantine(at, self.write_deadline(at), RemoveCause::PutTimedOut, fx);
            }
            PutConflict::Unreadable(at) => _ = self.remove_and_free(at, RemoveCause::Replaced, fx),
            PutConflict::Upsert(at) => {
                self.remove_and_quarantine(at, self.write_deadline(at), RemoveCause::Replaced, fx);
            }
        }
    }

    /// Until when the space of an object that is being written must not be given to others.
    fn write_deadline(&self, at: u32) -> u64 {
        self.entries[at].stamp.saturating_add(self.master.settings.put_release_ms)
    }

    /// Reuses an object's space for a new version, if it fits and has no reader or writer.
    fn rewrite(
        &mut self,
        at: u32,
        put: &PutRequest<'_>,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Option<ReplicaDescriptors> {
        let entry = &self.entries[at];
        let fits = entry.size == put.size && entry.replicas().count() == put.placement.replicas;
        let is_in_use = !entry.is_complete() || entry.is_leased(now_ms) || entry.pending().is_some();
        let has_copy = entry.copy().is_some();
        if !fits || is_in_use || has_copy || !entry.replicas().all(|it| self.is_responsive(it)) {
            return None;
        }
        let tenant = self.master.tenants.get(entry.tenant);
        let group = self.master.groups.name(entry.group);
        fx.record(StateChange::Removed {
            tenant: tenant.as_ref().map_or("", |it| &*it.name).into(),
            key: put.key.into(),
            group: group.as_deref().map(Into::into),
            tiers: storage_tiers(entry),
            cause: RemoveCause::Replaced,
        });
        self.abandon_work(at);
        self.report_vacated(self.entries[at].replicas(), fx);
        self.record_rewritten(at);
        MasterCounters::add(&self.master.counters.upserts_in_place, 1);
        let entry = &self.entries[at];
        let pin = self.soft_pin_deadline(put, entry.soft_pin_until_ms(), now_ms);
        let entry = &mut self.entries[at];
        (entry.client, entry.stamp) = (put.client, now_ms);
        if pin.is_some() || entry.extra.is_some() {
            let extra = entry.extra_mut();
            (extra.soft_pin_until_ms, extra.checksum) = (pin, None);
        }
        entry.drop_empty_extras();
        entry.replicas_mut().for_each(|it| it.ready = false);
        self.enqueue(at, EvictionQueue::Writing);
        self.entries[at].flags = EntryFlags::new(EvictionQueue::Writing, put.hard_pin);
        Some(self.emit_started(at, fx))
    }

    fn begin(
        &mut self,
        spot: KeyLocation,
        put: &PutRequest<'_>,
        (group, soft_pin_until_ms): (Option<(GroupId, &str)>, Option<u64>),
        replicas: &[MemoryReplica],
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> ReplicaDescriptors {
        let fresh = NewObject {
            key: put.key,
            client: put.client,
            size: put.size,
            stamp: now_ms,
            replicas,
            queue: EvictionQueue::Writing,
            hard_pin: put.hard_pin,
            soft_pin_until_ms,
            checksum: None,
            group,
        };
        let at = self.add(spot, &fresh);
        self.emit_started(at, fx)
    }

    fn emit_started(&self, at: u32, fx: &mut dyn StateChangeSink) -> ReplicaDescriptors {
        self.emit_state(at, StoreCause::Written, fx);
        let entry = &self.entries[at];
        entry.replicas().filter_map(|it| self.to_descriptor(it, entry.size)).collect()
    }

    /// The soft pin of what is written anew.
    fn current_soft_pin(&self, way: &PutConflict) -> Option<u64> {
        match *way {
            PutConflict::Upsert(at) => self.entries[at].soft_pin_until_ms(),
            _ => None,
        }
    }

    fn soft_pin_deadline(&self, put: &PutRequest<'_>, present: Option<u64>, now_ms: u64) -> Option<u64> {
        let settings = &self.master.settings;
        match put.pin.action {
            SoftPinAction::ENABLE => {
                let ttl = put.pin.ttl_ms.unwrap_or(settings.soft_pin_ttl_ms);
                Some(now_ms.saturating_add(ttl.min(settings.max_soft_pin_ttl_ms)))
            }
            SoftPinAction::DISABLE => None,
            _ => present,
        }
    }
}

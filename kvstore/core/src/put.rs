//! The beginning of writing objects.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicateConfig, SoftPin, SoftPinAction, Uuid};

use crate::count::Counters;
use crate::disk::DiskWork;
use crate::fact::{Effects, Fact, RemoveCause, StoreCause};
use crate::group::GroupId;
use crate::locked::{Fresh, Locked, Spot, media};
use crate::master::Master;
use crate::object::{PendingVersion, Queue, Replica, State};
use crate::placement::{Search, Wish};
use crate::read::Replicas;

/// The most replicas of one object.
const MAX_REPLICAS: u64 = 64;
/// Rounds of eviction for a tenant whose quota is used up.
const QUOTA_RETRIES: u32 = 2;

/// One object that somebody wants to write.
struct Put<'a> {
    client: Uuid,
    tenant: &'a str,
    key: &'a str,
    size: u64,
    wish: Wish<'a>,
    pin: SoftPin,
    hard_pin: bool,
    group: Option<&'a str>,
    upsert: bool,
}

/// What all objects of a batch have in common.
struct Plan<'a> {
    client: Uuid,
    tenant: &'a str,
    preferred: Vec<&'a str>,
    host: &'a str,
    replicas: u64,
    pin: SoftPin,
    hard_pin: bool,
    groups: Option<Vec<&'a str>>,
    /// Makes all objects of the batch start their search for space at the same place.
    together: Option<u64>,
    upsert: bool,
}

impl<'a> Plan<'a> {
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
            together: None,
            upsert,
        }
    }

    fn put(&'a self, master: &Master, now_ms: u64, index: usize, key: &'a str, size: u64) -> Put<'a> {
        let entropy = self.together.unwrap_or_else(|| master.hash(0, key)) ^ now_ms.rotate_left(32);
        let group = self.groups.as_ref().and_then(|groups| groups.get(index).copied());
        Put {
            client: self.client,
            tenant: self.tenant,
            key,
            size,
            wish: Wish {
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
enum Way {
    Free,
    /// Nobody may be writing this, but its writer may be slow: its space must be kept for a while.
    Abandoned(u32),
    /// Its nodes are silent, so nobody can read it.
    Unreadable(u32),
    /// It is to be written anew.
    Upsert(u32),
}

impl Master {
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
        fx: &mut dyn Effects,
    ) -> Result<Replicas, ErrorCode> {
        let plan = Plan::new(client, tenant, config, false);
        self.start(now_ms, &plan.put(self, now_ms, 0, key, size), fx)
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
        fx: &mut dyn Effects,
    ) -> Vec<Result<Replicas, ErrorCode>> {
        self.batch_start(now_ms, Plan::new(client, tenant, config, false), keys, sizes, config, fx)
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
        fx: &mut dyn Effects,
    ) -> Result<Replicas, ErrorCode> {
        let plan = Plan::new(client, tenant, config, true);
        self.start(now_ms, &plan.put(self, now_ms, 0, key, size), fx)
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
        fx: &mut dyn Effects,
    ) -> Vec<Result<Replicas, ErrorCode>> {
        self.batch_start(now_ms, Plan::new(client, tenant, config, true), keys, sizes, config, fx)
    }

    fn batch_start<S: AsRef<str>, K: AsRef<str>>(
        &self,
        now_ms: u64,
        mut plan: Plan<'_>,
        keys: &[K],
        sizes: &[u64],
        config: &ReplicateConfig<S>,
        fx: &mut dyn Effects,
    ) -> Vec<Result<Replicas, ErrorCode>> {
        let groups_fit = plan.groups.as_ref().is_none_or(|groups| groups.len() == keys.len());
        if keys.len() != sizes.len() || !groups_fit {
            return keys.iter().map(|_| Err(ErrorCode::INVALID_PARAMS)).collect();
        }
        if config.prefer_alloc_in_same_node {
            plan.together = keys.first().map(|key| self.hash(0, key.as_ref()));
        }
        let objects = keys.iter().zip(sizes).enumerate();
        objects
            .map(|(index, (key, size))| {
                self.start(now_ms, &plan.put(self, now_ms, index, key.as_ref(), *size), fx)
            })
            .collect()
    }

    fn start(&self, now_ms: u64, put: &Put<'_>, fx: &mut dyn Effects) -> Result<Replicas, ErrorCode> {
        if put.key.is_empty() || put.size == 0 || put.wish.replicas == 0 {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let tenant = self.tenants.admit(put.tenant)?;
        let spot = self.spot(tenant, put.key);
        let group = put.group.map(|name| (self.group(put.tenant, name), name));
        let mut quota_tries = 0;
        loop {
            let mut shard = self.lock(spot.shard);
            let way = shard.way(spot, put, now_ms)?;
            let segments = Arc::clone(&shard.segments);
            let mut found = Search::new(&segments, &self.settings, &put.wish, now_ms).run();
            let bytes = put.size.saturating_mul(found.len() as u64);
            let charged = !found.is_empty() && self.tenants.charge(tenant, bytes);
            if charged {
                if found.len() < put.wish.replicas {
                    Counters::add(&self.counters.partial_allocations, 1);
                }
                let present = shard.present_pin(&way);
                found.iter_mut().for_each(|it| it.id = self.new_replica_id());
                let pin = shard.pin_until(put, present, now_ms);
                if let Way::Upsert(at) = way
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
                shard.clear(&way, fx);
                return Ok(shard.begin(spot, put, (group, pin), &found, now_ms, fx));
            }
            found.iter().for_each(|it| shard.free(it));
            drop(shard);
            if found.is_empty() {
                if !self.make_room(now_ms, put.size, fx) {
                    if let Some(replicas) = self.rewrite_in_place(now_ms, spot, put, fx) {
                        return Ok(replicas);
                    }
                    Counters::add(&self.counters.allocation_failures, 1);
                    return Err(ErrorCode::NO_AVAILABLE_HANDLE);
                }
                continue;
            }
            quota_tries += 1;
            if quota_tries > QUOTA_RETRIES || !self.make_room_for_tenant(now_ms, tenant, bytes, fx) {
                return self.rewrite_in_place(now_ms, spot, put, fx).ok_or(ErrorCode::TENANT_QUOTA_EXCEEDED);
            }
        }
    }

    /// Evicts the present version of an object and reuses its space for the new one: there is space for
    /// one version only, although all that can be evicted has been.
    fn rewrite_in_place(
        &self,
        now_ms: u64,
        spot: Spot,
        put: &Put<'_>,
        fx: &mut dyn Effects,
    ) -> Option<Replicas> {
        let mut shard = self.lock(spot.shard);
        match shard.way(spot, put, now_ms) {
            Ok(Way::Upsert(at)) => shard.rewrite(at, put, now_ms, fx),
            _ => None,
        }
    }
}

impl Locked<'_> {
    fn way(&self, spot: Spot, put: &Put<'_>, now_ms: u64) -> Result<Way, ErrorCode> {
        let Some(at) = self.lookup(spot, put.key) else { return Ok(Way::Free) };
        let entry = &self.entries[at];
        if !entry.is_complete() {
            // Whoever wrote it before can no longer end it.
            if put.upsert {
                return Ok(Way::Upsert(at));
            }
            let discard_at = entry.stamp.saturating_add(self.master.settings.put_discard_ms);
            return if discard_at <= now_ms {
                Ok(Way::Abandoned(at))
            } else {
                Err(ErrorCode::OBJECT_ALREADY_EXISTS)
            };
        }
        if !self.is_readable(entry) {
            return Ok(Way::Unreadable(at));
        }
        match put.upsert {
            false => Err(ErrorCode::OBJECT_ALREADY_EXISTS),
            true if entry.transfer().is_some() => Err(ErrorCode::OBJECT_REPLICA_BUSY),
            // Its node reads or writes its bytes now.
            true if entry.work().is_some_and(DiskWork::is_fetched) => {
                Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK)
            }
            true => Ok(Way::Upsert(at)),
        }
    }

    /// Takes out of the way what is there.
    fn clear(&mut self, way: &Way, fx: &mut dyn Effects) {
        match *way {
            Way::Free => {}
            Way::Abandoned(at) => {
                Counters::add(&self.master.counters.discarded_puts, 1);
                self.hold_object(at, self.written_until(at), RemoveCause::Unended, fx);
            }
            Way::Unreadable(at) => _ = self.drop_object(at, RemoveCause::Replaced, fx),
            Way::Upsert(at) => self.hold_object(at, self.written_until(at), RemoveCause::Replaced, fx),
        }
    }

    /// Until when the space of an object that is being written must not be given to others.
    fn written_until(&self, at: u32) -> u64 {
        self.entries[at].stamp.saturating_add(self.master.settings.put_release_ms)
    }

    /// Reuses an object's space for a new version, if it fits and has no reader or writer.
    fn rewrite(&mut self, at: u32, put: &Put<'_>, now_ms: u64, fx: &mut dyn Effects) -> Option<Replicas> {
        let entry = &self.entries[at];
        let fits = entry.size == put.size && entry.replicas().count() == put.wish.replicas;
        let is_in_use = !entry.is_complete() || entry.is_leased(now_ms) || entry.pending().is_some();
        let has_copy = entry.copy().is_some();
        if !fits || is_in_use || has_copy || !entry.replicas().all(|it| self.is_heard(it)) {
            return None;
        }
        let tenant = self.master.tenants.get(entry.tenant);
        let group = self.master.groups.name(entry.group);
        fx.fact(Fact::Removed {
            tenant: tenant.as_ref().map_or("", |it| &*it.name).into(),
            key: put.key.into(),
            group: group.as_deref().map(Into::into),
            was: media(entry),
            cause: RemoveCause::Replaced,
        });
        self.abandon_work(at);
        self.report_vacated(self.entries[at].replicas(), fx);
        self.note_rewritten(at);
        Counters::add(&self.master.counters.upserts_in_place, 1);
        let entry = &self.entries[at];
        let pin = self.pin_until(put, entry.soft_pin_until_ms(), now_ms);
        let entry = &mut self.entries[at];
        (entry.client, entry.stamp) = (put.client, now_ms);
        if pin.is_some() || entry.extra.is_some() {
            let extra = entry.extra_mut();
            (extra.soft_pin_until_ms, extra.checksum) = (pin, None);
        }
        entry.tidy();
        entry.replicas_mut().for_each(|it| it.ready = false);
        self.enqueue(at, Queue::Writing);
        self.entries[at].state = State::new(Queue::Writing, put.hard_pin);
        Some(self.tell_started(at, fx))
    }

    fn begin(
        &mut self,
        spot: Spot,
        put: &Put<'_>,
        (group, soft_pin_until_ms): (Option<(GroupId, &str)>, Option<u64>),
        replicas: &[Replica],
        now_ms: u64,
        fx: &mut dyn Effects,
    ) -> Replicas {
        let fresh = Fresh {
            key: put.key,
            client: put.client,
            size: put.size,
            stamp: now_ms,
            replicas,
            queue: Queue::Writing,
            hard_pin: put.hard_pin,
            soft_pin_until_ms,
            checksum: None,
            group,
        };
        let at = self.add(spot, &fresh);
        self.tell_started(at, fx)
    }

    fn tell_started(&self, at: u32, fx: &mut dyn Effects) -> Replicas {
        self.tell_state(at, StoreCause::Written, fx);
        let entry = &self.entries[at];
        entry.replicas().filter_map(|it| self.describe(it, entry.size)).collect()
    }

    /// The soft pin of what is written anew.
    fn present_pin(&self, way: &Way) -> Option<u64> {
        match *way {
            Way::Upsert(at) => self.entries[at].soft_pin_until_ms(),
            _ => None,
        }
    }

    fn pin_until(&self, put: &Put<'_>, present: Option<u64>, now_ms: u64) -> Option<u64> {
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

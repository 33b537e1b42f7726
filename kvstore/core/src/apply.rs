//! Making facts true: replay of a log, a standby, the start from a snapshot.
//!
//! Facts may be applied again, and onto a state that already has some of what follows, as long as all that follows is
//! applied too. So the pieces of a snapshot need not be of one moment: an object that does not fit, because its space
//! is taken by another that is gone by then, is told again by the facts since the snapshot began.

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_wire::types::{Segment, Uuid};

use crate::client::Client;
use crate::disk::{Disk, DiskCopy};
use crate::fact::{Effects, Fact, ObjectState, Place, RemoveCause};
use crate::locked::{Fresh, Locked};
use crate::master::Master;
use crate::object::{Entry, PendingVersion, Queue, Replica};
use crate::placement::mix;
use crate::shard::Held;

/// A fact that does not fit the state. It is left out, which is right if what follows is applied too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotApplied {
    /// The segment is not mounted, or its place is taken.
    #[error("the space of the object is not there or is taken")]
    NoSpace,
    /// Mounting failed, or there are too many tenants.
    #[error("the master refuses what the fact says")]
    Refused,
}

/// Space that a change keeps from being given to others: segment and offset.
#[derive(Default)]
struct HeldSpaces(HashSet<(Uuid, u64)>);

impl Effects for HeldSpaces {
    fn fact(&mut self, fact: Fact<'_>) {
        if let Fact::Held { segment, offset, .. } = fact {
            self.0.insert((segment, offset));
        }
    }
}

impl Master {
    /// Makes a fact true. Facts of one master must be applied in their order and by one thread at a time, and nothing
    /// else may change the state until [`Self::finish_replay`].
    ///
    /// # Errors
    /// When it does not fit the state, which is not changed then.
    pub fn apply(&self, fact: &Fact<'_>) -> Result<(), NotApplied> {
        match fact {
            Fact::SegmentMounted { segment, client, at_ms } => {
                let _registry = self.registry.lock();
                let [name, te_endpoint, protocol, host_id] =
                    [&segment.name, &segment.te_endpoint, &segment.protocol, &segment.host_id]
                        .map(|text| Arc::<str>::from(&**text));
                let Segment { id, base, size, .. } = *segment;
                let info = Segment { id, name, base, size, te_endpoint, protocol, host_id };
                self.mount_one(*at_ms, info, *client, &mut ()).map_err(|_| NotApplied::Refused)?;
                self.capacity_changed();
            }
            Fact::SegmentStatus { segment, status, until_ms } => {
                let segments = self.segments.load();
                if let Some(mounted) = segments.place_of(*segment).and_then(|at| segments.get(at)) {
                    mounted.set_status(*status, *until_ms);
                }
            }
            Fact::SegmentUnmounted { segment, cause } => {
                let _registry = self.registry.lock();
                self.without_holds(|fx| self.lose(*segment, *cause, 0, fx));
            }
            Fact::ClientSilent { client, at_ms } => {
                let seen = Client::seen(*at_ms);
                self.registry.lock().clients.insert(*client, seen);
                self.client_lost(*at_ms, *client, &mut ());
            }
            Fact::ClientBack { client, at_ms } => {
                let seen = Client::seen(*at_ms);
                self.registry.lock().clients.insert(*client, seen);
                if let Some(disk) = self.disk(*client) {
                    disk.set_silent(false);
                }
            }
            Fact::DiskMounted { client } => self.restore_disk(*client),
            Fact::DiskUnmounted { client } => {
                let _registry = self.registry.lock();
                self.without_holds(|fx| self.lose_disk(*client, 0, fx));
            }
            Fact::ClientGone { client } => _ = self.registry.lock().clients.remove(client),
            Fact::Started(object) => self.restore(object, false)?,
            Fact::Stored { object, .. } => self.restore(object, true)?,
            Fact::Removed { tenant, key, .. } => {
                self.forget_transfer(tenant, key);
                self.unstore(tenant, key);
            }
            Fact::Held { segment, offset, size, until_ms } => {
                self.hold_at(*segment, *offset, *size, *until_ms)?;
            }
            Fact::Released { segment, offset } => self.release_at(*segment, *offset),
            Fact::TenantQuota { tenant, requested } => self.restore_quota(tenant, *requested)?,
            Fact::Transferring(state) => self.note_transfer(state),
            Fact::TransferOver { tenant, key } => self.forget_transfer(tenant, key),
            Fact::Task(state) => self.tasks.lock().restore(state, self.settings.max_tasks),
            Fact::DrainJob(state) => self.tasks.lock().jobs.restore(state),
            Fact::DrainMove { job, task, tenant, key, size } => {
                self.tasks.lock().jobs.restore_move(*job, *task, (tenant, key), *size);
            }
            Fact::DrainMoved { job, task, tenant, key, tries } => {
                self.tasks.lock().jobs.restore_moved(*job, *task, (tenant, key), *tries);
            }
        }
        Ok(())
    }

    /// Makes a change whose own facts follow, and gives back the space that it holds: [`Fact::Held`] is among them, and keeps it in another
    /// shard.
    fn without_holds(&self, change: impl FnOnce(&mut dyn Effects)) {
        let mut holds = HeldSpaces::default();
        change(&mut holds);
        if holds.0.is_empty() {
            return;
        }
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            let segments = Arc::clone(&shard.segments);
            let is_hold = |it: &Held| {
                segments
                    .get(it.segment)
                    .is_some_and(|segment| holds.0.contains(&(segment.info.id, it.offset)))
            };
            let (over, still): (Vec<Held>, Vec<Held>) = shard.held.drain(..).partition(is_hold);
            shard.held = still;
            for held in over {
                if let Some(segment) = segments.get(held.segment) {
                    segment.space(|space| space.free(held.block));
                }
            }
        }
    }

    fn restore_quota(&self, tenant: &str, requested: Option<u64>) -> Result<(), NotApplied> {
        match requested {
            Some(bytes) => {
                self.tenants.set_quota(tenant, bytes, self.capacity()).map_err(|_| NotApplied::Refused)?;
            }
            // It may be gone already.
            None => _ = self.tenants.remove_quota(tenant, self.capacity()),
        }
        Ok(())
    }

    /// Whether its node wants objects, it tells with its next heartbeat.
    fn restore_disk(&self, client: Uuid) {
        let _registry = self.registry.lock();
        match self.disk(client) {
            Some(disk) => disk.set_silent(false),
            None => self.with_disks(|disks| _ = disks.insert(client, Arc::new(Disk::new(client, false)))),
        }
    }

    fn restored_copy(&self, object: &ObjectState<'_>) -> Option<DiskCopy> {
        let told = object.on_disk.as_ref()?;
        let disk = self.disk(told.client)?;
        self.saw_replica_id(told.replica);
        Some(DiskCopy { id: told.replica, size: told.size, disk, endpoint: Arc::from(&*told.endpoint) })
    }

    fn unstore(&self, tenant: &str, key: &str) {
        let Ok(spot) = self.spot_of(tenant, key) else { return };
        let mut shard = self.lock(spot.shard);
        if let Some(at) = shard.lookup(spot, key) {
            let gone = shard.take(at, RemoveCause::Removed, &mut ());
            spaces(&gone).iter().for_each(|(it, _)| shard.free(it));
        }
    }

    fn restore(&self, object: &ObjectState<'_>, ready: bool) -> Result<(), NotApplied> {
        let tenant = if self.tenants.enabled() {
            self.tenants.register(&object.tenant).map_err(|_| NotApplied::Refused)?
        } else {
            0
        };
        let spot = self.spot(tenant, &object.key);
        let mut shard = self.lock(spot.shard);
        let present = shard.lookup(spot, &object.key);
        if let Some(at) = present.filter(|at| !ready && shard.entries[*at].is_complete()) {
            return self.restore_pending(&mut shard, at, object);
        }
        let old = present.map(|at| shard.take(at, RemoveCause::Replaced, &mut ()));
        let replicas = shard.reclaim(old.as_ref().map(spaces).unwrap_or_default(), object, ready);
        let copy = self.restored_copy(object).filter(|_| ready);
        if replicas.is_empty() && copy.is_none() {
            return Err(NotApplied::NoSpace);
        }
        replicas.iter().for_each(|it| self.saw_replica_id(it.id));
        let queue = match object.soft_pin_until_ms {
            _ if !ready => Queue::Writing,
            _ if object.hard_pin || replicas.is_empty() => Queue::Apart,
            Some(until) if until > object.since_ms => Queue::Soft,
            _ => Queue::Unread,
        };
        self.tenants.count(tenant, object.size.saturating_mul(replicas.len() as u64));
        let at = shard.add(
            spot,
            &Fresh {
                key: &object.key,
                client: object.client,
                size: object.size,
                stamp: object.since_ms,
                replicas: &replicas,
                queue,
                hard_pin: object.hard_pin,
                soft_pin_until_ms: object.soft_pin_until_ms,
                checksum: object.checksum,
                group: object.group.as_deref().map(|name| (self.group(&object.tenant, name), name)),
            },
        );
        if let Some(copy) = copy {
            shard.attach_copy(at, copy);
        }
        Ok(())
    }

    /// A new version of an object that can be read is being written.
    fn restore_pending(
        &self,
        shard: &mut Locked<'_>,
        at: u32,
        object: &ObjectState<'_>,
    ) -> Result<(), NotApplied> {
        let tenant = shard.entries[at].tenant;
        let mut before = Vec::new();
        if let Some(old) = shard.detach_pending(at) {
            self.tenants.discharge(tenant, old.bytes());
            before.extend(old.replicas.iter().map(|it| (*it, old.size)));
        }
        let replicas = shard.reclaim(before, object, false);
        if replicas.is_empty() {
            shard.settle(at, object.since_ms);
            return Err(NotApplied::NoSpace);
        }
        replicas.iter().for_each(|it| self.saw_replica_id(it.id));
        let group = object.group.as_deref().map(|name| (self.group(&object.tenant, name), name.into()));
        let pending = PendingVersion {
            client: object.client,
            size: object.size,
            since_ms: object.since_ms,
            replicas,
            hard_pin: object.hard_pin,
            soft_pin_until_ms: object.soft_pin_until_ms,
            group,
        };
        self.tenants.count(tenant, pending.bytes());
        shard.attach_pending(at, pending);
        Ok(())
    }

    /// The shard that keeps space which was told to be held.
    pub(crate) fn holder(&self, segment: Uuid, offset: u64) -> usize {
        (mix(segment.first ^ mix(segment.second ^ mix(offset))) % self.shards.len() as u64) as usize
    }

    fn hold_at(&self, segment: Uuid, offset: u64, size: u64, until_ms: u64) -> Result<(), NotApplied> {
        self.release_at(segment, offset);
        let mut shard = self.lock(self.holder(segment, offset));
        let at = shard.segments.place_of(segment).ok_or(NotApplied::NoSpace)?;
        let replica = shard.claim(at, offset, size).ok_or(NotApplied::NoSpace)?;
        shard.held.push(Held { until_ms, segment: at, block: replica.block, offset, size });
        Ok(())
    }

    fn release_at(&self, segment: Uuid, offset: u64) {
        let mut shard = self.lock(self.holder(segment, offset));
        let Some(at) = shard.segments.place_of(segment) else { return };
        let Some(index) = shard.held.iter().position(|it| it.segment == at && it.offset == offset) else {
            return;
        };
        let held = shard.held.swap_remove(index);
        if let Some(mounted) = shard.segments.get(at) {
            mounted.space(|space| space.free(held.block));
        }
    }
}

/// All replicas of an object that was taken out, of its new version too, with their sizes.
fn spaces(entry: &Entry) -> Vec<(Replica, u64)> {
    let present = entry.replicas().map(|it| (*it, entry.size));
    let pending = entry.pending().into_iter().flat_map(|new| new.replicas.iter().map(|it| (*it, new.size)));
    present.chain(pending).collect()
}

impl Locked<'_> {
    /// Space at a certain place.
    pub(crate) fn claim(&self, segment: u16, offset: u64, size: u64) -> Option<Replica> {
        let space = self.segments.get(segment)?.space(|space| space.allocate_at(offset, size))?;
        Some(Replica { id: 0, offset, block: space.block, segment, ready: false })
    }

    /// The replicas of an object as told: those that it had stay, the others are freed, and what is new is claimed.
    fn reclaim(&self, old: Vec<(Replica, u64)>, object: &ObjectState<'_>, ready: bool) -> Vec<Replica> {
        let is_told = |it: &Replica, place: &Place| {
            let id = self.segments.get(it.segment).map(|it| it.info.id);
            id == Some(place.segment) && it.offset == place.offset
        };
        let (kept, gone): (Vec<_>, Vec<_>) = old.into_iter().partition(|(it, size)| {
            *size == object.size && object.places.iter().any(|place| is_told(it, place))
        });
        gone.iter().for_each(|(it, _)| self.free(it));
        let mut replicas = Vec::with_capacity(object.places.len());
        for place in object.places.iter() {
            let known = kept.iter().find(|(it, _)| is_told(it, place)).map(|(it, _)| *it);
            let claimed = known.or_else(|| {
                let segment = self.segments.place_of(place.segment)?;
                self.claim(segment, place.offset, object.size)
            });
            replicas.extend(claimed.map(|it| Replica { id: place.replica, ready, ..it }));
        }
        replicas
    }
}

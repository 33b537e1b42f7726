//! Making facts true: replay of a log, a standby, the start from a snapshot.
//!
//! Facts may be applied again, and onto a state that already has some of what follows, as long as all that follows is
//! applied too. So the pieces of a snapshot need not be of one moment: an object that does not fit, because its space
//! is taken by another that is gone by then, is told again by the facts since the snapshot began.

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_wire::types::{Segment, Uuid};

use crate::change::{ObjectState, RemoveCause, ReplicaLocation, StateChange, StateChangeSink};
use crate::client::ClientLiveness;
use crate::disk::{ClientDisk, DiskCopy};
use crate::locked_shard::{LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica, ObjectEntry, PendingVersion};
use crate::placement::mix;
use crate::shard::QuarantinedRange;

/// A fact that does not fit the state. It is left out, which is right if what follows is applied too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The segment is not mounted, or its place is taken.
    #[error("the space of the object is not there or is taken")]
    NoSpace,
    /// Mounting failed, or there are too many tenants.
    #[error("the master refuses what the fact says")]
    Refused,
}

/// Space that a change keeps from being given to others: segment and offset.
#[derive(Default)]
struct QuarantinedRanges(HashSet<(Uuid, u64)>);

impl StateChangeSink for QuarantinedRanges {
    fn record(&mut self, fact: StateChange<'_>) {
        if let StateChange::RangeQuarantined { segment, offset, .. } = fact {
            self.0.insert((segment, offset));
        }
    }
}

impl MasterCore {
    /// Makes a fact true. Facts of one master must be applied in their order and by one thread at a time, and nothing
    /// else may change the state until [`Self::finish_replay`].
    ///
    /// # Errors
    /// When it does not fit the state, which is not changed then.
    pub fn apply(&self, fact: &StateChange<'_>) -> Result<(), ApplyError> {
        match fact {
            StateChange::SegmentMounted { segment, client, at_ms } => {
                let _registry = self.registry.lock();
                let [name, te_endpoint, protocol, host_id] =
                    [&segment.name, &segment.te_endpoint, &segment.protocol, &segment.host_id]
                        .map(|text| Arc::<str>::from(&**text));
                let Segment { id, base, size, .. } = *segment;
                let info = Segment { id, name, base, size, te_endpoint, protocol, host_id };
                self.mount_one(*at_ms, info, *client, &mut ()).map_err(|_| ApplyError::Refused)?;
                self.capacity_changed();
            }
            StateChange::SegmentStatus { segment, status, until_ms } => {
                let segments = self.segments.load();
                if let Some(mounted) = segments.index_of(*segment).and_then(|at| segments.get(at)) {
                    mounted.set_status(*status, *until_ms);
                }
            }
            StateChange::SegmentUnmounted { segment, cause } => {
                let _registry = self.registry.lock();
                self.without_quarantine(|fx| self.drop_segment(*segment, *cause, 0, fx));
            }
            StateChange::ClientSilent { client, at_ms } => {
                let seen = ClientLiveness::alive(*at_ms);
                self.registry.lock().clients.insert(*client, seen);
                self.client_disconnected(*at_ms, *client, &mut ());
            }
            StateChange::ClientRecovered { client, at_ms } => {
                let seen = ClientLiveness::alive(*at_ms);
                self.registry.lock().clients.insert(*client, seen);
                if let Some(disk) = self.disk(*client) {
                    disk.set_silent(false);
                }
            }
            StateChange::DiskMounted { client } => self.restore_disk(*client),
            StateChange::DiskUnmounted { client } => {
                let _registry = self.registry.lock();
                self.without_quarantine(|fx| self.drop_disk(*client, 0, fx));
            }
            StateChange::ClientExpired { client } => _ = self.registry.lock().clients.remove(client),
            StateChange::ObjectStarted(object) => self.restore(object, false)?,
            StateChange::ObjectStored { object, .. } => self.restore(object, true)?,
            StateChange::Removed { tenant, key, .. } => {
                self.remove_transfer(tenant, key);
                self.remove_replayed(tenant, key);
            }
            StateChange::RangeQuarantined { segment, offset, size, until_ms } => {
                self.quarantine_at(*segment, *offset, *size, *until_ms)?;
            }
            StateChange::RangeReleased { segment, offset } => self.release_quarantine_at(*segment, *offset),
            StateChange::TenantQuota { tenant, requested } => self.restore_quota(tenant, *requested)?,
            StateChange::TransferStarted(state) => self.record_transfer(state),
            StateChange::TransferEnded { tenant, key } => self.remove_transfer(tenant, key),
            StateChange::Task(state) => self.tasks.lock().restore(state, self.settings.max_tasks),
            StateChange::DrainJob(state) => self.tasks.lock().jobs.restore(state),
            StateChange::DrainMoveStarted { job, task, tenant, key, size } => {
                self.tasks.lock().jobs.restore_move(*job, *task, (tenant, key), *size);
            }
            StateChange::DrainMoveEnded { job, task, tenant, key, attempts: tries } => {
                self.tasks.lock().jobs.restore_moved(*job, *task, (tenant, key), *tries);
            }
        }
        Ok(())
    }

    /// Makes a change whose own facts follow, and gives back the space that it holds: [`StateChange::QuarantinedRange`] is among them, and keeps it in another
    /// shard.
    fn without_quarantine(&self, change: impl FnOnce(&mut dyn StateChangeSink)) {
        let mut holds = QuarantinedRanges::default();
        change(&mut holds);
        if holds.0.is_empty() {
            return;
        }
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            let segments = Arc::clone(&shard.segments);
            let is_hold = |it: &QuarantinedRange| {
                segments
                    .get(it.segment)
                    .is_some_and(|segment| holds.0.contains(&(segment.descriptor.id, it.offset)))
            };
            let (over, still): (Vec<QuarantinedRange>, Vec<QuarantinedRange>) =
                shard.quarantined.drain(..).partition(is_hold);
            shard.quarantined = still;
            for held in over {
                if let Some(segment) = segments.get(held.segment) {
                    segment.with_allocator(|space| space.free(held.block));
                }
            }
        }
    }

    fn restore_quota(&self, tenant: &str, requested: Option<u64>) -> Result<(), ApplyError> {
        match requested {
            Some(bytes) => {
                self.tenants.set_quota(tenant, bytes, self.capacity()).map_err(|_| ApplyError::Refused)?;
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
            None => {
                self.update_disks(|disks| _ = disks.insert(client, Arc::new(ClientDisk::new(client, false))));
            }
        }
    }

    fn restored_copy(&self, object: &ObjectState<'_>) -> Option<DiskCopy> {
        let told = object.disk_copy.as_ref()?;
        let disk = self.disk(told.client)?;
        self.reserve_replica_id(told.replica);
        Some(DiskCopy { id: told.replica, size: told.size, disk, endpoint: Arc::from(&*told.endpoint) })
    }

    fn remove_replayed(&self, tenant: &str, key: &str) {
        let Ok(spot) = self.locate_reader_key(tenant, key) else { return };
        let mut shard = self.lock(spot.shard);
        if let Some(at) = shard.lookup(spot, key) {
            let gone = shard.remove_entry(at, RemoveCause::Removed, &mut ());
            replica_ranges(&gone).iter().for_each(|(it, _)| shard.free(it));
        }
    }

    fn restore(&self, object: &ObjectState<'_>, ready: bool) -> Result<(), ApplyError> {
        let tenant = if self.tenants.enabled() {
            self.tenants.register(&object.tenant).map_err(|_| ApplyError::Refused)?
        } else {
            0
        };
        let spot = self.locate_key(tenant, &object.key);
        let mut shard = self.lock(spot.shard);
        let present = shard.lookup(spot, &object.key);
        if let Some(at) = present.filter(|at| !ready && shard.entries[*at].is_complete()) {
            return self.restore_pending(&mut shard, at, object);
        }
        let old = present.map(|at| shard.remove_entry(at, RemoveCause::Replaced, &mut ()));
        let replicas = shard.reclaim(old.as_ref().map(replica_ranges).unwrap_or_default(), object, ready);
        let copy = self.restored_copy(object).filter(|_| ready);
        if replicas.is_empty() && copy.is_none() {
            return Err(ApplyError::NoSpace);
        }
        replicas.iter().for_each(|it| self.reserve_replica_id(it.id));
        let queue = match object.soft_pin_until_ms {
            _ if !ready => EvictionQueue::Writing,
            _ if object.hard_pin || replicas.is_empty() => EvictionQueue::Unlisted,
            Some(until) if until > object.since_ms => EvictionQueue::SoftPinned,
            _ => EvictionQueue::Unread,
        };
        self.tenants.count(tenant, object.size.saturating_mul(replicas.len() as u64));
        let at = shard.add(
            spot,
            &NewObject {
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
        shard: &mut LockedShard<'_>,
        at: u32,
        object: &ObjectState<'_>,
    ) -> Result<(), ApplyError> {
        let tenant = shard.entries[at].tenant;
        let mut before = Vec::new();
        if let Some(old) = shard.detach_pending(at) {
            self.tenants.discharge(tenant, old.bytes());
            before.extend(old.replicas.iter().map(|it| (*it, old.size)));
        }
        let replicas = shard.reclaim(before, object, false);
        if replicas.is_empty() {
            shard.requeue_idle(at, object.since_ms);
            return Err(ApplyError::NoSpace);
        }
        replicas.iter().for_each(|it| self.reserve_replica_id(it.id));
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
    pub(crate) fn quarantine_shard(&self, segment: Uuid, offset: u64) -> usize {
        (mix(segment.first ^ mix(segment.second ^ mix(offset))) % self.shards.len() as u64) as usize
    }

    fn quarantine_at(&self, segment: Uuid, offset: u64, size: u64, until_ms: u64) -> Result<(), ApplyError> {
        self.release_quarantine_at(segment, offset);
        let mut shard = self.lock(self.quarantine_shard(segment, offset));
        let at = shard.segments.index_of(segment).ok_or(ApplyError::NoSpace)?;
        let replica = shard.claim(at, offset, size).ok_or(ApplyError::NoSpace)?;
        shard.quarantined.push(QuarantinedRange {
            until_ms,
            segment: at,
            block: replica.block,
            offset,
            size,
        });
        Ok(())
    }

    fn release_quarantine_at(&self, segment: Uuid, offset: u64) {
        let mut shard = self.lock(self.quarantine_shard(segment, offset));
        let Some(at) = shard.segments.index_of(segment) else { return };
        let Some(index) = shard.quarantined.iter().position(|it| it.segment == at && it.offset == offset)
        else {
            return;
        };
        let held = shard.quarantined.swap_remove(index);
        if let Some(mounted) = shard.segments.get(at) {
            mounted.with_allocator(|space| space.free(held.block));
        }
    }
}

/// All replicas of an object that was taken out, of its new version too, with their sizes.
fn replica_ranges(entry: &ObjectEntry) -> Vec<(MemoryReplica, u64)> {
    let present = entry.replicas().map(|it| (*it, entry.size));
    let pending = entry.pending().into_iter().flat_map(|new| new.replicas.iter().map(|it| (*it, new.size)));
    present.chain(pending).collect()
}

impl LockedShard<'_> {
    /// Space at a certain place.
    pub(crate) fn claim(&self, segment: u16, offset: u64, size: u64) -> Option<MemoryReplica> {
        let space = self.segments.get(segment)?.with_allocator(|space| space.allocate_at(offset, size))?;
        Some(MemoryReplica { id: 0, offset, block: space.block, segment, ready: false })
    }

    /// The replicas of an object as told: those that it had stay, the others are freed, and what is new is claimed.
    fn reclaim(
        &self,
        old: Vec<(MemoryReplica, u64)>,
        object: &ObjectState<'_>,
        ready: bool,
    ) -> Vec<MemoryReplica> {
        let is_told = |it: &MemoryReplica, place: &ReplicaLocation| {
            let id = self.segments.get(it.segment).map(|it| it.descriptor.id);
            id == Some(place.segment) && it.offset == place.offset
        };
        let (kept, gone): (Vec<_>, Vec<_>) = old.into_iter().partition(|(it, size)| {
            *size == object.size && object.locations.iter().any(|place| is_told(it, place))
        });
        gone.iter().for_each(|(it, _)| self.free(it));
        let mut replicas = Vec::with_capacity(object.locations.len());
        for place in object.locations.iter() {
            let known = kept.iter().find(|(it, _)| is_told(it, place)).map(|(it, _)| *it);
            let claimed = known.or_else(|| {
                let segment = self.segments.index_of(place.segment)?;
                self.claim(segment, place.offset, object.size)
            });
            replicas.extend(claimed.map(|it| MemoryReplica { id: place.replica, ready, ..it }));
        }
        replicas
    }
}

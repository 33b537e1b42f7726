//! Applying state changes: replay of a log, a standby, start from a snapshot.
//!
//! State changes may be applied repeatedly, and to a state that already includes later ones, as long as all later ones are applied
//! too. So the parts of a snapshot need not be consistent with each other: an object that does not fit, because another one that
//! was removed in the meantime occupies its range, is recorded again by the state changes since the snapshot was started.

use std::collections::HashSet;
use std::sync::Arc;

use mooncake_wire::types::Uuid;
use moongate_retention::BlockClass;

use crate::allocator::SegmentAllocator;
use crate::bulk_replay::JobRunner;
use crate::change::{ObjectState, RemoveCause, ReplicaLocation, StateChange, StateChangeSink};
use crate::client_registry::ClientLiveness;
use crate::disk::{ClientDisk, DiskCopy};
use crate::drain_job::InFlightMove;
use crate::indices::{EntryIndex, TenantIndex};
use crate::locked_shard::{LockedShard, NewObject};
use crate::master::MasterCore;
use crate::object::{EvictionQueue, MemoryReplica, ObjectEntry, ObjectName, PendingVersion};
use crate::object_table::ObjectTable;
use crate::shard::QuarantinedRange;

/// Why a state change does not fit the state. It is skipped, which is correct if all later ones are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The segment is not mounted, or the range is occupied.
    #[error("the object's range is not mounted or is occupied")]
    NoSpace,
    /// Mounting failed, or the maximum number of tenants is reached.
    #[error("the master rejects the state change: invalid segment or too many tenants")]
    Refused,
    /// Of another release, or damaged: they are learned again.
    #[error("the learned return times are unusable")]
    ReturnTimes,
}

/// Collects the ranges that a change quarantines, by segment and offset.
#[derive(Default)]
struct QuarantinedRanges(HashSet<(Uuid, u64)>);

impl StateChangeSink for QuarantinedRanges {
    fn record(&mut self, change: StateChange<'_>) {
        if let StateChange::RangeQuarantined { segment, offset, .. } = change {
            self.0.insert((segment, offset));
        }
    }
}

impl MasterCore {
    /// Applies a state change. The state changes of one master must be applied in order and by one thread at a time (in a bulk replay,
    /// those of a [`ReplayLane`](crate::ReplayLane)), and nothing else may change the state until [`Self::finish_replay`].
    ///
    /// # Errors
    /// When the change does not fit the state, which stays unchanged.
    pub fn apply(&self, change: &StateChange<'_>) -> Result<(), ApplyError> {
        match change {
            StateChange::SegmentMounted { segment, client, at_ms } => {
                let _registry = self.registry.lock();
                let descriptor = segment.map_text(|text| Arc::<str>::from(&**text));
                self.mount_one(*at_ms, descriptor, *client, &mut ()).map_err(|_| ApplyError::Refused)?;
                self.objects.capacity_changed();
            }
            StateChange::SegmentStatus { segment, status, until_ms } => {
                let segments = self.objects.segments.load();
                if let Some(mounted) = segments.index_of(*segment).and_then(|index| segments.get(index)) {
                    mounted.set_status(*status, *until_ms);
                }
            }
            StateChange::SegmentUnmounted { segment, cause } => {
                let _registry = self.registry.lock();
                self.objects.without_quarantine(|fx| self.objects.drop_segment(*segment, *cause, 0, fx));
            }
            StateChange::ClientSilent { client, at_ms } => {
                let liveness = ClientLiveness::alive(*at_ms);
                self.registry.lock().clients.insert(*client, liveness);
                self.client_disconnected(*at_ms, *client, &mut ());
            }
            StateChange::ClientRecovered { client, at_ms } => {
                let liveness = ClientLiveness::alive(*at_ms);
                self.registry.lock().clients.insert(*client, liveness);
                if let Some(disk) = self.objects.disk(*client) {
                    disk.set_silent(false);
                }
            }
            StateChange::DiskMounted { client } => {
                let _registry = self.registry.lock();
                self.objects.restore_disk(*client);
            }
            StateChange::DiskUnmounted { client } => {
                let _registry = self.registry.lock();
                self.objects.without_quarantine(|fx| self.objects.drop_disk(*client, 0, fx));
            }
            StateChange::ClientExpired { client } => _ = self.registry.lock().clients.remove(client),
            StateChange::ObjectStarted(object) => self.objects.restore(object, false)?,
            StateChange::ObjectStored { object, .. } => self.objects.restore(object, true)?,
            StateChange::Removed { tenant, key, .. } => {
                self.pending_transfers.lock().remove(tenant, key);
                self.objects.remove_replayed(tenant, key);
            }
            StateChange::RangeQuarantined { segment, offset, size, until_ms } => {
                self.objects.quarantine_at(*segment, *offset, *size, *until_ms)?;
            }
            StateChange::RangeReleased { segment, offset } => {
                self.objects.release_quarantine_at(*segment, *offset);
            }
            StateChange::TenantQuota { tenant, requested } => {
                self.objects.restore_quota(tenant, *requested)?;
            }
            StateChange::ReturnTimes { counts } => {
                self.objects.retention.restore(counts).map_err(|_| ApplyError::ReturnTimes)?;
            }
            StateChange::TransferStarted(state) => self.pending_transfers.lock().record(state),
            StateChange::TransferEnded { tenant, key } => self.pending_transfers.lock().remove(tenant, key),
            StateChange::Task(state) => self.planner.lock().tasks.restore(state),
            StateChange::DrainJob(state) => self.planner.lock().drain_jobs.restore(state),
            StateChange::DrainMoveStarted { job, task, tenant, key, size } => {
                let object = InFlightMove { name: ObjectName::new(tenant, key), size: *size };
                self.planner.lock().drain_jobs.restore_move(*job, *task, object);
            }
            StateChange::DrainMoveEnded { job, task, tenant, key, attempts } => {
                let name = ObjectName::new(tenant, key);
                self.planner.lock().drain_jobs.restore_moved(*job, *task, name, *attempts);
            }
        }
        Ok(())
    }

    /// Ends the replay of state changes, before requests are served. Every client that is not silent gets a full TTL for its next
    /// heartbeat.
    pub fn finish_replay(&self, now_ms: u64, runner: &dyn JobRunner) {
        self.end_bulk_replay(runner);
        self.registry.lock().restart_timers(now_ms);
        let pending = std::mem::take(&mut *self.pending_transfers.lock());
        self.objects.resume_transfers(pending);
        self.objects.sort_lists(runner);
        for (_, segment) in self.objects.segments.load().iter() {
            segment.with_allocator(SegmentAllocator::drop_offset_index);
        }
    }
}

impl ObjectTable {
    /// Offloading stays disabled until the node's next heartbeat. The caller must hold the registry lock.
    fn restore_disk(&self, client: Uuid) {
        match self.disk(client) {
            Some(disk) => disk.set_silent(false),
            None => {
                self.update_disks(|disks| _ = disks.insert(client, Arc::new(ClientDisk::new(client, false))));
            }
        }
    }

    /// Makes a change and frees the ranges that it quarantines: the log contains their [`StateChange::RangeQuarantined`], whose replay
    /// quarantines them in another shard.
    fn without_quarantine(&self, change: impl FnOnce(&mut dyn StateChangeSink)) {
        let mut ranges = QuarantinedRanges::default();
        change(&mut ranges);
        if ranges.0.is_empty() {
            return;
        }
        for shard in self.shard_indices() {
            let mut shard = self.lock(shard);
            let segments = Arc::clone(&shard.segments);
            let is_new = |range: &QuarantinedRange| {
                segments
                    .get(range.segment)
                    .is_some_and(|segment| ranges.0.contains(&(segment.descriptor.id, range.offset)))
            };
            let (released, remaining): (Vec<QuarantinedRange>, Vec<QuarantinedRange>) =
                shard.quarantined.drain(..).partition(is_new);
            shard.quarantined = remaining;
            for range in released {
                if let Some(segment) = segments.get(range.segment) {
                    segment.with_allocator(|allocator| allocator.free(range.block));
                }
            }
        }
    }

    fn restore_quota(&self, tenant: &str, requested: Option<u64>) -> Result<(), ApplyError> {
        match requested {
            Some(bytes) => {
                self.tenants.set_quota(tenant, bytes, self.capacity()).map_err(|_| ApplyError::Refused)?;
            }
            // It may have been removed already.
            None => _ = self.tenants.remove_quota(tenant, self.capacity()),
        }
        Ok(())
    }

    fn restored_copy(&self, object: &ObjectState<'_>) -> Option<DiskCopy> {
        let copy_state = object.disk_copy.as_ref()?;
        let disk = self.disk(copy_state.client)?;
        self.reserve_replica_id(copy_state.replica);
        Some(DiskCopy {
            id: copy_state.replica,
            size: copy_state.size,
            disk,
            endpoint: Arc::from(&*copy_state.endpoint),
        })
    }

    fn remove_replayed(&self, tenant: &str, key: &str) {
        let Ok(key_location) = self.locate_reader_key(tenant, key) else { return };
        let mut shard = self.lock(key_location.shard);
        if let Some(index) = shard.lookup(key_location, key) {
            let removed = shard.remove_entry(index, RemoveCause::Removed, &mut ());
            replica_ranges(&removed).iter().for_each(|(replica, _)| shard.free(replica));
        }
    }

    fn restore(&self, object: &ObjectState<'_>, ready: bool) -> Result<(), ApplyError> {
        let tenant = if self.tenants.enabled() {
            self.tenants.register(&object.tenant).map_err(|_| ApplyError::Refused)?
        } else {
            TenantIndex::DEFAULT
        };
        let key_location = self.locate_key(tenant, &object.key);
        let mut shard = self.lock(key_location.shard);
        let present = shard.lookup(key_location, &object.key);
        if let Some(index) = present.filter(|index| !ready && shard.entries[*index].is_complete()) {
            return self.restore_pending(&mut shard, index, object);
        }
        if let Some(index) = present.filter(|_| ready)
            && self.complete_replayed(&mut shard, index, object)
        {
            return Ok(());
        }
        let old = present.map(|index| shard.remove_entry(index, RemoveCause::Replaced, &mut ()));
        let replicas = shard.reclaim(old.as_ref().map(replica_ranges).unwrap_or_default(), object, ready);
        let copy = self.restored_copy(object).filter(|_| ready);
        if replicas.is_empty() && copy.is_none() {
            return Err(ApplyError::NoSpace);
        }
        replicas.iter().for_each(|replica| self.reserve_replica_id(replica.id));
        let queue = if ready { replayed_queue(object, !replicas.is_empty()) } else { EvictionQueue::Writing };
        self.tenants.count(tenant, object.size.saturating_mul(replicas.len() as u64));
        let index = shard.add(
            key_location,
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
            shard.attach_copy(index, copy);
        }
        Ok(())
    }

    /// Completes an object whose put was replayed before, if nothing else has changed. Otherwise returns false.
    fn complete_replayed(
        &self,
        shard: &mut LockedShard<'_>,
        index: EntryIndex,
        object: &ObjectState<'_>,
    ) -> bool {
        let entry = &shard.entries[index];
        let is_same_replica = |(replica, location): (&MemoryReplica, &ReplicaLocation)| {
            let segment = shard.segments.get(replica.segment).map(|segment| segment.descriptor.id);
            replica.id == location.replica
                && replica.offset == location.offset
                && segment == Some(location.segment)
        };
        let is_same = !entry.is_complete()
            && object.disk_copy.is_none()
            && (shard.writer(index), entry.size, entry.hard_pin())
                == (object.client, object.size, object.hard_pin)
            && entry.soft_pin_until_ms() == object.soft_pin_until_ms
            && self.groups.name(entry.group).as_deref() == object.group.as_deref()
            && entry.replicas().count() == object.locations.len()
            && entry.replicas().zip(&*object.locations).all(is_same_replica);
        if !is_same {
            return false;
        }
        let entry = &mut shard.entries[index];
        entry.replicas_mut().for_each(|replica| replica.ready = true);
        entry.stamp = object.since_ms;
        if object.checksum.is_some() || entry.extra.is_some() {
            entry.extra_mut().checksum = object.checksum;
        }
        entry.drop_empty_extras();
        shard.enqueue(index, replayed_queue(object, true));
        true
    }

    /// Replays the start of a new version of a readable object.
    fn restore_pending(
        &self,
        shard: &mut LockedShard<'_>,
        index: EntryIndex,
        object: &ObjectState<'_>,
    ) -> Result<(), ApplyError> {
        let tenant = shard.entries[index].tenant;
        let mut before = Vec::new();
        if let Some(old) = shard.detach_pending(index) {
            self.tenants.discharge(tenant, old.bytes());
            before.extend(old.replicas.iter().map(|replica| (*replica, old.size)));
        }
        let replicas = shard.reclaim(before, object, false);
        if replicas.is_empty() {
            shard.requeue_idle(index, object.since_ms);
            return Err(ApplyError::NoSpace);
        }
        replicas.iter().for_each(|replica| self.reserve_replica_id(replica.id));
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
        shard.attach_pending(index, pending);
        Ok(())
    }

    fn quarantine_at(&self, segment: Uuid, offset: u64, size: u64, until_ms: u64) -> Result<(), ApplyError> {
        self.release_quarantine_at(segment, offset);
        let mut shard = self.lock(self.quarantine_shard(segment, offset));
        let segment_index = shard.segments.index_of(segment).ok_or(ApplyError::NoSpace)?;
        let replica = shard.claim(segment_index, offset, size).ok_or(ApplyError::NoSpace)?;
        shard.quarantined.push(QuarantinedRange {
            until_ms,
            segment: segment_index,
            block: replica.block,
            offset,
            size,
        });
        Ok(())
    }

    fn release_quarantine_at(&self, segment: Uuid, offset: u64) {
        let mut shard = self.lock(self.quarantine_shard(segment, offset));
        let Some(segment_index) = shard.segments.index_of(segment) else { return };
        let Some(index) = shard
            .quarantined
            .iter()
            .position(|range| range.segment == segment_index && range.offset == offset)
        else {
            return;
        };
        let range = shard.quarantined.swap_remove(index);
        if let Some(mounted) = shard.segments.get(segment_index) {
            mounted.with_allocator(|allocator| allocator.free(range.block));
        }
    }

    /// Sorts the eviction queues by time stamp, since a snapshot emits objects in table order.
    fn sort_lists(&self, runner: &dyn JobRunner) {
        let job = |shard| Box::new(move || self.lock(shard).sort_lists()) as Box<dyn FnOnce() + Send + '_>;
        runner.run(self.shard_indices().map(job).collect());
    }
}

/// The queue of a readable object.
fn replayed_queue(object: &ObjectState<'_>, has_memory: bool) -> EvictionQueue {
    match object.soft_pin_until_ms {
        _ if object.hard_pin || !has_memory => EvictionQueue::Unlisted,
        Some(until) if until > object.since_ms => EvictionQueue::SoftPinned,
        _ => EvictionQueue::Unread(BlockClass::default()),
    }
}

/// All replicas of a removed object and of its new version, with their sizes.
fn replica_ranges(entry: &ObjectEntry) -> Vec<(MemoryReplica, u64)> {
    let present = entry.replicas().map(|replica| (*replica, entry.size));
    let pending =
        entry.pending().into_iter().flat_map(|new| new.replicas.iter().map(|replica| (*replica, new.size)));
    present.chain(pending).collect()
}

impl LockedShard<'_> {
    /// The replicas of an object's new state: keeps those in both states, frees the others of the old one, and claims the new ones.
    fn reclaim(
        &self,
        old: Vec<(MemoryReplica, u64)>,
        object: &ObjectState<'_>,
        ready: bool,
    ) -> Vec<MemoryReplica> {
        let is_same = |replica: &MemoryReplica, location: &ReplicaLocation| {
            let id = self.segments.get(replica.segment).map(|segment| segment.descriptor.id);
            id == Some(location.segment) && replica.offset == location.offset
        };
        let (retained, removed): (Vec<_>, Vec<_>) = old.into_iter().partition(|(replica, size)| {
            *size == object.size && object.locations.iter().any(|location| is_same(replica, location))
        });
        removed.iter().for_each(|(replica, _)| self.free(replica));
        let mut replicas = Vec::with_capacity(object.locations.len());
        for location in object.locations.iter() {
            let known =
                retained.iter().find(|(replica, _)| is_same(replica, location)).map(|(replica, _)| *replica);
            let claimed = known.or_else(|| {
                let segment = self.segments.index_of(location.segment)?;
                self.claim(segment, location.offset, object.size)
            });
            replicas.extend(claimed.map(|replica| MemoryReplica { id: location.replica, ready, ..replica }));
        }
        replicas
    }
}

//! A locked shard, with what its entries refer to.
//!
//! Lock order: the registry of clients, then at most one shard, then a group or a segment's space. The list of segments
//! is loaded after the shard is locked: a segment only leaves the list for good once every shard has been swept, so the
//! list is never older than the entries.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::Guard;
use mooncake_wire::types::ReplicaDescriptor as WireReplica;
use parking_lot::MutexGuard;

use crate::change::{
    ObjectState, RemoveCause, ReplicaLocation, StateChange, StateChangeSink, StorageTiers, StoreCause,
};
use crate::disk::DiskCopy;
use crate::group::{GroupId, GroupMember};
use crate::master::MasterCore;
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, ObjectEntry, ObjectExtras};
use crate::segment::SegmentTable;
use crate::shard::{ObjectShard, QuarantinedRange};
use crate::slab::NIL;

/// How a key is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyLocation {
    pub(crate) shard: usize,
    pub(crate) tag: u32,
    pub(crate) tenant: u16,
}

/// A new object.
pub(crate) struct NewObject<'a> {
    pub(crate) key: &'a str,
    pub(crate) client: mooncake_wire::types::Uuid,
    pub(crate) size: u64,
    pub(crate) stamp: u64,
    pub(crate) replicas: &'a [MemoryReplica],
    pub(crate) queue: EvictionQueue,
    pub(crate) hard_pin: bool,
    pub(crate) soft_pin_until_ms: Option<u64>,
    pub(crate) checksum: Option<u64>,
    pub(crate) group: Option<(GroupId, &'a str)>,
}

/// Where an object is that may have been told of.
pub(crate) fn storage_tiers(entry: &ObjectEntry) -> StorageTiers {
    StorageTiers { memory: entry.replicas().any(|it| it.ready), disk: entry.copy().is_some() }
}

/// A locked shard.
pub(crate) struct LockedShard<'a> {
    pub(crate) master: &'a MasterCore,
    pub(crate) shard_index: usize,
    pub(crate) segments: Guard<Arc<SegmentTable>>,
    shard: MutexGuard<'a, ObjectShard>,
}

impl Deref for LockedShard<'_> {
    type Target = ObjectShard;

    fn deref(&self) -> &ObjectShard {
        &self.shard
    }
}

impl DerefMut for LockedShard<'_> {
    fn deref_mut(&mut self) -> &mut ObjectShard {
        &mut self.shard
    }
}

impl Drop for LockedShard<'_> {
    fn drop(&mut self) {
        if let Some([unread, leased, soft]) = self.shard.changed_heads() {
            self.master.oldest_unread[self.shard_index].store(unread, Relaxed);
            self.master.oldest_leased[self.shard_index].store(leased, Relaxed);
            self.master.oldest_soft[self.shard_index].store(soft, Relaxed);
        }
    }
}

impl MasterCore {
    pub(crate) fn lock(&self, at: usize) -> LockedShard<'_> {
        let shard = self.shards[at].lock();
        LockedShard { master: self, shard_index: at, segments: self.segments.load(), shard }
    }
}

impl LockedShard<'_> {
    pub(crate) fn lookup(&self, spot: KeyLocation, key: &str) -> Option<u32> {
        self.shard.find(spot.tag, spot.tenant, key)
    }

    /// Whether a replica's node is heard of.
    pub(crate) fn is_responsive(&self, replica: &MemoryReplica) -> bool {
        self.segments.get(replica.segment).is_some_and(|it| it.is_readable())
    }

    /// Whether a reader can be sent to a replica.
    pub(crate) fn can_be_read(&self, replica: &MemoryReplica) -> bool {
        replica.ready && self.is_responsive(replica)
    }

    /// Whether a reader can be sent to any replica, or to a disk.
    pub(crate) fn is_readable(&self, entry: &ObjectEntry) -> bool {
        let is_on_disk = || entry.copy().is_some_and(|copy| copy.disk.is_responsive());
        entry.is_complete() && (entry.replicas().any(|it| self.can_be_read(it)) || is_on_disk())
    }

    /// Protects an object from eviction and removal.
    pub(crate) fn lease(&mut self, at: u32, now_ms: u64) {
        let until = now_ms.saturating_add(self.master.settings.lease_ttl_ms);
        let entry = &mut self.shard.entries[at];
        entry.stamp = entry.stamp.max(until);
        let (queue, prefix) = (entry.queue(), entry.prefix);
        let pinned_no_more =
            queue == EvictionQueue::SoftPinned && entry.soft_pin_until_ms().is_none_or(|pin| pin <= now_ms);
        self.shard.tally(prefix).hits += 1;
        match queue {
            EvictionQueue::Unread | EvictionQueue::Leased => self.shard.enqueue(at, EvictionQueue::Leased),
            EvictionQueue::SoftPinned if pinned_no_more => self.shard.enqueue(at, EvictionQueue::Leased),
            EvictionQueue::SoftPinned => self.shard.enqueue(at, EvictionQueue::SoftPinned),
            EvictionQueue::Vacant | EvictionQueue::Unlisted | EvictionQueue::Writing => {}
        }
    }

    /// Whether readers of a replica have to wait until its node is back.
    fn is_restarting(&self, replica: &MemoryReplica) -> bool {
        self.segments.get(replica.segment).is_some_and(|it| it.is_restarting())
    }

    /// The replicas that readers can be sent to, and after them the copy on a disk. Nobody shall wait for a node that is away
    /// who need not.
    pub(crate) fn readable_replicas(&self, at: u32) -> Vec<WireReplica<Arc<str>>> {
        let entry = &self.shard.entries[at];
        let all_away = entry.replicas().filter(|it| self.can_be_read(it)).all(|it| self.is_restarting(it));
        let readable =
            entry.replicas().filter(|it| self.can_be_read(it) && (all_away || !self.is_restarting(it)));
        let copy = entry.copy().filter(|copy| copy.disk.is_responsive()).map(DiskCopy::to_descriptor);
        readable.filter_map(|it| self.to_descriptor(it, entry.size)).chain(copy).collect()
    }

    pub(crate) fn to_descriptor(&self, replica: &MemoryReplica, size: u64) -> Option<WireReplica<Arc<str>>> {
        self.segments.get(replica.segment).map(|segment| segment.replica_descriptor(replica, size))
    }

    pub(crate) fn locations(&self, replicas: impl Iterator<Item = MemoryReplica>) -> Vec<ReplicaLocation> {
        let place = |it: MemoryReplica| {
            let segment = self.segments.get(it.segment)?.descriptor.id;
            Some(ReplicaLocation { replica: it.id, segment, offset: it.offset })
        };
        replicas.filter_map(place).collect()
    }

    /// Calls with the object as facts tell it.
    pub(crate) fn with_state(&self, at: u32, tell: impl FnOnce(ObjectState<'_>)) {
        let entry = &self.shard.entries[at];
        let is_complete = entry.is_complete();
        let places = self.locations(entry.replicas().copied().filter(|it| it.ready || !is_complete));
        let tenant = self.master.tenants.get(entry.tenant);
        let group = self.master.groups.name(entry.group);
        tell(ObjectState {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |it| &*it.name)),
            key: Cow::Borrowed(&entry.key),
            size: entry.size,
            client: entry.client,
            locations: Cow::Owned(places),
            disk_copy: entry.copy().map(DiskCopy::to_state),
            checksum: entry.checksum(),
            hard_pin: entry.hard_pin(),
            soft_pin_until_ms: entry.soft_pin_until_ms(),
            group: group.as_deref().map(Cow::Borrowed),
            since_ms: entry.stamp,
        });
    }

    /// Tells what an object is now.
    pub(crate) fn emit_state(&self, at: u32, cause: StoreCause, fx: &mut dyn StateChangeSink) {
        let is_complete = self.shard.entries[at].is_complete();
        self.with_state(at, |object| {
            fx.record(if is_complete {
                StateChange::ObjectStored { object, cause }
            } else {
                StateChange::ObjectStarted(object)
            });
        });
        self.emit_pending(at, fx);
    }

    /// Adds an object whose key is not there. Its space and its quota have been taken already.
    pub(crate) fn add(&mut self, spot: KeyLocation, fresh: &NewObject<'_>) -> u32 {
        let prefix = self.master.prefixes.index_of(fresh.key);
        let mut entry = ObjectEntry {
            key: fresh.key.into(),
            client: fresh.client,
            size: fresh.size,
            stamp: fresh.stamp,
            group: NIL,
            tenant: spot.tenant,
            prefix,
            flags: EntryFlags::new(fresh.queue, fresh.hard_pin),
            ..ObjectEntry::default()
        };
        entry.set_replicas(fresh.replicas);
        if fresh.soft_pin_until_ms.is_some() || fresh.checksum.is_some() {
            let ObjectExtras { soft_pin_until_ms, checksum, .. } = entry.extra_mut();
            (*soft_pin_until_ms, *checksum) = (fresh.soft_pin_until_ms, fresh.checksum);
        }
        let at = self.shard.insert(spot.tag, entry);
        if let Some((group, name)) = fresh.group {
            let member = GroupMember { shard: self.shard_index as u32, index: at };
            self.shard.entries[at].group = self.master.groups.join(group, name, member);
        }
        let tally = self.shard.tally(prefix);
        (tally.keys, tally.bytes) = (tally.keys + 1, tally.bytes + fresh.size);
        at
    }

    /// Removes an object, tells so and gives its space back. Returns its bytes, all replicas counted.
    pub(crate) fn remove_and_free(
        &mut self,
        at: u32,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        let entry = self.remove_entry(at, cause, fx);
        entry.replicas().for_each(|it| self.free(it));
        self.quarantine_pending(&entry, fx);
        entry.size * entry.replicas().count() as u64
    }

    /// Removes an object and tells so, but keeps its space until a time.
    pub(crate) fn remove_and_quarantine(
        &mut self,
        at: u32,
        until_ms: u64,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) {
        let entry = self.remove_entry(at, cause, fx);
        for replica in entry.replicas() {
            self.quarantine(replica, entry.size, until_ms, fx);
        }
        self.quarantine_pending(&entry, fx);
    }

    pub(crate) fn remove_entry(
        &mut self,
        at: u32,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) -> ObjectEntry {
        let entry = &self.shard.entries[at];
        let spot = self.master.locate_key(entry.tenant, &entry.key);
        let tenant = self.master.tenants.get(entry.tenant);
        let group = self.master.groups.name(entry.group);
        fx.record(StateChange::Removed {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |it| &*it.name)),
            key: Cow::Borrowed(&entry.key),
            group: group.as_deref().map(Cow::Borrowed),
            tiers: storage_tiers(entry),
            cause,
        });
        if entry.group != NIL {
            self.master.groups.leave(entry.group, GroupMember { shard: self.shard_index as u32, index: at });
        }
        if entry.transfer().is_some() || entry.work().is_some() {
            for place in self.locations(entry.replicas().copied().filter(|it| !it.ready)) {
                fx.record(StateChange::RangeReleased { segment: place.segment, offset: place.offset });
            }
            self.shard.transfers.retain(|it| *it != at);
        }
        self.abandon_work(at);
        self.detach_copy(at);
        self.report_vacated(self.shard.entries[at].replicas(), fx);
        let entry = self.shard.remove(spot.tag, at);
        self.record_departure(&entry, cause);
        let mut bytes = entry.size.saturating_mul(entry.replicas().count() as u64);
        if let Some(pending) = entry.pending() {
            self.shard.pending.remove(&(pending.since_ms, at));
            bytes = bytes.saturating_add(pending.bytes());
        }
        self.master.tenants.discharge(entry.tenant, bytes);
        let tally = self.shard.tally(entry.prefix);
        (tally.keys, tally.bytes) = (tally.keys - 1, tally.bytes - entry.size);
        entry
    }

    /// Reports ranges that belong to no object any more, before others get them.
    pub(crate) fn report_vacated<'r>(
        &self,
        replicas: impl Iterator<Item = &'r MemoryReplica>,
        fx: &mut dyn StateChangeSink,
    ) {
        for replica in replicas.filter(|it| it.ready) {
            if let Some(segment) = self.segments.get(replica.segment) {
                let place = ReplicaLocation {
                    replica: replica.id,
                    segment: segment.descriptor.id,
                    offset: replica.offset,
                };
                fx.range_vacated(place);
            }
        }
    }

    /// Gives a replica's space back.
    pub(crate) fn free(&self, replica: &MemoryReplica) {
        if let Some(segment) = self.segments.get(replica.segment) {
            segment.with_allocator(|space| space.free(replica.block));
        }
    }

    /// Keeps a replica's space from being given to others until a time.
    pub(crate) fn quarantine(
        &mut self,
        replica: &MemoryReplica,
        size: u64,
        until_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let MemoryReplica { offset, block, segment, .. } = *replica;
        self.shard.quarantined.push(QuarantinedRange { until_ms, segment, block, offset, size });
        if let Some(id) = self.segments.get(segment).map(|it| it.descriptor.id) {
            fx.record(StateChange::RangeQuarantined { segment: id, offset, size, until_ms });
        }
    }

    /// Gives held space back whose time has come.
    pub(crate) fn release_quarantined(&mut self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.shard.quarantined.iter().all(|it| it.until_ms > now_ms) {
            return;
        }
        let (over, still): (Vec<QuarantinedRange>, Vec<QuarantinedRange>) =
            self.shard.quarantined.iter().partition(|it| it.until_ms <= now_ms);
        self.shard.quarantined = still;
        for held in over {
            let Some(segment) = self.segments.get(held.segment) else { continue };
            fx.record(StateChange::RangeReleased { segment: segment.descriptor.id, offset: held.offset });
            segment.with_allocator(|space| space.free(held.block));
        }
    }

    /// Ends the writing of an object: readers may have it.
    pub(crate) fn complete(&mut self, at: u32, now_ms: u64) {
        let entry = &mut self.shard.entries[at];
        entry.replicas_mut().for_each(|it| it.ready = true);
        entry.stamp = now_ms;
        let bytes = entry.size.saturating_mul(entry.replicas().count() as u64);
        self.master.recent_writes.add(now_ms, bytes);
        let entry = &mut self.shard.entries[at];
        // Out of the list of what is being written before it is looked at as something that can be read.
        entry.drop_empty_extras();
        let queue = entry.target_queue(now_ms);
        self.shard.enqueue(at, queue);
    }
}

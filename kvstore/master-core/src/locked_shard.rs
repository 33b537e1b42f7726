//! A locked shard, with the segments that its entries refer to.
//!
//! Lock order: the client registry, then at most one shard, then a group or a segment's allocator. The segment table is loaded
//! after the shard is locked: a segment leaves the table only after every shard has been swept, so the table is never older than
//! the entries.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::Guard;
use mooncake_wire::types::ReplicaDescriptor as WireReplica;
use moongate_retention::BlockClass;
use parking_lot::MutexGuard;

use crate::change::{ObjectState, ReplicaLocation, StateChange, StateChangeSink, StorageTiers, StoreCause};
use crate::disk::DiskCopy;
use crate::group::{GroupId, GroupMember};
use crate::indices::{AllocatorBlockIndex, EntryIndex, GroupIndex, SegmentIndex, ShardIndex};
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, ObjectEntry, ObjectExtras};
use crate::object_table::{KeyLocation, ObjectTable};
use crate::retention::KeyUse;
use crate::segment::SegmentTable;
use crate::settings::RetentionPolicy;
use crate::shard::{ObjectShard, QuarantinedRange};

/// Position in a scan over all objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectCursor {
    pub(crate) shard: ShardIndex,
    /// The slot of the shard that is scanned next.
    pub(crate) slot: u32,
}

impl ObjectCursor {
    /// The position with these numbers, from [`Self::numbers`].
    pub fn from_numbers(shard: u32, slot: u32) -> Self {
        Self { shard: ShardIndex::new(shard as usize), slot }
    }

    /// Numbers of the shard and of its slot. They are valid as long as the master exists.
    pub fn numbers(self) -> (u32, u32) {
        (u32::try_from(self.shard.get()).unwrap_or(u32::MAX), self.slot)
    }
}

/// Fields of an object to be added.
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

/// Tiers with a complete replica of an object.
pub(crate) fn storage_tiers(entry: &ObjectEntry) -> StorageTiers {
    StorageTiers { memory: entry.replicas().any(|replica| replica.ready), disk: entry.copy().is_some() }
}

pub(crate) struct LockedShard<'a> {
    pub(crate) objects: &'a ObjectTable,
    pub(crate) shard_index: ShardIndex,
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
        let Self { objects, shard_index, shard, .. } = self;
        shard.take_changed_heads(|queue, stamp| objects.oldest_entries.set(queue, *shard_index, stamp));
    }
}

impl ObjectTable {
    pub(crate) fn lock(&self, index: ShardIndex) -> LockedShard<'_> {
        let shard = self.shards[index.get()].lock();
        LockedShard { objects: self, shard_index: index, segments: self.segments.load(), shard }
    }

    pub(crate) fn scan(
        &self,
        from: ObjectCursor,
        limit: u32,
        mut each: impl FnMut(&LockedShard<'_>, EntryIndex),
    ) -> Option<ObjectCursor> {
        if from.shard.get() >= self.shards.len() {
            return None;
        }
        let shard = self.lock(from.shard);
        let (indices, next) = shard.occupied(from.slot, limit.max(1));
        indices.for_each(|index| each(&shard, index));
        match next {
            Some(slot) => Some(ObjectCursor { shard: from.shard, slot }),
            None => Some(ObjectCursor { shard: self.shard_after(from.shard)?, slot: 0 }),
        }
    }
}

impl LockedShard<'_> {
    pub(crate) fn lookup(&self, key_location: KeyLocation, key: &str) -> Option<EntryIndex> {
        self.shard.find(key_location.tag, key_location.tenant, key)
    }

    /// Whether a replica's node sends heartbeats.
    pub(crate) fn is_responsive(&self, replica: &MemoryReplica) -> bool {
        self.segments.get(replica.segment).is_some_and(|segment| segment.is_readable())
    }

    /// Whether a replica can be returned to readers.
    pub(crate) fn can_be_read(&self, replica: &MemoryReplica) -> bool {
        replica.ready && self.is_responsive(replica)
    }

    /// Whether any memory replica or disk copy can be returned to readers.
    pub(crate) fn is_readable(&self, entry: &ObjectEntry) -> bool {
        let is_on_disk = || entry.copy().is_some_and(|copy| copy.disk.is_responsive());
        entry.is_complete() && (entry.replicas().any(|replica| self.can_be_read(replica)) || is_on_disk())
    }

    /// Extends an object's lease, which protects it from eviction and removal.
    pub(crate) fn lease(&mut self, index: EntryIndex, location: KeyLocation, read: KeyUse) {
        let settings = &self.objects.settings;
        let until =
            read.now_ms.saturating_add(settings.lease_ttl_ms).saturating_add(read.lease_extension_ms());
        let entry = &mut self.shard.entries[index];
        // A read during a lease belongs to the same use.
        let is_new_use = !entry.is_leased(read.now_ms);
        entry.stamp = entry.stamp.max(until);
        let (queue, prefix) = (entry.queue(), entry.prefix);
        let pin_expired = queue == EvictionQueue::SoftPinned
            && entry.soft_pin_until_ms().is_none_or(|pin| pin <= read.now_ms);
        let mut class = queue.class();
        if is_new_use && settings.retention == RetentionPolicy::Learned {
            class = class.used_again(read.description);
            self.objects.retention.record_use(read.now_ms, location, class);
        }
        self.shard.tally(prefix).hits += 1;
        match queue {
            EvictionQueue::Unread(_) | EvictionQueue::Leased(_) => {
                self.shard.enqueue(index, EvictionQueue::Leased(class));
            }
            EvictionQueue::SoftPinned if pin_expired => {
                self.shard.enqueue(index, EvictionQueue::Leased(class));
            }
            EvictionQueue::SoftPinned => self.shard.enqueue(index, EvictionQueue::SoftPinned),
            EvictionQueue::Vacant | EvictionQueue::Unlisted | EvictionQueue::Writing => {}
        }
    }

    /// Whether readers of a replica must wait for its node's restart.
    fn is_restarting(&self, replica: &MemoryReplica) -> bool {
        self.segments.get(replica.segment).is_some_and(|segment| segment.is_restarting())
    }

    /// The memory replicas for readers. Those on restarting nodes are only returned if there are no others.
    pub(crate) fn replicas_for_readers<'e>(
        &'e self,
        entry: &'e ObjectEntry,
    ) -> impl Iterator<Item = &'e MemoryReplica> {
        let all_restarting = entry
            .replicas()
            .filter(|replica| self.can_be_read(replica))
            .all(|replica| self.is_restarting(replica));
        entry.replicas().filter(move |replica| {
            self.can_be_read(replica) && (all_restarting || !self.is_restarting(replica))
        })
    }

    /// The replicas for readers, followed by the disk copy.
    pub(crate) fn readable_replicas(&self, index: EntryIndex) -> Vec<WireReplica<Arc<str>>> {
        let entry = &self.shard.entries[index];
        let copy = entry.copy().filter(|copy| copy.disk.is_responsive()).map(DiskCopy::to_descriptor);
        let memory = self.replicas_for_readers(entry);
        memory.filter_map(|replica| self.to_descriptor(replica, entry.size)).chain(copy).collect()
    }

    pub(crate) fn to_descriptor(&self, replica: &MemoryReplica, size: u64) -> Option<WireReplica<Arc<str>>> {
        self.segments.get(replica.segment).map(|segment| segment.replica_descriptor(replica, size))
    }

    pub(crate) fn locations(&self, replicas: impl Iterator<Item = MemoryReplica>) -> Vec<ReplicaLocation> {
        let location = |replica: MemoryReplica| {
            let segment = self.segments.get(replica.segment)?.descriptor.id;
            Some(ReplicaLocation { replica: replica.id, segment, offset: replica.offset })
        };
        replicas.filter_map(location).collect()
    }

    /// Calls `emit` with the object's state.
    pub(crate) fn with_state(&self, index: EntryIndex, emit: impl FnOnce(ObjectState<'_>)) {
        let entry = &self.shard.entries[index];
        let is_complete = entry.is_complete();
        let locations =
            self.locations(entry.replicas().copied().filter(|replica| replica.ready || !is_complete));
        let tenant = self.objects.tenants.get(entry.tenant);
        let group = self.objects.groups.name(entry.group);
        emit(ObjectState {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |entry| &*entry.name)),
            key: Cow::Borrowed(self.key(index)),
            size: entry.size,
            client: self.writer(index),
            locations: Cow::Owned(locations),
            disk_copy: entry.copy().map(DiskCopy::to_state),
            checksum: entry.checksum(),
            hard_pin: entry.hard_pin(),
            soft_pin_until_ms: entry.soft_pin_until_ms(),
            group: group.as_deref().map(Cow::Borrowed),
            since_ms: entry.stamp,
        });
    }

    /// Emits the current state of an object.
    pub(crate) fn emit_state(&self, index: EntryIndex, cause: StoreCause, fx: &mut dyn StateChangeSink) {
        let is_complete = self.shard.entries[index].is_complete();
        self.with_state(index, |object| {
            fx.record(if is_complete {
                StateChange::ObjectStored { object, cause }
            } else {
                StateChange::ObjectStarted(object)
            });
        });
        self.emit_pending(index, fx);
    }

    /// Emits the new version of an object, if there is one.
    pub(crate) fn emit_pending(&self, index: EntryIndex, fx: &mut dyn StateChangeSink) {
        let entry = &self.entries[index];
        let Some(pending) = entry.pending() else { return };
        let tenant = self.objects.tenants.get(entry.tenant);
        fx.record(StateChange::ObjectStarted(ObjectState {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |entry| &*entry.name)),
            key: Cow::Borrowed(self.key(index)),
            size: pending.size,
            client: pending.client,
            locations: Cow::Owned(self.locations(pending.replicas.iter().copied())),
            disk_copy: None,
            checksum: None,
            hard_pin: pending.hard_pin,
            soft_pin_until_ms: pending.soft_pin_until_ms,
            group: pending.group.as_ref().map(|(_, name)| Cow::Borrowed(&**name)),
            since_ms: pending.since_ms,
        }));
    }

    /// Adds an object whose key is absent. Its space and quota are allocated already.
    pub(crate) fn add(&mut self, key_location: KeyLocation, new_object: &NewObject<'_>) -> EntryIndex {
        let prefix = self.objects.prefixes.index_of(new_object.key);
        let mut entry = ObjectEntry {
            size: new_object.size,
            stamp: new_object.stamp,
            group: GroupIndex::NONE,
            tenant: key_location.tenant,
            prefix,
            flags: EntryFlags::new(new_object.queue, new_object.hard_pin),
            ..ObjectEntry::default()
        };
        entry.set_replicas(new_object.replicas);
        if new_object.soft_pin_until_ms.is_some() || new_object.checksum.is_some() {
            let ObjectExtras { soft_pin_until_ms, checksum, .. } = entry.extra_mut();
            (*soft_pin_until_ms, *checksum) = (new_object.soft_pin_until_ms, new_object.checksum);
        }
        let index = self.shard.insert(key_location.tag, new_object.key, new_object.client, entry);
        if let Some((group, name)) = new_object.group {
            let member = GroupMember { shard: self.shard_index, index };
            self.shard.entries[index].group = self.objects.groups.join(group, name, member);
        }
        let tally = self.shard.tally(prefix);
        (tally.keys, tally.bytes) = (tally.keys + 1, tally.bytes + new_object.size);
        index
    }

    /// Reports vacated ranges to the sink, before they are reused.
    pub(crate) fn report_vacated<'r>(
        &self,
        replicas: impl Iterator<Item = &'r MemoryReplica>,
        fx: &mut dyn StateChangeSink,
    ) {
        for replica in replicas.filter(|replica| replica.ready) {
            if let Some(segment) = self.segments.get(replica.segment) {
                let location = ReplicaLocation {
                    replica: replica.id,
                    segment: segment.descriptor.id,
                    offset: replica.offset,
                };
                fx.range_vacated(location);
            }
        }
    }

    /// Allocates the range at a given offset. In a bulk replay only the offset is checked.
    pub(crate) fn claim(&self, segment: SegmentIndex, offset: u64, size: u64) -> Option<MemoryReplica> {
        let mounted = self.segments.get(segment)?;
        let block = if self.objects.bulk_replay.load(Relaxed) {
            mounted.contains(offset, size).then_some(AllocatorBlockIndex::NONE)?
        } else {
            mounted.with_allocator(|allocator| allocator.allocate_at(offset, size))?.block
        };
        Some(MemoryReplica { id: 0, offset, block, segment, ready: false })
    }

    pub(crate) fn free(&self, replica: &MemoryReplica) {
        if let Some(segment) = self.segments.get(replica.segment) {
            segment.with_allocator(|allocator| allocator.free(replica.block));
        }
    }

    /// Protects a replica's space from reuse until a time.
    pub(crate) fn quarantine(
        &mut self,
        replica: &MemoryReplica,
        size: u64,
        until_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let MemoryReplica { offset, block, segment, .. } = *replica;
        self.shard.quarantined.push(QuarantinedRange { until_ms, segment, block, offset, size });
        if let Some(id) = self.segments.get(segment).map(|mounted| mounted.descriptor.id) {
            fx.record(StateChange::RangeQuarantined { segment: id, offset, size, until_ms });
        }
    }

    /// Frees quarantined ranges whose time has passed.
    pub(crate) fn release_quarantined(&mut self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.shard.quarantined.iter().all(|range| range.until_ms > now_ms) {
            return;
        }
        let (expired, remaining): (Vec<QuarantinedRange>, Vec<QuarantinedRange>) =
            self.shard.quarantined.iter().partition(|range| range.until_ms <= now_ms);
        self.shard.quarantined = remaining;
        for range in expired {
            let Some(segment) = self.segments.get(range.segment) else { continue };
            fx.record(StateChange::RangeReleased { segment: segment.descriptor.id, offset: range.offset });
            segment.with_allocator(|allocator| allocator.free(range.block));
        }
    }

    /// Ends the put of an object: it becomes readable.
    pub(crate) fn complete(&mut self, index: EntryIndex, location: KeyLocation, write: KeyUse) {
        let now_ms = write.now_ms;
        let entry = &mut self.shard.entries[index];
        entry.replicas_mut().for_each(|replica| replica.ready = true);
        // The end of a prompt is evicted before its start.
        entry.stamp = now_ms.saturating_sub(write.write_stagger_ms());
        let bytes = entry.size.saturating_mul(entry.replicas().count() as u64);
        self.objects.recent_writes.add(now_ms, bytes);
        let entry = &mut self.shard.entries[index];
        entry.drop_empty_extras();
        let queue = match entry.target_queue(now_ms) {
            EvictionQueue::Unread(_) if self.objects.settings.retention == RetentionPolicy::Learned => {
                let announced = self.objects.announced.take(location);
                let class = BlockClass::new(1, announced.unwrap_or(write.description));
                self.objects.retention.record_use(now_ms, location, class);
                EvictionQueue::Unread(class)
            }
            queue => queue,
        };
        self.shard.enqueue_by_stamp(index, queue);
    }
}

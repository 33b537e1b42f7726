//! Mounting and unmounting segments.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{Segment, SegmentStatus, Uuid};

use crate::change::{RemoveCause, StateChange, StateChangeSink, StoreCause, UnmountCause};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::segment::{SegmentEntry, SegmentTable};
use crate::slab::NIL;
use crate::statistics::MasterCounters;

fn to_shared<S: AsRef<str>>(segment: &Segment<S>) -> Segment<Arc<str>> {
    let [name, te_endpoint, protocol, host_id] =
        [&segment.name, &segment.te_endpoint, &segment.protocol, &segment.host_id]
            .map(|text| Arc::from(text.as_ref()));
    Segment { id: segment.id, name, base: segment.base, size: segment.size, te_endpoint, protocol, host_id }
}

pub(crate) fn to_borrowed(segment: &Segment<Arc<str>>) -> Segment<Cow<'_, str>> {
    let [name, te_endpoint, protocol, host_id] =
        [&segment.name, &segment.te_endpoint, &segment.protocol, &segment.host_id]
            .map(|text| Cow::Borrowed(&**text));
    Segment { id: segment.id, name, base: segment.base, size: segment.size, te_endpoint, protocol, host_id }
}

fn is_same_memory(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    (a.id, &a.name, a.base, a.size) == (b.id, &b.name, b.base, b.size)
}

fn overlap(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    a.base < b.base.saturating_add(b.size) && b.base < a.base.saturating_add(a.size)
}

impl MasterCore {
    /// Mounts a client's segment. Repeating the call has no effect, except that an unreachable segment becomes readable again. If
    /// the memory differs (by id, name, address or size), the objects of the previous segment are lost.
    ///
    /// # Errors
    /// `INVALID_PARAMS`.
    pub fn mount<S: AsRef<str>>(
        &self,
        now_ms: u64,
        segment: &Segment<S>,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let mut registry = self.registry.lock();
        self.mount_one(now_ms, to_shared(segment), client, fx)?;
        match registry.clients.get_mut(&client) {
            // Its other segments are not mounted again yet: the next heartbeat response requests that.
            Some(known) if known.silent => known.last_seen_ms = now_ms,
            _ => self.mark_alive(&mut registry, now_ms, client, fx),
        }
        self.capacity_changed();
        Ok(())
    }

    /// Mounts all segments of a client again, after a heartbeat response requested it. Segments not listed are dropped.
    ///
    /// # Errors
    /// `INVALID_PARAMS`. Segments before the invalid one stay mounted.
    pub fn remount<S: AsRef<str>>(
        &self,
        now_ms: u64,
        segments: &[Segment<S>],
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let mut registry = self.registry.lock();
        for segment in segments {
            self.mount_one(now_ms, to_shared(segment), client, fx)?;
        }
        let before = Arc::clone(&self.segments.load());
        for (_, old) in before.iter().filter(|(_, segment)| segment.client == client) {
            if segments.iter().all(|segment| segment.id != old.descriptor.id) {
                self.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
            }
        }
        self.mark_alive(&mut registry, now_ms, client, fx);
        self.capacity_changed();
        Ok(())
    }

    /// The caller must hold the registry lock.
    pub(crate) fn mount_one(
        &self,
        now_ms: u64,
        descriptor: Segment<Arc<str>>,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if descriptor.size == 0
            || descriptor.name.is_empty()
            || descriptor.base.checked_add(descriptor.size).is_none()
        {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let segments = Arc::clone(&self.segments.load());
        let known = segments.index_of(descriptor.id).and_then(|index| Some((index, segments.get(index)?)));
        if let Some((index, old)) = known
            && is_same_memory(&old.descriptor, &descriptor)
        {
            if old.client == client && old.descriptor == descriptor && old.is_readable() {
                return Ok(());
            }
            fx.record(StateChange::SegmentMounted {
                segment: to_borrowed(&descriptor),
                client,
                at_ms: now_ms,
            });
            self.segments.store(Arc::new(
                segments.with_segment(index, Some(Arc::new(old.remounted(descriptor, client)))),
            ));
            if !old.is_readable() {
                (0..self.shards.len()).for_each(|shard| self.lock(shard).requeue_recovered(index, now_ms));
            }
            return Ok(());
        }
        let conflicts = |old: &SegmentEntry| {
            old.descriptor.id == descriptor.id
                || old.descriptor.name == descriptor.name
                    && (old.client != client || overlap(&old.descriptor, &descriptor))
        };
        for (_, old) in segments.iter().filter(|(_, old)| conflicts(old)) {
            self.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
        }
        let segments = self.segments.load();
        let index = segments.free_index().ok_or(ErrorCode::INVALID_PARAMS)?;
        fx.record(StateChange::SegmentMounted { segment: to_borrowed(&descriptor), client, at_ms: now_ms });
        let mounted = Arc::new(SegmentEntry::new(descriptor, client, now_ms));
        self.await_inventory(&mounted, now_ms);
        self.segments.store(Arc::new(segments.with_segment(index, Some(mounted))));
        Ok(())
    }

    /// Unmounts a client's segment. An unknown segment counts as unmounted already.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client owns the segment.
    pub fn unmount(
        &self,
        now_ms: u64,
        segment: Uuid,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let Some(mounted) = self.own_segment(segment, client)? else { return Ok(()) };
        self.drop_segment(mounted.descriptor.id, UnmountCause::Unmounted, now_ms, fx);
        Ok(())
    }

    /// Unmounts a client's segment after `grace_ms`. Until then it stays readable and accepts no new objects.
    ///
    /// # Errors
    /// As [`Self::unmount`], and `SEGMENT_NOT_FOUND`.
    pub fn graceful_unmount(
        &self,
        now_ms: u64,
        segment: Uuid,
        client: Uuid,
        grace_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let mounted = self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let until_ms = Some(now_ms.saturating_add(grace_ms).max(1));
        self.set_status(&mounted, SegmentStatus::GRACEFULLY_UNMOUNTING, until_ms, fx);
        Ok(())
    }

    /// Endpoint of the node, base address and size in bytes of a client's segment.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the segment.
    pub fn segment_range(&self, segment: Uuid, client: Uuid) -> Result<(Arc<str>, u64, u64), ErrorCode> {
        let mounted = self.own_segment(segment, client)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        Ok((Arc::clone(&mounted.descriptor.te_endpoint), mounted.descriptor.base, mounted.descriptor.size))
    }

    pub(crate) fn own_segment(
        &self,
        segment: Uuid,
        client: Uuid,
    ) -> Result<Option<Arc<SegmentEntry>>, ErrorCode> {
        let segments = self.segments.load();
        let Some(mounted) = segments.index_of(segment).and_then(|index| segments.get(index)) else {
            return Ok(None);
        };
        if mounted.client == client { Ok(Some(Arc::clone(mounted))) } else { Err(ErrorCode::ILLEGAL_CLIENT) }
    }

    pub(crate) fn set_status(
        &self,
        mounted: &SegmentEntry,
        status: SegmentStatus,
        until_ms: Option<u64>,
        fx: &mut dyn StateChangeSink,
    ) {
        mounted.set_status(status, until_ms);
        fx.record(StateChange::SegmentStatus { segment: mounted.descriptor.id, status, until_ms });
    }

    /// Drops a segment and all objects without another replica. The caller must hold the registry lock, which serializes drops.
    pub(crate) fn drop_segment(
        &self,
        id: Uuid,
        cause: UnmountCause,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = Arc::clone(&self.segments.load());
        let Some((index, mounted)) =
            segments.index_of(id).and_then(|index| Some((index, segments.get(index)?)))
        else {
            return;
        };
        fx.record(StateChange::SegmentUnmounted { segment: id, cause });
        // From here on the segment allocates nothing and its replicas are not returned to readers. A put that has allocated space
        // before holds the lock of the object's shard until the entry exists, so the sweep below finds it.
        mounted.set_status(SegmentStatus::UNMOUNTING, None);
        mounted.set_silent(true);
        mounted.with_allocator(crate::allocator::SegmentAllocator::close);
        for shard in 0..self.shards.len() {
            self.lock(shard).drop_segment_replicas(index, now_ms, fx);
        }
        let segments: &SegmentTable = &self.segments.load();
        self.segments.store(Arc::new(segments.with_segment(index, None)));
        self.capacity_changed();
    }
}

impl LockedShard<'_> {
    /// Removes the replicas in a segment from all objects of this shard.
    fn drop_segment_replicas(&mut self, segment: u16, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.quarantined.retain(|range| range.segment != segment);
        self.drop_replicas(|replica, _| replica.segment == segment, now_ms, fx);
    }

    /// Removes lost replicas from all objects of this shard, and objects without another replica. `is_lost` gets the object's
    /// size in bytes as second argument. Returns the number of removed replicas.
    pub(crate) fn drop_replicas(
        &mut self,
        is_lost: impl Fn(&MemoryReplica, u64) -> bool,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        self.drop_pending_replicas(&is_lost, now_ms, fx);
        let (indices, _) = self.occupied(0, NIL);
        let is_affected = |index: &u32| {
            let entry = &self.entries[*index];
            entry.replicas().any(|replica| is_lost(replica, entry.size))
        };
        let affected: Vec<u32> = indices.filter(is_affected).collect();
        let mut count = 0;
        for index in affected {
            self.end_transfer(index, now_ms, fx);
            self.end_work(index, now_ms, fx);
            let entry = &self.entries[index];
            let (removed, remaining): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                entry.replicas().partition(|replica| is_lost(replica, entry.size));
            count += removed.len() as u64;
            if remaining.is_empty() && entry.copy().is_some() {
                self.drop_memory_replicas(index, fx);
                continue;
            }
            if remaining.is_empty() {
                MasterCounters::add(&self.master.counters.lost_keys, 1);
                self.remove_and_free(index, RemoveCause::SegmentLost, fx);
                continue;
            }
            self.master.tenants.discharge(entry.tenant, removed.len() as u64 * entry.size);
            self.report_vacated(removed.iter(), fx);
            self.entries[index].set_replicas(&remaining);
            self.emit_state(index, StoreCause::Replicas, fx);
            removed.iter().for_each(|replica| self.free(replica));
        }
        count
    }
}

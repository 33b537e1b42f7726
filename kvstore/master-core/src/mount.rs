//! Lending memory and taking it back.

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

fn to_shared<S: AsRef<str>>(it: &Segment<S>) -> Segment<Arc<str>> {
    let [name, te_endpoint, protocol, host_id] =
        [&it.name, &it.te_endpoint, &it.protocol, &it.host_id].map(|text| Arc::from(text.as_ref()));
    Segment { id: it.id, name, base: it.base, size: it.size, te_endpoint, protocol, host_id }
}

pub(crate) fn to_borrowed(it: &Segment<Arc<str>>) -> Segment<Cow<'_, str>> {
    let [name, te_endpoint, protocol, host_id] =
        [&it.name, &it.te_endpoint, &it.protocol, &it.host_id].map(|text| Cow::Borrowed(&**text));
    Segment { id: it.id, name, base: it.base, size: it.size, te_endpoint, protocol, host_id }
}

fn is_same_memory(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    (a.id, &a.name, a.base, a.size) == (b.id, &b.name, b.base, b.size)
}

fn overlap(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    a.base < b.base.saturating_add(b.size) && b.base < a.base.saturating_add(a.size)
}

impl MasterCore {
    /// A client lends memory. Doing so again changes nothing, except that it brings back what was silent. If the
    /// memory is not the same as before (by its id, name, address and size), what it held is lost.
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
            // Its other segments are not back yet: it will be told to mount them too.
            Some(known) if known.silent => known.last_seen_ms = now_ms,
            _ => self.mark_alive(&mut registry, now_ms, client, fx),
        }
        self.capacity_changed();
        Ok(())
    }

    /// A client lends memory again, after it was told to: these segments are all that it has.
    ///
    /// # Errors
    /// `INVALID_PARAMS`. Segments before the wrong one are mounted.
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
        for (_, old) in before.iter().filter(|(_, it)| it.client == client) {
            if segments.iter().all(|it| it.id != old.descriptor.id) {
                self.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
            }
        }
        self.mark_alive(&mut registry, now_ms, client, fx);
        self.capacity_changed();
        Ok(())
    }

    /// With the registry locked.
    pub(crate) fn mount_one(
        &self,
        now_ms: u64,
        info: Segment<Arc<str>>,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if info.size == 0 || info.name.is_empty() || info.base.checked_add(info.size).is_none() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let segments = Arc::clone(&self.segments.load());
        let known = segments.index_of(info.id).and_then(|at| Some((at, segments.get(at)?)));
        if let Some((at, old)) = known
            && is_same_memory(&old.descriptor, &info)
        {
            if old.client == client && old.descriptor == info && old.is_readable() {
                return Ok(());
            }
            fx.record(StateChange::SegmentMounted { segment: to_borrowed(&info), client, at_ms: now_ms });
            self.segments
                .store(Arc::new(segments.with_segment(at, Some(Arc::new(old.remounted(info, client))))));
            if !old.is_readable() {
                (0..self.shards.len()).for_each(|shard| self.lock(shard).requeue_recovered(at, now_ms));
            }
            return Ok(());
        }
        let is_in_the_way = |old: &SegmentEntry| {
            old.descriptor.id == info.id
                || old.descriptor.name == info.name
                    && (old.client != client || overlap(&old.descriptor, &info))
        };
        for (_, old) in segments.iter().filter(|(_, old)| is_in_the_way(old)) {
            self.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
        }
        let segments = self.segments.load();
        let at = segments.free_index().ok_or(ErrorCode::INVALID_PARAMS)?;
        fx.record(StateChange::SegmentMounted { segment: to_borrowed(&info), client, at_ms: now_ms });
        let mounted = Arc::new(SegmentEntry::new(info, client, now_ms));
        self.await_inventory(&mounted, now_ms);
        self.segments.store(Arc::new(segments.with_segment(at, Some(mounted))));
        Ok(())
    }

    /// A client takes a segment back. An unknown segment has been taken back already.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if it is another's.
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

    /// A client takes a segment back in a while: until then it can be read, but gets nothing new.
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

    /// Where the segment that a client has mounted is: its node's endpoint, the first address, and the number of bytes.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if it is another's.
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
        let Some(mounted) = segments.index_of(segment).and_then(|at| segments.get(at)) else {
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

    /// Drops a segment with all that is only there. With the registry locked, so that only one does it.
    pub(crate) fn drop_segment(
        &self,
        id: Uuid,
        cause: UnmountCause,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = Arc::clone(&self.segments.load());
        let Some((at, mounted)) = segments.index_of(id).and_then(|at| Some((at, segments.get(at)?))) else {
            return;
        };
        fx.record(StateChange::SegmentUnmounted { segment: id, cause });
        // From here on no space is given away and no reader sent there. Whoever took space before holds the lock of
        // the shard where the object will be, so that the sweep sees the object.
        mounted.set_status(SegmentStatus::UNMOUNTING, None);
        mounted.set_silent(true);
        mounted.with_allocator(crate::allocator::SegmentAllocator::close);
        for shard in 0..self.shards.len() {
            self.lock(shard).drop_segment_replicas(at, now_ms, fx);
        }
        let segments: &SegmentTable = &self.segments.load();
        self.segments.store(Arc::new(segments.with_segment(at, None)));
        self.capacity_changed();
    }
}

impl LockedShard<'_> {
    /// Takes a segment out of all objects of this shard.
    fn drop_segment_replicas(&mut self, segment: u16, now_ms: u64, fx: &mut dyn StateChangeSink) {
        self.quarantined.retain(|it| it.segment != segment);
        self.drop_replicas(|replica, _| replica.segment == segment, now_ms, fx);
    }

    /// Takes replicas out of all objects of this shard, and objects that are nowhere else. `is_lost` is told the object's
    /// bytes too. Returns how many replicas that were.
    pub(crate) fn drop_replicas(
        &mut self,
        is_lost: impl Fn(&MemoryReplica, u64) -> bool,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        self.drop_pending_replicas(&is_lost, now_ms, fx);
        let (places, _) = self.occupied(0, NIL);
        let is_affected = |at: &u32| {
            let entry = &self.entries[*at];
            entry.replicas().any(|it| is_lost(it, entry.size))
        };
        let affected: Vec<u32> = places.filter(is_affected).collect();
        let mut count = 0;
        for at in affected {
            self.end_transfer(at, now_ms, fx);
            self.end_work(at, now_ms, fx);
            let entry = &self.entries[at];
            let (gone, left): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                entry.replicas().partition(|it| is_lost(it, entry.size));
            count += gone.len() as u64;
            if left.is_empty() && entry.copy().is_some() {
                self.drop_memory_replicas(at, fx);
                continue;
            }
            if left.is_empty() {
                MasterCounters::add(&self.master.counters.lost_keys, 1);
                self.remove_and_free(at, RemoveCause::SegmentLost, fx);
                continue;
            }
            self.master.tenants.discharge(entry.tenant, gone.len() as u64 * entry.size);
            self.report_vacated(gone.iter(), fx);
            self.entries[at].set_replicas(&left);
            self.emit_state(at, StoreCause::Replicas, fx);
            gone.iter().for_each(|it| self.free(it));
        }
        count
    }
}

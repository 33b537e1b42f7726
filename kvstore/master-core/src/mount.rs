//! Mounting and unmounting segments.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{Segment, SegmentLocality, SegmentStatus, Uuid};

use crate::change::{StateChange, StateChangeSink, UnmountCause};
use crate::codec::MAX_HCA_NAMES;
use crate::master::MasterCore;
use crate::requests::ClientSegment;
use crate::segment::SegmentEntry;

fn to_shared<S: AsRef<str>>(segment: &Segment<S>) -> Segment<Arc<str>> {
    segment.map_text(|text| Arc::from(text.as_ref()))
}

pub(crate) fn to_borrowed(segment: &Segment<Arc<str>>) -> Segment<Cow<'_, str>> {
    segment.map_text(|text| Cow::Borrowed(&**text))
}

fn is_same_memory(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    (a.id, &a.name, a.base, a.size) == (b.id, &b.name, b.base, b.size)
}

fn overlap(a: &Segment<Arc<str>>, b: &Segment<Arc<str>>) -> bool {
    a.base < b.base.saturating_add(b.size) && b.base < a.base.saturating_add(a.size)
}

fn is_valid<S>(locality: &SegmentLocality<S>) -> bool {
    locality.numa_node >= 0 && locality.hca_names.len() as u64 <= MAX_HCA_NAMES
}

/// The memory of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentRange {
    /// Transfer endpoint of the node.
    pub endpoint: Arc<str>,
    /// Address of its first byte.
    pub base: u64,
    pub size: u64,
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
        registry.record_mount(&self.objects, now_ms, client, fx);
        self.objects.capacity_changed();
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
        let before = Arc::clone(&self.objects.segments.load());
        for (_, old) in before.iter().filter(|(_, segment)| segment.client == client) {
            if segments.iter().all(|segment| segment.id != old.descriptor.id) {
                self.objects.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
            }
        }
        registry.mark_alive(&self.objects, now_ms, client, fx);
        self.objects.capacity_changed();
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
            || descriptor.locality.as_ref().is_some_and(|locality| !is_valid(locality))
        {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let segments = Arc::clone(&self.objects.segments.load());
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
            self.objects.segments.store(Arc::new(
                segments.with_segment(index, Some(Arc::new(old.remounted(descriptor, client)))),
            ));
            if !old.is_readable() {
                self.objects
                    .shard_indices()
                    .for_each(|shard| self.objects.lock(shard).requeue_recovered(index, now_ms));
            }
            return Ok(());
        }
        let conflicts = |old: &SegmentEntry| {
            old.descriptor.id == descriptor.id
                || old.descriptor.name == descriptor.name
                    && (old.client != client || overlap(&old.descriptor, &descriptor))
        };
        for (_, old) in segments.iter().filter(|(_, old)| conflicts(old)) {
            self.objects.drop_segment(old.descriptor.id, UnmountCause::MemoryLost, now_ms, fx);
        }
        let segments = self.objects.segments.load();
        let index = segments.free_index().ok_or(ErrorCode::INVALID_PARAMS)?;
        fx.record(StateChange::SegmentMounted { segment: to_borrowed(&descriptor), client, at_ms: now_ms });
        let mounted = Arc::new(SegmentEntry::new(descriptor, client, now_ms));
        if self.rebuild.lock().take_announced(mounted.descriptor.id) {
            mounted.await_inventory(now_ms);
        }
        self.objects.segments.store(Arc::new(segments.with_segment(index, Some(mounted))));
        Ok(())
    }

    /// Unmounts a client's segment. An unknown segment counts as unmounted already.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client owns the segment.
    pub fn unmount(
        &self,
        now_ms: u64,
        segment: ClientSegment,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let Some(mounted) = self.objects.segments.load().own_segment(segment)? else { return Ok(()) };
        self.objects.drop_segment(mounted.descriptor.id, UnmountCause::Unmounted, now_ms, fx);
        Ok(())
    }

    /// Unmounts a client's segment after `grace_ms`. Until then it stays readable and accepts no new objects.
    ///
    /// # Errors
    /// As [`Self::unmount`], and `SEGMENT_NOT_FOUND`.
    pub fn graceful_unmount(
        &self,
        now_ms: u64,
        segment: ClientSegment,
        grace_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let _registry = self.registry.lock();
        let mounted =
            self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        let until_ms = Some(now_ms.saturating_add(grace_ms).max(1));
        mounted.change_status(SegmentStatus::GRACEFULLY_UNMOUNTING, until_ms, fx);
        Ok(())
    }

    /// Where a client's segment is.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`, or `ILLEGAL_CLIENT` if another client owns the segment.
    pub fn segment_range(&self, segment: ClientSegment) -> Result<SegmentRange, ErrorCode> {
        let mounted =
            self.objects.segments.load().own_segment(segment)?.ok_or(ErrorCode::SEGMENT_NOT_FOUND)?;
        Ok(SegmentRange {
            endpoint: Arc::clone(&mounted.descriptor.te_endpoint),
            base: mounted.descriptor.base,
            size: mounted.descriptor.size,
        })
    }
}

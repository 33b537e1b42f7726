//! Mounted segments: memory that nodes register with the master.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    BufferDescriptor, ReplicaDescriptor as WireReplica, ReplicaMedium, Segment, SegmentStatus, Uuid,
};
use parking_lot::Mutex;

use crate::allocator::{AllocatedRange, SegmentAllocator, rounded};
use crate::change::{StateChange, StateChangeSink};
use crate::indices::SegmentIndex;
use crate::inventory::INVENTORY_TIMEOUT_MS;
use crate::object::MemoryReplica;
use crate::requests::ClientSegment;

/// A replica descriptor as returned to clients.
pub type SharedReplicaDescriptor = WireReplica<Arc<str>>;
/// The replica descriptors of one object.
pub type ReplicaDescriptors = Vec<SharedReplicaDescriptor>;

#[derive(Debug)]
pub(crate) struct SegmentEntry {
    pub(crate) descriptor: Segment<Arc<str>>,
    pub(crate) client: Uuid,
    pub(crate) mounted_at_ms: u64,
    /// Whether its client sends no heartbeats.
    silent: AtomicBool,
    /// Whether its client restarts while a holder process preserves the memory.
    restarting: AtomicBool,
    /// Whether it is much emptier than the others: see [`crate::filling`].
    filling: AtomicBool,
    memory: Arc<SegmentSpace>,
}

/// The part of a segment that is shared when the same memory is mounted again.
#[derive(Debug)]
struct SegmentSpace {
    allocator: Mutex<SegmentAllocator>,
    /// Figures of the allocator, readable without its lock.
    used: AtomicU64,
    requested: AtomicU64,
    status: AtomicI32,
    /// When it will be unmounted; 0 if no time is set.
    unmount_at_ms: AtomicU64,
    /// Deadline of its pending inventory; 0 if none is pending.
    inventory_until_ms: AtomicU64,
}

impl SegmentEntry {
    pub(crate) fn new(descriptor: Segment<Arc<str>>, client: Uuid, now_ms: u64) -> Self {
        let allocator = Mutex::new(SegmentAllocator::new(descriptor.size));
        Self {
            descriptor,
            client,
            mounted_at_ms: now_ms,
            silent: AtomicBool::new(false),
            restarting: AtomicBool::new(false),
            filling: AtomicBool::new(false),
            memory: Arc::new(SegmentSpace {
                allocator,
                used: AtomicU64::new(0),
                requested: AtomicU64::new(0),
                status: AtomicI32::new(SegmentStatus::OK.0),
                unmount_at_ms: AtomicU64::new(0),
                inventory_until_ms: AtomicU64::new(0),
            }),
        }
    }

    /// The same memory with its contents, mounted again.
    pub(crate) fn remounted(&self, descriptor: Segment<Arc<str>>, client: Uuid) -> Self {
        Self {
            descriptor,
            client,
            mounted_at_ms: self.mounted_at_ms,
            silent: AtomicBool::new(false),
            restarting: AtomicBool::new(false),
            filling: AtomicBool::new(self.is_filling()),
            memory: Arc::clone(&self.memory),
        }
    }

    pub(crate) fn status(&self) -> SegmentStatus {
        SegmentStatus(self.memory.status.load(Relaxed))
    }

    pub(crate) fn set_status(&self, status: SegmentStatus, unmount_at_ms: Option<u64>) {
        self.memory.unmount_at_ms.store(unmount_at_ms.unwrap_or(0), Relaxed);
        self.memory.status.store(status.0, Relaxed);
    }

    /// Sets the status and emits it.
    pub(crate) fn change_status(
        &self,
        status: SegmentStatus,
        until_ms: Option<u64>,
        fx: &mut dyn StateChangeSink,
    ) {
        self.set_status(status, until_ms);
        fx.record(StateChange::SegmentStatus { segment: self.descriptor.id, status, until_ms });
    }

    pub(crate) fn unmount_at_ms(&self) -> Option<u64> {
        Some(self.memory.unmount_at_ms.load(Relaxed)).filter(|at| *at > 0)
    }

    pub(crate) fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Relaxed);
    }

    pub(crate) fn set_restarting(&self, restarting: bool) {
        self.restarting.store(restarting, Relaxed);
    }

    /// Whether reads must wait until the node has restarted.
    pub(crate) fn is_restarting(&self) -> bool {
        self.restarting.load(Relaxed)
    }

    pub(crate) fn set_filling(&self, filling: bool) {
        self.filling.store(filling, Relaxed);
    }

    /// Whether it is much emptier than the others.
    pub(crate) fn is_filling(&self) -> bool {
        self.filling.load(Relaxed)
    }

    /// Whether its replicas may be returned to readers.
    pub(crate) fn is_readable(&self) -> bool {
        !self.silent.load(Relaxed)
    }

    /// Whether it accepts new replicas.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_readable()
            && !self.is_restarting()
            && self.status() == SegmentStatus::OK
            && self.inventory_until_ms().is_none()
    }

    /// Deadline of its pending inventory, if one is pending.
    pub(crate) fn inventory_until_ms(&self) -> Option<u64> {
        Some(self.memory.inventory_until_ms.load(Relaxed)).filter(|until| *until > 0)
    }

    /// Accepts no new objects until the inventory is complete, or [`INVENTORY_TIMEOUT_MS`] after its latest batch.
    pub(crate) fn await_inventory(&self, now_ms: u64) {
        self.set_inventory_until(Some(now_ms.saturating_add(INVENTORY_TIMEOUT_MS)));
    }

    /// Ends the pending inventory, if there is one.
    pub(crate) fn end_inventory(&self) {
        if self.inventory_until_ms().is_some() {
            self.with_allocator(SegmentAllocator::drop_offset_index);
            self.set_inventory_until(None);
        }
    }

    fn set_inventory_until(&self, until_ms: Option<u64>) {
        self.memory.inventory_until_ms.store(until_ms.unwrap_or(0), Relaxed);
    }

    /// Number of allocated bytes, after rounding up.
    pub(crate) fn used(&self) -> u64 {
        self.memory.used.load(Relaxed)
    }

    /// Number of allocated bytes, before rounding up.
    pub(crate) fn requested(&self) -> u64 {
        self.memory.requested.load(Relaxed)
    }

    /// Free share of the segment, 0 to 1.
    pub(crate) fn free_ratio(&self) -> f64 {
        if self.descriptor.size == 0 { 0.0 } else { 1.0 - self.used() as f64 / self.descriptor.size as f64 }
    }

    /// Runs `work` on the locked allocator and updates the lock-free figures.
    pub(crate) fn with_allocator<R>(&self, work: impl FnOnce(&mut SegmentAllocator) -> R) -> R {
        let mut allocator = self.memory.allocator.lock();
        let result = work(&mut allocator);
        self.memory.used.store(allocator.used(), Relaxed);
        self.memory.requested.store(allocator.requested(), Relaxed);
        result
    }

    /// Whether a range may be allocated at an offset if nothing else is allocated.
    pub(crate) fn contains(&self, offset: u64, size: u64) -> bool {
        let end = rounded(size).and_then(|size| offset.checked_add(size));
        size > 0 && end.is_some_and(|end| end <= self.descriptor.size)
    }

    pub(crate) fn allocate(&self, size: u64) -> Option<AllocatedRange> {
        // Skips the lock when the segment is full. The figure may be stale; another segment is tried then.
        if self.used() >= self.descriptor.size {
            return None;
        }
        self.with_allocator(|allocator| allocator.allocate(size))
    }

    /// Descriptor of a replica for readers and writers.
    pub(crate) fn replica_descriptor(&self, replica: &MemoryReplica, size: u64) -> SharedReplicaDescriptor {
        let buffer = BufferDescriptor {
            size,
            address: self.descriptor.base.saturating_add(replica.offset),
            protocol: Arc::clone(&self.descriptor.protocol),
            endpoint: Arc::clone(&self.descriptor.te_endpoint),
            locality: self.descriptor.locality.clone(),
        };
        WireReplica { id: replica.id, medium: ReplicaMedium::Memory(buffer), status: replica.status() }
    }
}

/// Space of all segments, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AllocatedSpace {
    /// Allocated bytes, after rounding up.
    pub(crate) used: u64,
    pub(crate) capacity: u64,
}

/// All mounted segments. The table is immutable: a change creates a new one.
#[derive(Clone, Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<Arc<SegmentEntry>>>,
    mounted: Vec<SegmentIndex>,
    /// For each of `mounted`, the sum of the sizes up to it.
    cumulative_sizes: Vec<u64>,
    by_id: HashMap<Uuid, SegmentIndex>,
    by_name: HashMap<Arc<str>, Vec<SegmentIndex>>,
    /// Time of the most recent mount.
    pub(crate) newest_mount_ms: u64,
}

impl SegmentTable {
    pub(crate) fn get(&self, index: SegmentIndex) -> Option<&Arc<SegmentEntry>> {
        self.slots.get(index.get())?.as_ref()
    }

    pub(crate) fn index_of(&self, id: Uuid) -> Option<SegmentIndex> {
        self.by_id.get(&id).copied()
    }

    /// A client's segment, `None` if it is not mounted.
    ///
    /// # Errors
    /// `ILLEGAL_CLIENT` if another client owns the segment.
    pub(crate) fn own_segment(
        &self,
        ClientSegment { segment, client }: ClientSegment,
    ) -> Result<Option<Arc<SegmentEntry>>, ErrorCode> {
        let Some(mounted) = self.index_of(segment).and_then(|index| self.get(index)) else {
            return Ok(None);
        };
        if mounted.client == client { Ok(Some(Arc::clone(mounted))) } else { Err(ErrorCode::ILLEGAL_CLIENT) }
    }

    pub(crate) fn indices_by_name(&self, name: &str) -> &[SegmentIndex] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn mounted_indices(&self) -> &[SegmentIndex] {
        &self.mounted
    }

    /// Total size of the mounted segments in bytes.
    pub(crate) fn total_size(&self) -> u64 {
        self.cumulative_sizes.last().copied().unwrap_or(0)
    }

    /// The position in [`Self::mounted_indices`] of the segment with this byte, counted over all mounted segments in order.
    pub(crate) fn position_of_byte(&self, byte: u64) -> usize {
        self.cumulative_sizes.partition_point(|end| *end <= byte)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentIndex, &Arc<SegmentEntry>)> {
        self.mounted.iter().filter_map(|index| Some((*index, self.get(*index)?)))
    }

    pub(crate) fn usage(&self) -> AllocatedSpace {
        self.iter().fold(AllocatedSpace::default(), |sum, (_, segment)| AllocatedSpace {
            used: sum.used.saturating_add(segment.used()),
            capacity: sum.capacity.saturating_add(segment.descriptor.size),
        })
    }

    /// A free index, if fewer than 65 535 segments are mounted.
    pub(crate) fn free_index(&self) -> Option<SegmentIndex> {
        SegmentIndex::new(self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len()))
    }

    /// A copy of the table with the segment at `index` set or removed.
    pub(crate) fn with_segment(&self, index: SegmentIndex, segment: Option<Arc<SegmentEntry>>) -> Self {
        let mut slots = self.slots.clone();
        if slots.len() <= index.get() {
            slots.resize(index.get() + 1, None);
        }
        slots[index.get()] = segment;
        let mut new = Self { slots, ..Self::default() };
        for (slot, segment) in new.slots.iter().enumerate() {
            let (Some(index), Some(segment)) = (SegmentIndex::new(slot), segment) else { continue };
            new.mounted.push(index);
            new.cumulative_sizes.push(new.total_size().saturating_add(segment.descriptor.size));
            new.by_id.insert(segment.descriptor.id, index);
            new.by_name.entry(Arc::clone(&segment.descriptor.name)).or_default().push(index);
            new.newest_mount_ms = new.newest_mount_ms.max(segment.mounted_at_ms);
        }
        new
    }
}

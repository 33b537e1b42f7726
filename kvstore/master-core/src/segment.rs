//! Memory that nodes lend.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use mooncake_wire::types::{
    BufferDescriptor, ReplicaDescriptor as WireReplica, ReplicaMedium, Segment, SegmentStatus, Uuid,
};
use parking_lot::Mutex;

use crate::allocator::{AllocatedRange, SegmentAllocator};
use crate::object::MemoryReplica;

/// One mounted segment.
#[derive(Debug)]
pub(crate) struct SegmentEntry {
    pub(crate) descriptor: Segment<Arc<str>>,
    pub(crate) client: Uuid,
    pub(crate) mounted_at_ms: u64,
    /// Whether its client is not heard of.
    silent: AtomicBool,
    /// Whether its client is gone for a moment, and the memory is kept meanwhile.
    restarting: AtomicBool,
    memory: Arc<SegmentSpace>,
}

/// What stays the same when a segment is mounted again.
#[derive(Debug)]
struct SegmentSpace {
    allocator: Mutex<SegmentAllocator>,
    /// What the allocator says, for looking without its lock.
    used: AtomicU64,
    requested: AtomicU64,
    status: AtomicI32,
    /// When it will be unmounted; 0 if that is not settled.
    unmount_at_ms: AtomicU64,
    /// Until when its node's inventory is awaited; 0 if it is not.
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

    /// The same memory with all that is in it, mounted again.
    pub(crate) fn remounted(&self, info: Segment<Arc<str>>, client: Uuid) -> Self {
        Self {
            descriptor: info,
            client,
            mounted_at_ms: self.mounted_at_ms,
            silent: AtomicBool::new(false),
            restarting: AtomicBool::new(false),
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

    pub(crate) fn unmount_at_ms(&self) -> Option<u64> {
        Some(self.memory.unmount_at_ms.load(Relaxed)).filter(|at| *at > 0)
    }

    pub(crate) fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Relaxed);
    }

    pub(crate) fn set_restarting(&self, away: bool) {
        self.restarting.store(away, Relaxed);
    }

    /// Whether readers have to wait there.
    pub(crate) fn is_restarting(&self) -> bool {
        self.restarting.load(Relaxed)
    }

    /// Whether readers may be sent there.
    pub(crate) fn is_readable(&self) -> bool {
        !self.silent.load(Relaxed)
    }

    /// Whether it takes new replicas.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_readable()
            && !self.is_restarting()
            && self.status() == SegmentStatus::OK
            && self.inventory_until_ms().is_none()
    }

    /// Until when its node's inventory is awaited, if it is.
    pub(crate) fn inventory_until_ms(&self) -> Option<u64> {
        Some(self.memory.inventory_until_ms.load(Relaxed)).filter(|until| *until > 0)
    }

    pub(crate) fn set_inventory_until(&self, until_ms: Option<u64>) {
        self.memory.inventory_until_ms.store(until_ms.unwrap_or(0), Relaxed);
    }

    /// Bytes in use, as they were rounded.
    pub(crate) fn used(&self) -> u64 {
        self.memory.used.load(Relaxed)
    }

    /// Bytes in use, as they were asked for.
    pub(crate) fn requested(&self) -> u64 {
        self.memory.requested.load(Relaxed)
    }

    /// The share that is free.
    pub(crate) fn free_ratio(&self) -> f64 {
        if self.descriptor.size == 0 { 0.0 } else { 1.0 - self.used() as f64 / self.descriptor.size as f64 }
    }

    /// Works on the space and keeps the figures of what is in use.
    pub(crate) fn with_allocator<R>(&self, work: impl FnOnce(&mut SegmentAllocator) -> R) -> R {
        let mut allocator = self.memory.allocator.lock();
        let result = work(&mut allocator);
        self.memory.used.store(allocator.used(), Relaxed);
        self.memory.requested.store(allocator.requested(), Relaxed);
        result
    }

    pub(crate) fn allocate(&self, size: u64) -> Option<AllocatedRange> {
        // Without the lock when it is in vain: the figure may be old, but then another will have the space.
        if self.used() >= self.descriptor.size {
            return None;
        }
        self.with_allocator(|space| space.allocate(size))
    }

    /// How a reader or a writer finds a replica.
    pub(crate) fn replica_descriptor(&self, replica: &MemoryReplica, size: u64) -> WireReplica<Arc<str>> {
        let buffer = BufferDescriptor {
            size,
            address: self.descriptor.base.saturating_add(replica.offset),
            protocol: Arc::clone(&self.descriptor.protocol),
            endpoint: Arc::clone(&self.descriptor.te_endpoint),
        };
        WireReplica { id: replica.id, medium: ReplicaMedium::Memory(buffer), status: replica.status() }
    }
}

/// All mounted segments. The list itself never changes; a change is a new list.
#[derive(Clone, Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<Arc<SegmentEntry>>>,
    /// Places in `slots` that are taken.
    mounted: Vec<u16>,
    by_id: HashMap<Uuid, u16>,
    by_name: HashMap<Arc<str>, Vec<u16>>,
    /// When the last one was mounted.
    pub(crate) newest_mount_ms: u64,
}

impl SegmentTable {
    pub(crate) fn get(&self, at: u16) -> Option<&Arc<SegmentEntry>> {
        self.slots.get(usize::from(at))?.as_ref()
    }

    pub(crate) fn index_of(&self, id: Uuid) -> Option<u16> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn indices_by_name(&self, name: &str) -> &[u16] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn mounted_indices(&self) -> &[u16] {
        &self.mounted
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Arc<SegmentEntry>)> {
        self.mounted.iter().filter_map(|at| Some((*at, self.get(*at)?)))
    }

    /// Bytes in use, as they were rounded, and bytes in all.
    pub(crate) fn usage(&self) -> (u64, u64) {
        self.iter().fold((0, 0), |(used, size), (_, it)| {
            (used.saturating_add(it.used()), size.saturating_add(it.descriptor.size))
        })
    }

    /// A place for one more, if there are fewer than 65 535.
    pub(crate) fn free_index(&self) -> Option<u16> {
        let at = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        u16::try_from(at).ok().filter(|at| *at != u16::MAX)
    }

    /// The same list with a segment in a place, or without the one that is there.
    pub(crate) fn with_segment(&self, at: u16, segment: Option<Arc<SegmentEntry>>) -> Self {
        let mut slots = self.slots.clone();
        if slots.len() <= usize::from(at) {
            slots.resize(usize::from(at) + 1, None);
        }
        slots[usize::from(at)] = segment;
        let mut new = Self { slots, ..Self::default() };
        for (at, segment) in (0..).zip(&new.slots) {
            let Some(segment) = segment else { continue };
            new.mounted.push(at);
            new.by_id.insert(segment.descriptor.id, at);
            new.by_name.entry(Arc::clone(&segment.descriptor.name)).or_default().push(at);
            new.newest_mount_ms = new.newest_mount_ms.max(segment.mounted_at_ms);
        }
        new
    }
}

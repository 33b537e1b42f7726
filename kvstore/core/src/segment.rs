//! Memory that nodes lend.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use mooncake_wire::types::{
    BufferDescriptor, Replica as WireReplica, ReplicaMedium, Segment, SegmentStatus, Uuid,
};
use parking_lot::Mutex;

use crate::allocator::{Allocator, Space};
use crate::object::Replica;

/// One mounted segment.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) info: Segment<Arc<str>>,
    pub(crate) client: Uuid,
    pub(crate) mounted_at_ms: u64,
    /// Whether its client is not heard of.
    silent: AtomicBool,
    /// Whether its client is gone for a moment, and the memory is kept meanwhile.
    away: AtomicBool,
    memory: Arc<Memory>,
}

/// What stays the same when a segment is mounted again.
#[derive(Debug)]
struct Memory {
    allocator: Mutex<Allocator>,
    /// What the allocator says, for looking without its lock.
    used: AtomicU64,
    requested: AtomicU64,
    status: AtomicI32,
    /// When it will be unmounted; 0 if that is not settled.
    unmount_at_ms: AtomicU64,
    /// Until when its node's inventory is awaited; 0 if it is not.
    inventory_until_ms: AtomicU64,
}

impl Mounted {
    pub(crate) fn new(info: Segment<Arc<str>>, client: Uuid, now_ms: u64) -> Self {
        let allocator = Mutex::new(Allocator::new(info.size));
        Self {
            info,
            client,
            mounted_at_ms: now_ms,
            silent: AtomicBool::new(false),
            away: AtomicBool::new(false),
            memory: Arc::new(Memory {
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
    pub(crate) fn again(&self, info: Segment<Arc<str>>, client: Uuid) -> Self {
        Self {
            info,
            client,
            mounted_at_ms: self.mounted_at_ms,
            silent: AtomicBool::new(false),
            away: AtomicBool::new(false),
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

    pub(crate) fn set_away(&self, away: bool) {
        self.away.store(away, Relaxed);
    }

    /// Whether readers have to wait there.
    pub(crate) fn is_away(&self) -> bool {
        self.away.load(Relaxed)
    }

    /// Whether readers may be sent there.
    pub(crate) fn is_readable(&self) -> bool {
        !self.silent.load(Relaxed)
    }

    /// Whether it takes new replicas.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_readable()
            && !self.is_away()
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
        if self.info.size == 0 { 0.0 } else { 1.0 - self.used() as f64 / self.info.size as f64 }
    }

    /// Works on the space and keeps the figures of what is in use.
    pub(crate) fn space<R>(&self, work: impl FnOnce(&mut Allocator) -> R) -> R {
        let mut allocator = self.memory.allocator.lock();
        let result = work(&mut allocator);
        self.memory.used.store(allocator.used(), Relaxed);
        self.memory.requested.store(allocator.requested(), Relaxed);
        result
    }

    pub(crate) fn allocate(&self, size: u64) -> Option<Space> {
        // Without the lock when it is in vain: the figure may be old, but then another will have the space.
        if self.used() >= self.info.size {
            return None;
        }
        self.space(|space| space.allocate(size))
    }

    /// How a reader or a writer finds a replica.
    pub(crate) fn describe(&self, replica: &Replica, size: u64) -> WireReplica<Arc<str>> {
        let buffer = BufferDescriptor {
            size,
            address: self.info.base.saturating_add(replica.offset),
            protocol: Arc::clone(&self.info.protocol),
            endpoint: Arc::clone(&self.info.te_endpoint),
        };
        WireReplica { id: replica.id, medium: ReplicaMedium::Memory(buffer), status: replica.status() }
    }
}

/// All mounted segments. The list itself never changes; a change is a new list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    slots: Vec<Option<Arc<Mounted>>>,
    /// Places in `slots` that are taken.
    mounted: Vec<u16>,
    by_id: HashMap<Uuid, u16>,
    by_name: HashMap<Arc<str>, Vec<u16>>,
    /// When the last one was mounted.
    pub(crate) youngest_ms: u64,
}

impl Segments {
    pub(crate) fn get(&self, at: u16) -> Option<&Arc<Mounted>> {
        self.slots.get(usize::from(at))?.as_ref()
    }

    pub(crate) fn place_of(&self, id: Uuid) -> Option<u16> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn named(&self, name: &str) -> &[u16] {
        self.by_name.get(name).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn places(&self) -> &[u16] {
        &self.mounted
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Arc<Mounted>)> {
        self.mounted.iter().filter_map(|at| Some((*at, self.get(*at)?)))
    }

    /// Bytes in use, as they were rounded, and bytes in all.
    pub(crate) fn fill(&self) -> (u64, u64) {
        self.iter().fold((0, 0), |(used, size), (_, it)| {
            (used.saturating_add(it.used()), size.saturating_add(it.info.size))
        })
    }

    /// A place for one more, if there are fewer than 65 535.
    pub(crate) fn vacancy(&self) -> Option<u16> {
        let at = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        u16::try_from(at).ok().filter(|at| *at != u16::MAX)
    }

    /// The same list with a segment in a place, or without the one that is there.
    pub(crate) fn with(&self, at: u16, segment: Option<Arc<Mounted>>) -> Self {
        let mut slots = self.slots.clone();
        if slots.len() <= usize::from(at) {
            slots.resize(usize::from(at) + 1, None);
        }
        slots[usize::from(at)] = segment;
        let mut new = Self { slots, ..Self::default() };
        for (at, segment) in (0..).zip(&new.slots) {
            let Some(segment) = segment else { continue };
            new.mounted.push(at);
            new.by_id.insert(segment.info.id, at);
            new.by_name.entry(Arc::clone(&segment.info.name)).or_default().push(at);
            new.youngest_ms = new.youngest_ms.max(segment.mounted_at_ms);
        }
        new
    }
}

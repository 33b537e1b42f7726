//! Nodes' disks, the copies of objects on them, and what is under way between memory and disk.
//!
//! The master does not know where on a disk a copy is: who wants it asks the node. Lock order: a disk's queue may be
//! locked when a shard is, never the other way round.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    LocalDiskReplica, ReplicaDescriptor as WireReplica, ReplicaMedium, ReplicaStatus, Uuid,
};
use parking_lot::Mutex;

use crate::change::{DiskCopyState, StateChange, StateChangeSink, StoreCause};
use crate::locked_shard::LockedShard;
use crate::object::MemoryReplica;

/// Objects that were replaced while a node was putting them on its disk, which are remembered per disk.
const MAX_OUTDATED: usize = 65_536;

/// Clients with a disk.
pub(crate) type ClientDisks = HashMap<Uuid, Arc<ClientDisk>>;

/// What is under way, of all disks.
#[derive(Debug, Default)]
pub(crate) struct DiskTaskTotals {
    /// Bytes that nodes were asked to put on their disks.
    pub(crate) offloading: AtomicU64,
    /// Objects that nodes were asked to bring back.
    pub(crate) promoting: AtomicUsize,
}

/// What is on disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes of copies of objects.
    pub used: u64,
    /// Bytes in all, as far as clients have told.
    pub capacity: u64,
    /// Copies of objects.
    pub copies: u64,
    /// Objects that are on their way to memory.
    pub promoting: u64,
}

/// An object that waits for a node to fetch it.
#[derive(Debug)]
pub(crate) struct QueuedDiskTask {
    pub(crate) tenant: u16,
    pub(crate) key: Box<str>,
    /// Of the work. If the object has other work by then, or none, this is void.
    pub(crate) work: u64,
}

#[derive(Debug, Default)]
struct DiskTaskQueues {
    offloading: bool,
    offloads: VecDeque<QueuedDiskTask>,
    promotions: VecDeque<QueuedDiskTask>,
    /// What the node is putting on its disk although the object is gone or another by now.
    outdated: HashMap<(u16, Box<str>), u32>,
    remove_all: bool,
}

/// A client's disk.
#[derive(Debug)]
pub(crate) struct ClientDisk {
    pub(crate) client: Uuid,
    /// Whether its client is not heard of.
    silent: AtomicBool,
    gone: AtomicBool,
    capacity: AtomicU64,
    used: AtomicU64,
    copies: AtomicU64,
    queues: Mutex<DiskTaskQueues>,
}

/// A copy of an object on a disk.
#[derive(Clone, Debug)]
pub(crate) struct DiskCopy {
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) disk: Arc<ClientDisk>,
    /// Where its node serves it.
    pub(crate) endpoint: Arc<str>,
}

/// What a node was asked to do with an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskTask {
    /// To put it on its disk.
    Offload {
        /// The replica that it reads, which stays until it is done.
        source: u64,
        /// Whether the node knows about it.
        fetched: bool,
    },
    /// To bring it back into memory.
    Promotion {
        /// The replica that it writes, once there is one.
        staged: Option<u64>,
    },
}

/// What is being done about an object between memory and disk.
#[derive(Debug)]
pub(crate) struct ActiveDiskTask {
    pub(crate) id: u64,
    pub(crate) since_ms: u64,
    pub(crate) disk: Arc<ClientDisk>,
    pub(crate) task: DiskTask,
}

impl ClientDisk {
    pub(crate) fn new(client: Uuid, offloading: bool) -> Self {
        Self {
            client,
            silent: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            capacity: AtomicU64::new(0),
            used: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            queues: Mutex::new(DiskTaskQueues { offloading, ..DiskTaskQueues::default() }),
        }
    }

    pub(crate) fn is_responsive(&self) -> bool {
        !self.silent.load(Relaxed)
    }

    pub(crate) fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Relaxed);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// From now on nothing is put there. Whoever did before holds the lock of the object's shard.
    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Relaxed);
        self.set_silent(true);
    }

    pub(crate) fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Relaxed);
    }

    pub(crate) fn add_to(&self, fill: &mut DiskUsage) {
        fill.used = fill.used.saturating_add(self.used.load(Relaxed));
        fill.capacity = fill.capacity.saturating_add(self.capacity.load(Relaxed));
        fill.copies += self.copies.load(Relaxed);
    }

    /// Adds an object to those that the node shall put on the disk.
    ///
    /// # Errors
    /// `UNABLE_OFFLOADING` if it does not want any, `KEYS_ULTRA_LIMIT` if there are too many.
    pub(crate) fn add_offload(&self, waiting: QueuedDiskTask, limit: usize) -> Result<(), ErrorCode> {
        let mut queues = self.queues.lock();
        if !queues.offloading {
            return Err(ErrorCode::UNABLE_OFFLOADING);
        }
        if queues.offloads.len() >= limit {
            return Err(ErrorCode::KEYS_ULTRA_LIMIT);
        }
        queues.offloads.push_back(waiting);
        Ok(())
    }

    /// Takes all objects that wait, and notes whether the node wants more.
    pub(crate) fn take_offloads(&self, offloading: bool) -> VecDeque<QueuedDiskTask> {
        let mut queues = self.queues.lock();
        queues.offloading = offloading;
        std::mem::take(&mut queues.offloads)
    }

    pub(crate) fn add_promotion(&self, waiting: QueuedDiskTask) {
        self.queues.lock().promotions.push_back(waiting);
    }

    pub(crate) fn take_promotion(&self) -> Option<QueuedDiskTask> {
        self.queues.lock().promotions.pop_front()
    }

    /// The node is about to tell that it has an object which is not that object any more.
    fn mark_outdated(&self, tenant: u16, key: &str) {
        let mut queues = self.queues.lock();
        if queues.outdated.len() < MAX_OUTDATED {
            *queues.outdated.entry((tenant, key.into())).or_default() += 1;
        }
    }

    /// Whether what the node tells about is not that object any more.
    pub(crate) fn is_outdated(&self, tenant: u16, key: &str) -> bool {
        let mut queues = self.queues.lock();
        if queues.outdated.is_empty() {
            return false;
        }
        let name = (tenant, Box::from(key));
        let Some(count) = queues.outdated.get_mut(&name) else { return false };
        *count -= 1;
        if *count == 0 {
            queues.outdated.remove(&name);
        }
        true
    }

    /// The node may empty its disk, if nothing on it is known to the master.
    pub(crate) fn request_remove_all(&self) {
        if self.copies.load(Relaxed) == 0 {
            self.queues.lock().remove_all = true;
        }
    }

    /// Whether the node may empty its disk. Told once.
    pub(crate) fn take_remove_all(&self) -> bool {
        std::mem::take(&mut self.queues.lock().remove_all)
    }
}

impl ActiveDiskTask {
    /// Whether the node knows about it, and so may be working on it.
    pub(crate) fn is_fetched(&self) -> bool {
        !matches!(self.task, DiskTask::Offload { fetched: false, .. })
    }
}

impl DiskCopy {
    pub(crate) fn to_descriptor(&self) -> WireReplica<Arc<str>> {
        let medium = ReplicaMedium::LocalDisk(LocalDiskReplica {
            client_id: self.disk.client,
            object_size: self.size,
            transport_endpoint: Arc::clone(&self.endpoint),
        });
        WireReplica { id: self.id, medium, status: ReplicaStatus::COMPLETE }
    }

    pub(crate) fn to_state(&self) -> DiskCopyState<'_> {
        DiskCopyState {
            replica: self.id,
            client: self.disk.client,
            size: self.size,
            endpoint: (&*self.endpoint).into(),
        }
    }
}

impl LockedShard<'_> {
    /// Notes a copy on a disk, in place of the one that was known.
    pub(crate) fn attach_copy(&mut self, at: u32, copy: DiskCopy) {
        self.detach_copy(at);
        copy.disk.used.fetch_add(copy.size, Relaxed);
        copy.disk.copies.fetch_add(1, Relaxed);
        self.entries[at].extra_mut().copy = Some(copy);
    }

    /// Forgets the copy on a disk.
    pub(crate) fn detach_copy(&mut self, at: u32) -> Option<DiskCopy> {
        let copy = self.entries[at].extra.as_mut()?.copy.take()?;
        copy.disk.used.fetch_sub(copy.size, Relaxed);
        copy.disk.copies.fetch_sub(1, Relaxed);
        self.entries[at].drop_empty_extras();
        Some(copy)
    }

    pub(crate) fn begin_work(&mut self, at: u32, work: ActiveDiskTask, now_ms: u64) {
        let figures = &self.master.disk_task_totals;
        match work.task {
            DiskTask::Offload { .. } => _ = figures.offloading.fetch_add(self.entries[at].size, Relaxed),
            DiskTask::Promotion { .. } => _ = figures.promoting.fetch_add(1, Relaxed),
        }
        self.disk_tasks.insert((work.since_ms, at));
        self.entries[at].extra_mut().work = Some(Box::new(work));
        let queue = self.entries[at].target_queue(now_ms);
        self.enqueue(at, queue);
    }

    fn clear_work(&mut self, at: u32) -> Option<ActiveDiskTask> {
        let work = *self.entries[at].extra.as_mut()?.work.take()?;
        let figures = &self.master.disk_task_totals;
        match work.task {
            DiskTask::Offload { .. } => _ = figures.offloading.fetch_sub(self.entries[at].size, Relaxed),
            DiskTask::Promotion { .. } => _ = figures.promoting.fetch_sub(1, Relaxed),
        }
        self.disk_tasks.remove(&(work.since_ms, at));
        Some(work)
    }

    /// Begins to count the time anew in which a work has to be done.
    pub(crate) fn restart_work_timer(&mut self, at: u32, now_ms: u64, task: DiskTask) {
        let extra = self.entries[at].extra.as_mut();
        let Some(work) = extra.and_then(|extra| extra.work.as_mut()) else { return };
        let before = std::mem::replace(&mut work.since_ms, now_ms);
        work.task = task;
        self.disk_tasks.remove(&(before, at));
        self.disk_tasks.insert((now_ms, at));
    }

    /// The object is about to go, or to become another: what its node still does for it is in vain.
    pub(crate) fn abandon_work(&mut self, at: u32) {
        let Some(work) = self.clear_work(at) else { return };
        if matches!(work.task, DiskTask::Offload { fetched: true, .. }) {
            let entry = &self.entries[at];
            work.disk.mark_outdated(entry.tenant, &entry.key);
        }
    }

    /// Ends the work on an object, if there is any, and gives up what was taken for it.
    pub(crate) fn end_work(&mut self, at: u32, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(work) = self.clear_work(at) else { return };
        if let DiskTask::Promotion { staged: Some(staged) } = work.task {
            let entry = &mut self.entries[at];
            let (gone, left): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                entry.replicas().partition(|it| it.id == staged && !it.ready);
            entry.set_replicas(&left);
            let (tenant, bytes) = (entry.tenant, entry.size * gone.len() as u64);
            self.master.tenants.discharge(tenant, bytes);
            for place in self.locations(gone.iter().copied()) {
                fx.record(StateChange::RangeReleased { segment: place.segment, offset: place.offset });
            }
            gone.iter().for_each(|it| self.free(it));
        }
        self.requeue_idle(at, now_ms);
    }

    /// Puts an entry where it belongs by its lease once it is free again.
    pub(crate) fn requeue_idle(&mut self, at: u32, now_ms: u64) {
        self.entries[at].drop_empty_extras();
        let queue = self.entries[at].target_queue(now_ms);
        self.enqueue_by_stamp(at, queue);
    }

    /// Takes an object that has a copy on a disk out of memory. Returns the bytes that this freed.
    pub(crate) fn drop_memory_replicas(&mut self, at: u32, fx: &mut dyn StateChangeSink) -> u64 {
        let gone: Vec<MemoryReplica> = self.entries[at].replicas().copied().collect();
        self.report_vacated(gone.iter(), fx);
        let entry = &mut self.entries[at];
        let (tenant, bytes) = (entry.tenant, entry.size * gone.len() as u64);
        entry.set_replicas(&[]);
        self.enqueue(at, crate::object::EvictionQueue::Unlisted);
        self.master.tenants.discharge(tenant, bytes);
        self.emit_state(at, StoreCause::MemoryEvicted, fx);
        gone.iter().for_each(|it| self.free(it));
        bytes
    }
}

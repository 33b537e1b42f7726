//! Nodes' disks, the copies of objects on them, and the active offloads and promotions.
//!
//! The master does not track where on a disk a copy is stored: readers fetch it from the node. Lock order: a shard before a
//! disk's queues, never the reverse.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    LocalDiskReplica, ReplicaDescriptor as WireReplica, ReplicaMedium, ReplicaStatus, Uuid,
};
use parking_lot::Mutex;

use crate::change::DiskCopyState;
use crate::indices::TenantIndex;

/// Maximum number of tracked objects per disk that were replaced during their offload.
const MAX_OUTDATED: usize = 65_536;

/// Registered disks by client id.
pub(crate) type ClientDisks = HashMap<Uuid, Arc<ClientDisk>>;

/// Totals of active tasks of all disks.
#[derive(Debug, Default)]
pub(crate) struct DiskTaskTotals {
    /// Bytes of objects being offloaded to disks.
    pub(crate) offloading: AtomicU64,
    /// Number of objects being promoted to memory.
    pub(crate) promoting: AtomicUsize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes of all copies of objects.
    pub used: u64,
    /// Total capacity in bytes, as reported by clients.
    pub capacity: u64,
    /// Number of copies of objects.
    pub copies: u64,
    /// Number of objects being promoted to memory.
    pub promoting: u64,
}

/// An offload or promotion waiting for the node to fetch it.
#[derive(Debug)]
pub(crate) struct QueuedDiskTask {
    pub(crate) tenant: TenantIndex,
    pub(crate) key: Box<str>,
    /// Id of the disk task. The entry is ignored if the object has another task or none when it is fetched.
    pub(crate) work: u64,
}

#[derive(Debug, Default)]
struct DiskTaskQueues {
    offloading: bool,
    offloads: VecDeque<QueuedDiskTask>,
    promotions: VecDeque<QueuedDiskTask>,
    /// Objects being offloaded that have been removed or replaced in the meantime, with their counts.
    outdated: HashMap<(TenantIndex, Box<str>), u32>,
    remove_all: bool,
}

#[derive(Debug)]
pub(crate) struct ClientDisk {
    pub(crate) client: Uuid,
    /// Whether its client sends no heartbeats.
    silent: AtomicBool,
    unmounted: AtomicBool,
    capacity: AtomicU64,
    used: AtomicU64,
    copies: AtomicU64,
    queues: Mutex<DiskTaskQueues>,
}

/// A copy of an object on a node's disk.
#[derive(Clone, Debug)]
pub(crate) struct DiskCopy {
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) disk: Arc<ClientDisk>,
    /// Endpoint at which the node serves the copy.
    pub(crate) endpoint: Arc<str>,
}

/// The disk task of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskTask {
    /// Write the object to the node's disk.
    Offload {
        /// Source replica, which must stay until the end.
        source: u64,
        /// Whether the node has fetched the task.
        fetched: bool,
    },
    /// Copy the object from disk into memory.
    Promotion {
        /// Target replica, once it is allocated.
        staged: Option<u64>,
        /// Whether the node has registered it itself because a reader expects the object; the object is leased at the end.
        is_prefetch: bool,
    },
}

/// An active offload or promotion of an object.
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
            unmounted: AtomicBool::new(false),
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

    pub(crate) fn is_unmounted(&self) -> bool {
        self.unmounted.load(Relaxed)
    }

    /// Rejects new copies from now on. A concurrent attach holds the lock of the object's shard, which the sweep waits for.
    pub(crate) fn set_unmounted(&self) {
        self.unmounted.store(true, Relaxed);
        self.set_silent(true);
    }

    pub(crate) fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Relaxed);
    }

    pub(crate) fn add_copy(&self, bytes: u64) {
        self.used.fetch_add(bytes, Relaxed);
        self.copies.fetch_add(1, Relaxed);
    }

    pub(crate) fn remove_copy(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Relaxed);
        self.copies.fetch_sub(1, Relaxed);
    }

    pub(crate) fn add_to(&self, usage: &mut DiskUsage) {
        usage.used = usage.used.saturating_add(self.used.load(Relaxed));
        usage.capacity = usage.capacity.saturating_add(self.capacity.load(Relaxed));
        usage.copies += self.copies.load(Relaxed);
    }

    /// Queues an object for offloading.
    ///
    /// # Errors
    /// `UNABLE_OFFLOADING` if the node has disabled offloading, `KEYS_ULTRA_LIMIT` if the queue is full.
    pub(crate) fn add_offload(&self, queued: QueuedDiskTask, limit: usize) -> Result<(), ErrorCode> {
        let mut queues = self.queues.lock();
        if !queues.offloading {
            return Err(ErrorCode::UNABLE_OFFLOADING);
        }
        if queues.offloads.len() >= limit {
            return Err(ErrorCode::KEYS_ULTRA_LIMIT);
        }
        queues.offloads.push_back(queued);
        Ok(())
    }

    /// Takes all queued objects, and records whether the node accepts more.
    pub(crate) fn take_offloads(&self, offloading: bool) -> VecDeque<QueuedDiskTask> {
        let mut queues = self.queues.lock();
        queues.offloading = offloading;
        std::mem::take(&mut queues.offloads)
    }

    pub(crate) fn add_promotion(&self, queued: QueuedDiskTask) {
        self.queues.lock().promotions.push_back(queued);
    }

    pub(crate) fn take_promotion(&self) -> Option<QueuedDiskTask> {
        self.queues.lock().promotions.pop_front()
    }

    /// Records that the node's next report about this key concerns a removed or replaced object.
    pub(crate) fn mark_outdated(&self, tenant: TenantIndex, key: &str) {
        let mut queues = self.queues.lock();
        if queues.outdated.len() < MAX_OUTDATED {
            *queues.outdated.entry((tenant, key.into())).or_default() += 1;
        }
    }

    /// Whether the node's report concerns an object that has been removed or replaced; counts that report.
    pub(crate) fn is_outdated(&self, tenant: TenantIndex, key: &str) -> bool {
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

    /// Requests that the node clears its disk, if the master has no copies there.
    pub(crate) fn request_remove_all(&self) {
        if self.copies.load(Relaxed) == 0 {
            self.queues.lock().remove_all = true;
        }
    }

    /// Whether the node should clear its disk. Resets the request.
    pub(crate) fn take_remove_all(&self) -> bool {
        std::mem::take(&mut self.queues.lock().remove_all)
    }
}

impl ActiveDiskTask {
    /// Whether the node has fetched the task and may be executing it.
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

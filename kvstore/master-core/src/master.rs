//! The state of a master.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::client_registry::ClientRegistry;
use crate::drain_job::DrainJobTable;
use crate::hot_objects::HotObjectTracker;
use crate::inventory::{RebuildWindow, RestoreCounters};
use crate::object_table::ObjectTable;
use crate::settings::MasterCoreOptions;
use crate::sketch::CountMinSketch;
use crate::task_table::{TaskLimits, TaskTable};
use crate::transfer_replay::PendingTransfers;

/// The tasks of nodes, and what creates them. Its lock is never held together with another one.
#[derive(Debug)]
pub(crate) struct TaskPlanner {
    pub(crate) tasks: TaskTable,
    pub(crate) drain_jobs: DrainJobTable,
    pub(crate) hot_objects: HotObjectTracker,
}

impl TaskPlanner {
    fn new(settings: &MasterCoreOptions) -> Self {
        let limits = TaskLimits {
            tasks: settings.max_tasks,
            timeout_ms: settings.task_timeout_ms,
            retries: settings.task_retries,
        };
        Self {
            tasks: TaskTable::new(settings.seed, limits),
            drain_jobs: DrainJobTable::default(),
            hot_objects: HotObjectTracker::default(),
        }
    }
}

/// The state and logic of a master. See the crate's documentation for its use.
#[derive(Debug)]
pub struct MasterCore {
    pub(crate) objects: ObjectTable,
    pub(crate) registry: Mutex<ClientRegistry>,
    pub(crate) planner: Mutex<TaskPlanner>,
    pub(crate) sketch: CountMinSketch,
    /// Copies and moves found during replay.
    pub(crate) pending_transfers: Mutex<PendingTransfers>,
    /// Locked after the registry, before shards.
    pub(crate) rebuild: Mutex<RebuildWindow>,
    pub(crate) restores: RestoreCounters,
    /// The shard whose soft pins are checked next.
    pub(crate) next_unpin: AtomicUsize,
    pub(crate) view_version: AtomicI64,
}

impl MasterCore {
    pub fn new(settings: MasterCoreOptions) -> Self {
        Self {
            registry: Mutex::default(),
            planner: Mutex::new(TaskPlanner::new(&settings)),
            sketch: CountMinSketch::new(settings.disks.is_some_and(|tier| tier.promote_on_hit)),
            pending_transfers: Mutex::default(),
            rebuild: Mutex::default(),
            restores: RestoreCounters::default(),
            next_unpin: AtomicUsize::new(0),
            view_version: AtomicI64::new(0),
            objects: ObjectTable::new(settings),
        }
    }

    /// The settings passed to [`Self::new`].
    pub fn settings(&self) -> &MasterCoreOptions {
        &self.objects.settings
    }

    /// Sets the view version by which clients detect a change of the leader.
    pub fn set_view_version(&self, version: i64) {
        self.view_version.store(version, Relaxed);
    }
}

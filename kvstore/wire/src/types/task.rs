//! Copy and move tasks.

use super::{ReplicaDescriptor, Uuid};
use crate::pack::{layout, wire_code};

wire_code! {
    pub struct TaskType(i32) {
        REPLICA_COPY = 0,
        REPLICA_MOVE = 1,
    }
}

wire_code! {
    pub struct TaskStatus(i32) {
        /// No client has fetched it.
        PENDING = 0,
        /// A client is executing it.
        PROCESSING = 1,
        FAILED = 2,
        SUCCESS = 3,
    }
}

/// Source and targets of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan<S> {
    pub source: ReplicaDescriptor<S>,
    pub targets: Vec<ReplicaDescriptor<S>>,
}

layout! { CopyPlan<S> { source, targets } }

/// Source and target of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovePlan<S> {
    pub source: ReplicaDescriptor<S>,
    /// Target replica; `None` if the target segment has a replica already.
    pub target: Option<ReplicaDescriptor<S>>,
}

layout! { MovePlan<S> { source, target } }

/// Memory allocated for promoting an object from disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromotionAllocation<S> {
    pub memory: ReplicaDescriptor<S>,
}

layout! { PromotionAllocation<S> { memory } }

/// State of a task, as returned by `QueryTask`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskReport<S> {
    pub id: Uuid,
    pub task_type: TaskType,
    pub status: TaskStatus,
    /// Creation time, in milliseconds of Unix time.
    pub created_at_ms: i64,
    /// Time of the last change, in milliseconds of Unix time.
    pub last_updated_at_ms: i64,
    /// Client that executes the task.
    pub assigned_client: Uuid,
    pub message: S,
}

layout! { TaskReport<S> {
    id, task_type, status, created_at_ms, last_updated_at_ms, assigned_client, message,
} }

/// A task, as returned by `FetchTasks` to the client that executes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskAssignment<S> {
    pub id: Uuid,
    pub task_type: TaskType,
    /// Parameters of the task as JSON.
    pub payload: S,
    /// Creation time, in milliseconds of Unix time.
    pub created_at_ms: i64,
    /// Maximum number of attempts. Since 0.3.10.
    pub max_retry_attempts: u32,
}

layout! { TaskAssignment<S> { id, task_type, payload, created_at_ms, max_retry_attempts since V0_3_10 } }

/// A client's report of a task's end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskCompletion<S> {
    pub id: Uuid,
    pub status: TaskStatus,
    pub message: S,
}

layout! { TaskCompletion<S> { id, status, message } }

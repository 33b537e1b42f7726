//! Copies and moves of replicas.

use super::{ReplicaDescriptor, Uuid};
use crate::pack::{layout, wire_code};

wire_code! {
    /// What a task does.
    pub struct TaskType(i32) {
        /// Copies a replica.
        REPLICA_COPY = 0,
        /// Moves a replica.
        REPLICA_MOVE = 1,
    }
}

wire_code! {
    /// How far a task is.
    pub struct TaskStatus(i32) {
        /// No client has it yet.
        PENDING = 0,
        /// A client works on it.
        PROCESSING = 1,
        /// It failed.
        FAILED = 2,
        /// It is done.
        SUCCESS = 3,
    }
}

/// Where to copy from and to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan<S> {
    /// From here.
    pub source: ReplicaDescriptor<S>,
    /// To each of these.
    pub targets: Vec<ReplicaDescriptor<S>>,
}

layout! { CopyPlan<S> { source, targets } }

/// Where to move from and to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovePlan<S> {
    /// From here.
    pub source: ReplicaDescriptor<S>,
    /// To here, if it is not there already.
    pub target: Option<ReplicaDescriptor<S>>,
}

layout! { MovePlan<S> { source, target } }

/// Space in memory for an object that is on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromotionAllocation<S> {
    /// Where to write it.
    pub memory: ReplicaDescriptor<S>,
}

layout! { PromotionAllocation<S> { memory } }

/// A task as whoever asked for it sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskReport<S> {
    /// The task.
    pub id: Uuid,
    /// What it does.
    pub task_type: TaskType,
    /// How far it is.
    pub status: TaskStatus,
    /// When it was made, in milliseconds of Unix time.
    pub created_at_ms: i64,
    /// When it last changed, in milliseconds of Unix time.
    pub last_updated_at_ms: i64,
    /// Who works on it.
    pub assigned_client: Uuid,
    /// What happened, for people.
    pub message: S,
}

layout! { TaskReport<S> {
    id, task_type, status, created_at_ms, last_updated_at_ms, assigned_client, message,
} }

/// A task as the client that shall do it sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskAssignment<S> {
    /// The task.
    pub id: Uuid,
    /// What it does.
    pub task_type: TaskType,
    /// What exactly, as JSON.
    pub payload: S,
    /// When it was made, in milliseconds of Unix time.
    pub created_at_ms: i64,
    /// How often to try. Since 0.3.10.
    pub max_retry_attempts: u32,
}

layout! { TaskAssignment<S> { id, task_type, payload, created_at_ms, max_retry_attempts since V0_3_10 } }

/// How a client reports the end of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskCompletion<S> {
    /// The task.
    pub id: Uuid,
    /// How it ended.
    pub status: TaskStatus,
    /// What happened, for people.
    pub message: S,
}

layout! { TaskCompletion<S> { id, status, message } }

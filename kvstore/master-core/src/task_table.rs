//! Copy and move tasks for nodes: one queue per client, which the client polls.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{TaskAssignment, TaskCompletion, TaskReport, TaskStatus, TaskType, Uuid};

use crate::change::{StateChange, StateChangeSink, TaskState};
use crate::payload::TaskPayload;
use crate::split_mix::mix;

/// Maximum length of a task's payload in bytes.
const MAX_PAYLOAD: usize = 1 << 20;
/// Maximum length of a completion message in bytes; longer ones are truncated.
const MAX_MESSAGE: usize = 64 << 10;

#[derive(Clone, Debug)]
struct ReplicaTask {
    task_type: TaskType,
    status: TaskStatus,
    payload: String,
    client: Uuid,
    created_at_ms: u64,
    updated_at_ms: u64,
    message: String,
}

impl ReplicaTask {
    fn emit_state(&self, id: Uuid, fx: &mut dyn StateChangeSink) {
        fx.record(StateChange::Task(TaskState {
            id,
            task_type: self.task_type,
            status: self.status,
            payload: Cow::Borrowed(&self.payload),
            client: self.client,
            created_at_ms: self.created_at_ms,
            updated_at_ms: self.updated_at_ms,
            message: Cow::Borrowed(&self.message),
        }));
    }
}

/// Limits of tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskLimits {
    /// Maximum number of pending, of processing and of finished tasks (each).
    pub(crate) tasks: usize,
    /// Time after which a pending or processing task fails.
    pub(crate) timeout_ms: u64,
    /// Maximum number of attempts of a task by a client.
    pub(crate) retries: u32,
}

/// How a task has ended.
struct TaskEnd<'a> {
    status: TaskStatus,
    message: &'a str,
}

/// All tasks, and the queues of those that clients have not fetched.
#[derive(Debug)]
pub(crate) struct TaskTable {
    tasks: BTreeMap<Uuid, ReplicaTask>,
    pending: BTreeMap<Uuid, VecDeque<Uuid>>,
    pending_count: usize,
    processing_count: usize,
    finished: VecDeque<Uuid>,
    entropy: u64,
    limits: TaskLimits,
}

impl TaskTable {
    pub(crate) fn new(seed: u64, limits: TaskLimits) -> Self {
        Self {
            tasks: BTreeMap::new(),
            pending: BTreeMap::new(),
            pending_count: 0,
            processing_count: 0,
            finished: VecDeque::new(),
            entropy: seed,
            limits,
        }
    }

    /// A new id, unique among tasks, jobs and plans of this master.
    pub(crate) fn new_id(&mut self) -> Uuid {
        self.entropy = self.entropy.wrapping_add(1);
        Uuid { first: mix(self.entropy), second: mix(!self.entropy) }
    }

    pub(crate) fn add(
        &mut self,
        now_ms: u64,
        payload: TaskPayload,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let TaskPayload { task_type, json: payload } = payload;
        if payload.len() > MAX_PAYLOAD {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if self.pending_count >= self.limits.tasks {
            return Err(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED);
        }
        let id = self.new_id();
        let task = ReplicaTask {
            task_type,
            status: TaskStatus::PENDING,
            payload,
            client,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
            message: String::new(),
        };
        task.emit_state(id, fx);
        self.tasks.insert(id, task);
        self.pending.entry(client).or_default().push_back(id);
        self.pending_count += 1;
        Ok(id)
    }

    /// Fetches the next tasks of a client, at most `limit`.
    pub(crate) fn fetch(
        &mut self,
        now_ms: u64,
        client: Uuid,
        limit: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<TaskAssignment<String>> {
        let Some(queue) = self.pending.get_mut(&client) else { return Vec::new() };
        let free = self.limits.tasks.saturating_sub(self.processing_count);
        let count = usize::try_from(limit).unwrap_or(usize::MAX).min(free).min(queue.len());
        let ids: Vec<Uuid> = queue.drain(..count).collect();
        if queue.is_empty() {
            self.pending.remove(&client);
        }
        self.pending_count -= ids.len();
        self.processing_count += ids.len();
        let mut fetched = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(task) = self.tasks.get_mut(&id) else { continue };
            (task.status, task.updated_at_ms) = (TaskStatus::PROCESSING, now_ms);
            task.emit_state(id, fx);
            fetched.push(TaskAssignment {
                id,
                task_type: task.task_type,
                payload: task.payload.clone(),
                created_at_ms: task.created_at_ms.cast_signed(),
                max_retry_attempts: self.limits.retries,
            });
        }
        fetched
    }

    /// Ends a pending or processing task; the oldest finished ones above the limit are dropped.
    fn finish(
        &mut self,
        now_ms: u64,
        id: Uuid,
        TaskEnd { status, message }: TaskEnd<'_>,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(task) = self.tasks.get(&id) else { return };
        if !is_open(task.status) {
            return;
        }
        let message = message.get(..message.floor_char_boundary(MAX_MESSAGE)).unwrap_or_default();
        let task = ReplicaTask { status, updated_at_ms: now_ms, message: message.to_owned(), ..task.clone() };
        task.emit_state(id, fx);
        self.set(id, task);
    }

    pub(crate) fn cancel(&mut self, now_ms: u64, id: Uuid, message: &str, fx: &mut dyn StateChangeSink) {
        self.finish(now_ms, id, TaskEnd { status: TaskStatus::FAILED, message }, fx);
    }

    /// Stores a task's new state and updates queues and counts.
    fn set(&mut self, id: Uuid, task: ReplicaTask) {
        let (before, client, status) = (self.tasks.get(&id).map(|old| old.status), task.client, task.status);
        self.tasks.insert(id, task);
        if before == Some(status) {
            return;
        }
        match before {
            Some(TaskStatus::PENDING) => {
                self.pending_count -= 1;
                if let Some(queue) = self.pending.get_mut(&client) {
                    queue.retain(|other| *other != id);
                    if queue.is_empty() {
                        self.pending.remove(&client);
                    }
                }
            }
            Some(TaskStatus::PROCESSING) => self.processing_count -= 1,
            // A replay has restarted from an earlier state of this task.
            Some(_) => self.finished.retain(|other| *other != id),
            None => {}
        }
        match status {
            TaskStatus::PENDING => {
                self.pending.entry(client).or_default().push_back(id);
                self.pending_count += 1;
            }
            TaskStatus::PROCESSING => self.processing_count += 1,
            _ => self.finished.push_back(id),
        }
        while self.finished.len() > self.limits.tasks {
            if let Some(oldest) = self.finished.pop_front() {
                self.tasks.remove(&oldest);
            }
        }
    }

    /// Replays the state of a task.
    pub(crate) fn restore(&mut self, state: &TaskState<'_>) {
        let task = ReplicaTask {
            task_type: state.task_type,
            status: state.status,
            payload: state.payload.to_string(),
            client: state.client,
            created_at_ms: state.created_at_ms,
            updated_at_ms: state.updated_at_ms,
            message: state.message.to_string(),
        };
        self.set(state.id, task);
    }

    /// Emits all tasks: finished and pending ones in their order, then those being processed.
    pub(crate) fn emit_state(&self, fx: &mut dyn StateChangeSink) {
        let is_processing = |id: &&Uuid| self.status(**id) == Some(TaskStatus::PROCESSING);
        let processing = self.tasks.keys().filter(is_processing);
        for id in self.finished.iter().chain(self.pending.values().flatten()).chain(processing) {
            if let Some(task) = self.tasks.get(id) {
                task.emit_state(*id, fx);
            }
        }
    }

    /// Status of a task; `None` if it is unknown or dropped.
    pub(crate) fn status(&self, id: Uuid) -> Option<TaskStatus> {
        self.tasks.get(&id).map(|task| task.status)
    }

    /// Current state of a task; `None` if it is unknown or dropped.
    pub(crate) fn report(&self, id: Uuid) -> Option<TaskReport<String>> {
        self.tasks.get(&id).map(|task| TaskReport {
            id,
            task_type: task.task_type,
            status: task.status,
            created_at_ms: task.created_at_ms.cast_signed(),
            last_updated_at_ms: task.updated_at_ms.cast_signed(),
            assigned_client: task.client,
            message: task.message.clone(),
        })
    }

    /// Ends a task as its client reports.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, `ILLEGAL_CLIENT`.
    pub(crate) fn complete<S: AsRef<str>>(
        &mut self,
        now_ms: u64,
        client: Uuid,
        completion: &TaskCompletion<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let task = self.tasks.get(&completion.id).ok_or(ErrorCode::TASK_NOT_FOUND)?;
        if task.client != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        let end = TaskEnd { status: completion.status, message: completion.message.as_ref() };
        self.finish(now_ms, completion.id, end, fx);
        Ok(())
    }

    /// Fails tasks that have been pending or processing for longer than the timeout.
    pub(crate) fn expire(&mut self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let timeout_ms = self.limits.timeout_ms;
        if self.pending_count + self.processing_count == 0 {
            return;
        }
        let is_late = |task: &ReplicaTask| task.updated_at_ms.saturating_add(timeout_ms) <= now_ms;
        let late = self.tasks.iter().filter(|(_, task)| is_open(task.status) && is_late(task));
        let late: Vec<Uuid> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.cancel(now_ms, id, "task timed out", fx);
        }
    }
}

fn is_open(status: TaskStatus) -> bool {
    matches!(status, TaskStatus::PENDING | TaskStatus::PROCESSING)
}

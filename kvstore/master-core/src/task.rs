//! Copy and move tasks for nodes: one queue per client, which the client polls.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{TaskAssignment, TaskCompletion, TaskReport, TaskStatus, TaskType, Uuid};

use crate::change::{StateChange, StateChangeSink, TaskState};
use crate::drain::DrainJobTable;
use crate::dynamic::HotObjectTracker;
use crate::master::MasterCore;
use crate::payload::{copy_payload, move_payload};
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

/// All tasks, drain jobs and read counts of hot objects. Its lock is never held together with another one.
#[derive(Debug)]
pub(crate) struct TaskTable {
    tasks: BTreeMap<Uuid, ReplicaTask>,
    pending: BTreeMap<Uuid, VecDeque<Uuid>>,
    pending_count: usize,
    processing_count: usize,
    finished: VecDeque<Uuid>,
    pub(crate) jobs: DrainJobTable,
    pub(crate) hot_objects: HotObjectTracker,
    entropy: u64,
}

impl TaskTable {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            tasks: BTreeMap::new(),
            pending: BTreeMap::new(),
            pending_count: 0,
            processing_count: 0,
            finished: VecDeque::new(),
            jobs: DrainJobTable::default(),
            hot_objects: HotObjectTracker::default(),
            entropy: seed,
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
        (task_type, payload): (TaskType, String),
        client: Uuid,
        limit: usize,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        if payload.len() > MAX_PAYLOAD {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if self.pending_count >= limit {
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

    fn fetch(
        &mut self,
        now_ms: u64,
        client: Uuid,
        limit: usize,
        retries: u32,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<TaskAssignment<String>> {
        let Some(queue) = self.pending.get_mut(&client) else { return Vec::new() };
        let count = limit.min(queue.len());
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
                max_retry_attempts: retries,
            });
        }
        fetched
    }

    /// Ends a pending or processing task; the oldest finished ones above the limit are dropped.
    fn finish(
        &mut self,
        (now_ms, limit): (u64, usize),
        id: Uuid,
        (status, message): (TaskStatus, &str),
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(task) = self.tasks.get(&id) else { return };
        if !is_open(task.status) {
            return;
        }
        let message = message.get(..message.floor_char_boundary(MAX_MESSAGE)).unwrap_or_default();
        let task = ReplicaTask { status, updated_at_ms: now_ms, message: message.to_owned(), ..task.clone() };
        task.emit_state(id, fx);
        self.set(id, task, limit);
    }

    pub(crate) fn cancel(
        &mut self,
        (now_ms, limit): (u64, usize),
        id: Uuid,
        message: &str,
        fx: &mut dyn StateChangeSink,
    ) {
        self.finish((now_ms, limit), id, (TaskStatus::FAILED, message), fx);
    }

    /// Stores a task's new state and updates queues and counts.
    fn set(&mut self, id: Uuid, task: ReplicaTask, limit: usize) {
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
        while self.finished.len() > limit {
            if let Some(oldest) = self.finished.pop_front() {
                self.tasks.remove(&oldest);
            }
        }
    }

    /// Replays the state of a task.
    pub(crate) fn restore(&mut self, state: &TaskState<'_>, limit: usize) {
        let task = ReplicaTask {
            task_type: state.task_type,
            status: state.status,
            payload: state.payload.to_string(),
            client: state.client,
            created_at_ms: state.created_at_ms,
            updated_at_ms: state.updated_at_ms,
            message: state.message.to_string(),
        };
        self.set(state.id, task, limit);
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

    /// Fails tasks that have been pending or processing for longer than the timeout.
    pub(crate) fn expire(
        &mut self,
        now_ms: u64,
        timeout_ms: u64,
        limit: usize,
        fx: &mut dyn StateChangeSink,
    ) {
        if self.pending_count + self.processing_count == 0 {
            return;
        }
        let is_late = |task: &ReplicaTask| task.updated_at_ms.saturating_add(timeout_ms) <= now_ms;
        let late = self.tasks.iter().filter(|(_, task)| is_open(task.status) && is_late(task));
        let late: Vec<Uuid> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.cancel((now_ms, limit), id, "task timed out", fx);
        }
    }
}

fn is_open(status: TaskStatus) -> bool {
    matches!(status, TaskStatus::PENDING | TaskStatus::PROCESSING)
}

impl MasterCore {
    /// Creates a task for a node with an object to copy it to the named segments.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`, `INVALID_PARAMS` for no targets or one that is not mounted,
    /// `TASK_PENDING_LIMIT_EXCEEDED`.
    pub fn create_copy_task<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        targets: &[S],
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        if targets.is_empty() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let source = self.objects.source_of(tenant, key, None)?;
        self.objects.check_segments(&targets, ErrorCode::INVALID_PARAMS)?;
        let payload = copy_payload(tenant, key, &source.name, &targets, None)?;
        self.tasks.lock().add(now_ms, payload, source.client, self.objects.settings.max_tasks, fx)
    }

    /// Creates a task for the source segment's node to move an object to the target segment.
    ///
    /// # Errors
    /// As [`Self::create_copy_task`], and `INVALID_PARAMS` if the object is not on the source segment.
    pub fn create_move_task(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        source: &str,
        target: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        self.objects.source_of(tenant, key, None)?;
        if source == target {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let from =
            self.objects.source_of(tenant, key, Some(source)).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.objects.check_segments(&[target], ErrorCode::INVALID_PARAMS)?;
        let payload = move_payload(tenant, key, source, target)?;
        self.tasks.lock().add(now_ms, payload, from.client, self.objects.settings.max_tasks, fx)
    }

    /// Fetches the next tasks of a client, at most `limit`.
    pub fn fetch_tasks(
        &self,
        now_ms: u64,
        client: Uuid,
        limit: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<TaskAssignment<String>> {
        let mut tasks = self.tasks.lock();
        let free = self.objects.settings.max_tasks.saturating_sub(tasks.processing_count);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(free);
        tasks.fetch(now_ms, client, limit, self.objects.settings.task_retries, fx)
    }

    /// Current state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for a finished task that was dropped.
    pub fn query_task(&self, id: Uuid) -> Result<TaskReport<String>, ErrorCode> {
        let tasks = self.tasks.lock();
        let task = tasks.tasks.get(&id).ok_or(ErrorCode::TASK_NOT_FOUND)?;
        Ok(TaskReport {
            id,
            task_type: task.task_type,
            status: task.status,
            created_at_ms: task.created_at_ms.cast_signed(),
            last_updated_at_ms: task.updated_at_ms.cast_signed(),
            assigned_client: task.client,
            message: task.message.clone(),
        })
    }

    /// A client reports the result of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, `ILLEGAL_CLIENT`, `INVALID_PARAMS` for a status other than success or failure.
    pub fn complete_task<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        completion: &TaskCompletion<S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if !matches!(completion.status, TaskStatus::FAILED | TaskStatus::SUCCESS) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let mut tasks = self.tasks.lock();
        let task = tasks.tasks.get(&completion.id).ok_or(ErrorCode::TASK_NOT_FOUND)?;
        if task.client != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        let message = completion.message.as_ref();
        let end = (completion.status, message);
        tasks.finish((now_ms, self.objects.settings.max_tasks), completion.id, end, fx);
        Ok(())
    }
}

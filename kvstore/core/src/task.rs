//! Copies and moves that nodes are asked to do: a queue per client, polled by it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{TaskAssignment, TaskCompletion, TaskReport, TaskStatus, TaskType, Uuid};
use serde::Serialize;

use crate::drain::Jobs;
use crate::dynamic::Heat;
use crate::master::Master;
use crate::placement::mix;
use crate::transfer::DynamicPlan;

/// What a client is told to copy.
#[derive(Serialize)]
struct CopyPayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    targets: &'a [&'a str],
    dynamic_replication_lease_id_high: u64,
    dynamic_replication_lease_id_low: u64,
    dynamic_replication_version_epoch: u64,
}

/// What a client is told to move.
#[derive(Serialize)]
struct MovePayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    target: &'a str,
}

/// A task.
#[derive(Clone, Debug)]
struct Task {
    task_type: TaskType,
    status: TaskStatus,
    payload: String,
    client: Uuid,
    created_at_ms: u64,
    updated_at_ms: u64,
    message: String,
}

/// All tasks, drain jobs and what is read often. Its lock is never held together with another.
#[derive(Debug)]
pub(crate) struct Tasks {
    all: BTreeMap<Uuid, Task>,
    waiting: BTreeMap<Uuid, VecDeque<Uuid>>,
    waiting_count: usize,
    worked_on: usize,
    finished: VecDeque<Uuid>,
    pub(crate) jobs: Jobs,
    pub(crate) heat: Heat,
    entropy: u64,
}

impl Tasks {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            all: BTreeMap::new(),
            waiting: BTreeMap::new(),
            waiting_count: 0,
            worked_on: 0,
            finished: VecDeque::new(),
            jobs: Jobs::default(),
            heat: Heat::default(),
            entropy: seed,
        }
    }

    /// An id that no task, job or plan of this master has.
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
    ) -> Result<Uuid, ErrorCode> {
        if self.waiting_count >= limit {
            return Err(ErrorCode::TASK_PENDING_LIMIT_EXCEEDED);
        }
        let id = self.new_id();
        let task = Task {
            task_type,
            status: TaskStatus::PENDING,
            payload,
            client,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
            message: String::new(),
        };
        self.all.insert(id, task);
        self.waiting.entry(client).or_default().push_back(id);
        self.waiting_count += 1;
        Ok(id)
    }

    fn fetch(
        &mut self,
        now_ms: u64,
        client: Uuid,
        limit: usize,
        retries: u32,
    ) -> Vec<TaskAssignment<String>> {
        let Some(queue) = self.waiting.get_mut(&client) else { return Vec::new() };
        let count = limit.min(queue.len());
        let ids: Vec<Uuid> = queue.drain(..count).collect();
        if queue.is_empty() {
            self.waiting.remove(&client);
        }
        self.waiting_count -= ids.len();
        self.worked_on += ids.len();
        let mut fetched = Vec::with_capacity(ids.len());
        for id in ids {
            let Some(task) = self.all.get_mut(&id) else { continue };
            (task.status, task.updated_at_ms) = (TaskStatus::PROCESSING, now_ms);
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

    /// Ends a task that waits or is worked on; the oldest ended ones are forgotten.
    fn finish(&mut self, now_ms: u64, id: Uuid, status: TaskStatus, message: &str, limit: usize) {
        let Some(task) = self.all.get_mut(&id) else { return };
        match task.status {
            TaskStatus::PENDING => {
                self.waiting_count -= 1;
                if let Some(queue) = self.waiting.get_mut(&task.client) {
                    queue.retain(|it| *it != id);
                    if queue.is_empty() {
                        self.waiting.remove(&task.client);
                    }
                }
            }
            TaskStatus::PROCESSING => self.worked_on -= 1,
            _ => return,
        }
        (task.status, task.updated_at_ms, task.message) = (status, now_ms, message.to_owned());
        self.finished.push_back(id);
        while self.finished.len() > limit {
            if let Some(oldest) = self.finished.pop_front() {
                self.all.remove(&oldest);
            }
        }
    }

    pub(crate) fn cancel(&mut self, now_ms: u64, id: Uuid, message: &str, limit: usize) {
        self.finish(now_ms, id, TaskStatus::FAILED, message, limit);
    }

    /// How far a task is; nothing if it is forgotten.
    pub(crate) fn status(&self, id: Uuid) -> Option<TaskStatus> {
        self.all.get(&id).map(|task| task.status)
    }

    /// Fails what has waited or been worked on for too long.
    pub(crate) fn expire(&mut self, now_ms: u64, timeout_ms: u64, limit: usize) {
        if self.waiting_count + self.worked_on == 0 {
            return;
        }
        let is_open = |task: &Task| matches!(task.status, TaskStatus::PENDING | TaskStatus::PROCESSING);
        let is_late = |task: &Task| task.updated_at_ms.saturating_add(timeout_ms) <= now_ms;
        let late: Vec<Uuid> =
            self.all.iter().filter(|(_, it)| is_open(it) && is_late(it)).map(|(id, _)| *id).collect();
        for id in late {
            self.cancel(now_ms, id, "not done in time", limit);
        }
    }
}

pub(crate) fn copy_payload(
    tenant: &str,
    key: &str,
    source: &str,
    targets: &[&str],
    plan: Option<DynamicPlan>,
) -> Result<(TaskType, String), ErrorCode> {
    let (lease, epoch) = plan.unwrap_or_default();
    let payload = CopyPayload {
        tenant_id: tenant,
        key,
        source,
        targets,
        dynamic_replication_lease_id_high: lease.first,
        dynamic_replication_lease_id_low: lease.second,
        dynamic_replication_version_epoch: epoch,
    };
    let json = serde_json::to_string(&payload).map_err(|_| ErrorCode::SERIALIZE_FAIL)?;
    Ok((TaskType::REPLICA_COPY, json))
}

pub(crate) fn move_payload(
    tenant: &str,
    key: &str,
    source: &str,
    target: &str,
) -> Result<(TaskType, String), ErrorCode> {
    let payload = MovePayload { tenant_id: tenant, key, source, target };
    let json = serde_json::to_string(&payload).map_err(|_| ErrorCode::SERIALIZE_FAIL)?;
    Ok((TaskType::REPLICA_MOVE, json))
}

/// A replica that can be read: its segment's name and whose that is.
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) client: Uuid,
    /// The names of all segments that have a replica.
    pub(crate) holders: Vec<Arc<str>>,
}

impl Master {
    /// Asks a node that has an object to copy it to the named segments.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`, `INVALID_PARAMS` without targets or for one that is not mounted,
    /// `TASK_PENDING_LIMIT_EXCEEDED`.
    pub fn create_copy_task<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        targets: &[S],
    ) -> Result<Uuid, ErrorCode> {
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        if targets.is_empty() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let source = self.source_of(tenant, key, None)?;
        self.check_segments(&targets, ErrorCode::INVALID_PARAMS)?;
        let payload = copy_payload(tenant, key, &source.name, &targets, None)?;
        self.tasks.lock().add(now_ms, payload, source.client, self.settings.max_tasks)
    }

    /// Asks the node that has an object on the source segment to move it to the target segment.
    ///
    /// # Errors
    /// As [`Self::create_copy_task`], and `INVALID_PARAMS` if the object is not on the source.
    pub fn create_move_task(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        source: &str,
        target: &str,
    ) -> Result<Uuid, ErrorCode> {
        self.source_of(tenant, key, None)?;
        if source == target {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let from = self.source_of(tenant, key, Some(source)).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.check_segments(&[target], ErrorCode::INVALID_PARAMS)?;
        let payload = move_payload(tenant, key, source, target)?;
        self.tasks.lock().add(now_ms, payload, from.client, self.settings.max_tasks)
    }

    /// Whether all of these segments are mounted; if not, `error`.
    pub(crate) fn check_segments(&self, names: &[&str], error: ErrorCode) -> Result<(), ErrorCode> {
        let segments = self.segments.load();
        let all_known = names.iter().all(|name| !segments.named(name).is_empty());
        if all_known { Ok(()) } else { Err(error) }
    }

    /// A replica of an object that can be read, on the named segment if one is named.
    pub(crate) fn source_of(&self, tenant: &str, key: &str, on: Option<&str>) -> Result<Source, ErrorCode> {
        let spot = self.spot_of(tenant, key)?;
        let shard = self.lock(spot.shard);
        let at = shard.lookup(spot, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[at];
        if !entry.is_complete() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        let readable = entry.replicas().filter(|it| shard.can_be_read(it));
        let mut mounted = readable.filter_map(|it| shard.segments.get(it.segment));
        let fits = |name: &str| on.is_none_or(|on| on == name);
        let found = mounted.find(|it| fits(&it.info.name)).ok_or(ErrorCode::REPLICA_NOT_FOUND)?;
        let mounted = entry.replicas().filter_map(|it| shard.segments.get(it.segment));
        let holders = mounted.map(|it| Arc::clone(&it.info.name)).collect();
        Ok(Source { name: found.info.name.to_string(), client: found.client, holders })
    }

    /// The next tasks for a client, at most so many.
    pub fn fetch_tasks(&self, now_ms: u64, client: Uuid, limit: u64) -> Vec<TaskAssignment<String>> {
        let mut tasks = self.tasks.lock();
        let free = self.settings.max_tasks.saturating_sub(tasks.worked_on);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(free);
        tasks.fetch(now_ms, client, limit, self.settings.task_retries)
    }

    /// How far a task is.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for one that ended long ago.
    pub fn query_task(&self, id: Uuid) -> Result<TaskReport<String>, ErrorCode> {
        let tasks = self.tasks.lock();
        let task = tasks.all.get(&id).ok_or(ErrorCode::TASK_NOT_FOUND)?;
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

    /// A client has done a task, or failed to.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, `ILLEGAL_CLIENT`, `INVALID_PARAMS` for a status that is no end.
    pub fn complete_task<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        completion: &TaskCompletion<S>,
    ) -> Result<(), ErrorCode> {
        if !matches!(completion.status, TaskStatus::FAILED | TaskStatus::SUCCESS) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let mut tasks = self.tasks.lock();
        let task = tasks.all.get(&completion.id).ok_or(ErrorCode::TASK_NOT_FOUND)?;
        if task.client != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        let message = completion.message.as_ref();
        tasks.finish(now_ms, completion.id, completion.status, message, self.settings.max_tasks);
        Ok(())
    }
}

//! Creating copy and move tasks, and their life at the clients that perform them.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{TaskAssignment, TaskCompletion, TaskReport, TaskStatus, Uuid};

use crate::change::StateChangeSink;
use crate::master::MasterCore;
use crate::payload::{copy_payload, move_payload};
use crate::requests::{CopyRequest, CopyTaskRequest, MoveRequest};

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
        request: &CopyTaskRequest<'_, S>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let CopyTaskRequest { key, targets } = *request;
        let targets: Vec<&str> = targets.iter().map(AsRef::as_ref).collect();
        if targets.is_empty() {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let source = self.objects.source_of(tenant, key, None)?;
        self.objects.check_segments(&targets, ErrorCode::INVALID_PARAMS)?;
        let request = CopyRequest { key, source: &source.name, targets: &targets, lease: None };
        let payload = copy_payload(tenant, &request)?;
        self.planner.lock().tasks.add(now_ms, payload, source.client, fx)
    }

    /// Creates a task for the source segment's node to move an object to the target segment.
    ///
    /// # Errors
    /// As [`Self::create_copy_task`], and `INVALID_PARAMS` if the object is not on the source segment.
    pub fn create_move_task(
        &self,
        now_ms: u64,
        tenant: &str,
        request: MoveRequest<'_>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let MoveRequest { key, source, target } = request;
        if source == target {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        self.objects.source_of(tenant, key, None)?;
        let from =
            self.objects.source_of(tenant, key, Some(source)).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        self.objects.check_segments(&[target], ErrorCode::INVALID_PARAMS)?;
        let payload = move_payload(tenant, request)?;
        self.planner.lock().tasks.add(now_ms, payload, from.client, fx)
    }

    /// Fetches the next tasks of a client, at most `limit`.
    pub fn fetch_tasks(
        &self,
        now_ms: u64,
        client: Uuid,
        limit: u64,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<TaskAssignment<String>> {
        self.planner.lock().tasks.fetch(now_ms, client, limit, fx)
    }

    /// Current state of a task.
    ///
    /// # Errors
    /// `TASK_NOT_FOUND`, also for a finished task that was dropped.
    pub fn query_task(&self, id: Uuid) -> Result<TaskReport<String>, ErrorCode> {
        self.planner.lock().tasks.report(id).ok_or(ErrorCode::TASK_NOT_FOUND)
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
        self.planner.lock().tasks.complete(now_ms, client, completion, fx)?;
        self.refill_drain_job(now_ms, completion.id, fx);
        Ok(())
    }
}

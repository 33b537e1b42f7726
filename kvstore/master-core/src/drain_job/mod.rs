//! Drain jobs: move all objects off a set of segments, a limited number at a time.

mod candidates;
mod report;

use std::borrow::Cow;
use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobResponse, JobStatus};
use mooncake_wire::types::{SegmentStatus, TaskStatus, Uuid};

pub(crate) use self::candidates::find_moves;
use self::candidates::{DrainCandidates, DrainMove};
use crate::change::{StateChange, StateChangeSink};
use crate::object::ObjectName;
use crate::payload::move_payload;
use crate::requests::MoveRequest;
use crate::segment::SegmentTable;
use crate::task_table::TaskTable;

/// Default number of objects moved at a time.
const DEFAULT_CONCURRENCY: u32 = 4;
/// Maximum number of objects that a job may move at a time.
const MAX_CONCURRENCY: u32 = 1024;
/// Maximum number of attempts per object.
const MAX_ATTEMPTS: u32 = 3;
/// Interval between dispatches of a job, in milliseconds.
const DISPATCH_INTERVAL_MS: u64 = 500;
/// Maximum number of jobs, including finished ones.
const MAX_JOBS: usize = 1024;
/// Maximum number of source segments, and of target segments, of a job.
pub(crate) const MAX_SEGMENT_NAMES: usize = 1 << 16;

/// An object that is currently being moved.
#[derive(Clone, Debug)]
pub(crate) struct InFlightMove {
    pub(crate) name: ObjectName,
    pub(crate) size: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct DrainJobEntry {
    segments: Vec<String>,
    targets: Vec<String>,
    concurrency: usize,
    status: JobStatus,
    created_at_ms: u64,
    updated_at_ms: u64,
    dispatched_at_ms: u64,
    moves: BTreeMap<Uuid, InFlightMove>,
    attempts: BTreeMap<ObjectName, u32>,
    succeeded: u64,
    failed: u64,
    blocked: u64,
    moved_bytes: u64,
    /// Progress that was recorded last.
    reported: DrainProgress,
    message: Cow<'static, str>,
}

/// A job that has ended.
pub(crate) struct EndedDrainJob {
    pub(crate) segments: Vec<String>,
    /// New status of the segments.
    pub(crate) status: SegmentStatus,
}

/// Figures of a job that change while its status stays the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DrainProgress {
    updated_at_ms: u64,
    succeeded: u64,
    failed: u64,
    blocked: u64,
}

#[derive(Debug, Default)]
pub(crate) struct DrainJobTable(BTreeMap<Uuid, DrainJobEntry>);

impl DrainJobEntry {
    fn new(now_ms: u64, request: &CreateDrainJobRequest) -> Self {
        let concurrency = request.max_concurrency.unwrap_or(DEFAULT_CONCURRENCY).clamp(1, MAX_CONCURRENCY);
        Self {
            segments: request.segments.clone(),
            targets: request.target_segments.clone(),
            concurrency: concurrency as usize,
            status: JobStatus::CREATED,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
            dispatched_at_ms: 0,
            moves: BTreeMap::new(),
            attempts: BTreeMap::new(),
            succeeded: 0,
            failed: 0,
            blocked: 0,
            moved_bytes: 0,
            reported: DrainProgress { updated_at_ms: now_ms, succeeded: 0, failed: 0, blocked: 0 },
            message: Cow::Borrowed("Drain job created"),
        }
    }

    fn is_finished(&self) -> bool {
        matches!(self.status, JobStatus::SUCCEEDED | JobStatus::FAILED | JobStatus::CANCELED)
    }

    fn progress(&self) -> DrainProgress {
        DrainProgress {
            updated_at_ms: self.updated_at_ms,
            succeeded: self.succeeded,
            failed: self.failed,
            blocked: self.blocked,
        }
    }

    fn end(&mut self, now_ms: u64, status: JobStatus, message: &'static str) {
        (self.status, self.updated_at_ms, self.message) = (status, now_ms, Cow::Borrowed(message));
    }

    /// Collects the results of moves that have ended.
    fn collect(
        &mut self,
        now_ms: u64,
        job: Uuid,
        tasks: &BTreeMap<Uuid, Option<TaskStatus>>,
        fx: &mut dyn StateChangeSink,
    ) {
        for (id, status) in tasks {
            if matches!(status, Some(TaskStatus::PENDING | TaskStatus::PROCESSING)) {
                continue;
            }
            let Some(done) = self.moves.remove(id) else { continue };
            self.updated_at_ms = now_ms;
            let name = done.name;
            let attempts = if *status == Some(TaskStatus::SUCCESS) {
                self.succeeded += 1;
                self.moved_bytes = self.moved_bytes.saturating_add(done.size);
                0
            } else {
                let attempts = self.attempts.get(&name).map_or(1, |attempts| attempts + 1);
                self.failed += u64::from(attempts == MAX_ATTEMPTS);
                attempts
            };
            let (tenant, key) = (Cow::Borrowed(&*name.tenant), Cow::Borrowed(&*name.key));
            fx.record(StateChange::DrainMoveEnded { job, task: *id, tenant, key, attempts });
            self.record_attempts(name, attempts);
        }
    }

    /// Stores the number of failed attempts of an object; 0 removes it.
    fn record_attempts(&mut self, name: ObjectName, attempts: u32) {
        if attempts == 0 {
            self.attempts.remove(&name);
        } else {
            self.attempts.insert(name, attempts);
        }
    }
}

/// Drops finished jobs when the job limit is reached.
fn drop_finished(jobs: &mut BTreeMap<Uuid, DrainJobEntry>) {
    if jobs.len() >= MAX_JOBS {
        jobs.retain(|_, job| !job.is_finished());
    }
}

impl DrainJobTable {
    /// Adds a job for segments that are mounted.
    ///
    /// # Errors
    /// `UNAVAILABLE_IN_CURRENT_STATUS` for a segment that is not writable or is being drained, or for too many jobs.
    pub(crate) fn add(
        &mut self,
        now_ms: u64,
        request: &CreateDrainJobRequest,
        segments: &SegmentTable,
        tasks: &mut TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let Self(jobs) = self;
        // Segments of a failed job stay DRAINING and may be drained by a new job.
        let is_drained =
            |name: &String| jobs.values().any(|job| !job.is_finished() && job.segments.contains(name));
        let can_be_drained = |name: &String| {
            segments.indices_by_name(name).iter().filter_map(|index| segments.get(*index)).all(|segment| {
                match segment.status() {
                    SegmentStatus::OK => true,
                    SegmentStatus::DRAINING => !is_drained(name),
                    _ => false,
                }
            })
        };
        if !request.segments.iter().all(can_be_drained) {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        drop_finished(jobs);
        if jobs.len() >= MAX_JOBS {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        let id = tasks.new_id();
        let job = DrainJobEntry::new(now_ms, request);
        job.emit_state(id, fx);
        jobs.insert(id, job);
        Ok(id)
    }

    /// Current state of a job.
    pub(crate) fn report(&self, id: Uuid) -> Option<DrainJobResponse> {
        self.0.get(&id).map(|job| job.report(id))
    }

    /// Cancels a job with the tasks of its moves. Returns its segments.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS` if the job has finished.
    pub(crate) fn cancel(
        &mut self,
        now_ms: u64,
        id: Uuid,
        tasks: &mut TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Vec<String>, ErrorCode> {
        let job = self.0.get_mut(&id).ok_or(ErrorCode::JOB_NOT_FOUND)?;
        if job.is_finished() {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        job.end(now_ms, JobStatus::CANCELED, "Drain job canceled");
        let moves: Vec<Uuid> = std::mem::take(&mut job.moves).into_keys().collect();
        job.emit_state(id, fx);
        for task in moves {
            tasks.cancel(now_ms, task, "its drain job was canceled", fx);
        }
        Ok(job.segments.clone())
    }

    /// Collects the results of all jobs that are due for a dispatch, and returns these jobs.
    pub(crate) fn collect_due(
        &mut self,
        now_ms: u64,
        tasks: &TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<(Uuid, DrainJobEntry)> {
        let moves = self.0.values().flat_map(|job| job.moves.keys());
        let statuses = moves.map(|id| (*id, tasks.status(*id))).collect();
        let due = self.0.iter_mut().filter(|(_, job)| {
            !job.is_finished() && job.dispatched_at_ms.saturating_add(DISPATCH_INTERVAL_MS) <= now_ms
        });
        due.map(|(id, job)| {
            job.collect(now_ms, *id, &statuses, fx);
            job.dispatched_at_ms = now_ms;
            (*id, job.clone())
        })
        .collect()
    }

    /// Starts moves of a job. If nothing is left to move, the job ends.
    pub(crate) fn dispatch(
        &mut self,
        now_ms: u64,
        id: Uuid,
        candidates: DrainCandidates,
        tasks: &mut TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Option<EndedDrainJob> {
        let mut started = BTreeMap::new();
        for DrainMove { object, source, target, client } in candidates.moves {
            let ObjectName { tenant, key } = &object.name;
            let request = MoveRequest { key, source: &source, target: &target };
            let task =
                move_payload(tenant, request).and_then(|payload| tasks.add(now_ms, payload, client, fx));
            if let Ok(task) = task {
                let (tenant, key) = (Cow::Borrowed(&**tenant), Cow::Borrowed(&**key));
                fx.record(StateChange::DrainMoveStarted { job: id, task, tenant, key, size: object.size });
                started.insert(task, object);
            }
        }
        let job = self.0.get_mut(&id).filter(|job| !job.is_finished())?;
        let before = (job.reported, job.status);
        job.moves.extend(started);
        job.blocked = candidates.blocked;
        job.reported = job.progress();
        if candidates.remaining > 0 || !job.moves.is_empty() {
            (job.status, job.message) = (JobStatus::RUNNING, Cow::Borrowed("Drain job running"));
            if before != (job.reported, job.status) {
                job.emit_state(id, fx);
            }
            return None;
        }
        let status = if candidates.abandoned > 0 {
            job.end(now_ms, JobStatus::FAILED, "Some objects could not be moved");
            SegmentStatus::DRAINING
        } else {
            job.end(now_ms, JobStatus::SUCCEEDED, "Drain job succeeded");
            SegmentStatus::DRAINED
        };
        job.emit_state(id, fx);
        Some(EndedDrainJob { segments: job.segments.clone(), status })
    }
}

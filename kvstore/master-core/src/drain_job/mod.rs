//! Drain jobs: move all objects off a set of segments, a limited number at a time.

mod candidates;
mod report;
mod scan;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobResponse, JobStatus};
use mooncake_wire::types::{SegmentStatus, TaskStatus, Uuid};

use self::candidates::DrainMove;
pub(crate) use self::scan::advance;
use self::scan::{DrainScan, ScanEnd, ScannedMoves};
use crate::change::{StateChange, StateChangeSink};
use crate::object::ObjectName;
use crate::payload::move_payload;
use crate::requests::MoveRequest;
use crate::segment::SegmentTable;
use crate::task_table::TaskTable;

/// Default number of objects moved at a time. Each takes four calls to the master besides the transfer, so that
/// with fewer, small objects would leave the network idle.
const DEFAULT_CONCURRENCY: u32 = 32;
/// Maximum number of objects that a job may move at a time.
const MAX_CONCURRENCY: u32 = 1024;
/// Maximum number of attempts per object.
const MAX_ATTEMPTS: u32 = 3;
/// Pause after all objects were considered and none could be moved, in milliseconds.
const RETRY_INTERVAL_MS: u64 = 500;
/// Share of a job's slots, as a divisor, in which moves have ended before others start without a tick: results are then collected
/// and recorded once for several moves.
const REFILL_DIVISOR: usize = 4;
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
    segments: Arc<[String]>,
    targets: Arc<[String]>,
    concurrency: usize,
    status: JobStatus,
    created_at_ms: u64,
    updated_at_ms: u64,
    /// Where the search for objects to move continues; not recorded.
    scan: DrainScan,
    /// Whether another thread continues the scan now.
    is_scanned: bool,
    /// Moves that have ended since results were collected; not recorded.
    ended: usize,
    /// Objects that were left when all were last considered; not recorded.
    left: u64,
    moves: Arc<BTreeMap<Uuid, InFlightMove>>,
    attempts: Arc<BTreeMap<ObjectName, u32>>,
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
    pub(crate) segments: Arc<[String]>,
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
            segments: request.segments.as_slice().into(),
            targets: request.target_segments.as_slice().into(),
            concurrency: concurrency as usize,
            status: JobStatus::CREATED,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
            scan: DrainScan::default(),
            is_scanned: false,
            ended: 0,
            left: 0,
            moves: Arc::default(),
            attempts: Arc::default(),
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
    fn collect(&mut self, now_ms: u64, job: Uuid, tasks: &TaskTable, fx: &mut dyn StateChangeSink) {
        let status_of = |id: &Uuid| (*id, tasks.status(*id));
        self.ended = 0;
        let is_ended = |(_, status): &(Uuid, Option<TaskStatus>)| {
            !matches!(status, Some(TaskStatus::PENDING | TaskStatus::PROCESSING))
        };
        let ended: Vec<_> = self.moves.keys().map(status_of).filter(is_ended).collect();
        for (id, status) in ended {
            let Some(done) = Arc::make_mut(&mut self.moves).remove(&id) else { continue };
            self.updated_at_ms = now_ms;
            let name = done.name;
            let attempts = if status == Some(TaskStatus::SUCCESS) {
                self.succeeded += 1;
                self.moved_bytes = self.moved_bytes.saturating_add(done.size);
                0
            } else {
                let attempts = self.attempts.get(&name).map_or(1, |attempts| attempts + 1);
                self.failed += u64::from(attempts == MAX_ATTEMPTS);
                attempts
            };
            let (tenant, key) = (Cow::Borrowed(&*name.tenant), Cow::Borrowed(&*name.key));
            fx.record(StateChange::DrainMoveEnded { job, task: id, tenant, key, attempts });
            self.record_attempts(name, attempts);
        }
    }

    /// Stores the number of failed attempts of an object; 0 removes it.
    fn record_attempts(&mut self, name: ObjectName, attempts: u32) {
        if attempts > 0 {
            Arc::make_mut(&mut self.attempts).insert(name, attempts);
        } else if self.attempts.contains_key(&name) {
            Arc::make_mut(&mut self.attempts).remove(&name);
        }
    }

    /// Collects the results of moves. Whether a scan may start others now.
    fn collect_and_take(
        &mut self,
        now_ms: u64,
        id: Uuid,
        tasks: &TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> bool {
        self.collect(now_ms, id, tasks, fx);
        self.emit_progress(id, fx);
        self.is_scanned = self.scan.is_due(now_ms) && self.free_slots() > 0;
        self.is_scanned
    }

    fn emit_progress(&mut self, id: Uuid, fx: &mut dyn StateChangeSink) {
        let progress = self.progress();
        if self.reported != progress {
            self.reported = progress;
            self.emit_state(id, fx);
        }
    }

    fn free_slots(&self) -> usize {
        self.concurrency.saturating_sub(self.moves.len())
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

    /// The job that drains one of these segments.
    pub(crate) fn open_job_of<'a>(&self, segments: impl Iterator<Item = &'a String>) -> Option<Uuid> {
        let drains = |job: &DrainJobEntry, name: &String| !job.is_finished() && job.segments.contains(name);
        segments
            .into_iter()
            .find_map(|name| self.0.iter().find(|(_, job)| drains(job, name)).map(|(id, _)| *id))
    }

    /// Number of objects that were left in these segments when all objects were last considered; `None` if no job drains them.
    pub(crate) fn left_in(&self, segments: &[String]) -> Option<u64> {
        let job = self.0.get(&self.open_job_of(segments.iter())?)?;
        Some(job.left)
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
    ) -> Result<Arc<[String]>, ErrorCode> {
        let job = self.0.get_mut(&id).ok_or(ErrorCode::JOB_NOT_FOUND)?;
        if job.is_finished() {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        job.end(now_ms, JobStatus::CANCELED, "Drain job canceled");
        let moves = std::mem::take(&mut job.moves);
        job.emit_state(id, fx);
        for task in moves.keys() {
            tasks.cancel(now_ms, *task, "its drain job was canceled", fx);
        }
        Ok(Arc::clone(&job.segments))
    }

    /// Collects the results of moves, and returns the jobs that can start others now. No other thread gets these until
    /// [`Self::dispatch`].
    pub(crate) fn take_due(
        &mut self,
        now_ms: u64,
        tasks: &TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<(Uuid, DrainJobEntry)> {
        let open = self.0.iter_mut().filter(|(_, job)| !job.is_finished() && !job.is_scanned);
        let due = open.filter_map(|(id, job)| {
            let is_due = job.collect_and_take(now_ms, *id, tasks, fx);
            is_due.then(|| (*id, job.clone()))
        });
        due.collect()
    }

    /// As [`Self::take_due`], after a task has ended: only its job, and only once enough of its slots are free.
    pub(crate) fn take_due_after(
        &mut self,
        now_ms: u64,
        task: Uuid,
        tasks: &TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Option<(Uuid, DrainJobEntry)> {
        let (id, job) = self.0.iter_mut().find(|(_, job)| job.moves.contains_key(&task))?;
        job.ended += 1;
        let is_enough = job.ended >= job.concurrency.div_ceil(REFILL_DIVISOR);
        let is_due = is_enough && !job.is_scanned && job.collect_and_take(now_ms, *id, tasks, fx);
        is_due.then(|| (*id, job.clone()))
    }

    /// Starts moves that a scan has found. If nothing is left to move, the job ends.
    pub(crate) fn dispatch(
        &mut self,
        now_ms: u64,
        id: Uuid,
        scanned: ScannedMoves,
        tasks: &mut TaskTable,
        fx: &mut dyn StateChangeSink,
    ) -> Option<EndedDrainJob> {
        let job = self.0.get_mut(&id)?;
        job.is_scanned = false;
        if job.is_finished() {
            return None;
        }
        job.scan = scanned.scan;
        for planned in scanned.moves {
            job.start(now_ms, id, planned, tasks, fx);
        }
        if let Some(end) = scanned.end {
            (job.blocked, job.left) = (end.blocked, end.remaining + end.abandoned);
            if end.remaining == 0 && job.moves.is_empty() {
                return Some(job.finish(now_ms, id, &end, fx));
            }
        }
        if job.status == JobStatus::RUNNING {
            job.emit_progress(id, fx);
        } else {
            (job.status, job.message) = (JobStatus::RUNNING, Cow::Borrowed("Drain job running"));
            job.emit_state(id, fx);
        }
        None
    }
}

impl DrainJobEntry {
    fn start(
        &mut self,
        now_ms: u64,
        id: Uuid,
        DrainMove { object, source, target, client }: DrainMove,
        tasks: &mut TaskTable,
        fx: &mut dyn StateChangeSink,
    ) {
        let ObjectName { tenant, key } = &object.name;
        let request = MoveRequest { key, source: &source, target: &target };
        let task = move_payload(tenant, request).and_then(|payload| tasks.add(now_ms, payload, client, fx));
        if let Ok(task) = task {
            let (tenant, key) = (Cow::Borrowed(&**tenant), Cow::Borrowed(&**key));
            fx.record(StateChange::DrainMoveStarted { job: id, task, tenant, key, size: object.size });
            Arc::make_mut(&mut self.moves).insert(task, object);
        }
    }

    fn finish(
        &mut self,
        now_ms: u64,
        id: Uuid,
        scan: &ScanEnd,
        fx: &mut dyn StateChangeSink,
    ) -> EndedDrainJob {
        let status = if scan.abandoned > 0 {
            self.end(now_ms, JobStatus::FAILED, "Some objects could not be moved");
            SegmentStatus::DRAINING
        } else {
            self.end(now_ms, JobStatus::SUCCEEDED, "Drain job succeeded");
            SegmentStatus::DRAINED
        };
        self.emit_state(id, fx);
        EndedDrainJob { segments: Arc::clone(&self.segments), status }
    }
}

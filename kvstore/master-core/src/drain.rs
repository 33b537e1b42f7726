//! Creating, canceling and running drain jobs.

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobResponse};
use mooncake_wire::types::{SegmentStatus, Uuid};

use crate::change::StateChangeSink;
use crate::drain_job::{DrainJobEntry, EndedDrainJob, MAX_SEGMENT_NAMES, advance};
use crate::master::{MasterCore, TaskPlanner};

/// Maximum number of entries that a tick considers for a job: some milliseconds.
const ENTRIES_PER_TICK: u32 = 1 << 18;
/// Maximum number of entries that a node's report of a moved object considers: less than a millisecond.
const ENTRIES_PER_CALL: u32 = 1 << 13;

impl MasterCore {
    /// Starts to drain segments. They accept no new objects from now on.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for no segments, more than 65 536, or a segment that is also a target; `SEGMENT_NOT_FOUND`;
    /// `UNAVAILABLE_IN_CURRENT_STATUS` for a segment that is not writable or is being drained, or for too many jobs.
    pub fn create_drain_job(
        &self,
        now_ms: u64,
        request: &CreateDrainJobRequest,
        fx: &mut dyn StateChangeSink,
    ) -> Result<Uuid, ErrorCode> {
        let overlaps = request.target_segments.iter().any(|name| request.segments.contains(name));
        let too_many =
            [&request.segments, &request.target_segments].iter().any(|names| names.len() > MAX_SEGMENT_NAMES);
        if request.segments.is_empty() || overlaps || too_many {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let segments = self.objects.segments.load();
        let mut names = request.segments.iter().chain(&request.target_segments);
        if names.any(|name| segments.indices_by_name(name).is_empty()) {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mut planner = self.planner.lock();
        let TaskPlanner { tasks, drain_jobs, .. } = &mut *planner;
        let id = drain_jobs.add(now_ms, request, &segments, tasks, fx)?;
        // Still under the lock, before another job can be created for the same segments.
        self.objects.set_segment_statuses(&request.segments, SegmentStatus::DRAINING, fx);
        Ok(id)
    }

    /// Current state of a job.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`.
    pub fn drain_job(&self, id: Uuid) -> Result<DrainJobResponse, ErrorCode> {
        self.planner.lock().drain_jobs.report(id).ok_or(ErrorCode::JOB_NOT_FOUND)
    }

    /// Cancels a job; its segments accept new objects again. Moves in progress may still complete.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`, `UNAVAILABLE_IN_CURRENT_STATUS` if the job has finished.
    pub fn cancel_drain_job(
        &self,
        now_ms: u64,
        id: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let mut planner = self.planner.lock();
        let TaskPlanner { tasks, drain_jobs, .. } = &mut *planner;
        let segments = drain_jobs.cancel(now_ms, id, tasks, fx)?;
        drop(planner);
        self.objects.set_segment_statuses(&segments, SegmentStatus::OK, fx);
        Ok(())
    }

    /// Collects results and starts moves of all jobs that are due.
    pub(crate) fn run_drain_jobs(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let due = {
            let mut planner = self.planner.lock();
            let TaskPlanner { tasks, drain_jobs, .. } = &mut *planner;
            drain_jobs.take_due(now_ms, tasks, fx)
        };
        for (id, job) in due {
            self.continue_drain_job(now_ms, id, &job, ENTRIES_PER_TICK, fx);
        }
    }

    /// Starts further moves of the drain job whose task has ended, so that it does not wait for the next tick.
    pub(crate) fn refill_drain_job(&self, now_ms: u64, ended: Uuid, fx: &mut dyn StateChangeSink) {
        let due = {
            let mut planner = self.planner.lock();
            let TaskPlanner { tasks, drain_jobs, .. } = &mut *planner;
            drain_jobs.take_due_after(now_ms, ended, tasks, fx)
        };
        if let Some((id, job)) = due {
            self.continue_drain_job(now_ms, id, &job, ENTRIES_PER_CALL, fx);
        }
    }

    fn continue_drain_job(
        &self,
        now_ms: u64,
        id: Uuid,
        job: &DrainJobEntry,
        entries: u32,
        fx: &mut dyn StateChangeSink,
    ) {
        let scanned = advance(&self.objects, job, now_ms, entries);
        let mut planner = self.planner.lock();
        let TaskPlanner { tasks, drain_jobs, .. } = &mut *planner;
        let ended = drain_jobs.dispatch(now_ms, id, scanned, tasks, fx);
        drop(planner);
        if let Some(EndedDrainJob { segments, status }) = ended {
            self.objects.set_segment_statuses(&segments, status, fx);
        }
    }
}

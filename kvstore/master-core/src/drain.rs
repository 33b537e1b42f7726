//! Creating, canceling and running drain jobs.

use std::collections::BTreeMap;

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

    /// Has all objects in the memory of a node moved to other nodes, which it may repeat at any time. Returns the number of objects
    /// that are left, at least 1 until all its segments are drained.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the node has no segment; as [`Self::create_drain_job`].
    pub fn drain_node(
        &self,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<u64, ErrorCode> {
        let segments = self.segments_of(client);
        if segments.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        if segments.values().all(|status| *status == SegmentStatus::DRAINED) {
            return Ok(0);
        }
        let is_open = |(_, status): &(String, SegmentStatus)| *status != SegmentStatus::DRAINED;
        let segments: Vec<String> = segments.into_iter().filter(is_open).map(|(name, _)| name).collect();
        let left = self.planner.lock().drain_jobs.left_in(&segments);
        if let Some(left) = left {
            return Ok(left.max(1));
        }
        let request = CreateDrainJobRequest { segments, ..CreateDrainJobRequest::default() };
        self.create_drain_job(now_ms, &request, fx).map(|_| 1)
    }

    /// The node stays: its segments accept objects again.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` if the node has no segment.
    pub fn cancel_node_drain(
        &self,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let segments = self.segments_of(client);
        if segments.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let job = self.planner.lock().drain_jobs.open_job_of(segments.keys());
        if let Some(job) = job {
            self.cancel_drain_job(now_ms, job, fx)?;
        }
        let is_closed = |(_, status): &(String, SegmentStatus)| {
            matches!(*status, SegmentStatus::DRAINING | SegmentStatus::DRAINED)
        };
        let closed: Vec<String> = segments.into_iter().filter(is_closed).map(|(name, _)| name).collect();
        self.objects.set_segment_statuses(&closed, SegmentStatus::OK, fx);
        Ok(())
    }

    /// Names and statuses of a client's segments.
    fn segments_of(&self, client: Uuid) -> BTreeMap<String, SegmentStatus> {
        let segments = self.objects.segments.load();
        let own = segments.iter().filter(|(_, segment)| segment.client == client);
        own.map(|(_, segment)| (segment.descriptor.name.to_string(), segment.status())).collect()
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

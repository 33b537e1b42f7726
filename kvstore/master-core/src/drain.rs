//! Drain jobs: move all objects off a set of segments, a limited number at a time.

mod report;

use std::borrow::Cow;
use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobResponse, JobStatus};
use mooncake_wire::types::{SegmentStatus, TaskStatus, Uuid};

use crate::change::{StateChange, StateChangeSink};
use crate::master::MasterCore;
use crate::payload::move_payload;
use crate::split_mix::mix;
use crate::task::TaskTable;

/// Default number of objects moved at a time.
const DEFAULT_CONCURRENCY: u32 = 4;
/// Maximum number of objects that a job may move at a time.
const MAX_CONCURRENCY: u32 = 1024;
/// Maximum number of attempts per object.
const MAX_ATTEMPTS: u32 = 3;
/// Interval between dispatches of a job, in milliseconds.
const DISPATCH_INTERVAL_MS: u64 = 500;
/// Number of entries scanned under one lock.
const ENTRIES_PER_LOCK: u32 = 1024;
/// Maximum number of jobs, including finished ones.
const MAX_JOBS: usize = 1024;
/// Maximum number of source segments, and of target segments, of a job.
pub(crate) const MAX_SEGMENT_NAMES: usize = 1 << 16;

/// An object that is currently being moved.
#[derive(Clone, Debug)]
struct InFlightMove {
    tenant: String,
    key: String,
    size: u64,
}

#[derive(Clone, Debug)]
struct DrainJobEntry {
    segments: Vec<String>,
    targets: Vec<String>,
    concurrency: usize,
    status: JobStatus,
    created_at_ms: u64,
    updated_at_ms: u64,
    dispatched_at_ms: u64,
    moves: BTreeMap<Uuid, InFlightMove>,
    attempts: BTreeMap<(String, String), u32>,
    succeeded: u64,
    failed: u64,
    blocked: u64,
    moved_bytes: u64,
    /// Progress last recorded: see [`DrainJobEntry::progress`].
    reported: [u64; 4],
    message: Cow<'static, str>,
}

#[derive(Debug, Default)]
pub(crate) struct DrainJobTable(BTreeMap<Uuid, DrainJobEntry>);

impl DrainJobEntry {
    fn is_finished(&self) -> bool {
        matches!(self.status, JobStatus::SUCCEEDED | JobStatus::FAILED | JobStatus::CANCELED)
    }

    /// Figures that change while the status stays the same.
    fn progress(&self) -> [u64; 4] {
        [self.updated_at_ms, self.succeeded, self.failed, self.blocked]
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
            let name = (done.tenant, done.key);
            let attempts = if *status == Some(TaskStatus::SUCCESS) {
                self.succeeded += 1;
                self.moved_bytes = self.moved_bytes.saturating_add(done.size);
                0
            } else {
                let attempts = self.attempts.get(&name).map_or(1, |attempts| attempts + 1);
                self.failed += u64::from(attempts == MAX_ATTEMPTS);
                attempts
            };
            let (tenant, key) = (Cow::Borrowed(&*name.0), Cow::Borrowed(&*name.1));
            fx.record(StateChange::DrainMoveEnded { job, task: *id, tenant, key, attempts });
            self.record_attempts(name, attempts);
        }
    }

    /// Stores the number of failed attempts of an object; 0 removes it.
    fn record_attempts(&mut self, name: (String, String), attempts: u32) {
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

/// Result of scanning the table for a job.
#[derive(Default)]
struct DrainCandidates {
    moves: Vec<(InFlightMove, String, String, Uuid)>,
    blocked: u64,
    abandoned: u64,
    remaining: u64,
}

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
        let mut tasks = self.tasks.lock();
        let TaskTable { jobs: DrainJobTable(jobs), .. } = &mut *tasks;
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
        let concurrency = request.max_concurrency.unwrap_or(DEFAULT_CONCURRENCY).clamp(1, MAX_CONCURRENCY);
        let job = DrainJobEntry {
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
            reported: [now_ms, 0, 0, 0],
            message: Cow::Borrowed("Drain job created"),
        };
        job.emit_state(id, fx);
        tasks.jobs.0.insert(id, job);
        // Still under the lock, before another job can be created for the same segments.
        self.objects.set_segment_statuses(&request.segments, SegmentStatus::DRAINING, fx);
        Ok(id)
    }

    /// Current state of a job.
    ///
    /// # Errors
    /// `JOB_NOT_FOUND`.
    pub fn drain_job(&self, id: Uuid) -> Result<DrainJobResponse, ErrorCode> {
        self.tasks.lock().jobs.0.get(&id).map(|job| job.report(id)).ok_or(ErrorCode::JOB_NOT_FOUND)
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
        let mut tasks = self.tasks.lock();
        let job = tasks.jobs.0.get_mut(&id).ok_or(ErrorCode::JOB_NOT_FOUND)?;
        if job.is_finished() {
            return Err(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS);
        }
        job.end(now_ms, JobStatus::CANCELED, "Drain job canceled");
        let moves: Vec<Uuid> = std::mem::take(&mut job.moves).into_keys().collect();
        let segments = job.segments.clone();
        job.emit_state(id, fx);
        for task in moves {
            tasks.cancel((now_ms, self.objects.settings.max_tasks), task, "its drain job was canceled", fx);
        }
        drop(tasks);
        self.objects.set_segment_statuses(&segments, SegmentStatus::OK, fx);
        Ok(())
    }

    /// Collects results and starts moves of all jobs that are due.
    pub(crate) fn run_drain_jobs(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let due: Vec<(Uuid, DrainJobEntry)> = {
            let mut tasks = self.tasks.lock();
            let statuses = tasks.move_statuses();
            let jobs = tasks.jobs.0.iter_mut();
            let due = jobs.filter(|(_, job)| {
                !job.is_finished() && job.dispatched_at_ms.saturating_add(DISPATCH_INTERVAL_MS) <= now_ms
            });
            due.map(|(id, job)| {
                job.collect(now_ms, *id, &statuses, fx);
                job.dispatched_at_ms = now_ms;
                (*id, job.clone())
            })
            .collect()
        };
        for (id, job) in due {
            let candidates = self.find_moves(&job);
            self.dispatch(now_ms, id, candidates, fx);
        }
    }

    fn dispatch(&self, now_ms: u64, id: Uuid, candidates: DrainCandidates, fx: &mut dyn StateChangeSink) {
        let mut tasks = self.tasks.lock();
        let mut started = BTreeMap::new();
        for (object, source, target, client) in candidates.moves {
            let task = move_payload(&object.tenant, &object.key, &source, &target)
                .and_then(|payload| tasks.add(now_ms, payload, client, self.objects.settings.max_tasks, fx));
            if let Ok(task) = task {
                let (tenant, key) = (Cow::Borrowed(&*object.tenant), Cow::Borrowed(&*object.key));
                fx.record(StateChange::DrainMoveStarted { job: id, task, tenant, key, size: object.size });
                started.insert(task, object);
            }
        }
        let Some(job) = tasks.jobs.0.get_mut(&id).filter(|job| !job.is_finished()) else { return };
        let before = (job.reported, job.status);
        job.moves.extend(started);
        job.blocked = candidates.blocked;
        job.reported = job.progress();
        if candidates.remaining > 0 || !job.moves.is_empty() {
            (job.status, job.message) = (JobStatus::RUNNING, Cow::Borrowed("Drain job running"));
            if before != (job.reported, job.status) {
                job.emit_state(id, fx);
            }
            return;
        }
        let status = if candidates.abandoned > 0 {
            job.end(now_ms, JobStatus::FAILED, "Some objects could not be moved");
            SegmentStatus::DRAINING
        } else {
            job.end(now_ms, JobStatus::SUCCEEDED, "Drain job succeeded");
            SegmentStatus::DRAINED
        };
        job.emit_state(id, fx);
        let segments = job.segments.clone();
        drop(tasks);
        self.objects.set_segment_statuses(&segments, status, fx);
    }

    fn find_moves(&self, job: &DrainJobEntry) -> DrainCandidates {
        let mut candidates = DrainCandidates::default();
        let mut free_slots = job.concurrency.saturating_sub(job.moves.len());
        for shard in 0..self.objects.shards.len() {
            let mut from = Some(0);
            while let Some(start) = from {
                let shard = self.objects.lock(shard);
                let (indices, next) = shard.occupied(start, ENTRIES_PER_LOCK);
                for index in indices {
                    self.consider_entry(&shard, index, job, &mut free_slots, &mut candidates);
                }
                from = next;
            }
        }
        candidates
    }

    fn consider_entry(
        &self,
        shard: &crate::locked_shard::LockedShard<'_>,
        index: u32,
        job: &DrainJobEntry,
        free_slots: &mut usize,
        candidates: &mut DrainCandidates,
    ) {
        let entry = &shard.entries[index];
        let name_of = |segment: u16| shard.segments.get(segment).map(|mounted| &*mounted.descriptor.name);
        let is_drained = |name: &str| job.segments.iter().any(|segment| segment == name);
        let Some(source) = entry.replicas().find(|replica| name_of(replica.segment).is_some_and(is_drained))
        else {
            return;
        };
        if job.moves.values().any(|object| *object.key == *entry.key) {
            return;
        }
        let tenant =
            self.objects.tenants.get(entry.tenant).map(|tenant| tenant.name.to_string()).unwrap_or_default();
        let key = entry.key.to_string();
        if job.attempts.get(&(tenant.clone(), key.clone())).is_some_and(|attempts| *attempts >= MAX_ATTEMPTS)
        {
            candidates.abandoned += 1;
            return;
        }
        candidates.remaining += 1;
        let holders: Vec<&str> = entry.replicas().filter_map(|replica| name_of(replica.segment)).collect();
        let is_busy = entry.transfer().is_some() || entry.work().is_some();
        let is_free =
            entry.is_complete() && entry.pending().is_none() && !is_busy && shard.can_be_read(source);
        let target = self.drain_target(shard, job, &holders, mix(u64::from(index)));
        let (true, Some(target), Some(mounted)) = (is_free, target, shard.segments.get(source.segment))
        else {
            candidates.blocked += 1;
            return;
        };
        if *free_slots > 0 {
            *free_slots -= 1;
            let object = InFlightMove { tenant, key, size: entry.size };
            candidates.moves.push((object, mounted.descriptor.name.to_string(), target, mounted.client));
        }
    }

    /// The writable segment with the highest free share among the allowed targets without a replica.
    fn drain_target(
        &self,
        shard: &crate::locked_shard::LockedShard<'_>,
        job: &DrainJobEntry,
        holders: &[&str],
        entropy: u64,
    ) -> Option<String> {
        let is_allowed =
            |name: &str| job.targets.is_empty() || job.targets.iter().any(|target| target == name);
        let fitting = shard.segments.iter().filter(|(_, segment)| {
            segment.is_writable()
                && is_allowed(&segment.descriptor.name)
                && !holders.contains(&&*segment.descriptor.name)
        });
        // Random choice among equals.
        let rank = |index: u16, free: f64| (free, mix(entropy ^ u64::from(index)));
        fitting
            .map(|(index, segment)| (rank(index, segment.free_ratio()), segment))
            .max_by(|(a, _), (b, _)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))
            .map(|(_, segment)| segment.descriptor.name.to_string())
    }
}

impl TaskTable {
    /// Task status of the moves of all jobs.
    fn move_statuses(&self) -> BTreeMap<Uuid, Option<TaskStatus>> {
        let moves = self.jobs.0.values().flat_map(|job| job.moves.keys());
        moves.map(|id| (*id, self.status(*id))).collect()
    }
}

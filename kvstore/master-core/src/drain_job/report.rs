//! Reports and state changes of drain jobs.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::DrainJobResponse;
use mooncake_wire::types::Uuid;

use super::scan::DrainScan;
use super::{DrainJobEntry, DrainJobTable, DrainProgress, InFlightMove};
use crate::change::{DrainJobState, StateChange, StateChangeSink};
use crate::object::ObjectName;

impl DrainJobEntry {
    pub(super) fn report(&self, id: Uuid) -> DrainJobResponse {
        DrainJobResponse {
            success: true,
            job_id: id,
            job_type: 0,
            type_name: "DRAIN".to_owned(),
            status: self.status,
            status_name: self.status.name().unwrap_or_default().to_owned(),
            created_at_ms_epoch: self.created_at_ms.cast_signed(),
            last_updated_at_ms_epoch: self.updated_at_ms.cast_signed(),
            segments: self.segments.to_vec(),
            succeeded_units: self.succeeded,
            failed_units: self.failed,
            blocked_units: self.blocked,
            active_units: self.moves.len() as u64,
            migrated_bytes: self.moved_bytes,
            message: self.message.to_string(),
            error_code: ErrorCode::OK,
            error_message: String::new(),
        }
    }

    /// Emits the job's state, without the objects being moved.
    pub(super) fn emit_state(&self, id: Uuid, fx: &mut dyn StateChangeSink) {
        fx.record(StateChange::DrainJob(DrainJobState {
            id,
            segments: Cow::Borrowed(&self.segments),
            targets: Cow::Borrowed(&self.targets),
            concurrency: self.concurrency as u64,
            status: self.status,
            created_at_ms: self.created_at_ms,
            updated_at_ms: self.updated_at_ms,
            succeeded: self.succeeded,
            failed: self.failed,
            blocked: self.blocked,
            moved_bytes: self.moved_bytes,
            message: Cow::Borrowed(&self.message),
        }));
    }
}

impl DrainJobTable {
    /// Replays the state of a job.
    pub(crate) fn restore(&mut self, state: &DrainJobState<'_>) {
        let Self(jobs) = self;
        let known = jobs.remove(&state.id);
        if known.is_none() {
            super::drop_finished(jobs);
        }
        let (moves, attempts) = known.map(|job| (job.moves, job.attempts)).unwrap_or_default();
        let progress = DrainProgress {
            updated_at_ms: state.updated_at_ms,
            succeeded: state.succeeded,
            failed: state.failed,
            blocked: state.blocked,
        };
        let mut job = DrainJobEntry {
            segments: state.segments.iter().cloned().collect(),
            targets: state.targets.iter().cloned().collect(),
            concurrency: usize::try_from(state.concurrency).unwrap_or(usize::MAX),
            status: state.status,
            created_at_ms: state.created_at_ms,
            updated_at_ms: state.updated_at_ms,
            scan: DrainScan::default(),
            is_scanned: false,
            ended: 0,
            left: 0,
            moves,
            attempts,
            succeeded: state.succeeded,
            failed: state.failed,
            blocked: state.blocked,
            moved_bytes: state.moved_bytes,
            reported: progress,
            message: Cow::Owned(state.message.to_string()),
        };
        if job.is_finished() {
            job.moves = Arc::default();
        }
        jobs.insert(state.id, job);
    }

    /// Replays the start of an object's move.
    pub(crate) fn restore_move(&mut self, job: Uuid, task: Uuid, object: InFlightMove) {
        if let Some(job) = self.0.get_mut(&job) {
            Arc::make_mut(&mut job.moves).insert(task, object);
        }
    }

    /// Replays the end of an object's move.
    pub(crate) fn restore_moved(&mut self, job: Uuid, task: Uuid, name: ObjectName, attempts: u32) {
        if let Some(job) = self.0.get_mut(&job) {
            Arc::make_mut(&mut job.moves).remove(&task);
            job.record_attempts(name, attempts);
        }
    }

    /// Emits all jobs with their moves.
    pub(crate) fn emit_state(&self, fx: &mut dyn StateChangeSink) {
        for (id, job) in &self.0 {
            job.emit_state(*id, fx);
            for (task, object) in &*job.moves {
                let ObjectName { tenant, key } = &object.name;
                let (tenant, key) = (Cow::Borrowed(&**tenant), Cow::Borrowed(&**key));
                fx.record(StateChange::DrainMoveStarted {
                    job: *id,
                    task: *task,
                    tenant,
                    key,
                    size: object.size,
                });
            }
            for (ObjectName { tenant, key }, attempts) in &*job.attempts {
                let (tenant, key) = (Cow::Borrowed(&**tenant), Cow::Borrowed(&**key));
                let task = Uuid { first: 0, second: 0 };
                fx.record(StateChange::DrainMoveEnded { job: *id, task, tenant, key, attempts: *attempts });
            }
        }
    }
}

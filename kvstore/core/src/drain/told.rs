//! Drain jobs as others are told of them.

use std::borrow::Cow;

use mooncake_wire::ErrorCode;
use mooncake_wire::admin::DrainJob;
use mooncake_wire::types::Uuid;

use super::{Job, Jobs, Move};
use crate::fact::{DrainState, Effects, Fact};

impl Job {
    pub(super) fn report(&self, id: Uuid) -> DrainJob {
        DrainJob {
            success: true,
            job_id: id,
            job_type: 0,
            type_name: "DRAIN".to_owned(),
            status: self.status,
            status_name: self.status.name().unwrap_or_default().to_owned(),
            created_at_ms_epoch: self.created_at_ms.cast_signed(),
            last_updated_at_ms_epoch: self.updated_at_ms.cast_signed(),
            segments: self.segments.clone(),
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

    /// Tells what it is, without the objects that it moves.
    pub(super) fn tell(&self, id: Uuid, fx: &mut dyn Effects) {
        fx.fact(Fact::DrainJob(DrainState {
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

impl Jobs {
    /// Makes a job what a fact says.
    pub(crate) fn restore(&mut self, state: &DrainState<'_>) {
        let Self(jobs) = self;
        let known = jobs.remove(&state.id);
        if known.is_none() {
            super::forget_over(jobs);
        }
        let (moves, tries) = known.map(|job| (job.moves, job.tries)).unwrap_or_default();
        let mut job = Job {
            segments: state.segments.to_vec(),
            targets: state.targets.to_vec(),
            concurrency: usize::try_from(state.concurrency).unwrap_or(usize::MAX),
            status: state.status,
            created_at_ms: state.created_at_ms,
            updated_at_ms: state.updated_at_ms,
            dispatched_at_ms: 0,
            moves,
            tries,
            succeeded: state.succeeded,
            failed: state.failed,
            blocked: state.blocked,
            moved_bytes: state.moved_bytes,
            told: [0; 4],
            message: Cow::Owned(state.message.to_string()),
        };
        job.told = job.figures();
        if job.is_over() {
            job.moves.clear();
        }
        jobs.insert(state.id, job);
    }

    /// A job has begun to move an object.
    pub(crate) fn restore_move(&mut self, job: Uuid, task: Uuid, (tenant, key): (&str, &str), size: u64) {
        if let Some(job) = self.0.get_mut(&job) {
            job.moves.insert(task, Move { tenant: tenant.to_owned(), key: key.to_owned(), size });
        }
    }

    /// A job's task has ended.
    pub(crate) fn restore_moved(&mut self, job: Uuid, task: Uuid, (tenant, key): (&str, &str), tries: u32) {
        if let Some(job) = self.0.get_mut(&job) {
            job.moves.remove(&task);
            job.tried((tenant.to_owned(), key.to_owned()), tries);
        }
    }

    /// Tells all jobs.
    pub(crate) fn tell(&self, fx: &mut dyn Effects) {
        for (id, job) in &self.0 {
            job.tell(*id, fx);
            for (task, it) in &job.moves {
                let (tenant, key) = (Cow::Borrowed(&*it.tenant), Cow::Borrowed(&*it.key));
                fx.fact(Fact::DrainMove { job: *id, task: *task, tenant, key, size: it.size });
            }
            for ((tenant, key), tries) in &job.tries {
                let (tenant, key) = (Cow::Borrowed(&**tenant), Cow::Borrowed(&**key));
                let task = Uuid { first: 0, second: 0 };
                fx.fact(Fact::DrainMoved { job: *id, task, tenant, key, tries: *tries });
            }
        }
    }
}

//! Encoding and decoding of state changes of copies, moves, tasks and drain jobs.

use std::borrow::Cow;

use mooncake_wire::admin::JobStatus;
use mooncake_wire::types::{TaskStatus, TaskType};

use super::read::StateChangeReader;
use super::write::StateChangeWriter;
use super::{StateChangeDecodeError, kind};
use crate::change::{DrainJobState, DynamicReplicationLease, StateChange, TaskState, TransferState};
use crate::drain_job::MAX_SEGMENT_NAMES;

pub(super) fn write(writer: &mut StateChangeWriter<'_>, change: &StateChange<'_>) {
    match change {
        StateChange::TransferStarted(state) => {
            writer.head(kind::TRANSFER_STARTED);
            writer.text(&state.tenant);
            writer.text(&state.key);
            writer.id(state.client);
            writer.number(state.source);
            writer.number(u64::from(state.is_move));
            writer.number(state.since_ms);
            writer.number(u64::from(state.lease.is_some()));
            if let Some(DynamicReplicationLease { id, epoch }) = state.lease {
                writer.id(id);
                writer.number(epoch);
            }
            writer.locations(&state.locations);
        }
        StateChange::TransferEnded { tenant, key } => {
            writer.head(kind::TRANSFER_ENDED);
            writer.text(tenant);
            writer.text(key);
        }
        StateChange::Task(state) => {
            writer.head(kind::TASK);
            writer.id(state.id);
            writer.code(state.task_type.0);
            writer.code(state.status.0);
            writer.text(&state.payload);
            writer.id(state.client);
            writer.numbers([state.created_at_ms, state.updated_at_ms]);
            writer.text(&state.message);
        }
        StateChange::DrainJob(state) => {
            writer.head(kind::DRAIN_JOB);
            writer.id(state.id);
            for names in [&state.segments, &state.targets] {
                writer.number(names.len() as u64);
                names.iter().for_each(|name| writer.text(name));
            }
            writer.code(state.status.0);
            writer.numbers([state.concurrency, state.created_at_ms, state.updated_at_ms]);
            writer.numbers([state.succeeded, state.failed, state.blocked, state.moved_bytes]);
            writer.text(&state.message);
        }
        StateChange::DrainMoveStarted { job, task, tenant, key, size } => {
            writer.head(kind::DRAIN_MOVE_STARTED);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(*size);
        }
        StateChange::DrainMoveEnded { job, task, tenant, key, attempts } => {
            writer.head(kind::DRAIN_MOVE_ENDED);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(u64::from(*attempts));
        }
        _ => {}
    }
}

pub(super) fn read<'a>(
    reader: &mut StateChangeReader<'a>,
    kind: u8,
) -> Result<StateChange<'a>, StateChangeDecodeError> {
    Ok(match kind {
        kind::TRANSFER_STARTED => StateChange::TransferStarted(TransferState {
            tenant: reader.text()?,
            key: reader.text()?,
            client: reader.id()?,
            source: reader.number()?,
            is_move: reader.flag()?,
            since_ms: reader.number()?,
            lease: match reader.flag()? {
                true => Some(DynamicReplicationLease { id: reader.id()?, epoch: reader.number()? }),
                false => None,
            },
            locations: Cow::Owned(reader.locations()?),
        }),
        kind::TRANSFER_ENDED => StateChange::TransferEnded { tenant: reader.text()?, key: reader.text()? },
        kind::TASK => StateChange::Task(TaskState {
            id: reader.id()?,
            task_type: TaskType(reader.code()?),
            status: TaskStatus(reader.code()?),
            payload: reader.text()?,
            client: reader.id()?,
            created_at_ms: reader.number()?,
            updated_at_ms: reader.number()?,
            message: reader.text()?,
        }),
        kind::DRAIN_JOB => {
            let (id, segments, targets) = (reader.id()?, names(reader)?, names(reader)?);
            let status = JobStatus(reader.code()?);
            StateChange::DrainJob(DrainJobState {
                id,
                segments: Cow::Owned(segments),
                targets: Cow::Owned(targets),
                status,
                concurrency: reader.number()?,
                created_at_ms: reader.number()?,
                updated_at_ms: reader.number()?,
                succeeded: reader.number()?,
                failed: reader.number()?,
                blocked: reader.number()?,
                moved_bytes: reader.number()?,
                message: reader.text()?,
            })
        }
        kind::DRAIN_MOVE_STARTED => StateChange::DrainMoveStarted {
            job: reader.id()?,
            task: reader.id()?,
            tenant: reader.text()?,
            key: reader.text()?,
            size: reader.number()?,
        },
        kind::DRAIN_MOVE_ENDED => StateChange::DrainMoveEnded {
            job: reader.id()?,
            task: reader.id()?,
            tenant: reader.text()?,
            key: reader.text()?,
            attempts: u32::try_from(reader.number()?)
                .map_err(|_| StateChangeDecodeError::Value("number of attempts"))?,
        },
        _ => return Err(StateChangeDecodeError::Value("kind")),
    })
}

fn names(reader: &mut StateChangeReader<'_>) -> Result<Vec<String>, StateChangeDecodeError> {
    let count = reader.number()?;
    if count > MAX_SEGMENT_NAMES as u64 {
        return Err(StateChangeDecodeError::Value("number of segments"));
    }
    (0..count).map(|_| reader.text().map(Cow::into_owned)).collect()
}

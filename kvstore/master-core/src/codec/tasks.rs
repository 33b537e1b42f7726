//! Facts about copies, moves, tasks and drain jobs.

use std::borrow::Cow;

use mooncake_wire::admin::JobStatus;
use mooncake_wire::types::{TaskStatus, TaskType};

use super::read::StateChangeReader;
use super::write::StateChangeWriter;
use super::{StateChangeDecodeError, kind};
use crate::change::{DrainJobState, StateChange, TaskState, TransferState};
use crate::drain::MAX_SEGMENT_NAMES;

pub(super) fn write(writer: &mut StateChangeWriter<'_>, fact: &StateChange<'_>) {
    match fact {
        StateChange::TransferStarted(it) => {
            writer.head(kind::TRANSFER_STARTED);
            writer.text(&it.tenant);
            writer.text(&it.key);
            writer.id(it.client);
            writer.number(it.source);
            writer.number(u64::from(it.is_move));
            writer.number(it.since_ms);
            writer.number(u64::from(it.lease.is_some()));
            if let Some((id, epoch)) = it.lease {
                writer.id(id);
                writer.number(epoch);
            }
            writer.locations(&it.locations);
        }
        StateChange::TransferEnded { tenant, key } => {
            writer.head(kind::TRANSFER_ENDED);
            writer.text(tenant);
            writer.text(key);
        }
        StateChange::Task(it) => {
            writer.head(kind::TASK);
            writer.id(it.id);
            writer.code(it.task_type.0);
            writer.code(it.status.0);
            writer.text(&it.payload);
            writer.id(it.client);
            writer.numbers([it.created_at_ms, it.updated_at_ms]);
            writer.text(&it.message);
        }
        StateChange::DrainJob(it) => {
            writer.head(kind::DRAIN_JOB);
            writer.id(it.id);
            for names in [&it.segments, &it.targets] {
                writer.number(names.len() as u64);
                names.iter().for_each(|name| writer.text(name));
            }
            writer.code(it.status.0);
            writer.numbers([it.concurrency, it.created_at_ms, it.updated_at_ms]);
            writer.numbers([it.succeeded, it.failed, it.blocked, it.moved_bytes]);
            writer.text(&it.message);
        }
        StateChange::DrainMoveStarted { job, task, tenant, key, size } => {
            writer.head(kind::DRAIN_MOVE_STARTED);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(*size);
        }
        StateChange::DrainMoveEnded { job, task, tenant, key, attempts: tries } => {
            writer.head(kind::DRAIN_MOVE_ENDED);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(u64::from(*tries));
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
            lease: if reader.flag()? { Some((reader.id()?, reader.number()?)) } else { None },
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
                .map_err(|_| StateChangeDecodeError::Value("number of tries"))?,
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

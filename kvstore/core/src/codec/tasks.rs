//! Facts about copies, moves, tasks and drain jobs.

use std::borrow::Cow;

use mooncake_wire::admin::JobStatus;
use mooncake_wire::types::{TaskStatus, TaskType};

use super::read::Reader;
use super::write::Writer;
use super::{DecodeError, kind};
use crate::drain::MAX_NAMES;
use crate::fact::{DrainState, Fact, TaskState, TransferState};

pub(super) fn write(writer: &mut Writer<'_>, fact: &Fact<'_>) {
    match fact {
        Fact::Transferring(it) => {
            writer.head(kind::TRANSFERRING);
            writer.text(&it.tenant);
            writer.text(&it.key);
            writer.id(it.client);
            writer.number(it.source);
            writer.number(u64::from(it.moves));
            writer.number(it.since_ms);
            writer.number(u64::from(it.plan.is_some()));
            if let Some((id, epoch)) = it.plan {
                writer.id(id);
                writer.number(epoch);
            }
            writer.places(&it.places);
        }
        Fact::TransferOver { tenant, key } => {
            writer.head(kind::TRANSFER_OVER);
            writer.text(tenant);
            writer.text(key);
        }
        Fact::Task(it) => {
            writer.head(kind::TASK);
            writer.id(it.id);
            writer.code(it.task_type.0);
            writer.code(it.status.0);
            writer.text(&it.payload);
            writer.id(it.client);
            writer.numbers([it.created_at_ms, it.updated_at_ms]);
            writer.text(&it.message);
        }
        Fact::DrainJob(it) => {
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
        Fact::DrainMove { job, task, tenant, key, size } => {
            writer.head(kind::DRAIN_MOVE);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(*size);
        }
        Fact::DrainMoved { job, task, tenant, key, tries } => {
            writer.head(kind::DRAIN_MOVED);
            writer.id(*job);
            writer.id(*task);
            writer.text(tenant);
            writer.text(key);
            writer.number(u64::from(*tries));
        }
        _ => {}
    }
}

pub(super) fn read<'a>(reader: &mut Reader<'a>, kind: u8) -> Result<Fact<'a>, DecodeError> {
    Ok(match kind {
        kind::TRANSFERRING => Fact::Transferring(TransferState {
            tenant: reader.text()?,
            key: reader.text()?,
            client: reader.id()?,
            source: reader.number()?,
            moves: reader.flag()?,
            since_ms: reader.number()?,
            plan: if reader.flag()? { Some((reader.id()?, reader.number()?)) } else { None },
            places: Cow::Owned(reader.places()?),
        }),
        kind::TRANSFER_OVER => Fact::TransferOver { tenant: reader.text()?, key: reader.text()? },
        kind::TASK => Fact::Task(TaskState {
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
            Fact::DrainJob(DrainState {
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
        kind::DRAIN_MOVE => Fact::DrainMove {
            job: reader.id()?,
            task: reader.id()?,
            tenant: reader.text()?,
            key: reader.text()?,
            size: reader.number()?,
        },
        kind::DRAIN_MOVED => Fact::DrainMoved {
            job: reader.id()?,
            task: reader.id()?,
            tenant: reader.text()?,
            key: reader.text()?,
            tries: u32::try_from(reader.number()?).map_err(|_| DecodeError::Value("number of tries"))?,
        },
        _ => return Err(DecodeError::Value("kind")),
    })
}

fn names(reader: &mut Reader<'_>) -> Result<Vec<String>, DecodeError> {
    let count = reader.number()?;
    if count > MAX_NAMES as u64 {
        return Err(DecodeError::Value("number of segments"));
    }
    (0..count).map(|_| reader.text().map(Cow::into_owned)).collect()
}

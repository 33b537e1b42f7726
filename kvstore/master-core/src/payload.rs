//! JSON payloads of tasks, in Mooncake's format.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::TaskType;
use serde::Serialize;

use crate::change::DynamicReplicationLease;
use crate::requests::{CopyRequest, MoveRequest};

/// Payload of a copy task.
#[derive(Serialize)]
struct CopyPayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    targets: &'a [&'a str],
    dynamic_replication_lease_id_high: u64,
    dynamic_replication_lease_id_low: u64,
    dynamic_replication_version_epoch: u64,
}

/// Payload of a move task.
#[derive(Serialize)]
struct MovePayload<'a> {
    tenant_id: &'a str,
    key: &'a str,
    source: &'a str,
    target: &'a str,
}

/// What a task orders its client to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TaskPayload {
    pub(crate) task_type: TaskType,
    pub(crate) json: String,
}

impl TaskPayload {
    fn new(task_type: TaskType, payload: &impl Serialize) -> Result<Self, ErrorCode> {
        let json = serde_json::to_string(payload).map_err(|_| ErrorCode::SERIALIZE_FAIL)?;
        Ok(Self { task_type, json })
    }
}

pub(crate) fn copy_payload(tenant: &str, copy: &CopyRequest<'_, &str>) -> Result<TaskPayload, ErrorCode> {
    let DynamicReplicationLease { id, epoch } = copy.lease.unwrap_or_default();
    let payload = CopyPayload {
        tenant_id: tenant,
        key: copy.key,
        source: copy.source,
        targets: copy.targets,
        dynamic_replication_lease_id_high: id.first,
        dynamic_replication_lease_id_low: id.second,
        dynamic_replication_version_epoch: epoch,
    };
    TaskPayload::new(TaskType::REPLICA_COPY, &payload)
}

pub(crate) fn move_payload(tenant: &str, request: MoveRequest<'_>) -> Result<TaskPayload, ErrorCode> {
    let MoveRequest { key, source, target } = request;
    let payload = MovePayload { tenant_id: tenant, key, source, target };
    TaskPayload::new(TaskType::REPLICA_MOVE, &payload)
}

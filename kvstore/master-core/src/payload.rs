//! JSON payloads of tasks, in Mooncake's format.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::TaskType;
use serde::Serialize;

use crate::change::DynamicReplicationLease;

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

pub(crate) fn copy_payload(
    tenant: &str,
    key: &str,
    source: &str,
    targets: &[&str],
    lease: Option<DynamicReplicationLease>,
) -> Result<(TaskType, String), ErrorCode> {
    let (id, epoch) = lease.unwrap_or_default();
    let payload = CopyPayload {
        tenant_id: tenant,
        key,
        source,
        targets,
        dynamic_replication_lease_id_high: id.first,
        dynamic_replication_lease_id_low: id.second,
        dynamic_replication_version_epoch: epoch,
    };
    let json = serde_json::to_string(&payload).map_err(|_| ErrorCode::SERIALIZE_FAIL)?;
    Ok((TaskType::REPLICA_COPY, json))
}

pub(crate) fn move_payload(
    tenant: &str,
    key: &str,
    source: &str,
    target: &str,
) -> Result<(TaskType, String), ErrorCode> {
    let payload = MovePayload { tenant_id: tenant, key, source, target };
    let json = serde_json::to_string(&payload).map_err(|_| ErrorCode::SERIALIZE_FAIL)?;
    Ok((TaskType::REPLICA_MOVE, json))
}

//! Admin requests for objects.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use mooncake_wire::ErrorCode;
use mooncake_wire::admin::{
    AdminBufferDescriptor, BatchQueryKeysResponse, KeyReplicas, LocalDiskObject, RemoveAllResponse,
};
use mooncake_wire::events::mooncake::DEFAULT_TENANT;
use mooncake_wire::rpc::RpcMethod;
use mooncake_wire::types::{LocalDiskReplica, ReplicaMedium};
use moongate_master_core::{ObjectCursor, SharedReplicaDescriptor};

use super::chunked_body::{ChunkedBody, body};
use super::{AdminContext, SharedAdminContext, change, client_ids, response};
use crate::counters::CallOutcome;
use crate::query_string::QueryString;
use crate::server::MasterServer;

/// Objects that are read under one lock.
const OBJECTS_PER_LOCK: u32 = 1024;

pub(super) fn in_memory(replicas: &[SharedReplicaDescriptor]) -> Vec<AdminBufferDescriptor<'_>> {
    let buffers = replicas.iter().filter_map(|replica| match &replica.medium {
        ReplicaMedium::Memory(buffer) => Some(buffer),
        _ => None,
    });
    buffers
        .map(|buffer| AdminBufferDescriptor {
            size: buffer.size,
            address: buffer.address,
            protocol: Cow::Borrowed(&*buffer.protocol),
            endpoint: Cow::Borrowed(&*buffer.endpoint),
        })
        .collect()
}

pub(super) fn on_disks(replicas: &[SharedReplicaDescriptor]) -> Vec<LocalDiskObject> {
    let disks = replicas.iter().filter_map(|replica| match &replica.medium {
        ReplicaMedium::LocalDisk(replica) => Some(replica),
        _ => None,
    });
    let describe = |replica: &LocalDiskReplica<Arc<str>>| LocalDiskObject {
        client_id: client_ids::published(replica.client_id),
        object_size: replica.object_size,
        transport_endpoint: replica.transport_endpoint.to_string(),
    };
    disks.map(describe).collect()
}

/// Counts an HTTP request with the RPCs of the same kind.
fn count(server: &MasterServer, method: RpcMethod, failed: bool, started: Instant) {
    server.counters.add(0, method, CallOutcome { failed, ..CallOutcome::default() }, started.elapsed());
}

/// Grants a lease on the object. The key is not percent-decoded, as in Mooncake.
pub(super) async fn query_key(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let started = Instant::now();
    let server = &admin.server;
    let found = match query.raw("key").filter(|key| !key.is_empty()) {
        Some(key) => server.master.replicas(server.clock.now_ms(), DEFAULT_TENANT, key),
        None => Err(ErrorCode::OBJECT_NOT_FOUND),
    };
    count(server, RpcMethod::GetReplicaList, found.is_err(), started);
    match found {
        Ok(list) => response::data(in_memory(&list.replicas)),
        Err(code) => response::failed(code),
    }
}

/// Returns the replicas of several objects without granting leases.
pub(super) async fn batch_query_keys(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let Some(keys) = query.decoded("keys") else {
        let error = "No keys provided. Use ?keys=key1,key2,...".to_owned();
        return response::json(
            StatusCode::BAD_REQUEST,
            &BatchQueryKeysResponse::InvalidQuery { success: false, error },
        );
    };
    let keys: Vec<&str> = keys.split(',').collect();
    let found = admin.server.master.peek(DEFAULT_TENANT, &keys);
    let mut data = BTreeMap::new();
    for (key, found) in keys.iter().zip(&found) {
        let entry = match found {
            Ok(replicas) => {
                let local_disk_values = Some(on_disks(replicas)).filter(|disks| !disks.is_empty());
                let values = Some(in_memory(replicas));
                KeyReplicas { ok: true, values, local_disk_values, ..KeyReplicas::default() }
            }
            Err(code) => KeyReplicas { error: code.name().map(str::to_owned), ..KeyReplicas::default() },
        };
        data.insert((*key).to_owned(), entry);
    }
    response::ok(&BatchQueryKeysResponse::Found { success: true, data })
}

/// All keys, one per line.
struct KeyListBody {
    admin: Arc<AdminContext>,
    cursor: ObjectCursor,
}

impl ChunkedBody for KeyListBody {
    fn next(&mut self, out: &mut Vec<u8>) -> bool {
        let next = self.admin.server.master.keys(self.cursor, OBJECTS_PER_LOCK, |_, key| {
            out.extend_from_slice(key.as_bytes());
            out.push(b'\n');
        });
        self.cursor = next.unwrap_or_default();
        next.is_some()
    }
}

pub(super) async fn all_keys(State(admin): SharedAdminContext) -> Response {
    response::text(StatusCode::OK, body(KeyListBody { admin, cursor: ObjectCursor::default() }))
}

pub(super) async fn remove_all(State(admin): SharedAdminContext, query: QueryString) -> Response {
    let started = Instant::now();
    let force = matches!(query.raw("force"), Some("true" | "1"));
    let tenant = query.decoded("tenant_id").map(Cow::into_owned);
    let removed = change(&admin.server, move |server, now_ms, recorder| {
        server.master.remove_all(now_ms, tenant.as_deref(), force, recorder)
    });
    let removed = removed.await;
    count(&admin.server, RpcMethod::RemoveAll, removed.is_err(), started);
    match removed {
        Ok(removed_count) => response::ok(&RemoveAllResponse { success: true, removed_count }),
        Err(code) => response::failed(code),
    }
}

//! Who calls.

use mooncake_wire::rpc::{Request, RpcMethod};
use mooncake_wire::types::Uuid;

/// The client that a request names as its sender, for requests that clients make all the time.
pub(super) fn calling_client(request: &Request<&str>) -> Option<Uuid> {
    match request {
        Request::MountSegment(it) => Some(it.client_id),
        Request::ReMountSegment(it) => Some(it.client_id),
        Request::Ping(it) => Some(it.client_id),
        Request::FetchTasks(it) => Some(it.client_id),
        Request::MountLocalDiskSegment(it) | Request::OffloadObjectHeartbeat(it) => Some(it.client_id),
        Request::PutStart(it) | Request::UpsertStart(it) => Some(it.client_id),
        Request::PutEnd(it) | Request::UpsertEnd(it) => Some(it.client_id),
        Request::PutRevoke(it) | Request::UpsertRevoke(it) => Some(it.client_id),
        Request::BatchPutStart(it) | Request::BatchUpsertStart(it) => Some(it.client_id),
        Request::BatchPutEnd(it) => Some(it.client_id),
        Request::BatchPutRevoke(it) => Some(it.client_id),
        _ => None,
    }
}

/// Whether only clients make this call that lend memory.
pub(super) fn is_node_only(method: RpcMethod) -> bool {
    matches!(method, RpcMethod::Ping | RpcMethod::MountSegment | RpcMethod::ReMountSegment)
}

//! Identifies the client of a request.

use mooncake_wire::rpc::{Request, RpcMethod};
use mooncake_wire::types::Uuid;

/// The client id in a request, for request types that clients send regularly.
pub(super) fn calling_client(request: &Request<&str>) -> Option<Uuid> {
    match request {
        Request::MountSegment(arguments) => Some(arguments.client_id),
        Request::ReMountSegment(arguments) => Some(arguments.client_id),
        Request::Ping(arguments) => Some(arguments.client_id),
        Request::FetchTasks(arguments) => Some(arguments.client_id),
        Request::MountLocalDiskSegment(arguments) | Request::OffloadObjectHeartbeat(arguments) => {
            Some(arguments.client_id)
        }
        Request::RegisterPrefetchTask(arguments) => Some(arguments.client_id),
        Request::PutStart(arguments) | Request::UpsertStart(arguments) => Some(arguments.client_id),
        Request::PutEnd(arguments) | Request::UpsertEnd(arguments) => Some(arguments.client_id),
        Request::PutRevoke(arguments) | Request::UpsertRevoke(arguments) => Some(arguments.client_id),
        Request::BatchPutStart(arguments) | Request::BatchUpsertStart(arguments) => Some(arguments.client_id),
        Request::BatchPutEnd(arguments) => Some(arguments.client_id),
        Request::BatchPutRevoke(arguments) => Some(arguments.client_id),
        _ => None,
    }
}

/// Whether only store nodes (clients that register segments) send this method.
pub(super) fn is_node_only(method: RpcMethod) -> bool {
    matches!(method, RpcMethod::Ping | RpcMethod::MountSegment | RpcMethod::ReMountSegment)
}

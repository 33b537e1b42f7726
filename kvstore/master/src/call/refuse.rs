//! Rejects calls whose changes cannot be persisted.

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{Request, RpcMethod};

/// Error code for a change that cannot be persisted: the disk is full or broken.
pub(super) const NOT_PERSISTED: ErrorCode = ErrorCode::PERSISTENT_FAIL;

/// A reply that rejects a call.
pub(super) trait RefusedReply {
    /// The reply to a rejected call with this number of objects.
    fn refused(code: ErrorCode, objects: usize) -> Self;
}

impl<T> RefusedReply for Result<T, ErrorCode> {
    fn refused(code: ErrorCode, _: usize) -> Self {
        Err(code)
    }
}

impl<T> RefusedReply for Vec<Result<T, ErrorCode>> {
    fn refused(code: ErrorCode, objects: usize) -> Self {
        (0..objects).map(|_| Err(code)).collect()
    }
}

impl RefusedReply for i64 {
    fn refused(code: ErrorCode, _: usize) -> Self {
        code.0.into()
    }
}

/// Whether a successful reply promises that a change is durable. Heartbeats and repeated mounts promise nothing: nodes send them again
/// after a restart, and reads from a node that was disconnected for a moment depend on them.
pub(super) fn is_durable_change(method: RpcMethod) -> bool {
    !matches!(
        method,
        RpcMethod::ExistKey
            | RpcMethod::BatchExistKey
            | RpcMethod::ProbeKey
            | RpcMethod::BatchProbeKey
            | RpcMethod::BatchQueryIp
            | RpcMethod::GetReplicaListByRegex
            | RpcMethod::GetReplicaList
            | RpcMethod::BatchGetReplicaList
            | RpcMethod::GetReplicaListForAdmin
            | RpcMethod::BatchGetReplicaListForAdmin
            | RpcMethod::RegisterPrefetchTask
            | RpcMethod::ReMountSegment
            | RpcMethod::ReMountNoFSegment
            | RpcMethod::GetAllNoFSegments
            | RpcMethod::GetNoFSegmentsByName
            | RpcMethod::Ping
            | RpcMethod::GetFsdir
            | RpcMethod::QuerySegmentStatus
            | RpcMethod::QuerySegmentStatusById
            | RpcMethod::GetStorageConfig
            | RpcMethod::ServiceReady
            | RpcMethod::ReportSsdCapacity
            | RpcMethod::PollRemoveAll
            | RpcMethod::QueryTask
    )
}

/// Number of objects in a batch; 1 for other calls.
pub(super) fn object_count(request: &Request<&str>) -> usize {
    match request {
        Request::BatchPutStart(arguments) | Request::BatchUpsertStart(arguments) => arguments.keys.len(),
        Request::BatchPutEnd(arguments) => arguments.objects.len(),
        Request::BatchUpsertEnd(arguments) => arguments.objects.len(),
        Request::BatchPutRevoke(arguments) => arguments.keys.len(),
        Request::BatchUpsertRevoke(arguments) => arguments.keys.len(),
        Request::BatchRemove(arguments) => arguments.keys.len(),
        Request::BatchEvictDiskReplica(arguments) => arguments.keys.len(),
        _ => 1,
    }
}

//! Calls that are refused because their changes cannot be kept.

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{Request, RpcMethod};

/// The code for a change that cannot be kept: the disk is full or broken.
pub(super) const NOT_PERSISTED: ErrorCode = ErrorCode::PERSISTENT_FAIL;

/// A reply to a refused call.
pub(super) trait RefusedReply {
    /// The reply to a call about so many objects.
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

/// Whether success of a call means that a change is durable. Heartbeats and repeated mounts do not: they are made again after a restart, and reads of a node that was gone for a moment depend on them.
pub(super) fn is_durable_change(method: RpcMethod) -> bool {
    !matches!(
        method,
        RpcMethod::ExistKey
            | RpcMethod::BatchExistKey
            | RpcMethod::BatchQueryIp
            | RpcMethod::GetReplicaListByRegex
            | RpcMethod::GetReplicaList
            | RpcMethod::BatchGetReplicaList
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

/// The objects that a batch is about; 1 for other calls.
pub(super) fn object_count(request: &Request<&str>) -> usize {
    match request {
        Request::BatchPutStart(it) | Request::BatchUpsertStart(it) => it.keys.len(),
        Request::BatchPutEnd(it) => it.objects.len(),
        Request::BatchUpsertEnd(it) => it.objects.len(),
        Request::BatchPutRevoke(it) => it.keys.len(),
        Request::BatchUpsertRevoke(it) => it.keys.len(),
        Request::BatchRemove(it) => it.keys.len(),
        Request::BatchEvictDiskReplica(it) => it.keys.len(),
        _ => 1,
    }
}

//! What needs disks, NVMe over fabrics or a distributed file system. There are none behind this master, and it answers
//! as Mooncake's own does where there are none.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::OffloadTasks;

use super::serve;

serve! {
    MountNoFSegment(_, _) => Err(ErrorCode::NOT_SUPPORTED),
    ReMountNoFSegment(_, _) => Err(ErrorCode::NOT_SUPPORTED),
    UnmountNoFSegment(_, _) => Err(ErrorCode::NOT_SUPPORTED),
    GetAllNoFSegments(_, _) => Ok(Vec::new()),
    GetNoFSegmentsByName(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    MountLocalDiskSegment(_, _) => Err(ErrorCode::UNABLE_OFFLOAD),
    UnmountLocalDiskSegment(_, _) => Err(ErrorCode::UNABLE_OFFLOAD),
    OffloadObjectHeartbeat(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    ReportSsdCapacity(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    NotifyOffloadSuccess(_, _) => Err(ErrorCode::UNABLE_OFFLOAD),
    PromotionObjectHeartbeat(_, _) => Ok(OffloadTasks(Vec::new())),
    PromotionAllocStart(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    NotifyPromotionSuccess(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    NotifyPromotionFailure(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    EvictDiskReplica(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    BatchEvictDiskReplica(_, it) => it.keys.iter().map(|_| Err(ErrorCode::OBJECT_NOT_FOUND)).collect(),
    PollRemoveAll(_, _) => Ok(false),
}

//! What needs disks, NVMe over fabrics or a distributed file system. There are none behind this master, and it answers
//! as Mooncake's own does where there are none.

use mooncake_wire::ErrorCode;
use moongate_kvcore::Master;

use super::serve;

/// Removes nothing from an object that is only in memory.
fn no_disk_replica(core: &Master, tenant: &str, key: &str) -> Result<(), ErrorCode> {
    let found = core.peek(tenant, &[key]).pop();
    if found == Some(Err(ErrorCode::OBJECT_NOT_FOUND)) { Err(ErrorCode::OBJECT_NOT_FOUND) } else { Ok(()) }
}

serve! {
    MountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    ReMountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    UnmountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    GetAllNoFSegments(_, _) => Ok(Vec::new()),
    GetNoFSegmentsByName(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    MountLocalDiskSegment(_, _) => Err(ErrorCode::UNABLE_OFFLOAD),
    UnmountLocalDiskSegment(_, _) => Err(ErrorCode::UNABLE_OFFLOAD),
    OffloadObjectHeartbeat(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    ReportSsdCapacity(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    // There is nothing that could have been asked for.
    NotifyOffloadSuccess(_, it) => {
        if it.tasks.is_empty() { Ok(()) } else { Err(ErrorCode::UNABLE_OFFLOAD) }
    },
    PromotionObjectHeartbeat(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    PromotionAllocStart(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    NotifyPromotionSuccess(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    NotifyPromotionFailure(_, _) => Err(ErrorCode::OBJECT_NOT_FOUND),
    EvictDiskReplica(call, it) => no_disk_replica(call.core, it.tenant, it.key),
    BatchEvictDiskReplica(call, it) => {
        it.keys.iter().map(|key| no_disk_replica(call.core, it.tenant, key)).collect()
    },
    PollRemoveAll(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
}

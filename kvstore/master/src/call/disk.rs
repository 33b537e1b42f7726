//! RPCs for the disks of nodes. RPCs for NVMe over Fabrics or a shared file system, neither of which this master supports, get the same
//! reply as from a Mooncake master without them.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::Uuid;
use moongate_master_core::ClientObjectKey;

use super::serve;

fn object<'a>(client: Uuid, tenant: &'a str, key: &'a str) -> ClientObjectKey<'a> {
    ClientObjectKey { client, tenant, key }
}

serve! {
    MountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    ReMountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    UnmountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    GetAllNoFSegments(_, _) => Ok(Vec::new()),
    GetNoFSegmentsByName(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    MountLocalDiskSegment(call, args) => {
        call.core.mount_disk(call.now_ms, args.client_id, args.enable_offloading, call.effects)
    },
    UnmountLocalDiskSegment(call, args) => call.core.unmount_disk(call.now_ms, args.client_id, call.effects),
    OffloadObjectHeartbeat[String](call, args) => {
        call.core.fetch_offloads(call.now_ms, args.client_id, args.enable_offloading, call.effects)
    },
    ReportSsdCapacity(call, args) => call.core.set_disk_capacity(args.client_id, args.total_bytes),
    NotifyOffloadSuccess(call, args) => {
        call.core.offloaded(call.now_ms, args.client_id, &args.tasks, &args.stored, call.effects)
    },
    PromotionObjectHeartbeat[String](call, args) => call.core.fetch_promotions(args.client_id),
    PromotionAllocStart(call, args) => {
        let object = object(args.client_id, args.tenant, args.key);
        let started = call.core.promotion_start(call.now_ms, object, args.size, &args.preferred_segments, call.effects);
        call.grant(AccessRights::Write, started.iter().map(|allocation| &allocation.memory));
        started
    },
    NotifyPromotionSuccess(call, args) => {
        call.core.promotion_end(call.now_ms, object(args.client_id, args.tenant, args.key), call.effects)
    },
    NotifyPromotionFailure(call, args) => {
        call.core.promotion_revoke(call.now_ms, object(args.client_id, args.tenant, args.key), call.effects)
    },
    EvictDiskReplica(call, args) => {
        call.core.evict_disk_copy(call.now_ms, args.client_id, args.tenant, args.key, args.replica_type, call.effects)
    },
    BatchEvictDiskReplica(call, args) => {
        let mut evict = |key: &&str| {
            call.core.evict_disk_copy(call.now_ms, args.client_id, args.tenant, key, args.replica_type, call.effects)
        };
        args.keys.iter().map(&mut evict).collect()
    },
    PollRemoveAll(call, args) => call.core.request_remove_all(args.client_id),
}

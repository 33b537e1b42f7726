//! RPCs for the disks of nodes. RPCs for NVMe over Fabrics or a shared file system, neither of which this master supports, get the same
//! reply as from a Mooncake master without them.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use moongate_master_core::{OffloadReport, PromotionRequest};

use super::serve;

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
        let report = OffloadReport { tasks: &args.tasks, stored: &args.stored };
        call.core.offloaded(call.now_ms, args.client_id, &report, call.effects)
    },
    PromotionObjectHeartbeat[String](call, args) => call.core.fetch_promotions(args.client_id),
    RegisterPrefetchTask(call, args) => {
        call.core.register_prefetch(call.context(args.client_id, args.tenant), args.key)
    },
    PromotionAllocStart(call, args) => {
        let request = PromotionRequest { key: args.key, size: args.size, preferred: &args.preferred_segments };
        let started = call.core.promotion_start(call.context(args.client_id, args.tenant), &request, call.effects);
        call.reply.grant(AccessRights::Write, started.iter().map(|allocation| &allocation.memory));
        started
    },
    NotifyPromotionSuccess(call, args) => {
        call.core.promotion_end(call.context(args.client_id, args.tenant), args.key, call.effects)
    },
    NotifyPromotionFailure(call, args) => {
        call.core.promotion_revoke(call.context(args.client_id, args.tenant), args.key, call.effects)
    },
    EvictDiskReplica(call, args) => {
        call.core.evict_disk_copy(call.context(args.client_id, args.tenant), args.key, args.replica_type, call.effects)
    },
    EvictDiskReplicaIfCurrent(call, args) => {
        let (context, replica) =
            (call.context(args.client_id, args.tenant), (args.replica_type, args.replica_id));
        call.core.evict_current_disk_copy(context, args.key, replica, call.effects)
    },
    BatchEvictDiskReplica(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let evict = |key: &&str| call.core.evict_disk_copy(context, key, args.replica_type, call.effects);
        args.keys.iter().map(evict).collect()
    },
    PollRemoveAll(call, args) => call.core.request_remove_all(args.client_id),
}

//! Disks of nodes; and what needs NVMe over fabrics or a shared file system, of which there are none behind this master:
//! that is answered as Mooncake's own does where there are none.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::Uuid;
use moongate_master_core::ClientObjectKey;

use super::serve;

fn work<'a>(client: Uuid, tenant: &'a str, key: &'a str) -> ClientObjectKey<'a> {
    ClientObjectKey { client, tenant, key }
}

serve! {
    MountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    ReMountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    UnmountNoFSegment(_, _) => Err(ErrorCode::UNAVAILABLE_IN_CURRENT_MODE),
    GetAllNoFSegments(_, _) => Ok(Vec::new()),
    GetNoFSegmentsByName(_, _) => Err(ErrorCode::SEGMENT_NOT_FOUND),
    MountLocalDiskSegment(call, it) => {
        call.core.mount_disk(call.now_ms, it.client_id, it.enable_offloading, call.effects)
    },
    UnmountLocalDiskSegment(call, it) => call.core.unmount_disk(call.now_ms, it.client_id, call.effects),
    OffloadObjectHeartbeat[String](call, it) => {
        call.core.fetch_offloads(call.now_ms, it.client_id, it.enable_offloading, call.effects)
    },
    ReportSsdCapacity(call, it) => call.core.set_disk_capacity(it.client_id, it.total_bytes),
    NotifyOffloadSuccess(call, it) => {
        call.core.offloaded(call.now_ms, it.client_id, &it.tasks, &it.stored, call.effects)
    },
    PromotionObjectHeartbeat[String](call, it) => call.core.fetch_promotions(it.client_id),
    PromotionAllocStart(call, it) => {
        let work = work(it.client_id, it.tenant, it.key);
        let started = call.core.promotion_start(call.now_ms, work, it.size, &it.preferred_segments, call.effects);
        call.grant(AccessRights::Write, started.iter().map(|room| &room.memory));
        started
    },
    NotifyPromotionSuccess(call, it) => {
        call.core.promotion_end(call.now_ms, work(it.client_id, it.tenant, it.key), call.effects)
    },
    NotifyPromotionFailure(call, it) => {
        call.core.promotion_revoke(call.now_ms, work(it.client_id, it.tenant, it.key), call.effects)
    },
    EvictDiskReplica(call, it) => {
        call.core.evict_disk_copy(call.now_ms, it.client_id, it.tenant, it.key, it.replica_type, call.effects)
    },
    BatchEvictDiskReplica(call, it) => {
        let mut evict = |key: &&str| {
            call.core.evict_disk_copy(call.now_ms, it.client_id, it.tenant, key, it.replica_type, call.effects)
        };
        it.keys.iter().map(&mut evict).collect()
    },
    PollRemoveAll(call, it) => call.core.request_remove_all(it.client_id),
}

//! Nodes and what they lend.

use std::sync::Arc;

use mooncake_wire::types::DEFAULT_TENANT;

use super::serve;

/// What every release since 0.3.8 answers, whatever its layouts: clients compare it with their own.
const VERSION: &str = "2.0.0";

serve! {
    ServiceReady[&'static str](_, _) => Ok(VERSION),
    GetFsdir[String](call, _) => Ok(call.server.storage.fsdir.clone()),
    GetStorageConfig[String](call, _) => Ok(call.server.storage.clone()),
    MountSegment(call, it) => call.core.mount(call.now_ms, &it.segment, it.client_id, call.effects),
    ReMountSegment(call, it) => call.core.remount(call.now_ms, &it.segments, it.client_id, call.effects),
    UnmountSegment(call, it) => call.core.unmount(call.now_ms, it.segment_id, it.client_id, call.effects),
    GracefulUnmountSegment(call, it) => {
        call.core.graceful_unmount(call.now_ms, it.segment_id, it.client_id, it.grace_period_ms, call.effects)
    },
    QuerySegmentStatus(call, it) => call.core.segment_status(it.name),
    QuerySegmentStatusById(call, it) => call.core.segment_status_by_id(it.segment_id),
    Ping(call, it) => Ok(call.core.ping(call.now_ms, it.client_id)),
    BatchQueryIp[String](call, it) => Ok(call.core.query_ip(&it.client_ids)),
    BatchReplicaClear(call, it) => {
        let cleared =
            call.core.replica_clear(call.now_ms, DEFAULT_TENANT, &it.keys, it.client_id, it.segment, call.effects);
        Ok(cleared.into_iter().map(Arc::from).collect())
    },
}

//! RPCs for nodes and their segments.

use std::sync::Arc;

use moongate_master_core::ClientSegment;

use super::serve;

/// Reply of every release since 0.3.8, whatever its layouts: clients compare it with their own version.
pub(crate) const PROTOCOL_VERSION: &str = "2.0.0";

serve! {
    ServiceReady[&'static str](_, _) => Ok(PROTOCOL_VERSION),
    GetFsdir[String](call, _) => Ok(call.server.storage.fsdir.clone()),
    GetStorageConfig[String](call, _) => Ok(call.server.storage.clone()),
    MountSegment(call, args) => call.core.mount(call.now_ms, &args.segment, args.client_id, call.effects),
    ReMountSegment(call, args) => call.core.remount(call.now_ms, &args.segments, args.client_id, call.effects),
    UnmountSegment(call, args) => {
        let segment = ClientSegment { segment: args.segment_id, client: args.client_id };
        call.core.unmount(call.now_ms, segment, call.effects)
    },
    GracefulUnmountSegment(call, args) => {
        let segment = ClientSegment { segment: args.segment_id, client: args.client_id };
        call.core.graceful_unmount(call.now_ms, segment, args.grace_period_ms, call.effects)
    },
    QuerySegmentStatus(call, args) => call.core.segment_status(args.name),
    QuerySegmentStatusById(call, args) => call.core.segment_status_by_id(args.segment_id),
    Ping(call, args) => Ok(call.core.ping(call.now_ms, args.client_id)),
    BatchQueryIp[String](call, args) => Ok(call.core.query_ip(&args.client_ids)),
    BatchReplicaClear(call, args) => {
        let context = call.context(args.client_id, args.tenant);
        let cleared = call.core.replica_clear(context, &args.keys, args.segment, call.effects);
        Ok(cleared.into_iter().map(Arc::from).collect())
    },
}

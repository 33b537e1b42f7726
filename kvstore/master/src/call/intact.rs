//! Moongate's RPC for the intact memory ranges of a node.

use bytes::BytesMut;
use mooncake_wire::frame::{RequestHeader, RpcFault};
use mooncake_wire::intact_ranges::{IntactRangesArguments, encode_reply};
use moongate_master_core::{IntactRanges, MasterCore};

use crate::recorder::FactRecorder;

/// Handles a node's report of the ranges that were completely written before its restart.
///
/// # Errors
/// The fault to reply with. Unknown function ids end here too.
pub(super) fn handle(
    core: &MasterCore,
    now_ms: u64,
    (header, body): (RequestHeader, &[u8]),
    fx: &mut FactRecorder,
    out: &mut BytesMut,
) -> Result<(), RpcFault> {
    let arguments = IntactRangesArguments::decode(header.function_id, body)?;
    let intact = IntactRanges {
        from: arguments.from,
        to: arguments.to,
        starts: &arguments.starts,
        ends: &arguments.ends,
    };
    let reply = core.retain_intact(now_ms, arguments.segment_id, arguments.client_id, intact, fx);
    if let Ok(lost @ 1..) = reply {
        tracing::info!(segment = %arguments.segment_id, replicas = lost, "dropped replicas that were incomplete when their node restarted");
    }
    encode_reply(header.sequence, reply, out).map_err(|_| RpcFault::invalid_argument())
}

//! Moongate's RPC for the intact memory ranges of a node.

use mooncake_wire::frame::RpcFault;
use mooncake_wire::intact_ranges::{IntactRangesArguments, encode_reply};
use moongate_master_core::{ClientSegment, IntactRanges};

use super::ExtensionCall;

/// Handles a node's report of the ranges that were completely written before its restart.
///
/// # Errors
/// The fault to reply with. Unknown function ids end here too.
pub(super) fn handle(call: ExtensionCall<'_>, function_id: u32, body: &[u8]) -> Result<(), RpcFault> {
    let arguments = IntactRangesArguments::decode(function_id, body)?;
    let intact = IntactRanges {
        from: arguments.from,
        to: arguments.to,
        starts: &arguments.starts,
        ends: &arguments.ends,
    };
    let segment = ClientSegment { segment: arguments.segment_id, client: arguments.client_id };
    let reply = call.server.master.retain_intact(call.now_ms, segment, intact, call.effects);
    if let Ok(lost @ 1..) = reply {
        tracing::info!(segment = %arguments.segment_id, replicas = lost, "dropped replicas that were incomplete when their node restarted");
    }
    encode_reply(call.sequence, reply, call.out).map_err(|_| RpcFault::invalid_argument())
}

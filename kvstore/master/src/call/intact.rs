//! What nodes of ours tell beside Mooncake's RPCs.

use bytes::BytesMut;
use mooncake_wire::frame::{RequestHeader, RpcFault};
use mooncake_wire::intact_ranges::{IntactRangesArguments, encode_reply};
use moongate_master_core::{IntactRanges, MasterCore};

use crate::journal::FactRecorder;

/// Answers a node that tells which parts of its memory are whole.
///
/// # Errors
/// The fault to be answered, also to all other calls.
pub(super) fn handle(
    core: &MasterCore,
    now_ms: u64,
    (header, body): (RequestHeader, &[u8]),
    fx: &mut FactRecorder,
    out: &mut BytesMut,
) -> Result<(), RpcFault> {
    let it = IntactRangesArguments::decode(header.function_id, body)?;
    let whole = IntactRanges { from: it.from, to: it.to, starts: &it.starts, ends: &it.ends };
    let reply = core.retain_intact(now_ms, it.segment_id, it.client_id, whole, fx);
    if let Ok(lost @ 1..) = reply {
        tracing::info!(segment = %it.segment_id, replicas = lost, "a node was restarted before these were written to their end");
    }
    encode_reply(header.sequence, reply, out).map_err(|_| RpcFault::invalid_argument())
}

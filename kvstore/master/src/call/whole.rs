//! What nodes of ours tell beside Mooncake's RPCs.

use bytes::BytesMut;
use mooncake_wire::frame::{Fault, RequestHeader};
use mooncake_wire::whole::{WholeArguments, encode_reply};
use moongate_kvcore::{Master, Whole};

use crate::journal::Recorder;

/// Answers a node that tells which parts of its memory are whole.
///
/// # Errors
/// The fault to be answered, also to all other calls.
pub(super) fn answer(
    core: &Master,
    now_ms: u64,
    (header, body): (RequestHeader, &[u8]),
    fx: &mut Recorder,
    out: &mut BytesMut,
) -> Result<(), Fault> {
    let it = WholeArguments::decode(header.function_id, body)?;
    let whole = Whole { from: it.from, to: it.to, starts: &it.starts, ends: &it.ends };
    let reply = core.keep_whole(now_ms, it.segment_id, it.client_id, whole, fx);
    if let Ok(lost @ 1..) = reply {
        tracing::info!(segment = %it.segment_id, replicas = lost, "a node was restarted before these were written to their end");
    }
    encode_reply(header.sequence, reply, out).map_err(|_| Fault::invalid_argument())
}

//! Receives the keys of segments, with which capabilities are signed.

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::{SegmentKeyArguments, encode_reply};
use mooncake_wire::frame::RpcFault;
use moongate_master_core::{ClientSegment, SegmentRange};

use super::ExtensionCall;
use crate::capabilities::KeyedSegment;

/// Registers the key of a segment that a node sent, and replies.
///
/// # Errors
/// The fault to reply with.
pub(super) fn receive_key(call: ExtensionCall<'_>, arguments: &SegmentKeyArguments) -> Result<(), RpcFault> {
    let ExtensionCall { server, now_ms, sequence, out, .. } = call;
    let key = arguments.segment_key().ok_or_else(RpcFault::invalid_argument)?;
    let segment = ClientSegment { segment: arguments.segment_id, client: arguments.client_id };
    let reply = server.master.segment_range(segment).and_then(|SegmentRange { endpoint, base, size }| {
        let segment = KeyedSegment {
            id: arguments.segment_id,
            base,
            size,
            key,
            clock_ms: arguments.clock_ms,
            received_ms: now_ms,
        };
        let is_registered = server.capabilities.register(endpoint, segment);
        if is_registered { Ok(()) } else { Err(ErrorCode::NO_AVAILABLE_HANDLE) }
    });
    encode_reply(sequence, reply, out).map_err(|_| RpcFault::invalid_argument())
}

//! An RPC in addition to Mooncake's, by which a Moongate node that is about to be removed has its objects moved to other nodes. A master
//! without this function responds with the fault `NOT_REGISTERED`.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments};
use crate::rpc::MasterResult;
use crate::types::Uuid;

const DIALECT: Dialect = Dialect::NEWEST;

/// A node whose objects are to be moved away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeDrainArguments {
    pub client_id: Uuid,
    /// Whether the node stays after all: its segments accept objects again.
    pub is_cancelled: bool,
}

arguments! { NodeDrainArguments { client_id, is_cancelled } }

struct NodeDrainSignatures {
    function_id: u32,
    arguments: TypeSignature,
    reply: TypeSignature,
}

static SIGNATURES: LazyLock<NodeDrainSignatures> = LazyLock::new(|| NodeDrainSignatures {
    function_id: pack::md5_prefix(b"moongate::Master::DrainNode"),
    arguments: TypeSignature::of::<NodeDrainArguments>(DIALECT),
    reply: TypeSignature::of::<MasterResult<u64>>(DIALECT),
});

impl NodeDrainArguments {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.function_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.arguments, DIALECT, out))
    }

    /// Decodes a request; `None` for another function.
    ///
    /// # Errors
    /// The fault to respond with.
    pub fn decode(function_id: u32, body: &[u8]) -> Result<Option<Self>, RpcFault> {
        if function_id != SIGNATURES.function_id {
            return Ok(None);
        }
        let decoded = pack::decode(body, &SIGNATURES.arguments, DIALECT);
        decoded.map(Some).map_err(|_| RpcFault::invalid_argument())
    }
}

/// Appends the reply: the number of objects that are left on the node, at least 1 until all segments are drained.
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
pub fn encode_reply(sequence: u32, reply: MasterResult<u64>, out: &mut BytesMut) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &SIGNATURES.reply, DIALECT, out)
    })
}

/// Reads the reply.
///
/// # Errors
/// When the body is not such a reply.
pub fn decode_reply(body: &[u8]) -> Result<MasterResult<u64>, UnpackError> {
    pack::decode(body, &SIGNATURES.reply, DIALECT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn requests_round_trip_and_malformed_ones_are_rejected() {
        let drain = NodeDrainArguments { client_id: Uuid { first: 1, second: 2 }, is_cancelled: true };
        let mut out = BytesMut::new();
        drain.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        let function = frame.header.function_id;
        assert_eq!(NodeDrainArguments::decode(function, frame.body), Ok(Some(drain)));
        assert_eq!(NodeDrainArguments::decode(1, frame.body), Ok(None));
        let truncated = NodeDrainArguments::decode(function, &frame.body[1..]);
        assert_eq!(truncated, Err(RpcFault::invalid_argument()));
        out.clear();
        encode_reply(7, Ok(3), &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(decode_reply(frame.body), Ok(Ok(3)));
    }
}

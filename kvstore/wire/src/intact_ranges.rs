//! An RPC in addition to Mooncake's, by which a Moongate node reports after a restart which ranges of its memory are intact. A master
//! without this function responds with the fault `NOT_REGISTERED` and keeps returning the other replicas to readers, whose reads the
//! node rejects.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments};
use crate::rpc::MasterResult;
use crate::types::Uuid;

const DIALECT: Dialect = Dialect::NEWEST;

/// Intact ranges of a segment between two offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntactRangesArguments {
    /// Client that owns the segment.
    pub client_id: Uuid,
    pub segment_id: Uuid,
    /// Start of the reported part of the segment.
    pub from: u64,
    /// End of the reported part of the segment (exclusive).
    pub to: u64,
    /// Start offsets of the intact ranges, ascending.
    pub starts: Vec<u64>,
    /// End offsets of the intact ranges (exclusive). The last one may exceed `to`.
    pub ends: Vec<u64>,
}

arguments! { IntactRangesArguments { client_id, segment_id, from, to, starts, ends } }

struct IntactRangesSignatures {
    function_id: u32,
    arguments: TypeSignature,
    reply: TypeSignature,
}

static SIGNATURES: LazyLock<IntactRangesSignatures> = LazyLock::new(|| IntactRangesSignatures {
    function_id: pack::md5_prefix(b"moongate::Master::Whole"),
    arguments: TypeSignature::of::<IntactRangesArguments>(DIALECT),
    reply: TypeSignature::of::<MasterResult<u64>>(DIALECT),
});

impl IntactRangesArguments {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.function_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.arguments, DIALECT, out))
    }

    /// Decodes a request for this function.
    ///
    /// # Errors
    /// The fault to respond with.
    pub fn decode(function_id: u32, body: &[u8]) -> Result<Self, RpcFault> {
        if function_id != SIGNATURES.function_id {
            return Err(RpcFault::not_registered());
        }
        let decoded: Self =
            pack::decode(body, &SIGNATURES.arguments, DIALECT).map_err(|_| RpcFault::invalid_argument())?;
        if decoded.starts.len() == decoded.ends.len() {
            Ok(decoded)
        } else {
            Err(RpcFault::invalid_argument())
        }
    }
}

/// Appends the reply: the number of dropped replicas.
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
        let id = Uuid { first: 1, second: 2 };
        let ranges = IntactRangesArguments {
            client_id: id,
            segment_id: id,
            from: 0,
            to: 9,
            starts: vec![1, 5],
            ends: vec![2, 12],
        };
        let mut out = BytesMut::new();
        ranges.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(IntactRangesArguments::decode(frame.header.function_id, frame.body), Ok(ranges.clone()));
        assert_eq!(IntactRangesArguments::decode(1, frame.body), Err(RpcFault::not_registered()));
        let function = frame.header.function_id;
        assert_eq!(
            IntactRangesArguments::decode(function, &frame.body[1..]),
            Err(RpcFault::invalid_argument())
        );
        let mut uneven = BytesMut::new();
        IntactRangesArguments { ends: vec![2], ..ranges }.encode(7, &mut uneven).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&uneven, 1 << 20) else {
            panic!()
        };
        assert_eq!(IntactRangesArguments::decode(function, frame.body), Err(RpcFault::invalid_argument()));
        out.clear();
        encode_reply(7, Ok(3), &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(decode_reply(frame.body), Ok(Ok(3)));
    }
}

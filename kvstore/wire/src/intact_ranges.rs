//! What a node of ours tells a master of ours after a restart, beside Mooncake's RPCs: which parts of its memory are whole. A
//! master that does not know the function answers so, and goes on sending readers to the rest, who are refused there.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments};
use crate::rpc::MasterResult;
use crate::types::Uuid;

const DIALECT: Dialect = Dialect::NEWEST;

/// Which parts of a segment are whole, between two offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntactRangesArguments {
    /// Who lends it.
    pub client_id: Uuid,
    /// The segment.
    pub segment_id: Uuid,
    /// The first offset that this is about.
    pub from: u64,
    /// The offset before which it ends.
    pub to: u64,
    /// Where whole parts begin, in ascending order.
    pub starts: Vec<u64>,
    /// Where each of them ends. The last may end after `to`.
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
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.function_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.arguments, DIALECT, out))
    }

    /// Reads a request, if it is this one.
    ///
    /// # Errors
    /// The fault to be answered.
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

/// Appends the reply: how many replicas are not read any more.
///
/// # Errors
/// When it does not fit into a frame. Then nothing is appended.
pub fn encode_reply(sequence: u32, reply: MasterResult<u64>, out: &mut BytesMut) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &SIGNATURES.reply, DIALECT, out)
    })
}

/// Reads the reply.
///
/// # Errors
/// When it is none.
pub fn decode_reply(body: &[u8]) -> Result<MasterResult<u64>, UnpackError> {
    pack::decode(body, &SIGNATURES.reply, DIALECT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn it_comes_through_and_other_things_do_not() {
        let id = Uuid { first: 1, second: 2 };
        let whole = IntactRangesArguments {
            client_id: id,
            segment_id: id,
            from: 0,
            to: 9,
            starts: vec![1, 5],
            ends: vec![2, 12],
        };
        let mut out = BytesMut::new();
        whole.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(IntactRangesArguments::decode(frame.header.function_id, frame.body), Ok(whole.clone()));
        assert_eq!(IntactRangesArguments::decode(1, frame.body), Err(RpcFault::not_registered()));
        let function = frame.header.function_id;
        assert_eq!(
            IntactRangesArguments::decode(function, &frame.body[1..]),
            Err(RpcFault::invalid_argument())
        );
        let mut odd = BytesMut::new();
        IntactRangesArguments { ends: vec![2], ..whole }.encode(7, &mut odd).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&odd, 1 << 20) else {
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

//! The RPC by which a node registers the key of a segment with the master. A master accepts it only on connections with a client
//! certificate.

use std::sync::LazyLock;

use bytes::BytesMut;

use super::SegmentKey;
use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments};
use crate::rpc::MasterResult;
use crate::types::Uuid;

const DIALECT: Dialect = Dialect::NEWEST;

/// Arguments of the segment key RPC.
#[derive(Clone, PartialEq, Eq)]
pub struct SegmentKeyArguments {
    /// The node that has mounted the segment.
    pub client_id: Uuid,
    pub segment_id: Uuid,
    /// The node's clock in milliseconds, by which it checks expiry.
    pub clock_ms: u64,
    /// The key's 32 bytes as four little-endian numbers.
    pub key: Vec<u64>,
}

arguments! { SegmentKeyArguments { client_id, segment_id, clock_ms, key } }

struct SegmentKeySignatures {
    function_id: u32,
    arguments: TypeSignature,
    reply: TypeSignature,
}

static SIGNATURES: LazyLock<SegmentKeySignatures> = LazyLock::new(|| SegmentKeySignatures {
    function_id: pack::md5_prefix(b"moongate::Master::SegmentKey"),
    arguments: TypeSignature::of::<SegmentKeyArguments>(DIALECT),
    reply: TypeSignature::of::<MasterResult<()>>(DIALECT),
});

impl SegmentKeyArguments {
    /// Arguments for the key of a segment.
    #[must_use]
    pub fn new(client_id: Uuid, segment_id: Uuid, clock_ms: u64, key: &SegmentKey) -> Self {
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Self { client_id, segment_id, clock_ms, key: key.0.chunks_exact(8).map(number).collect() }
    }

    /// The key; `None` unless it has 32 bytes.
    #[must_use]
    pub fn segment_key(&self) -> Option<SegmentKey> {
        let mut bytes = [0; 32];
        if self.key.len() * 8 != bytes.len() {
            return None;
        }
        for (chunk, number) in bytes.chunks_exact_mut(8).zip(&self.key) {
            chunk.copy_from_slice(&number.to_le_bytes());
        }
        Some(SegmentKey(bytes))
    }

    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let header = RequestHeader { sequence, function_id: SIGNATURES.function_id };
        frame::write_request(out, header, |out| pack::encode(self, &SIGNATURES.arguments, DIALECT, out))
    }

    /// Decodes a request; `None` if it is for another function.
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

impl std::fmt::Debug for SegmentKeyArguments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SegmentKeyArguments").field("segment_id", &self.segment_id).finish_non_exhaustive()
    }
}

/// Appends the reply.
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
pub fn encode_reply(sequence: u32, reply: MasterResult<()>, out: &mut BytesMut) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &SIGNATURES.reply, DIALECT, out)
    })
}

/// Reads the reply.
///
/// # Errors
/// When the body is not such a reply.
pub fn decode_reply(body: &[u8]) -> Result<MasterResult<()>, UnpackError> {
    pack::decode(body, &SIGNATURES.reply, DIALECT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn requests_and_replies_round_trip() {
        let id = Uuid { first: 1, second: 2 };
        let key = SegmentKey::new(std::array::from_fn(|index| index as u8));
        let sent = SegmentKeyArguments::new(id, id, 5, &key);
        assert_eq!(sent.segment_key(), Some(key));
        assert!(!format!("{sent:?}").contains("key:"), "debug output must not contain the key");
        let mut out = BytesMut::new();
        sent.encode(7, &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(&out, 1 << 20) else {
            panic!()
        };
        let function = frame.header.function_id;
        assert_eq!(SegmentKeyArguments::decode(function, frame.body), Ok(Some(sent.clone())));
        assert_eq!(SegmentKeyArguments::decode(1, frame.body), Ok(None));
        assert!(SegmentKeyArguments::decode(function, &frame.body[1..]).is_err());
        let short = SegmentKeyArguments { key: vec![1; 3], ..sent };
        assert_eq!(short.segment_key(), None);
        out.clear();
        encode_reply(7, Ok(()), &mut out).unwrap();
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
            panic!()
        };
        assert_eq!(decode_reply(frame.body), Ok(Ok(())));
    }
}

//! RPCs in addition to Mooncake's about the masters of one store, its shards: a master states which shard it is, and a router which
//! masters there are, so that a client can call them directly. Servers without these functions respond with the fault `NOT_REGISTERED`.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, layout};
use crate::rpc::MasterResult;

const DIALECT: Dialect = Dialect::NEWEST;

/// Maximum number of shards of a store.
pub const MAX_SHARDS: u64 = 256;

/// Which shard a master is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardIdentity {
    pub index: u64,
    /// Number of shards of the store.
    pub count: u64,
}

layout! { ShardIdentity { index, count } }

impl std::fmt::Display for ShardIdentity {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}/{}", self.index, self.count)
    }
}

/// The addresses of a store's masters, in the order of the shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardList<S> {
    pub masters: Vec<S>,
}

layout! { ShardList<S> { masters } }

struct ShardSignatures {
    identity: (u32, TypeSignature),
    list: (u32, TypeSignature),
}

static SIGNATURES: LazyLock<ShardSignatures> = LazyLock::new(|| ShardSignatures {
    identity: (
        pack::md5_prefix(b"moongate::Master::ShardIdentity"),
        TypeSignature::of::<MasterResult<ShardIdentity>>(DIALECT),
    ),
    list: (
        pack::md5_prefix(b"moongate::Router::ShardList"),
        TypeSignature::of::<MasterResult<ShardList<&str>>>(DIALECT),
    ),
});

/// An RPC about shards. Neither has arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardRequest {
    /// Of a master: its [`ShardIdentity`].
    Identity,
    /// Of a router: its [`ShardList`].
    List,
}

impl ShardRequest {
    /// The request with this function id, if it is one of these.
    pub fn from_function_id(id: u32) -> Option<Self> {
        [Self::Identity, Self::List].into_iter().find(|request| request.signature().0 == id)
    }

    fn signature(self) -> &'static (u32, TypeSignature) {
        match self {
            Self::Identity => &SIGNATURES.identity,
            Self::List => &SIGNATURES.list,
        }
    }

    /// Appends a frame with this request.
    ///
    /// # Errors
    /// Never, but for the form of all encoders.
    pub fn encode(self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        frame::write_request(out, RequestHeader { sequence, function_id: self.signature().0 }, |_| Ok(()))
    }
}

/// Appends the reply to [`ShardRequest::Identity`]; `None` from a master that is the only one of its store.
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
pub fn encode_identity(
    sequence: u32,
    identity: Option<ShardIdentity>,
    out: &mut BytesMut,
) -> Result<(), PackError> {
    let Some(identity) = identity else { return RpcFault::not_registered().write(sequence, out) };
    let reply: MasterResult<ShardIdentity> = Ok(identity);
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &SIGNATURES.identity.1, DIALECT, out)
    })
}

/// Reads the reply to [`ShardRequest::Identity`].
///
/// # Errors
/// When the body is not such a reply.
pub fn decode_identity(body: &[u8]) -> Result<MasterResult<ShardIdentity>, UnpackError> {
    pack::decode(body, &SIGNATURES.identity.1, DIALECT)
}

/// Appends the reply to [`ShardRequest::List`].
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
pub fn encode_list(sequence: u32, masters: Vec<&str>, out: &mut BytesMut) -> Result<(), PackError> {
    let reply: MasterResult<ShardList<&str>> = Ok(ShardList { masters });
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &SIGNATURES.list.1, DIALECT, out)
    })
}

/// Reads the reply to [`ShardRequest::List`].
///
/// # Errors
/// When the body is not such a reply.
pub fn decode_list(body: &[u8]) -> Result<MasterResult<ShardList<String>>, UnpackError> {
    pack::decode(body, &SIGNATURES.list.1, DIALECT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameParseResult;

    #[test]
    fn requests_and_replies_survive_the_wire() {
        for request in [ShardRequest::Identity, ShardRequest::List] {
            let mut out = BytesMut::new();
            request.encode(7, &mut out).unwrap();
            let FrameParseResult::Frame(sent) = frame::parse::<RequestHeader>(&out, 100).unwrap() else {
                panic!("incomplete")
            };
            assert_eq!(ShardRequest::from_function_id(sent.header.function_id), Some(request));
            assert_eq!((sent.header.sequence, sent.body), (7, &[][..]));
        }
        let body = |out: &BytesMut| {
            let FrameParseResult::Frame(reply) = frame::parse::<ResponseHeader>(out, 1000).unwrap() else {
                panic!("incomplete")
            };
            assert_eq!(reply.header.sequence, 7);
            (reply.header.error, reply.body.to_vec())
        };
        let identity = ShardIdentity { index: 2, count: 4 };
        let mut out = BytesMut::new();
        encode_identity(7, Some(identity), &mut out).unwrap();
        assert_eq!(decode_identity(&body(&out).1), Ok(Ok(identity)));
        let mut out = BytesMut::new();
        encode_identity(7, None, &mut out).unwrap();
        assert_eq!(u16::from(body(&out).0), RpcFault::NOT_REGISTERED);
        let mut out = BytesMut::new();
        encode_list(7, vec!["a:1", "b:2"], &mut out).unwrap();
        let masters = vec!["a:1".to_owned(), "b:2".to_owned()];
        assert_eq!(decode_list(&body(&out).1), Ok(Ok(ShardList { masters })));
        assert!(decode_list(&[1, 2]).is_err());
    }
}

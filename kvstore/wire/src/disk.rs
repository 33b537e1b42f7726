//! The RPCs of a node with a disk: readers have it bring objects into its memory, and read them there.
//!
//! The node serves them on a port of its own, which a replica on its disk names
//! ([`LocalDiskReplica::transport_endpoint`](crate::types::LocalDiskReplica)). The forms are those of 0.3.13.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments, layout};
use crate::rpc::MasterResult;
use crate::types::DEFAULT_TENANT;

const DIALECT: Dialect = Dialect::NEWEST;
/// Between tenant and key in the names of objects on a disk.
const SEPARATOR: char = '\0';

/// Objects that shall be brought into memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageArguments<S> {
    /// Their names on the disk, see [`name`].
    pub names: Vec<S>,
    /// Bytes of each.
    pub sizes: Vec<i64>,
}

arguments! { StageArguments<S> { names, sizes } }

/// Objects that have been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseArguments {
    /// Which, as [`StagedObjects::batch_id`] told.
    pub batch_id: u64,
}

arguments! { ReleaseArguments { batch_id } }

/// Where objects are that were brought into memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StagedObjects<S> {
    /// Names them when they are released.
    pub batch_id: u64,
    /// The address of each.
    pub addresses: Vec<u64>,
    /// The node's `host:port`, as in replicas in memory.
    pub endpoint: S,
    /// Milliseconds for which they stay there, from when they were asked for.
    pub ttl_ms: u64,
}

layout! { StagedObjects<S> { batch_id, addresses, endpoint, ttl_ms } }

/// A request to such a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskRequest<S> {
    /// Brings objects into memory.
    Stage(StageArguments<S>),
    /// Gives their memory back.
    Release(ReleaseArguments),
}

/// What a request looks like, and its reply.
struct DiskCallSignatures {
    function_id: u32,
    arguments: TypeSignature,
    reply: TypeSignature,
}

static STAGE_SIGNATURES: LazyLock<DiskCallSignatures> = LazyLock::new(|| DiskCallSignatures {
    function_id: pack::md5_prefix(b"mooncake::RealClient::batch_get_offload_object"),
    arguments: TypeSignature::of::<StageArguments<&str>>(DIALECT),
    reply: TypeSignature::of::<MasterResult<StagedObjects<&str>>>(DIALECT),
});

static RELEASE_SIGNATURES: LazyLock<DiskCallSignatures> = LazyLock::new(|| DiskCallSignatures {
    function_id: pack::md5_prefix(b"mooncake::RealClient::release_offload_buffer"),
    arguments: TypeSignature::of::<ReleaseArguments>(DIALECT),
    reply: TypeSignature::of::<bool>(DIALECT),
});

impl DiskRequest<&str> {
    /// Appends a frame with this request.
    ///
    /// # Errors
    /// When it does not fit into a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let forms = match self {
            Self::Stage(_) => &STAGE_SIGNATURES,
            Self::Release(_) => &RELEASE_SIGNATURES,
        };
        let header = RequestHeader { sequence, function_id: forms.function_id };
        frame::write_request(out, header, |out| match self {
            Self::Stage(arguments) => pack::encode(arguments, &forms.arguments, DIALECT, out),
            Self::Release(arguments) => pack::encode(arguments, &forms.arguments, DIALECT, out),
        })
    }
}

impl DiskRequest<String> {
    /// Reads a request.
    ///
    /// # Errors
    /// The fault to be answered: there is no such function, or its arguments have another form.
    pub fn decode(function_id: u32, body: &[u8]) -> Result<Self, RpcFault> {
        let wrong = |_: UnpackError| RpcFault::invalid_argument();
        if function_id == STAGE_SIGNATURES.function_id {
            pack::decode(body, &STAGE_SIGNATURES.arguments, DIALECT).map(Self::Stage).map_err(wrong)
        } else if function_id == RELEASE_SIGNATURES.function_id {
            pack::decode(body, &RELEASE_SIGNATURES.arguments, DIALECT).map(Self::Release).map_err(wrong)
        } else {
            Err(RpcFault::not_registered())
        }
    }
}

/// Appends the reply to [`DiskRequest::Stage`].
///
/// # Errors
/// When it does not fit into a frame. Then nothing is appended.
pub fn encode_staged(
    sequence: u32,
    reply: &MasterResult<StagedObjects<&str>>,
    out: &mut BytesMut,
) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(reply, &STAGE_SIGNATURES.reply, DIALECT, out)
    })
}

/// Reads the reply to [`DiskRequest::Stage`].
///
/// # Errors
/// When it is in another form, as that of an older release.
pub fn decode_staged(body: &[u8]) -> Result<MasterResult<StagedObjects<String>>, UnpackError> {
    pack::decode(body, &STAGE_SIGNATURES.reply, DIALECT)
}

/// Appends the reply to [`DiskRequest::Release`]: whether there was such a batch.
///
/// # Errors
/// When it does not fit into a frame. Then nothing is appended.
pub fn encode_released(sequence: u32, reply: bool, out: &mut BytesMut) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &RELEASE_SIGNATURES.reply, DIALECT, out)
    })
}

/// The name on a disk of a tenant's object.
#[must_use]
pub fn name(tenant: &str, key: &str) -> String {
    format!("{tenant}{SEPARATOR}{key}")
}

/// The tenant and the key of a name. Without a tenant it is the default one's.
#[must_use]
pub fn tenant_and_key(name: &str) -> (&str, &str) {
    name.split_once(SEPARATOR).unwrap_or((DEFAULT_TENANT, name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use crate::frame::FrameParseResult;

    fn request(out: &[u8]) -> Result<DiskRequest<String>, RpcFault> {
        let Ok(FrameParseResult::Frame(frame)) = frame::parse::<RequestHeader>(out, 1 << 20) else {
            panic!()
        };
        DiskRequest::decode(frame.header.function_id, frame.body)
    }

    #[test]
    fn requests_and_replies_come_through() {
        let mut out = BytesMut::new();
        let name = name("default", "k");
        assert_eq!(tenant_and_key(&name), (DEFAULT_TENANT, "k"));
        assert_eq!(tenant_and_key("k"), (DEFAULT_TENANT, "k"));
        let stage = StageArguments { names: vec![name.as_str()], sizes: vec![77] };
        DiskRequest::Stage(stage).encode(1, &mut out).unwrap();
        let expected = StageArguments { names: vec![name], sizes: vec![77] };
        assert_eq!(request(&out), Ok(DiskRequest::Stage(expected)));
        out.clear();
        DiskRequest::Release(ReleaseArguments { batch_id: 5 }).encode(1, &mut out).unwrap();
        assert_eq!(request(&out), Ok(DiskRequest::Release(ReleaseArguments { batch_id: 5 })));
        for reply in [
            Ok(StagedObjects { batch_id: 1, addresses: vec![2, 3], endpoint: "h:1", ttl_ms: 4 }),
            Err(ErrorCode::OBJECT_NOT_FOUND),
        ] {
            out.clear();
            encode_staged(9, &reply, &mut out).unwrap();
            let Ok(FrameParseResult::Frame(frame)) = frame::parse::<ResponseHeader>(&out, 1 << 20) else {
                panic!()
            };
            let found = decode_staged(frame.body).unwrap();
            assert_eq!(found.map(|it| it.addresses), reply.map(|it| it.addresses));
        }
    }

    #[test]
    fn other_requests_are_refused() {
        assert_eq!(DiskRequest::decode(1, &[]), Err(RpcFault::not_registered()));
        assert_eq!(
            DiskRequest::decode(STAGE_SIGNATURES.function_id, &[1, 2, 3, 4]),
            Err(RpcFault::invalid_argument())
        );
    }
}

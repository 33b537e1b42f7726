//! RPCs of a node with a disk: readers request that it stages objects in its memory, and read them from there.
//!
//! The node serves them on a separate port, which the descriptor of a replica on its disk contains
//! ([`LocalDiskReplica::transport_endpoint`](crate::types::LocalDiskReplica)). The layouts are those of 0.3.13.

use std::sync::LazyLock;

use bytes::BytesMut;

use crate::dialect::Dialect;
use crate::frame::{self, RequestHeader, ResponseHeader, RpcFault};
use crate::pack::{self, PackError, TypeSignature, UnpackError, arguments, layout};
use crate::rpc::MasterResult;
use crate::types::DEFAULT_TENANT;

const DIALECT: Dialect = Dialect::NEWEST;
/// Separates tenant and key in the names of objects on a disk.
const SEPARATOR: char = '\0';

/// Objects to stage in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageArguments<S> {
    /// Names of the objects on the disk, see [`name`].
    pub names: Vec<S>,
    /// Sizes of the objects in bytes.
    pub sizes: Vec<i64>,
}

arguments! { StageArguments<S> { names, sizes } }

/// Releases staged objects after they have been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseArguments {
    /// Id of the batch, from [`StagedObjects::batch_id`].
    pub batch_id: u64,
}

arguments! { ReleaseArguments { batch_id } }

/// Locations of staged objects in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StagedObjects<S> {
    /// Id of the batch, for [`ReleaseArguments`].
    pub batch_id: u64,
    /// Addresses of the objects in the node.
    pub addresses: Vec<u64>,
    /// The node's `host:port`, as in memory replicas.
    pub endpoint: S,
    /// How long the objects stay staged, in milliseconds from the request.
    pub ttl_ms: u64,
}

layout! { StagedObjects<S> { batch_id, addresses, endpoint, ttl_ms } }

/// A request to a node with a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskRequest<S> {
    Stage(StageArguments<S>),
    /// Frees the memory of staged objects.
    Release(ReleaseArguments),
}

/// Function id and type signatures of an RPC.
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
    /// When it exceeds the size of a frame. Then nothing is appended.
    pub fn encode(&self, sequence: u32, out: &mut BytesMut) -> Result<(), PackError> {
        let signatures = match self {
            Self::Stage(_) => &STAGE_SIGNATURES,
            Self::Release(_) => &RELEASE_SIGNATURES,
        };
        let header = RequestHeader { sequence, function_id: signatures.function_id };
        frame::write_request(out, header, |out| match self {
            Self::Stage(arguments) => pack::encode(arguments, &signatures.arguments, DIALECT, out),
            Self::Release(arguments) => pack::encode(arguments, &signatures.arguments, DIALECT, out),
        })
    }
}

impl DiskRequest<String> {
    /// Reads a request.
    ///
    /// # Errors
    /// The fault to respond with: unknown function, or arguments with another layout.
    pub fn decode(function_id: u32, body: &[u8]) -> Result<Self, RpcFault> {
        let malformed = |_: UnpackError| RpcFault::invalid_argument();
        if function_id == STAGE_SIGNATURES.function_id {
            pack::decode(body, &STAGE_SIGNATURES.arguments, DIALECT).map(Self::Stage).map_err(malformed)
        } else if function_id == RELEASE_SIGNATURES.function_id {
            pack::decode(body, &RELEASE_SIGNATURES.arguments, DIALECT).map(Self::Release).map_err(malformed)
        } else {
            Err(RpcFault::not_registered())
        }
    }
}

/// Appends the reply to [`DiskRequest::Stage`].
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
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
/// When it has another layout, for example that of an older release.
pub fn decode_staged(body: &[u8]) -> Result<MasterResult<StagedObjects<String>>, UnpackError> {
    pack::decode(body, &STAGE_SIGNATURES.reply, DIALECT)
}

/// Appends the reply to [`DiskRequest::Release`]: whether the batch existed.
///
/// # Errors
/// When it exceeds the size of a frame. Then nothing is appended.
pub fn encode_released(sequence: u32, reply: bool, out: &mut BytesMut) -> Result<(), PackError> {
    frame::write_response(out, ResponseHeader { sequence, error: 0 }, |out| {
        pack::encode(&reply, &RELEASE_SIGNATURES.reply, DIALECT, out)
    })
}

/// Name of a tenant's object on a disk.
#[must_use]
pub fn name(tenant: &str, key: &str) -> String {
    format!("{tenant}{SEPARATOR}{key}")
}

/// Tenant and key of a name. A name without a tenant belongs to the default one.
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
    fn requests_and_replies_round_trip() {
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
            assert_eq!(found.map(|staged| staged.addresses), reply.map(|staged| staged.addresses));
        }
    }

    #[test]
    fn other_requests_are_rejected() {
        assert_eq!(DiskRequest::decode(1, &[]), Err(RpcFault::not_registered()));
        assert_eq!(
            DiskRequest::decode(STAGE_SIGNATURES.function_id, &[1, 2, 3, 4]),
            Err(RpcFault::invalid_argument())
        );
    }
}

//! Whole frames: a client's request as requests of shards, and their responses as one.

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, RpcFault};
use mooncake_wire::pack::{Pack, PackError, Unpack};
use mooncake_wire::rpc::{self, Request, RpcMethod, decode_reply, encode_reply, encode_request};
use mooncake_wire::{Dialect, ErrorCode};

use crate::{ShardCount, ShardIndex, ShardedRpc};

/// A request that was split into calls of shards, whose responses are to be merged.
#[derive(Debug)]
pub struct SplitRequest {
    method: RpcMethod,
    items: Vec<usize>,
}

/// The shards to call, and a request frame for each. The sequence numbers are 0.
pub type ShardFrames = Vec<(ShardIndex, BytesMut)>;

/// A shard's response.
#[derive(Clone, Debug)]
pub enum ShardResponse {
    /// The body of a reply.
    Reply(Bytes),
    /// The call was rejected before it was executed.
    Fault(RpcFault),
    /// There is no response.
    Unreachable,
}

impl SplitRequest {
    /// Splits a request that was encoded in `dialect`. Each part carries the attachment.
    ///
    /// # Errors
    /// When a part exceeds the size of a frame.
    pub fn new(
        request: Request<&str>,
        dialect: Dialect,
        attachment: &[u8],
        shards: ShardCount,
    ) -> Result<(Self, ShardFrames), PackError> {
        let method = request.method();
        let (mut frames, items) = split(request, dialect, shards)?;
        for (_, frame) in &mut frames {
            frame::attach(frame, attachment)?;
        }
        Ok((Self { method, items }, frames))
    }

    /// Appends the response in `dialect`, from the responses of the shards in the order of the frames.
    pub fn merge(&self, sequence: u32, dialect: Dialect, responses: &[ShardResponse], out: &mut BytesMut) {
        let fault = responses.iter().find_map(|response| match response {
            ShardResponse::Fault(fault) => Some(fault),
            _ => None,
        });
        let start = out.len();
        let written = match (fault, responses) {
            (Some(fault), _) => fault.write(sequence, out),
            // The usual case: a response that is passed on as it is.
            (None, [ShardResponse::Reply(body)]) if self.method.reply_dialects(body).contains(dialect) => {
                let header = frame::ResponseHeader { sequence, error: 0 };
                frame::write_response(out, header, |out| {
                    out.extend_from_slice(body);
                    Ok(())
                })
            }
            _ => merge(self, sequence, dialect, responses, out),
        };
        if written.is_err() {
            // The shards have executed the call anyway; the client retries in another form.
            out.truncate(start);
            let _ = RpcFault::invalid_argument().write(sequence, out);
        }
    }
}

type SplitFrames = (ShardFrames, Vec<usize>);

fn split_as<'a, M: ShardedRpc>(
    arguments: M::Arguments<&'a str>,
    dialect: Dialect,
    shards: ShardCount,
) -> Result<SplitFrames, PackError>
where
    M::Arguments<&'a str>: Pack,
{
    let split = M::split(arguments, shards);
    let encode = |(shard, arguments): (ShardIndex, M::Arguments<&'a str>)| {
        let mut frame = BytesMut::new();
        encode_request::<M, &str>(0, dialect, &arguments, &mut frame)?;
        Ok((shard, frame))
    };
    Ok((split.calls.into_iter().map(encode).collect::<Result<_, _>>()?, split.items))
}

fn merge_as<'a, M: ShardedRpc>(
    items: &[usize],
    sequence: u32,
    dialect: Dialect,
    responses: &'a [ShardResponse],
    out: &mut BytesMut,
) -> Result<(), PackError>
where
    M::Reply<&'a str>: Pack + Unpack<'a>,
{
    let decode = |response: &'a ShardResponse| match response {
        ShardResponse::Reply(body) => match decode_reply::<M, &str>(body) {
            Ok((reply, _)) => Ok(reply),
            Err(_) => Err(ErrorCode::INTERNAL_ERROR),
        },
        _ => Err(ErrorCode::RPC_FAIL),
    };
    let reply = M::merge(items, responses.iter().map(decode).collect());
    encode_reply::<M, &str>(sequence, dialect, &reply, out)
}

/// Every RPC is listed.
macro_rules! sharded {
    ($($method:ident)+) => {
        fn split(request: Request<&str>, dialect: Dialect, shards: ShardCount) -> Result<SplitFrames, PackError> {
            match request {
                $(Request::$method(arguments) => split_as::<rpc::$method>(arguments, dialect, shards),)+
            }
        }

        fn merge(
            request: &SplitRequest,
            sequence: u32,
            dialect: Dialect,
            responses: &[ShardResponse],
            out: &mut BytesMut,
        ) -> Result<(), PackError> {
            match request.method {
                $(RpcMethod::$method => {
                    merge_as::<rpc::$method>(&request.items, sequence, dialect, responses, out)
                })+
            }
        }
    };
}

sharded! {
    ExistKey BatchExistKey ProbeKey BatchProbeKey BatchQueryIp BatchReplicaClear
    GetReplicaListByRegex GetReplicaList BatchGetReplicaList GetReplicaListForAdmin BatchGetReplicaListForAdmin
    PutStart PutEnd PutRevoke BatchPutStart BatchPutEnd BatchPutRevoke
    UpsertStart UpsertEnd UpsertRevoke BatchUpsertStart BatchUpsertEnd BatchUpsertRevoke
    Remove RemoveByRegex RemoveAll BatchRemove
    MountSegment MountNoFSegment ReMountSegment ReMountNoFSegment UnmountSegment GracefulUnmountSegment
    UnmountNoFSegment GetAllNoFSegments GetNoFSegmentsByName
    Ping GetFsdir QuerySegmentStatus QuerySegmentStatusById GetStorageConfig ServiceReady
    MountLocalDiskSegment UnmountLocalDiskSegment OffloadObjectHeartbeat ReportSsdCapacity NotifyOffloadSuccess
    PromotionObjectHeartbeat RegisterPrefetchTask PromotionAllocStart NotifyPromotionSuccess NotifyPromotionFailure
    CopyStart DynamicReplicaCopyStart CopyEnd DynamicReplicaCopyEnd CopyRevoke DynamicReplicaCopyRevoke
    MoveStart MoveEnd MoveRevoke
    EvictDiskReplica BatchEvictDiskReplica EvictDiskReplicaIfCurrent PollRemoveAll
    CreateCopyTask CreateMoveTask QueryTask FetchTasks MarkTaskToComplete
}

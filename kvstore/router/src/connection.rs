//! The calls of one client connection.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mooncake_wire::ErrorCode;
use mooncake_wire::caller_dialect::{ConnectionDialect, DialectRegistry};
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, RpcFault, RpcFrame};
use mooncake_wire::intact_ranges::{self, IntactRangesArguments};
use mooncake_wire::node_drain::{self, NodeDrainArguments};
use mooncake_wire::pack::UnpackError;
use mooncake_wire::rpc::{self, MasterResult, Request, RpcMethod};
use mooncake_wire::shards::{ShardRequest, encode_list};
use moongate_runtime::Supervisor;
use moongate_runtime::net::TcpStream;
use moongate_store_shards::{ShardResponse, SplitRequest, split_intact_ranges};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use crate::masters::{ConnectionMasters, ShardMasters};
use crate::segment_sizes::SegmentSizes;

/// Bytes reserved for each read from the socket.
const READ_BUFFER: usize = 16 << 10;
/// Bytes of responses after which they are sent before further requests are handled.
const MAX_RESPONSE_BATCH: usize = 256 << 10;

/// What all connections share.
#[derive(Debug)]
pub(crate) struct RouterState {
    pub(crate) masters: ShardMasters,
    pub(crate) dialects: DialectRegistry,
    pub(crate) segments: SegmentSizes,
    pub(crate) max_frame_bytes: usize,
    pub(crate) stall_timeout: Duration,
    /// Of the tasks of connections to masters, which end with the connection of the client that they serve, not before: at a shutdown
    /// its call in progress is completed.
    pub(crate) master_tasks: Supervisor,
}

pub(crate) struct ClientConnection {
    router: Arc<RouterState>,
    masters: ConnectionMasters,
    dialect: ConnectionDialect,
}

impl ClientConnection {
    pub(crate) fn new(router: Arc<RouterState>, host: IpAddr) -> Self {
        let masters = ConnectionMasters::new(router.masters.count, &router.master_tasks);
        Self { router, masters, dialect: ConnectionDialect::new(host) }
    }

    /// Serves calls one after the other, until the client closes the connection or `stop` is cancelled between two calls.
    ///
    /// # Errors
    /// When the socket fails, a request or the reading of responses stalls, or the client sends anything but requests.
    pub(crate) async fn run(mut self, mut stream: TcpStream, stop: CancellationToken) -> io::Result<()> {
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        let limit = self.router.stall_timeout;
        loop {
            let is_complete = self.handle_requests(&mut input, &mut output).await?;
            if !output.is_empty() {
                within(limit, stream.write_all(&output)).await?;
                output.clear();
            }
            if !is_complete {
                continue;
            }
            input.reserve(READ_BUFFER);
            let read = if input.is_empty() {
                tokio::select! {
                    read = stream.read_buf(&mut input) => read?,
                    () = stop.cancelled() => return Ok(()),
                }
            } else {
                within(limit, stream.read_buf(&mut input)).await?
            };
            if read == 0 {
                return Ok(());
            }
        }
    }

    /// Handles the complete requests in `input`. Returns false if responses have to be sent before the next one.
    async fn handle_requests(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> io::Result<bool> {
        loop {
            match frame::take::<RequestHeader>(input, self.router.max_frame_bytes)
                .map_err(io::Error::other)?
            {
                FrameParseResult::Frame(request) => self.handle(&request, output).await,
                FrameParseResult::Incomplete(_) => return Ok(true),
            }
            if output.len() >= MAX_RESPONSE_BATCH {
                return Ok(false);
            }
        }
    }

    async fn handle(&mut self, request: &RpcFrame<RequestHeader, Bytes>, output: &mut BytesMut) {
        let counters = Arc::clone(&self.router.masters.counters);
        counters.calls.fetch_add(1, Relaxed);
        let start = output.len();
        let handled = match RpcMethod::from_function_id(request.header.function_id) {
            Some(method) => self.handle_call(method, request, output).await,
            None => self.handle_extension(request, output).await,
        };
        if let Err(fault) = handled {
            counters.rejected.fetch_add(1, Relaxed);
            output.truncate(start);
            // The messages of faults are short.
            let _ = fault.write(request.header.sequence, output);
        }
    }

    async fn handle_call(
        &mut self,
        method: RpcMethod,
        RpcFrame { header, body, attachment }: &RpcFrame<RequestHeader, Bytes>,
        output: &mut BytesMut,
    ) -> Result<(), RpcFault> {
        let router = &*self.router;
        // All possible dialects have the same layout of the arguments.
        let possible = method.request_dialects(body);
        let dialect = possible.newest().ok_or_else(RpcFault::invalid_argument)?;
        let request =
            Request::<&str>::decode(method, dialect, body).map_err(|_| RpcFault::invalid_argument())?;
        self.dialect.observe(possible, request.calling_client(), &router.dialects);
        let reply_dialect = self.dialect.reply_dialect(method, possible, &router.dialects);
        router.segments.observe(&request);
        let split = SplitRequest::new(request, dialect, attachment, router.masters.count);
        let (split, frames) = split.map_err(|_| RpcFault::invalid_argument())?;
        let responses = router.masters.call(&self.masters, frames).await;
        split.merge(header.sequence, reply_dialect, &responses, output);
        Ok(())
    }

    async fn handle_extension(
        &mut self,
        RpcFrame { header, body, .. }: &RpcFrame<RequestHeader, Bytes>,
        output: &mut BytesMut,
    ) -> Result<(), RpcFault> {
        if ShardRequest::from_function_id(header.function_id) == Some(ShardRequest::List) {
            let masters = self.router.masters.addresses.iter().map(String::as_str).collect();
            return encode_list(header.sequence, masters, output).map_err(|_| RpcFault::invalid_argument());
        }
        if let Some(drain) = NodeDrainArguments::decode(header.function_id, body)? {
            let left = self.drain_node(drain).await?;
            return node_drain::encode_reply(header.sequence, left, output)
                .map_err(|_| RpcFault::invalid_argument());
        }
        let report =
            IntactRangesArguments::decode(header.function_id, body).map_err(|fault| match fault.code {
                RpcFault::NOT_REGISTERED => rpc::unsupported_fault(header.function_id),
                _ => fault,
            })?;
        let dropped = self.report_intact_ranges(&report).await?;
        intact_ranges::encode_reply(header.sequence, dropped, output)
            .map_err(|_| RpcFault::invalid_argument())
    }

    /// Passes a report on to the shards whose parts it covers. Returns the number of replicas that they drop.
    async fn report_intact_ranges(
        &self,
        report: &IntactRangesArguments,
    ) -> Result<MasterResult<u64>, RpcFault> {
        let masters = &self.router.masters;
        // As of a master without this call: readers get the replicas, and the node rejects the reads of those that are not intact.
        let Some(size) = self.router.segments.get(report.segment_id) else {
            tracing::warn!(
                segment = %report.segment_id,
                "the report of a node's intact memory is not passed on: its segment was not mounted through this router"
            );
            return Err(RpcFault::not_registered());
        };
        let encode = |(shard, report): (usize, IntactRangesArguments)| {
            let mut frame = BytesMut::new();
            report.encode(0, &mut frame).map(|()| (shard, frame)).map_err(|_| RpcFault::invalid_argument())
        };
        let parts = split_intact_ranges(report, size, masters.count);
        let frames = parts.into_iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        self.sum(frames, intact_ranges::decode_reply).await
    }

    /// Passes a node's drain on to all shards, each of which has a part of its segments. Returns the number of objects that are left.
    async fn drain_node(&self, drain: NodeDrainArguments) -> Result<MasterResult<u64>, RpcFault> {
        let masters = &self.router.masters;
        let mut frame = BytesMut::new();
        drain.encode(0, &mut frame).map_err(|_| RpcFault::invalid_argument())?;
        let frames = masters.count.iter().map(|shard| (shard, frame.clone())).collect();
        self.sum(frames, node_drain::decode_reply).await
    }

    /// Sends requests to shards, and adds the numbers in their replies. The first error of a shard counts for all.
    async fn sum(
        &self,
        frames: Vec<(usize, BytesMut)>,
        decode: impl Fn(&[u8]) -> Result<MasterResult<u64>, UnpackError>,
    ) -> Result<MasterResult<u64>, RpcFault> {
        let mut sum = 0_u64;
        for response in self.router.masters.call(&self.masters, frames).await {
            match response {
                ShardResponse::Reply(body) => match decode(&body) {
                    Ok(Ok(count)) => sum = sum.saturating_add(count),
                    Ok(Err(code)) => return Ok(Err(code)),
                    Err(_) => return Ok(Err(ErrorCode::INTERNAL_ERROR)),
                },
                ShardResponse::Fault(fault) => return Err(fault),
                ShardResponse::Unreachable => return Ok(Err(ErrorCode::RPC_FAIL)),
            }
        }
        Ok(Ok(sum))
    }
}

async fn within<T>(limit: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, io).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

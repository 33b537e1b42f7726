//! From a request's frame to the state machine and back to a frame.

mod client;
mod disk;
mod grant;
mod intact;
mod inventory;
mod object;
mod refuse;
mod segment;
mod transfer;
mod write;

use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use mooncake_wire::capability::{CertificateFingerprint, SegmentKeyArguments};
use mooncake_wire::frame::{self, FrameError, FrameParseResult, RequestHeader, RpcFault, RpcFrame};
use mooncake_wire::inventory::InventoryRequest;
use mooncake_wire::pack::{Pack, PackError, type_hash};
use mooncake_wire::rpc::{self, Request, RpcDefinition, RpcMethod, encode_reply};
use mooncake_wire::types::Uuid;
use mooncake_wire::{Dialect, DialectSet};
use moongate_master_core::MasterCore;

use crate::counters::{CallOutcome, ReplyOutcome};
use crate::dialects::ConnectionDialect;
use crate::journal::FactRecorder;
use crate::presence::HeartbeatAttributes;
use crate::server::MasterServer;
use refuse::{NOT_PERSISTED, RefusedReply};

/// Bytes of replies after which they are sent before more requests are looked at.
const MAX_REPLY_BATCH: usize = 256 * 1024;

/// One connection's calls, whatever carries them.
pub struct CallerSession {
    server: Arc<MasterServer>,
    /// Which thread serves it; see [`crate::RpcCounters`].
    lane: usize,
    dialect_state: ConnectionDialect,
    recorder: FactRecorder,
    /// Whether changes are refused although they might be kept.
    refuses_writes: bool,
    /// Its number, by which late calls are recognised.
    connection: u64,
    /// The certificate that the caller has shown, if callers must.
    peer: Option<CertificateFingerprint>,
    /// The node that sends heartbeats on this connection, and its latest heartbeat.
    node: Option<(Uuid, HeartbeatAttributes)>,
}

/// How far [`CallerSession::run`] has come.
#[derive(Debug, PartialEq, Eq)]
pub struct RpcProgress {
    /// Bytes that were dealt with.
    pub consumed: usize,
    /// What the rest is.
    pub remaining: RemainingInput,
}

/// What comes after the requests that were dealt with.
#[derive(Debug, PartialEq, Eq)]
pub enum RemainingInput {
    /// A part of a request, perhaps nothing. At least so many more bytes are needed.
    Incomplete(usize),
    /// More requests: the replies so far are to be sent first.
    More,
    /// Nothing that can be understood: the connection is of no more use.
    Malformed(FrameError),
}

/// What a call has at hand.
struct RpcCall<'c> {
    server: &'c MasterServer,
    core: &'c MasterCore,
    now_ms: u64,
    effects: &'c mut FactRecorder,
    dialect: Dialect,
    connection: u64,
    sequence: u32,
    /// How many objects a call is about that is not to be made.
    refused_objects: Option<usize>,
    /// The certificate that the caller has shown, if callers must.
    peer: Option<CertificateFingerprint>,
    /// What the reply grants the caller.
    grants: BytesMut,
    out: &'c mut BytesMut,
}

/// What this master does for an RPC.
trait RpcHandler: RpcDefinition {
    /// The strings in its reply.
    type Text;

    fn serve(call: &mut RpcCall<'_>, arguments: Self::Arguments<&str>) -> Self::Reply<Self::Text>;
}

/// `serve! { Method(call, arguments) => reply, Method[Text](call, arguments) => reply, … }`. Strings in replies are
/// `Arc<str>` unless `Text` is told.
macro_rules! serve {
    (@text) => { std::sync::Arc<str> };
    (@text $text:ty) => { $text };
    ($($method:ident $([$text:ty])? ($call:pat, $arguments:pat) => $reply:expr,)+) => {$(
        impl $crate::call::RpcHandler for mooncake_wire::rpc::$method {
            type Text = $crate::call::serve!(@text $($text)?);

            fn serve(
                $call: &mut $crate::call::RpcCall<'_>,
                $arguments: <Self as mooncake_wire::rpc::RpcDefinition>::Arguments<&str>,
            ) -> <Self as mooncake_wire::rpc::RpcDefinition>::Reply<Self::Text> {
                $reply
            }
        }
    )+};
}

use serve;

/// Calls what the request asks for; every RPC is listed.
macro_rules! dispatch {
    ($call:ident, $request:ident: $($method:ident)+) => {
        match $request {
            $(Request::$method(arguments) => {
                let reply = match $call.refused_objects {
                    None => <rpc::$method as RpcHandler>::serve(&mut $call, arguments),
                    Some(objects) => RefusedReply::refused(NOT_PERSISTED, objects),
                };
                $call.reply::<rpc::$method>(&reply)
            })+
        }
    };
}

impl RpcCall<'_> {
    fn reply<M: RpcHandler>(&mut self, reply: &M::Reply<M::Text>) -> (CallOutcome, Result<(), PackError>)
    where
        M::Reply<M::Text>: Pack + ReplyOutcome,
    {
        let start = self.out.len();
        let written = encode_reply::<M, M::Text>(self.sequence, self.dialect, reply, self.out);
        if written.is_ok() {
            self.attach_grants(start);
        }
        (reply.outcome(), written)
    }
}

impl CallerSession {
    /// A caller who has not said anything yet. `lane` is the number of the thread that serves it.
    pub fn new(server: Arc<MasterServer>, host: std::net::IpAddr, lane: usize) -> Self {
        let (recorder, connection) = (server.recorder(), server.upserts.new_connection());
        let dialect_state = ConnectionDialect::new(host);
        Self {
            server,
            lane,
            dialect_state,
            recorder,
            refuses_writes: false,
            connection,
            peer: None,
            node: None,
        }
    }

    /// The same for a caller that has shown this certificate.
    #[must_use]
    pub fn with_certificate(mut self, peer: CertificateFingerprint) -> Self {
        self.peer = Some(peer);
        self
    }

    /// Runs the requests at the start of `input` and appends their replies to `output`. Before the replies are sent,
    /// [`CallerSession::commit`] has to succeed.
    pub fn run(&mut self, input: &[u8], output: &mut BytesMut) -> RpcProgress {
        let mut began = Instant::now();
        let now_ms = self.server.clock.at_ms(began);
        let (mut used, limit) = (0, self.server.limits.frame_bytes);
        loop {
            let rest = input.get(used..).unwrap_or_default();
            let frame = match frame::parse::<RequestHeader>(rest, limit) {
                Ok(FrameParseResult::Frame(frame)) => frame,
                Ok(FrameParseResult::Incomplete(missing)) => {
                    return RpcProgress { consumed: used, remaining: RemainingInput::Incomplete(missing) };
                }
                Err(error) => {
                    return RpcProgress { consumed: used, remaining: RemainingInput::Malformed(error) };
                }
            };
            used += frame.size();
            if let Some((method, tally)) = self.handle_request(now_ms, frame, output) {
                let ended = Instant::now();
                self.server.counters.add(self.lane, method, tally, ended - began);
                began = ended;
            }
            if output.len() >= MAX_REPLY_BATCH {
                return RpcProgress { consumed: used, remaining: RemainingInput::More };
            }
        }
    }

    /// Waits until the changes that the replies tell of are where they have to be.
    ///
    /// # Errors
    /// When they cannot be brought there. Then the replies must not be sent.
    pub fn commit(&mut self) -> std::io::Result<()> {
        self.recorder.commit()
    }

    /// [`CallerSession::commit`] for another thread; none if there is nothing to wait for.
    pub fn take_commit(&mut self) -> Option<impl FnOnce() -> std::io::Result<()> + Send + use<>> {
        self.recorder.take_commit()
    }

    /// [`CallerSession::run`] again, after [`CallerSession::commit`] has failed for the same requests: changes are not made again, and their callers are
    /// answered that they cannot be kept. The replies may be sent without a commit. Nothing if the commit has failed for another reason than
    /// that changes cannot be written.
    pub fn refuse_writes(&mut self, input: &[u8], output: &mut BytesMut) -> Option<()> {
        if self.server.journal.may_write() {
            return None;
        }
        self.refuses_writes = true;
        let mut used = 0;
        while let RpcProgress { consumed: more @ 1.., .. } =
            self.run(input.get(used..).unwrap_or_default(), output)
        {
            used += more;
        }
        self.refuses_writes = false;
        self.recorder.discard_pending();
        self.recorder.commit().ok()
    }

    fn handle_request(
        &mut self,
        now_ms: u64,
        RpcFrame { header, body, attachment }: RpcFrame<RequestHeader, &[u8]>,
        out: &mut BytesMut,
    ) -> Option<(RpcMethod, CallOutcome)> {
        let server = &*self.server;
        let Some(method) = RpcMethod::from_function_id(header.function_id) else {
            if let Err(fault) = self.handle_extension(now_ms, header, body, out) {
                self.server.counters.add_unknown_function();
                write_fault(&fault, header.sequence, out);
            }
            return None;
        };
        let possible = method.request_dialects(body);
        let Some(request) = decode(method, possible, body) else {
            server.counters.add_unknown_arguments();
            if possible.is_empty() {
                server.unknown_forms.report_once(method, type_hash(body));
            }
            write_fault(&RpcFault::invalid_argument(), header.sequence, out);
            return None;
        };
        let client = client::calling_client(&request);
        self.dialect_state.observe(possible, client, &server.dialects);
        let node = client.filter(|_| client::is_node_only(method));
        if let Some(node) = node {
            let heartbeat = HeartbeatAttributes {
                is_persistent: matches!(attachment, rpc::MEMORY_RETAINED | rpc::NODE_DRAINED),
                dedicated: attachment == rpc::HEARTBEATS_ONLY,
            };
            let before = self.node;
            if before != Some((node, heartbeat)) {
                server.presence.record_heartbeat(now_ms, before.map(|(before, _)| before), node, heartbeat);
                self.node = Some((node, heartbeat));
            }
        }
        let dialect = self.dialect_state.reply_dialect(method, possible, &server.dialects);
        let (core, fx, sequence) = (&server.master, &mut self.recorder, header.sequence);
        let is_refused =
            refuse::is_durable_change(method) && (self.refuses_writes || !server.journal.may_write());
        let refused = is_refused.then(|| refuse::object_count(&request));
        if let Some(objects) = refused {
            server.counters.add_refused_writes(objects);
        }
        let connection = self.connection;
        let (peer, grants) = (self.peer, BytesMut::new());
        let call = RpcCall {
            server,
            core,
            now_ms,
            effects: fx,
            dialect,
            connection,
            sequence,
            refused_objects: refused,
            peer,
            grants,
            out,
        };
        let tally = execute(call, request);
        if let Some(node) = node.filter(|_| attachment == rpc::NODE_DRAINED) {
            server.master.client_restarting(node);
        }
        Some((method, tally))
    }
}

impl CallerSession {
    /// Answers a request that only our own programs make.
    fn handle_extension(
        &mut self,
        now_ms: u64,
        header: RequestHeader,
        body: &[u8],
        out: &mut BytesMut,
    ) -> Result<(), RpcFault> {
        let (server, fx, sequence) = (&*self.server, &mut self.recorder, header.sequence);
        if let Some(request) = InventoryRequest::decode(header.function_id, body)? {
            return inventory::handle(server, now_ms, sequence, request, fx, out);
        }
        // Keys cross no connection that is not encrypted, and count only if their sender has a certificate.
        if self.peer.is_some()
            && let Some(key) = SegmentKeyArguments::decode(header.function_id, body)?
        {
            return grant::receive_key(server, now_ms, sequence, &key, out);
        }
        intact::handle(&server.master, now_ms, (header, body), fx, out)
    }
}

/// Reads a request. Dialects in which it can be meant have the same form of arguments: any of them will do.
fn decode(method: RpcMethod, possible: DialectSet, body: &[u8]) -> Option<Request<&str>> {
    let decoded = Request::decode(method, possible.newest()?, body);
    decoded.inspect_err(|error| tracing::debug!(method = method.name(), %error, "refused a request")).ok()
}

fn execute(mut call: RpcCall<'_>, request: Request<&str>) -> CallOutcome {
    let method = request.method();
    let (tally, written) = dispatch!(call, request:
        ExistKey BatchExistKey BatchQueryIp BatchReplicaClear GetReplicaListByRegex GetReplicaList BatchGetReplicaList
        PutStart PutEnd PutRevoke BatchPutStart BatchPutEnd BatchPutRevoke
        UpsertStart UpsertEnd UpsertRevoke BatchUpsertStart BatchUpsertEnd BatchUpsertRevoke
        Remove RemoveByRegex RemoveAll BatchRemove
        MountSegment MountNoFSegment ReMountSegment ReMountNoFSegment UnmountSegment GracefulUnmountSegment
        UnmountNoFSegment GetAllNoFSegments GetNoFSegmentsByName
        Ping GetFsdir QuerySegmentStatus QuerySegmentStatusById GetStorageConfig ServiceReady
        MountLocalDiskSegment UnmountLocalDiskSegment OffloadObjectHeartbeat ReportSsdCapacity NotifyOffloadSuccess
        PromotionObjectHeartbeat PromotionAllocStart NotifyPromotionSuccess NotifyPromotionFailure
        CopyStart DynamicReplicaCopyStart CopyEnd DynamicReplicaCopyEnd CopyRevoke DynamicReplicaCopyRevoke
        MoveStart MoveEnd MoveRevoke
        EvictDiskReplica BatchEvictDiskReplica PollRemoveAll
        CreateCopyTask CreateMoveTask QueryTask FetchTasks MarkTaskToComplete
    );
    if let Err(error) = written {
        // The state has changed all the same; the client will ask again in another way.
        tracing::warn!(method = method.name(), %error, "a reply cannot be expressed");
        write_fault(&RpcFault::invalid_argument(), call.sequence, call.out);
    }
    tally
}

fn write_fault(fault: &RpcFault, sequence: u32, out: &mut BytesMut) {
    if let Err(error) = fault.write(sequence, out) {
        tracing::warn!(%error, "a fault cannot be expressed");
    }
}

impl Drop for CallerSession {
    /// A node whose last connection is gone is not read from until it is heard of again, unless its memory is kept.
    fn drop(&mut self) {
        if let Some((node, _)) = self.node
            && let Some(gone) = self.server.presence.connection_closed(self.server.clock.now_ms(), node)
        {
            self.server.handle_node_departure(node, gone);
        }
    }
}

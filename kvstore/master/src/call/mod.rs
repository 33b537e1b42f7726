//! Decodes a request frame and executes it on the state machine, whose result becomes the reply.

mod disk;
mod intact;
mod inventory;
mod node_drain;
mod object;
mod refuse;
mod segment;
mod segment_key;
mod transfer;
mod write;

use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use mooncake_wire::DialectSet;
use mooncake_wire::caller_dialect::ConnectionDialect;
use mooncake_wire::capability::{CertificateFingerprint, SegmentKeyArguments};
use mooncake_wire::frame::{self, FrameError, FrameParseResult, RequestHeader, RpcFault, RpcFrame};
use mooncake_wire::inventory::InventoryRequest;
use mooncake_wire::node_drain::NodeDrainArguments;
use mooncake_wire::pack::type_hash;
use mooncake_wire::rpc::{self, Request, RpcDefinition, RpcMethod};
use mooncake_wire::shards::{self, ShardRequest};
use mooncake_wire::types::Uuid;
use moongate_master_core::{CallContext, MasterCore};

use crate::counters::{CallOutcome, ReplyOutcome};
use crate::presence::HeartbeatAttributes;
use crate::recorder::FactRecorder;
use crate::reply::{CallReply, write_fault};
use crate::server::MasterServer;
use refuse::{NOT_PERSISTED, RefusedReply};
pub(crate) use segment::PROTOCOL_VERSION;

/// Bytes of replies after which they are sent before further requests are executed.
const MAX_REPLY_BATCH: usize = 256 * 1024;

/// The calls of one connection, independent of the transport.
pub struct CallerSession {
    server: Arc<MasterServer>,
    /// Number of the thread that serves it; see [`crate::RpcCounters`].
    lane: usize,
    dialect_state: ConnectionDialect,
    recorder: FactRecorder,
    /// Whether durable changes are rejected even though the journal accepts them.
    refuses_writes: bool,
    /// Connection number, which detects late calls of an earlier connection.
    connection: u64,
    /// The caller's certificate, if callers must have one.
    peer: Option<CertificateFingerprint>,
    /// The node that sends heartbeats on this connection, and its latest heartbeat.
    node: Option<(Uuid, HeartbeatAttributes)>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct RpcProgress {
    /// Bytes of the input that were processed.
    pub consumed: usize,
    /// The state of the remaining input.
    pub remaining: RemainingInput,
}

/// What follows the processed requests.
#[derive(Debug, PartialEq, Eq)]
pub enum RemainingInput {
    /// An incomplete request, possibly empty. At least this many further bytes are needed.
    Incomplete(usize),
    /// More requests: the replies so far have to be sent first.
    More,
    /// Invalid bytes: the connection must be closed.
    Malformed(FrameError),
}

struct RpcCall<'c> {
    server: &'c MasterServer,
    core: &'c MasterCore,
    now_ms: u64,
    effects: &'c mut FactRecorder,
    connection: u64,
    /// Set if the call is rejected: the number of its objects.
    refused_objects: Option<usize>,
    reply: CallReply<'c>,
}

trait RpcHandler: RpcDefinition {
    /// Type of the strings in its reply.
    type Text;

    fn serve(call: &mut RpcCall<'_>, arguments: Self::Arguments<&str>) -> Self::Reply<Self::Text>;
}

/// `serve! { Method(call, arguments) => reply, Method[Text](call, arguments) => reply, … }`. Strings in replies are
/// `Arc<str>` unless `Text` is given.
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

/// Dispatches a request to its handler; every RPC is listed.
macro_rules! dispatch {
    ($call:ident, $request:ident: $($method:ident)+) => {
        match $request {
            $(Request::$method(arguments) => {
                let reply = match $call.refused_objects {
                    None => <rpc::$method as RpcHandler>::serve(&mut $call, arguments),
                    Some(objects) => RefusedReply::refused(NOT_PERSISTED, objects),
                };
                let written =
                    $call.reply.encode::<rpc::$method, <rpc::$method as RpcHandler>::Text>(&reply);
                (reply.outcome(), written)
            })+
        }
    };
}

/// A request of Moongate's own protocol.
struct ExtensionCall<'c> {
    server: &'c MasterServer,
    now_ms: u64,
    sequence: u32,
    effects: &'c mut FactRecorder,
    out: &'c mut BytesMut,
}

impl RpcCall<'_> {
    fn context<'a>(&self, client: Uuid, tenant: &'a str) -> CallContext<'a> {
        CallContext { now_ms: self.now_ms, client, tenant }
    }
}

impl CallerSession {
    /// A connection without requests so far. `lane` is the number of the thread that serves it.
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

    /// Adds the caller's certificate.
    #[must_use]
    pub fn with_certificate(mut self, peer: CertificateFingerprint) -> Self {
        self.peer = Some(peer);
        self
    }

    /// Runs the requests at the start of `input` and appends their replies to `output`. Before the replies are sent, the
    /// [recorder](Self::recorder) has to be committed.
    pub fn run(&mut self, input: &[u8], output: &mut BytesMut) -> RpcProgress {
        let mut started = Instant::now();
        let now_ms = self.server.clock.at_ms(started);
        let (mut consumed, limit) = (0, self.server.limits.frame_bytes);
        loop {
            let rest = input.get(consumed..).unwrap_or_default();
            let frame = match frame::parse::<RequestHeader>(rest, limit) {
                Ok(FrameParseResult::Frame(frame)) => frame,
                Ok(FrameParseResult::Incomplete(missing)) => {
                    return RpcProgress { consumed, remaining: RemainingInput::Incomplete(missing) };
                }
                Err(error) => {
                    return RpcProgress { consumed, remaining: RemainingInput::Malformed(error) };
                }
            };
            consumed += frame.size();
            if let Some((method, outcome)) = self.handle_request(now_ms, frame, output) {
                let ended = Instant::now();
                self.server.counters.add(self.lane, method, outcome, ended - started);
                started = ended;
            }
            if output.len() >= MAX_REPLY_BATCH {
                return RpcProgress { consumed, remaining: RemainingInput::More };
            }
        }
    }

    /// The changes behind the replies.
    pub fn recorder(&mut self) -> &mut FactRecorder {
        &mut self.recorder
    }

    /// Runs the requests again after their commit has failed: durable changes are not repeated, and their callers get an error. The
    /// replies may be sent without a commit. `None` if the commit failed for another reason than a journal that cannot be written.
    pub fn refuse_writes(&mut self, input: &[u8], output: &mut BytesMut) -> Option<()> {
        if self.server.journal.may_write() {
            return None;
        }
        self.refuses_writes = true;
        let mut consumed = 0;
        while let RpcProgress { consumed: more @ 1.., .. } =
            self.run(input.get(consumed..).unwrap_or_default(), output)
        {
            consumed += more;
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
            if let Err(mut fault) = self.handle_extension(now_ms, header, body, out) {
                self.server.counters.add_unknown_function();
                if fault.code == RpcFault::NOT_REGISTERED {
                    self.server.unknown_forms.report_function_once(header.function_id);
                    fault = rpc::unsupported_fault(header.function_id);
                }
                write_fault(&fault, header.sequence, out);
            }
            return None;
        };
        let dialects = method.request_dialects(body);
        let Some(request) = decode(method, dialects, body) else {
            server.counters.add_unknown_arguments();
            if dialects.is_empty() {
                server.unknown_forms.report_once(method, type_hash(body));
            }
            write_fault(&RpcFault::invalid_argument(), header.sequence, out);
            return None;
        };
        let client = request.calling_client();
        self.dialect_state.observe(dialects, client, &server.dialects);
        let node = client.filter(|_| is_node_only(method));
        if let Some(node) = node {
            let heartbeat = HeartbeatAttributes {
                is_persistent: matches!(attachment, rpc::MEMORY_RETAINED | rpc::NODE_DRAINED),
                dedicated: attachment == rpc::HEARTBEATS_ONLY,
            };
            let previous = self.node;
            if previous != Some((node, heartbeat)) {
                server.presence.record_heartbeat(
                    now_ms,
                    previous.map(|(previous, _)| previous),
                    node,
                    heartbeat,
                );
                self.node = Some((node, heartbeat));
            }
        }
        let dialect = self.dialect_state.reply_dialect(method, dialects, &server.dialects);
        let (core, effects, sequence) = (&server.master, &mut self.recorder, header.sequence);
        let is_refused =
            refuse::is_durable_change(method) && (self.refuses_writes || !server.journal.may_write());
        let refused_objects = is_refused.then(|| refuse::object_count(&request));
        if let Some(objects) = refused_objects {
            server.counters.add_refused_writes(objects);
        }
        let connection = self.connection;
        let (peer, grants) = (self.peer, BytesMut::new());
        let reply = CallReply { server, now_ms, dialect, sequence, peer, grants, out };
        let call = RpcCall { server, core, now_ms, effects, connection, refused_objects, reply };
        let outcome = execute(call, request);
        if let Some(node) = node.filter(|_| attachment == rpc::NODE_DRAINED) {
            server.master.client_restarting(node);
        }
        Some((method, outcome))
    }
}

impl CallerSession {
    /// Handles a request of Moongate's own protocol.
    fn handle_extension(
        &mut self,
        now_ms: u64,
        header: RequestHeader,
        body: &[u8],
        out: &mut BytesMut,
    ) -> Result<(), RpcFault> {
        let call = ExtensionCall {
            server: &self.server,
            now_ms,
            sequence: header.sequence,
            effects: &mut self.recorder,
            out,
        };
        if let Some(request) = InventoryRequest::decode(header.function_id, body)? {
            return inventory::handle(call, request);
        }
        if let Some(request) = ShardRequest::from_function_id(header.function_id) {
            let written = match request {
                ShardRequest::Identity => {
                    shards::encode_identity(header.sequence, call.server.shard, call.out)
                }
                // The first call of every client, which only a router answers.
                ShardRequest::List => RpcFault::not_registered().write(header.sequence, call.out),
            };
            return written.map_err(|_| RpcFault::invalid_argument());
        }
        // Segment keys are accepted on TLS connections with a client certificate only.
        if self.peer.is_some()
            && let Some(key) = SegmentKeyArguments::decode(header.function_id, body)?
        {
            return segment_key::receive_key(call, &key);
        }
        if let Some(drain) = NodeDrainArguments::decode(header.function_id, body)? {
            return node_drain::handle(call, drain);
        }
        intact::handle(call, header.function_id, body)
    }
}

/// Whether only store nodes (clients that register segments) send this method.
fn is_node_only(method: RpcMethod) -> bool {
    matches!(method, RpcMethod::Ping | RpcMethod::MountSegment | RpcMethod::ReMountSegment)
}

/// Decodes a request. All possible dialects have the same argument layout, so any of them can be used.
fn decode(method: RpcMethod, dialects: DialectSet, body: &[u8]) -> Option<Request<&str>> {
    let decoded = Request::decode(method, dialects.newest()?, body);
    decoded.inspect_err(|error| tracing::debug!(method = method.name(), %error, "rejected a request")).ok()
}

fn execute(mut call: RpcCall<'_>, request: Request<&str>) -> CallOutcome {
    let method = request.method();
    let (outcome, written) = dispatch!(call, request:
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
    );
    if let Err(error) = written {
        // The state has changed anyway; the client retries in another form.
        tracing::warn!(method = method.name(), %error, "cannot encode a reply");
        call.reply.encode_fault(&RpcFault::invalid_argument());
    }
    outcome
}

impl Drop for CallerSession {
    /// A node whose last connection has closed is not read from until it sends a heartbeat again, unless its memory is persistent.
    fn drop(&mut self) {
        if let Some((node, _)) = self.node
            && let Some(departure) = self.server.presence.connection_closed(self.server.clock.now_ms(), node)
        {
            self.server.handle_node_departure(node, departure);
        }
    }
}

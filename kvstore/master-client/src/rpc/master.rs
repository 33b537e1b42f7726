//! Client of one master, with a pool of connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use mooncake_wire::Dialect;
use mooncake_wire::capability::{SegmentKeyArguments, decode_reply as decode_key_reply};
use mooncake_wire::frame::{self, RpcFault};
use mooncake_wire::intact_ranges::{IntactRangesArguments, decode_reply as decode_ranges_reply};
use mooncake_wire::inventory::{
    InventoryArguments, InventoryReply, ObjectChangesArguments, ObjectChangesReply,
};
use mooncake_wire::node_drain::{NodeDrainArguments, decode_reply as decode_drain_reply};
use mooncake_wire::pack::{Pack, PackError, Unpack, UnpackError};
use mooncake_wire::rpc::{
    BatchExistKey, KeysArguments, MasterResult, RpcDefinition, decode_reply, encode_request,
};
use mooncake_wire::shards::{ShardIdentity, ShardRequest, decode_list};
use mooncake_wire::types::DEFAULT_TENANT;
use moongate_runtime::{BackoffPolicy, Supervisor};
use tokio::sync::{mpsc, oneshot};

use super::connection::MasterConnection;
use super::dialect_guess::{DialectGuess, attempts};
use super::error::{RpcError, RpcProtocolError};
use super::grants::StoreCredentials;
use super::locate::MasterLocator;
use super::session::{PendingCall, RpcResponseFrame};

/// Options of a master's client. The master's own limits are unknown, so these are this client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasterClientOptions {
    /// Number of connections. A master processes the calls of one connection sequentially.
    pub connections: usize,
    /// Maximum number of calls that wait for a response on one connection.
    pub in_flight: usize,
    /// Maximum number of calls queued for one connection. When all queues are full, calls fail.
    pub queue: usize,
    /// Time limit for a call, including all attempts in different dialects.
    pub timeout: Duration,
    /// Time limit for opening a connection.
    pub connect_timeout: Duration,
    /// Maximum size of a response in bytes.
    pub max_response: usize,
    /// Jittered pauses between attempts to connect. Calls during a pause fail at once.
    pub retry: BackoffPolicy,
    /// How long a thread busy-polls for the response when a single call is in flight on a connection; zero turns this off. Useful
    /// if responses take only tens of microseconds, and latency matters.
    pub busy_poll: Duration,
    /// Which shard of its store the master must be. Each connection is checked before its first call, as a call to another shard would
    /// find none of its objects.
    pub shard: Option<ShardIdentity>,
}

impl Default for MasterClientOptions {
    fn default() -> Self {
        Self {
            connections: 2,
            in_flight: 1024,
            queue: 1024,
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            max_response: 64 << 20,
            retry: BackoffPolicy { initial: Duration::from_millis(50), max: Duration::from_secs(2) },
            busy_poll: Duration::ZERO,
            shard: None,
        }
    }
}

/// RPC client of a Mooncake master. Clones are cheap and share connections.
#[derive(Clone, Debug)]
pub struct MasterClient {
    shared: Arc<MasterClientInner>,
}

#[derive(Debug)]
struct MasterClientInner {
    locator: Arc<MasterLocator>,
    options: MasterClientOptions,
    supervisor: Supervisor,
    queues: Vec<mpsc::Sender<PendingCall>>,
    next_queue: AtomicUsize,
    sequence: AtomicU32,
    dialect: DialectGuess,
    authentication: Option<StoreCredentials>,
}

impl MasterClient {
    /// A client of the master at `address`, the text of a [`MasterAddress`](super::MasterAddress). Connects on first use. Its tasks
    /// end when the last clone is dropped, or with the supervisor.
    #[must_use]
    pub fn new(address: &str, options: MasterClientOptions, supervisor: &Supervisor) -> Self {
        Self::authenticated(address, options, None, supervisor)
    }

    /// As [`MasterClient::new`], over TLS with certificates if `authentication` is given. It also stores the master's grants.
    #[must_use]
    pub fn authenticated(
        address: &str,
        options: MasterClientOptions,
        authentication: Option<StoreCredentials>,
        supervisor: &Supervisor,
    ) -> Self {
        let locator = Arc::new(MasterLocator::new(address, options.connect_timeout));
        let start = |_| {
            let (queue, calls) = mpsc::channel(options.queue.max(1));
            let tls = authentication.as_ref().map(|it| it.tls.clone());
            let connection = MasterConnection::new(Arc::clone(&locator), options, tls, calls);
            let token = supervisor.token();
            supervisor.spawn("kvstore-rpc", async move {
                token.run_until_cancelled(connection.run()).await;
            });
            queue
        };
        let queues = (0..options.connections.max(1)).map(start).collect();
        let shared = MasterClientInner {
            locator,
            options,
            supervisor: supervisor.clone(),
            queues,
            next_queue: AtomicUsize::new(0),
            sequence: AtomicU32::new(0),
            dialect: DialectGuess::new(),
            authentication,
        };
        Self { shared: Arc::new(shared) }
    }

    /// A client of another master, a shard of the same store, with the same options and credentials.
    pub(super) fn shard(&self, address: &str, shard: ShardIdentity) -> Self {
        let options = MasterClientOptions { shard: Some(shard), ..self.shared.options };
        Self::authenticated(address, options, self.shared.authentication.clone(), &self.shared.supervisor)
    }

    /// This program's credentials, if it authenticates.
    #[must_use]
    pub fn authentication(&self) -> Option<&StoreCredentials> {
        self.shared.authentication.as_ref()
    }

    /// Sends the master the key of a segment, with which it signs capabilities for that segment.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from masters that do not authenticate their callers.
    pub async fn send_segment_key(&self, key: &SegmentKeyArguments) -> Result<(), RpcError> {
        self.request(|sequence, out| key.encode(sequence, out), decode_key_reply).await
    }

    /// The address as configured, not the resolved leader.
    #[must_use]
    pub fn address(&self) -> &str {
        self.shared.locator.address()
    }

    /// The newest dialect that is consistent with the master's responses so far.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.shared.dialect.get()
    }

    /// Calls an RPC. `M` is the RPC, and `S` the type of strings in the arguments, as in
    /// `call::<ExistKey, &str>(…)`.
    ///
    /// # Errors
    /// When there is no response, or it cannot be decoded. An [`ErrorCode`](mooncake_wire::ErrorCode) from the master is in the
    /// reply, not here; `?` converts it to [`RpcError::Refused`].
    pub async fn call<M: RpcDefinition, S>(
        &self,
        arguments: &M::Arguments<S>,
    ) -> Result<M::Reply<String>, RpcError>
    where
        M::Arguments<S>: Pack,
        M::Reply<String>: for<'a> Unpack<'a>,
    {
        self.call_with_attachment::<M, S>(arguments, &[]).await
    }

    /// As [`MasterClient::call`], with an attachment that Mooncake's own masters ignore.
    ///
    /// # Errors
    /// As [`MasterClient::call`].
    pub async fn call_with_attachment<M: RpcDefinition, S>(
        &self,
        arguments: &M::Arguments<S>,
        attachment: &[u8],
    ) -> Result<M::Reply<String>, RpcError>
    where
        M::Arguments<S>: Pack,
        M::Reply<String>: for<'a> Unpack<'a>,
    {
        let limit = self.shared.options.timeout;
        match tokio::time::timeout(limit, self.call_with_fallback::<M, S>(arguments, attachment)).await {
            Ok(result) => result,
            Err(_) => Err(RpcError::TimedOut { address: self.shared_address(), limit }),
        }
    }

    /// Whether objects with these keys of the default tenant exist, in the keys' order. The master **leases** each existing object:
    /// by default it can be neither evicted nor removed for ten seconds. So queries for many keys take space away from
    /// writers. [`AdminClient::locate`](crate::admin::AdminClient::locate) has no such effect.
    ///
    /// # Errors
    /// As [`MasterClient::call`].
    pub async fn exist_and_lease(&self, keys: Vec<&str>) -> Result<Vec<MasterResult<bool>>, RpcError> {
        self.call::<BatchExistKey, &str>(&KeysArguments { keys, tenant: DEFAULT_TENANT }).await
    }

    async fn call_with_fallback<M: RpcDefinition, S>(
        &self,
        arguments: &M::Arguments<S>,
        attachment: &[u8],
    ) -> Result<M::Reply<String>, RpcError>
    where
        M::Arguments<S>: Pack,
        M::Reply<String>: for<'a> Unpack<'a>,
    {
        let method = M::METHOD;
        for dialect in attempts(method, self.dialect()) {
            let sequence = self.next_sequence();
            let mut frame = BytesMut::new();
            encode_request::<M, S>(sequence, dialect, arguments, &mut frame)?;
            frame::attach(&mut frame, attachment)?;
            let response = self.exchange(sequence, frame.freeze()).await?;
            match self.fault(&response)? {
                None => {}
                Some(fault) if fault.code == RpcFault::INVALID_ARGUMENT => continue,
                Some(fault) => return Err(fault.into()),
            }
            let (reply, dialects) =
                decode_reply::<M, String>(&response.body).map_err(|error| self.protocol_error(error))?;
            if let Some(guess) = self.shared.dialect.observe(method, dialect, dialects) {
                tracing::info!(master = self.address(), dialect = %guess, "detected the dialect of the Mooncake master");
            }
            return Ok(reply);
        }
        Err(RpcError::UnknownRelease {
            address: self.shared_address(),
            method: method.name(),
            oldest: Dialect::OLDEST.release(),
            newest: Dialect::NEWEST.release(),
        })
    }

    /// Sends a complete request frame, whose sequence number is replaced, and returns the body of the response.
    ///
    /// # Errors
    /// As [`MasterClient::call`]; [`RpcError::Fault`] if the master rejects the call.
    pub async fn forward(&self, mut frame: BytesMut) -> Result<Bytes, RpcError> {
        let forwarded = |sequence, out: &mut BytesMut| {
            frame::set_sequence(&mut frame, sequence);
            *out = frame;
            Ok(())
        };
        self.exchange_request(forwarded).await
    }

    /// The masters of the store behind a router, in the order of the shards; `None` if this is not a router.
    ///
    /// # Errors
    /// As [`MasterClient::call`].
    pub async fn shards(&self) -> Result<Option<Vec<String>>, RpcError> {
        match self.request(|sequence, out| ShardRequest::List.encode(sequence, out), decode_list).await {
            Ok(list) => Ok(Some(list.masters)),
            Err(RpcError::Fault(fault)) if fault.code == RpcFault::NOT_REGISTERED => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reports which ranges of a node's memory are intact. Returns the number of replicas that the master drops for it.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from Mooncake's masters, which lack this call.
    pub async fn report_intact_ranges(&self, ranges: &IntactRangesArguments) -> Result<u64, RpcError> {
        self.request(|sequence, out| ranges.encode(sequence, out), decode_ranges_reply).await
    }

    /// Has the objects of a node moved to others, or cancels that. Returns the number of objects that are left on it.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from Mooncake's masters, which lack this call.
    pub async fn drain_node(&self, arguments: NodeDrainArguments) -> Result<u64, RpcError> {
        self.request(|sequence, out| arguments.encode(sequence, out), decode_drain_reply).await
    }

    /// Announces or offers a segment's objects to a master that may have lost its log.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from Mooncake's masters, which lack this call.
    pub async fn inventory(&self, arguments: &InventoryArguments<&str>) -> Result<InventoryReply, RpcError> {
        self.request(|sequence, out| arguments.encode(sequence, out), InventoryReply::decode).await
    }

    /// Polls for changes of the objects in a segment.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from Mooncake's masters, which lack this call.
    pub async fn object_changes(
        &self,
        arguments: &ObjectChangesArguments,
    ) -> Result<ObjectChangesReply<String>, RpcError> {
        self.request(|sequence, out| arguments.encode(sequence, out), |body| ObjectChangesReply::decode(body))
            .await
    }

    /// Calls an RPC that only Moongate's programs have: sends the request that `encode` writes, and decodes the reply.
    pub(super) async fn request<T>(
        &self,
        encode: impl FnOnce(u32, &mut BytesMut) -> Result<(), PackError>,
        decode: impl FnOnce(&[u8]) -> Result<MasterResult<T>, UnpackError>,
    ) -> Result<T, RpcError> {
        let body = self.exchange_request(encode).await?;
        Ok(decode(&body).map_err(|error| self.protocol_error(error))??)
    }

    /// Sends the request that `encode` writes, and returns the body of the response.
    pub(super) async fn exchange_request(
        &self,
        encode: impl FnOnce(u32, &mut BytesMut) -> Result<(), PackError>,
    ) -> Result<Bytes, RpcError> {
        let sequence = self.next_sequence();
        let mut frame = BytesMut::new();
        encode(sequence, &mut frame)?;
        let limit = self.shared.options.timeout;
        let exchanged = tokio::time::timeout(limit, self.exchange(sequence, frame.freeze())).await;
        let response =
            exchanged.map_err(|_| RpcError::TimedOut { address: self.shared_address(), limit })??;
        match self.fault(&response)? {
            None => Ok(response.body),
            Some(fault) => Err(fault.into()),
        }
    }

    fn next_sequence(&self) -> u32 {
        self.shared.sequence.fetch_add(1, Ordering::Relaxed)
    }

    /// The fault in a response, if it has one.
    fn fault(&self, response: &RpcResponseFrame) -> Result<Option<RpcFault>, RpcError> {
        match response.header.error {
            0 => Ok(None),
            error => {
                let fault = RpcFault::parse(error, &response.body);
                fault.map(Some).map_err(|error| self.protocol_error(error))
            }
        }
    }

    async fn exchange(&self, sequence: u32, frame: Bytes) -> Result<RpcResponseFrame, RpcError> {
        let (reply, response) = oneshot::channel();
        let sent = self.shared.authentication.as_ref().map(|it| (it, Instant::now()));
        self.enqueue(PendingCall { sequence, frame, reply })?;
        let response = response.await.unwrap_or(Err(RpcError::Closed));
        if let (Some((authentication, sent)), Ok(response)) = (sent, &response) {
            authentication.grants.record(&response.attachment, sent);
        }
        response
    }

    /// Queues the call for the next connection in round-robin order whose queue has space.
    fn enqueue(&self, mut call: PendingCall) -> Result<(), RpcError> {
        let queues = &self.shared.queues;
        let first = self.shared.next_queue.fetch_add(1, Ordering::Relaxed) % queues.len();
        let mut failure = RpcError::Closed;
        for queue in queues.iter().cycle().skip(first).take(queues.len()) {
            call = match queue.try_send(call) {
                Ok(()) => return Ok(()),
                Err(mpsc::error::TrySendError::Full(call)) => {
                    failure = RpcError::Busy { address: self.shared_address() };
                    call
                }
                Err(mpsc::error::TrySendError::Closed(call)) => call,
            };
        }
        Err(failure)
    }

    pub(super) fn protocol_error(&self, error: impl Into<RpcProtocolError>) -> RpcError {
        RpcError::Protocol { address: self.shared_address(), source: error.into() }
    }

    fn shared_address(&self) -> Arc<str> {
        Arc::clone(self.shared.locator.address())
    }
}

//! Calls of the masters.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::join_all;
use mooncake_wire::shards::ShardIdentity;
use moongate_master_client::rpc::{MasterClient, MasterClientOptions, RpcError};
use moongate_runtime::{LogRateLimiter, Supervisor};
use moongate_store_shards::{ShardCount, ShardFrames, ShardIndex, ShardResponse};

use crate::counters::RouterCounters;
use crate::options::RouterOptions;

/// The masters of the store, shared by all connections.
#[derive(Debug)]
pub(crate) struct ShardMasters {
    pub(crate) count: ShardCount,
    pub(crate) addresses: Vec<String>,
    pub(crate) call_timeout: Duration,
    pub(crate) max_response: usize,
    pub(crate) counters: Arc<RouterCounters>,
    shards: Vec<ShardHealth>,
}

/// Whether a shard responds, for all connections: a machine that is gone costs a caller the time limit of a call, so while a shard does
/// not respond, one call at a time finds out whether it does again, and the others fail at once.
#[derive(Debug)]
struct ShardHealth {
    is_silent: AtomicBool,
    is_probed: AtomicBool,
    warnings: LogRateLimiter,
}

impl ShardHealth {
    fn new() -> Self {
        Self {
            is_silent: AtomicBool::new(false),
            is_probed: AtomicBool::new(false),
            warnings: LogRateLimiter::new(),
        }
    }

    /// A permit for a call; `None` if it is to fail at once.
    fn permit(&self) -> Option<CallPermit<'_>> {
        let is_probe = self.is_silent.load(Relaxed);
        (!is_probe || !self.is_probed.swap(true, Relaxed)).then_some(CallPermit { health: self, is_probe })
    }
}

/// A call of a shard that is being made.
struct CallPermit<'a> {
    health: &'a ShardHealth,
    /// Whether it finds out if a silent shard responds again.
    is_probe: bool,
}

impl CallPermit<'_> {
    fn record(self, responded: bool) {
        self.health.is_silent.store(!responded, Relaxed);
    }
}

impl Drop for CallPermit<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            self.health.is_probed.store(false, Relaxed);
        }
    }
}

/// One client connection's connections to the masters. A master associates calls with their connection, so those of one caller must not
/// share theirs with others.
#[derive(Debug)]
pub(crate) struct ConnectionMasters {
    /// By shard, set with the first call.
    clients: Vec<OnceLock<Option<MasterClient>>>,
    supervisor: Supervisor,
}

impl ConnectionMasters {
    pub(crate) fn new(count: ShardCount, supervisor: &Supervisor) -> Self {
        Self { clients: count.iter().map(|_| OnceLock::new()).collect(), supervisor: supervisor.clone() }
    }
}

impl ShardMasters {
    pub(crate) fn new(count: ShardCount, options: &RouterOptions, counters: Arc<RouterCounters>) -> Self {
        Self {
            count,
            addresses: options.shards.clone(),
            call_timeout: options.call_timeout,
            max_response: options.max_frame_bytes,
            counters,
            shards: count.iter().map(|_| ShardHealth::new()).collect(),
        }
    }

    /// Sends the frames at the same time, and returns the responses in their order.
    pub(crate) async fn call(
        &self,
        masters: &ConnectionMasters,
        mut frames: ShardFrames,
    ) -> Vec<ShardResponse> {
        if frames.len() == 1
            && let Some((shard, frame)) = frames.pop()
        {
            return vec![self.call_one(masters, shard, frame).await];
        }
        join_all(frames.into_iter().map(|(shard, frame)| self.call_one(masters, shard, frame))).await
    }

    /// A client of a master with one connection, opened with the first call.
    fn connect(&self, shard: ShardIndex, supervisor: &Supervisor) -> Option<MasterClient> {
        let options = MasterClientOptions {
            connections: 1,
            timeout: self.call_timeout,
            connect_timeout: self.call_timeout,
            max_response: self.max_response,
            shard: Some(ShardIdentity { index: shard as u64, count: self.count.get() as u64 }),
            ..MasterClientOptions::default()
        };
        Some(MasterClient::new(self.addresses.get(shard)?, options, supervisor))
    }

    async fn call_one(
        &self,
        masters: &ConnectionMasters,
        shard: ShardIndex,
        frame: BytesMut,
    ) -> ShardResponse {
        let master = masters
            .clients
            .get(shard)
            .and_then(|client| client.get_or_init(|| self.connect(shard, &masters.supervisor)).as_ref());
        let (Some(master), Some(counters), Some(health)) =
            (master, self.counters.shards.get(shard), self.shards.get(shard))
        else {
            return ShardResponse::Unreachable;
        };
        counters.calls.fetch_add(1, Relaxed);
        let Some(permit) = health.permit() else {
            counters.failed.fetch_add(1, Relaxed);
            return ShardResponse::Unreachable;
        };
        let response = master.forward(frame).await;
        let (response, failure) = match response {
            Ok(body) => (ShardResponse::Reply(body), None),
            Err(RpcError::Fault(fault)) => (ShardResponse::Fault(fault), None),
            Err(error) => (ShardResponse::Unreachable, Some(error)),
        };
        permit.record(failure.is_none());
        if let Some(error) = failure {
            counters.failed.fetch_add(1, Relaxed);
            if health.warnings.is_due() {
                tracing::warn!(shard, %error, "calls of a shard fail");
            }
        }
        response
    }
}

//! Calls of the masters.

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
    warnings: Vec<LogRateLimiter>,
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
            warnings: count.iter().map(|_| LogRateLimiter::new()).collect(),
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
        let (Some(master), Some(counters)) = (master, self.counters.shards.get(shard)) else {
            return ShardResponse::Unreachable;
        };
        counters.calls.fetch_add(1, Relaxed);
        match master.forward(frame).await {
            Ok(body) => ShardResponse::Reply(body),
            Err(RpcError::Fault(fault)) => ShardResponse::Fault(fault),
            Err(error) => {
                counters.failed.fetch_add(1, Relaxed);
                if self.warnings.get(shard).is_some_and(LogRateLimiter::is_due) {
                    tracing::warn!(shard, %error, "calls of a shard fail");
                }
                ShardResponse::Unreachable
            }
        }
    }
}

//! One client connection's connections to the masters.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::join_all;
use mooncake_wire::shards::ShardIdentity;
use moongate_master_client::rpc::{MasterClient, MasterClientOptions, RpcError};
use moongate_runtime::{LogRateLimiter, Supervisor};
use moongate_store_shards::{ShardCount, ShardIndex, ShardResponse};

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

    /// A client of each master. Each has one connection, opened with the first call: a master associates calls with their connection,
    /// so those of one caller must not share theirs with others.
    pub(crate) fn connect(&self, supervisor: &Supervisor) -> Vec<MasterClient> {
        let connect = |(index, address): (usize, &String)| {
            let identity = ShardIdentity { index: index as u64, count: self.count.get() as u64 };
            let options = MasterClientOptions {
                connections: 1,
                timeout: self.call_timeout,
                connect_timeout: self.call_timeout,
                max_response: self.max_response,
                shard: Some(identity),
                ..MasterClientOptions::default()
            };
            MasterClient::new(address, options, supervisor)
        };
        self.addresses.iter().enumerate().map(connect).collect()
    }

    /// Sends the frames at the same time, and returns the responses in their order.
    pub(crate) async fn call(
        &self,
        masters: &[MasterClient],
        mut frames: Vec<(ShardIndex, BytesMut)>,
    ) -> Vec<ShardResponse> {
        if frames.len() == 1
            && let Some((shard, frame)) = frames.pop()
        {
            return vec![self.call_one(masters, shard, frame).await];
        }
        join_all(frames.into_iter().map(|(shard, frame)| self.call_one(masters, shard, frame))).await
    }

    async fn call_one(&self, masters: &[MasterClient], shard: ShardIndex, frame: BytesMut) -> ShardResponse {
        let (Some(master), Some(counters)) = (masters.get(shard), self.counters.shards.get(shard)) else {
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

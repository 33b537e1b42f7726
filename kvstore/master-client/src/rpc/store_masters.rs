//! The masters that have a store's objects: the only one, or the shards behind a router.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mooncake_wire::ErrorCode;
use mooncake_wire::pack::{Pack, Unpack};
use mooncake_wire::rpc::{NoArguments, ServiceReady};
use mooncake_wire::shards::ShardIdentity;
use moongate_store_shards::{ShardCount, ShardIndex, ShardedRpc};
use parking_lot::Mutex;

use super::error::RpcError;
use super::master::MasterClient;

/// Time after which masters that could not be called directly are tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Calls the masters that have the objects of a call. Clones are cheap.
#[derive(Clone, Debug)]
pub(super) struct StoreMasters {
    /// The master with the configured address, or the router.
    entry: MasterClient,
    route: Arc<Mutex<Option<MasterRoute>>>,
}

/// How the masters are called.
#[derive(Clone, Debug)]
enum MasterRoute {
    /// There is one master.
    Single,
    /// Each shard directly.
    Direct(Arc<Shards>),
    /// All through the router until this time, because a master cannot be reached from here.
    Router(Instant),
}

#[derive(Debug)]
struct Shards {
    count: ShardCount,
    masters: Vec<MasterClient>,
}

impl Shards {
    async fn call<M: ShardedRpc>(
        &self,
        shard: ShardIndex,
        arguments: M::Arguments<&str>,
    ) -> Result<M::Reply<String>, RpcError>
    where
        for<'a> M::Arguments<&'a str>: Pack,
        for<'a> M::Reply<String>: Unpack<'a>,
    {
        self.masters.get(shard).ok_or(RpcError::Closed)?.call::<M, &str>(&arguments).await
    }
}

impl StoreMasters {
    pub(super) fn new(entry: MasterClient) -> Self {
        Self { entry, route: Arc::default() }
    }

    pub(super) fn entry(&self) -> &MasterClient {
        &self.entry
    }

    /// Makes a call of the shards that have its objects.
    ///
    /// # Errors
    /// As [`MasterClient::call`], if there is no response at all. If only some shards do not respond, their part of the reply is
    /// `RPC_FAIL`.
    pub(super) async fn call<M: ShardedRpc>(
        &self,
        arguments: M::Arguments<&str>,
    ) -> Result<M::Reply<String>, RpcError>
    where
        for<'a> M::Arguments<&'a str>: Pack,
        for<'a> M::Reply<String>: Unpack<'a>,
    {
        let Some(shards) = self.shards().await? else { return self.entry.call::<M, &str>(&arguments).await };
        let split = M::split(arguments, shards.count);
        let calls = split.calls.into_iter().map(|(shard, arguments)| shards.call::<M>(shard, arguments));
        let mut replies = join_all(calls).await;
        if replies.iter().any(|reply| matches!(reply, Err(RpcError::OtherShard { .. }))) {
            // The list of masters has changed.
            *self.route.lock() = None;
        }
        if replies.iter().all(Result::is_err) || replies.len() == 1 {
            return replies.pop().unwrap_or(Err(RpcError::Closed));
        }
        let failed = |error: RpcError| match error {
            RpcError::TimedOut { .. } => ErrorCode::RPC_TIMEOUT,
            _ => ErrorCode::RPC_FAIL,
        };
        Ok(M::merge(&split.items, replies.into_iter().map(|reply| reply.map_err(failed)).collect()))
    }

    /// The shards to call directly; `None` if the entry is to be called.
    async fn shards(&self) -> Result<Option<Arc<Shards>>, RpcError> {
        let route = self.route.lock().clone();
        match route {
            Some(MasterRoute::Single) => Ok(None),
            Some(MasterRoute::Direct(shards)) => Ok(Some(shards)),
            Some(MasterRoute::Router(until)) if Instant::now() < until => Ok(None),
            _ => {
                let found = self.find_route().await?;
                let shards = match &found {
                    MasterRoute::Direct(shards) => Some(Arc::clone(shards)),
                    _ => None,
                };
                *self.route.lock() = Some(found);
                Ok(shards)
            }
        }
    }

    async fn find_route(&self) -> Result<MasterRoute, RpcError> {
        let Some(addresses) = self.entry.shards().await? else { return Ok(MasterRoute::Single) };
        let through_router = || MasterRoute::Router(Instant::now() + RETRY_PAUSE);
        let Ok(count) = ShardCount::new(addresses.len()) else { return Ok(through_router()) };
        let connect = |(index, address): (usize, &String)| {
            let identity = ShardIdentity { index: index as u64, count: count.get() as u64 };
            self.entry.shard(address, identity)
        };
        let masters: Vec<_> = addresses.iter().enumerate().map(connect).collect();
        let probes = masters.iter().map(|master| master.call::<ServiceReady, &str>(&NoArguments));
        if let Some(error) = join_all(probes).await.into_iter().find_map(Result::err) {
            tracing::warn!(%error, "a master cannot be called directly; calling the router for {RETRY_PAUSE:?}");
            return Ok(through_router());
        }
        Ok(MasterRoute::Direct(Arc::new(Shards { count, masters })))
    }
}

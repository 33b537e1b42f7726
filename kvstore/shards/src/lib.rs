//! Divides a store's metadata among several masters, its shards.
//!
//! Each shard is a master of its own, with its own log and standbys, and has no knowledge of the others. A key belongs to one shard
//! for good ([`ShardCount::shard_of`]), and each shard allocates in its own part of every segment ([`segment_part`]), so shards need no
//! common lock. A call is [split](ShardedRpc::split) into calls of shards, and their replies are [merged](ShardedRpc::merge).
//!
//! Nothing here does I/O: a router applies it to the calls of clients that call one master, and Moongate's own client to its own.

mod batches;
mod by_key;
mod everywhere;
mod frames;
mod intact;
mod merging;
mod parts;
mod shard;

pub use frames::{ShardFrames, ShardResponse, SplitRequest};
pub use intact::split_intact_ranges;
pub use parts::segment_part;
pub use shard::{InvalidShardCount, ShardCount, ShardIndex};

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::RpcDefinition;

/// A call, split into calls of shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitCall<A> {
    /// The shards to call, in ascending order, and the arguments of each.
    pub calls: Vec<(ShardIndex, A)>,
    /// For a batch: per item, the index in `calls` of the call with it. Empty for other calls.
    pub items: Vec<usize>,
}

impl<A> SplitCall<A> {
    fn one(shard: ShardIndex, arguments: A) -> Self {
        Self { calls: vec![(shard, arguments)], items: Vec::new() }
    }

    /// The same call of every shard.
    fn everywhere(shards: ShardCount, arguments: &A) -> Self
    where
        A: Clone,
    {
        Self { calls: shards.iter().map(|shard| (shard, arguments.clone())).collect(), items: Vec::new() }
    }
}

/// An RPC of a store with several masters.
pub trait ShardedRpc: RpcDefinition {
    /// The calls of shards that this call consists of.
    fn split(arguments: Self::Arguments<&str>, shards: ShardCount) -> SplitCall<Self::Arguments<&str>>;

    /// The reply to the call, from the replies of its parts in the order of [`SplitCall::calls`], and [`SplitCall::items`]. A shard that
    /// could not be called replies with an error code, by convention `RPC_FAIL`.
    fn merge<S: Ord>(items: &[usize], replies: Vec<Result<Self::Reply<S>, ErrorCode>>) -> Self::Reply<S>;
}

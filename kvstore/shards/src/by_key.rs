//! Calls about one key, which one shard executes.

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc;
use mooncake_wire::rpc::RpcDefinition;

use crate::merging::only;
use crate::{ShardCount, ShardedRpc, SplitCall};

/// `by_key! { Method: path.to.key, … }`
macro_rules! by_key {
    ($($method:ident: $($key:ident).+,)+) => {$(
        impl ShardedRpc for rpc::$method {
            fn split(
                arguments: <Self as RpcDefinition>::Arguments<&str>,
                shards: ShardCount,
            ) -> SplitCall<<Self as RpcDefinition>::Arguments<&str>> {
                let shard = shards.shard_of(arguments.$($key).+);
                SplitCall::one(shard, arguments)
            }

            fn merge<S: Ord>(
                _: &[usize],
                replies: Vec<Result<<Self as RpcDefinition>::Reply<S>, ErrorCode>>,
            ) -> <Self as RpcDefinition>::Reply<S> {
                only(replies)
            }
        }
    )+};
}

by_key! {
    ExistKey: key,
    ProbeKey: key,
    GetReplicaList: key,
    GetReplicaListForAdmin: key,
    PutStart: key,
    PutEnd: object.key,
    PutRevoke: key,
    UpsertStart: key,
    UpsertEnd: object.key,
    UpsertRevoke: key,
    Remove: key,
    RegisterPrefetchTask: key,
    PromotionAllocStart: key,
    NotifyPromotionSuccess: key,
    NotifyPromotionFailure: key,
    CopyStart: key,
    DynamicReplicaCopyStart: key,
    CopyEnd: key,
    DynamicReplicaCopyEnd: key,
    CopyRevoke: key,
    DynamicReplicaCopyRevoke: key,
    MoveStart: key,
    MoveEnd: key,
    MoveRevoke: key,
    EvictDiskReplica: key,
    EvictDiskReplicaIfCurrent: key,
    CreateCopyTask: key,
    CreateMoveTask: key,
}

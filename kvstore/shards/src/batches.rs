//! Calls about several keys, each of which belongs to one shard.

use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc;
use mooncake_wire::rpc::{
    BatchEvictDiskArguments, BatchProbeArguments, BatchPutEndArguments, BatchPutRevokeArguments,
    BatchPutStartArguments, BatchRemoveArguments, BatchUpsertEndArguments, BatchUpsertRevokeArguments,
    KeysArguments, OffloadedArguments, ReplicaClearArguments, RpcDefinition,
};
use mooncake_wire::types::ReplicateConfig;

use crate::merging::{all, interleaved};
use crate::{ShardCount, ShardIndex, ShardedRpc, SplitCall};

/// Arguments with a list of items.
trait BatchArguments<'a> {
    /// The key of each item.
    fn keys(&self) -> impl Iterator<Item = &'a str>;

    /// These arguments with only the items at the given indices.
    fn select(&self, items: &[usize]) -> Self;
}

fn select<T: Clone>(values: &[T], items: &[usize]) -> Vec<T> {
    items.iter().filter_map(|item| values.get(*item)).cloned().collect()
}

fn select_optional<T: Clone>(values: Option<&Vec<T>>, items: &[usize]) -> Option<Vec<T>> {
    values.map(|values| select(values, items))
}

/// Members of the configuration that have a value per object.
fn select_config<'a>(config: &ReplicateConfig<&'a str>, items: &[usize]) -> ReplicateConfig<&'a str> {
    ReplicateConfig {
        group_ids: select_optional(config.group_ids.as_ref(), items),
        session_ids: select_optional(config.session_ids.as_ref(), items),
        per_key_preferred_hca_names: select_optional(config.per_key_preferred_hca_names.as_ref(), items),
        residency_affinity_ids: select_optional(config.residency_affinity_ids.as_ref(), items),
        preferred_segments: config.preferred_segments.clone(),
        preferred_nof_segments: config.preferred_nof_segments.clone(),
        preferred_hca_names: config.preferred_hca_names.clone(),
        ..*config
    }
}

macro_rules! with_keys {
    ($($arguments:ident)+) => {$(
        impl<'a> BatchArguments<'a> for $arguments<&'a str> {
            fn keys(&self) -> impl Iterator<Item = &'a str> {
                self.keys.iter().copied()
            }

            fn select(&self, items: &[usize]) -> Self {
                Self { keys: select(&self.keys, items), ..*self }
            }
        }
    )+};
}

with_keys! {
    KeysArguments BatchProbeArguments ReplicaClearArguments BatchPutRevokeArguments BatchUpsertRevokeArguments
    BatchRemoveArguments BatchEvictDiskArguments
}

macro_rules! with_objects {
    ($($arguments:ident)+) => {$(
        impl<'a> BatchArguments<'a> for $arguments<&'a str> {
            fn keys(&self) -> impl Iterator<Item = &'a str> {
                self.objects.iter().map(|object| object.key)
            }

            fn select(&self, items: &[usize]) -> Self {
                Self { objects: select(&self.objects, items), ..*self }
            }
        }
    )+};
}

with_objects! { BatchPutEndArguments BatchUpsertEndArguments }

impl<'a> BatchArguments<'a> for BatchPutStartArguments<&'a str> {
    fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.keys.iter().copied()
    }

    fn select(&self, items: &[usize]) -> Self {
        Self {
            keys: select(&self.keys, items),
            sizes: select(&self.sizes, items),
            config: select_config(&self.config, items),
            ..*self
        }
    }
}

impl<'a> BatchArguments<'a> for OffloadedArguments<&'a str> {
    fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.tasks.iter().map(|task| task.key)
    }

    fn select(&self, items: &[usize]) -> Self {
        Self {
            client_id: self.client_id,
            tasks: select(&self.tasks, items),
            stored: select(&self.stored, items),
        }
    }
}

/// Splits a batch. An empty one goes to the first shard.
fn split<'a, A: BatchArguments<'a>>(arguments: A, shards: ShardCount) -> SplitCall<A> {
    let mut by_shard: BTreeMap<ShardIndex, Vec<usize>> = BTreeMap::new();
    let shard_of_item: Vec<ShardIndex> = arguments.keys().map(|key| shards.shard_of(key)).collect();
    for (item, shard) in shard_of_item.iter().enumerate() {
        by_shard.entry(*shard).or_default().push(item);
    }
    if by_shard.len() <= 1 {
        let shard = by_shard.into_keys().next().unwrap_or(0);
        return SplitCall { calls: vec![(shard, arguments)], items: vec![0; shard_of_item.len()] };
    }
    let mut items = vec![0; shard_of_item.len()];
    let mut calls = Vec::with_capacity(by_shard.len());
    for (shard, selected) in by_shard {
        for item in &selected {
            if let Some(call) = items.get_mut(*item) {
                *call = calls.len();
            }
        }
        calls.push((shard, arguments.select(&selected)));
    }
    SplitCall { calls, items }
}

macro_rules! batches {
    ($($($method:ident)+ => |$items:pat_param, $replies:ident| $merged:expr;)+) => {$($(
        impl ShardedRpc for rpc::$method {
            fn split(
                arguments: <Self as RpcDefinition>::Arguments<&str>,
                shards: ShardCount,
            ) -> SplitCall<<Self as RpcDefinition>::Arguments<&str>> {
                split(arguments, shards)
            }

            fn merge<S: Ord>(
                $items: &[usize],
                $replies: Vec<Result<<Self as RpcDefinition>::Reply<S>, ErrorCode>>,
            ) -> <Self as RpcDefinition>::Reply<S> {
                $merged
            }
        }
    )+)+};
}

batches! {
    BatchExistKey BatchProbeKey BatchGetReplicaList BatchGetReplicaListForAdmin
    BatchPutStart BatchPutEnd BatchPutRevoke BatchUpsertStart BatchUpsertEnd BatchUpsertRevoke
    BatchRemove BatchEvictDiskReplica => |items, replies| interleaved(items, replies);
    BatchReplicaClear => |_, replies| all(replies).map(|cleared| cleared.into_iter().flatten().collect());
    NotifyOffloadSuccess => |_, replies| all(replies).map(|_| ());
}

//! Calls that every shard executes: segments, heartbeats, tasks, and searches over all keys.

use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc;
use mooncake_wire::rpc::{
    FetchTasksArguments, MasterResult, MountArguments, MountNofArguments, RemountArguments,
    RemountNofArguments, RpcDefinition, SsdCapacityArguments,
};
use mooncake_wire::types::{ClientStatus, NofSegment, OffloadTasks, PingReply, SegmentStatus};

use crate::merging::{ShardReply, all, any, existing, reachable};
use crate::parts::DivisibleSegment;
use crate::{ShardCount, ShardedRpc, SplitCall};

/// `everywhere! { Method(replies) => merged, … }`: the same call of each shard.
macro_rules! everywhere {
    ($($method:ident($replies:ident) => $merged:expr,)+) => {$(
        impl ShardedRpc for rpc::$method {
            fn split(
                arguments: <Self as RpcDefinition>::Arguments<&str>,
                shards: ShardCount,
            ) -> SplitCall<<Self as RpcDefinition>::Arguments<&str>> {
                SplitCall::everywhere(shards, &arguments)
            }

            fn merge<S: Ord>(
                _: &[usize],
                $replies: Vec<Result<<Self as RpcDefinition>::Reply<S>, ErrorCode>>,
            ) -> <Self as RpcDefinition>::Reply<S> {
                $merged
            }
        }
    )+};
}

everywhere! {
    BatchQueryIp(replies) => reachable(replies).map(|found| found.into_iter().flatten().collect()),
    GetReplicaListByRegex(replies) => all(replies).map(|found| found.into_iter().flatten().collect()),
    RemoveByRegex(replies) => all(replies).map(|counts| counts.into_iter().fold(0, i64::saturating_add)),
    RemoveAll(replies) => removed(replies),
    UnmountSegment(replies) => done(existing(replies, ErrorCode::SEGMENT_NOT_FOUND)),
    GracefulUnmountSegment(replies) => done(existing(replies, ErrorCode::SEGMENT_NOT_FOUND)),
    UnmountNoFSegment(replies) => done(existing(replies, ErrorCode::SEGMENT_NOT_FOUND)),
    GetAllNoFSegments(replies) => all(replies).map(whole_segments),
    GetNoFSegmentsByName(replies) => all(replies).map(|owners| {
        let owners = owners.into_iter().flatten().map(|owner| ((owner.segment_id, owner.client_id), owner));
        owners.collect::<BTreeMap<_, _>>().into_values().collect()
    }),
    Ping(replies) => reachable(replies).map(heartbeat),
    GetFsdir(replies) => any(replies),
    GetStorageConfig(replies) => any(replies),
    ServiceReady(replies) => any(replies),
    QuerySegmentStatus(replies) => segment_status(replies),
    QuerySegmentStatusById(replies) => segment_status(replies),
    MountLocalDiskSegment(replies) => done(reachable(replies)),
    UnmountLocalDiskSegment(replies) => done(all(replies)),
    OffloadObjectHeartbeat(replies) => reachable(replies).map(tasks),
    PromotionObjectHeartbeat(replies) => reachable(replies).map(tasks),
    // A client then clears its disk, so it must not while any shard has objects there.
    PollRemoveAll(replies) => all(replies).map(|removed| !removed.contains(&false)),
    QueryTask(replies) => any(replies),
    MarkTaskToComplete(replies) => any(replies),
}

/// `in_parts! { Method => |arguments, shard, shards| the shard's arguments, |replies| merged; … }`
macro_rules! in_parts {
    ($($method:ident => |$arguments:ident, $shard:pat_param, $shards:ident| $part:expr, |$replies:ident| $merged:expr;)+) => {$(
        impl ShardedRpc for rpc::$method {
            fn split(
                $arguments: <Self as RpcDefinition>::Arguments<&str>,
                $shards: ShardCount,
            ) -> SplitCall<<Self as RpcDefinition>::Arguments<&str>> {
                let part = |$shard| $part;
                let calls = $shards.iter().filter_map(|shard| part(shard).map(|part| (shard, part))).collect();
                SplitCall { calls, items: Vec::new() }
            }

            fn merge<S: Ord>(
                _: &[usize],
                $replies: Vec<Result<<Self as RpcDefinition>::Reply<S>, ErrorCode>>,
            ) -> <Self as RpcDefinition>::Reply<S> {
                $merged
            }
        }
    )+};
}

in_parts! {
    MountSegment => |arguments, shard, shards| {
        let client_id = arguments.client_id;
        arguments.segment.part(shard, shards).map(|segment| MountArguments { segment, client_id })
    }, |replies| done(reachable(replies));
    MountNoFSegment => |arguments, shard, shards| {
        let client_id = arguments.client_id;
        arguments.segment.part(shard, shards).map(|segment| MountNofArguments { segment, client_id })
    }, |replies| done(reachable(replies));
    ReMountSegment => |arguments, shard, shards| {
        let segments = arguments.segments.iter().filter_map(|segment| segment.part(shard, shards)).collect();
        Some(RemountArguments { segments, client_id: arguments.client_id })
    }, |replies| done(reachable(replies));
    ReMountNoFSegment => |arguments, shard, shards| {
        let segments = arguments.segments.iter().filter_map(|segment| segment.part(shard, shards)).collect();
        Some(RemountNofArguments { segments, client_id: arguments.client_id })
    }, |replies| done(reachable(replies));
    ReportSsdCapacity => |arguments, _, shards| {
        let count = i64::try_from(shards.get()).unwrap_or(i64::MAX);
        Some(SsdCapacityArguments { total_bytes: arguments.total_bytes / count, ..arguments.clone() })
    }, |replies| done(reachable(replies));
    // Rounded up, so that no shard's tasks wait for ever.
    FetchTasks => |arguments, _, shards| {
        let limit = arguments.limit.div_ceil(shards.get() as u64);
        Some(FetchTasksArguments { limit, ..arguments.clone() })
    }, |replies| reachable(replies).map(|tasks| tasks.into_iter().flatten().collect());
}

fn done(replies: MasterResult<Vec<()>>) -> MasterResult<()> {
    replies.map(|_| ())
}

/// The number of removed objects, or the first error code, which is negative.
fn removed(replies: Vec<Result<i64, ErrorCode>>) -> i64 {
    let counts = replies.into_iter().map(|reply| reply.unwrap_or_else(|code| code.0.into()));
    counts
        .reduce(|sum, count| {
            if sum < 0 {
                sum
            } else if count < 0 {
                count
            } else {
                sum.saturating_add(count)
            }
        })
        .unwrap_or(0)
}

/// A client has to mount its segments again if any shard lacks them.
fn heartbeat(replies: Vec<PingReply>) -> PingReply {
    let status = |status| replies.iter().any(|reply| reply.client_status == status);
    let client_status = if status(ClientStatus::NEED_REMOUNT) {
        ClientStatus::NEED_REMOUNT
    } else if replies.iter().all(|reply| reply.client_status == ClientStatus::OK) {
        ClientStatus::OK
    } else {
        ClientStatus::UNDEFINED
    };
    let view_version_id = replies.iter().map(|reply| reply.view_version_id).max().unwrap_or_default();
    PingReply { view_version_id, client_status }
}

fn tasks<S>(replies: Vec<OffloadTasks<S>>) -> OffloadTasks<S> {
    OffloadTasks(replies.into_iter().flat_map(|tasks| tasks.0).collect())
}

/// The status of all parts if it is the same; else that of a part that is not finished with what the others are.
fn segment_status(replies: Vec<ShardReply<SegmentStatus>>) -> MasterResult<SegmentStatus> {
    let statuses = existing(replies, ErrorCode::SEGMENT_NOT_FOUND)?;
    let unfinished = [
        SegmentStatus::DRAINING,
        SegmentStatus::UNMOUNTING,
        SegmentStatus::GRACEFULLY_UNMOUNTING,
        SegmentStatus::OK,
        SegmentStatus::DRAINED,
    ];
    let found = unfinished.into_iter().find(|status| statuses.contains(status));
    Ok(found.unwrap_or(SegmentStatus::UNDEFINED))
}

/// Segments whose parts are in several shards.
fn whole_segments<S: Ord>(replies: Vec<Vec<NofSegment<S>>>) -> Vec<NofSegment<S>> {
    let mut whole: BTreeMap<_, NofSegment<S>> = BTreeMap::new();
    for part in replies.into_iter().flatten() {
        match whole.get_mut(&part.id) {
            Some(segment) => {
                segment.base = segment.base.min(part.base);
                segment.size = segment.size.saturating_add(part.size);
            }
            None => _ = whole.insert(part.id, part),
        }
    }
    whole.into_values().collect()
}

#[cfg(test)]
mod tests {
    use mooncake_wire::types::{Segment, Uuid};

    use super::*;

    const ID: Uuid = Uuid { first: 1, second: 2 };

    fn mount(size: u64, shards: usize) -> Vec<(usize, u64, u64)> {
        let segment = Segment {
            id: ID,
            name: "node",
            base: 1 << 20,
            size,
            te_endpoint: "node",
            protocol: "tcp",
            host_id: "",
            locality: None,
        };
        let arguments = MountArguments { segment, client_id: ID };
        let split = rpc::MountSegment::split(arguments, ShardCount::new(shards).unwrap());
        let parts = split.calls.iter().map(|(shard, part)| (*shard, part.segment.base, part.segment.size));
        parts.collect()
    }

    #[test]
    fn a_segment_is_mounted_in_parts() {
        let mebibyte = 1 << 20;
        assert_eq!(mount(8 * mebibyte, 2), [(0, mebibyte, 4 * mebibyte), (1, 5 * mebibyte, 4 * mebibyte)]);
        // Too small for a page in each.
        assert_eq!(mount(5000, 2), [(1, mebibyte, 5000)]);
        // A master refuses it, so it must get it.
        assert_eq!(mount(0, 2), [(0, mebibyte, 0)]);
    }

    #[test]
    fn a_client_mounts_again_if_any_shard_lacks_its_segments() {
        let reply = |view_version_id, client_status| Ok(Ok(PingReply { view_version_id, client_status }));
        let merged = |replies| rpc::Ping::merge::<&str>(&[], replies);
        let (ok, remount) = (ClientStatus::OK, ClientStatus::NEED_REMOUNT);
        let both = merged(vec![reply(3, ok), reply(2, remount)]);
        assert_eq!(both, Ok(PingReply { view_version_id: 3, client_status: remount }));
        let one = merged(vec![reply(3, ok), Err(ErrorCode::RPC_FAIL)]);
        assert_eq!(one, Ok(PingReply { view_version_id: 3, client_status: ok }));
    }

    #[test]
    fn removals_are_added_up_unless_one_failed() {
        let merged = |replies| rpc::RemoveAll::merge::<&str>(&[], replies);
        assert_eq!(merged(vec![Ok(3), Ok(0), Ok(4)]), 7);
        assert_eq!(merged(vec![Ok(3), Err(ErrorCode::RPC_FAIL), Ok(4)]), -900);
    }

    #[test]
    fn a_disk_is_cleared_only_if_all_shards_are_empty() {
        let merged = |replies| rpc::PollRemoveAll::merge::<&str>(&[], replies);
        assert_eq!(merged(vec![Ok(Ok(true)), Ok(Ok(true))]), Ok(true));
        assert_eq!(merged(vec![Ok(Ok(true)), Ok(Ok(false))]), Ok(false));
        assert_eq!(merged(vec![Ok(Ok(true)), Err(ErrorCode::RPC_FAIL)]), Err(ErrorCode::RPC_FAIL));
    }

    #[test]
    fn the_parts_of_a_disk_are_one_segment() {
        let part = |id, base, size| NofSegment { id, name: "n", base, size, te_endpoint: "n" };
        let other = Uuid { first: 9, second: 9 };
        let replies = vec![vec![part(ID, 100, 50), part(other, 7, 1)], vec![part(ID, 150, 60)]];
        assert_eq!(whole_segments(replies), [part(ID, 100, 110), part(other, 7, 1)]);
    }
}

//! Metric families of calls, by RPC.

use mooncake_wire::rpc::RpcMethod;

use super::text::MasterMetricsText;
use crate::counters::{CallCounts, RpcCounters};

/// RPCs for one object or segment, with the names of their families.
const SINGLE: [(&str, RpcMethod); 25] = [
    ("exist_key", RpcMethod::ExistKey),
    ("put_start", RpcMethod::PutStart),
    ("put_end", RpcMethod::PutEnd),
    ("put_revoke", RpcMethod::PutRevoke),
    ("get_replica_list", RpcMethod::GetReplicaList),
    ("get_replica_list_by_regex", RpcMethod::GetReplicaListByRegex),
    ("remove", RpcMethod::Remove),
    ("remove_by_regex", RpcMethod::RemoveByRegex),
    ("remove_all", RpcMethod::RemoveAll),
    ("mount_segment", RpcMethod::MountSegment),
    ("unmount_segment", RpcMethod::UnmountSegment),
    ("remount_segment", RpcMethod::ReMountSegment),
    ("ping", RpcMethod::Ping),
    ("copy_start", RpcMethod::CopyStart),
    ("copy_end", RpcMethod::CopyEnd),
    ("copy_revoke", RpcMethod::CopyRevoke),
    ("move_start", RpcMethod::MoveStart),
    ("move_end", RpcMethod::MoveEnd),
    ("move_revoke", RpcMethod::MoveRevoke),
    ("evict_disk_replica", RpcMethod::EvictDiskReplica),
    ("create_copy_task", RpcMethod::CreateCopyTask),
    ("create_move_task", RpcMethod::CreateMoveTask),
    ("update_task", RpcMethod::MarkTaskToComplete),
    ("query_task", RpcMethod::QueryTask),
    ("fetch_tasks", RpcMethod::FetchTasks),
];

/// Batch RPCs, with the names of their families.
const BATCHES: [(&str, RpcMethod); 7] = [
    ("batch_exist_key", RpcMethod::BatchExistKey),
    ("batch_query_ip", RpcMethod::BatchQueryIp),
    ("batch_replica_clear", RpcMethod::BatchReplicaClear),
    ("batch_get_replica_list", RpcMethod::BatchGetReplicaList),
    ("batch_put_start", RpcMethod::BatchPutStart),
    ("batch_put_end", RpcMethod::BatchPutEnd),
    ("batch_put_revoke", RpcMethod::BatchPutRevoke),
];

pub(super) fn all(text: &mut MasterMetricsText, counters: &RpcCounters) {
    for (name, method) in SINGLE {
        let counts = counters.call_counts(method);
        requests(text, name, method, &counts);
    }
    for (name, method) in BATCHES {
        let counts = counters.call_counts(method);
        requests(text, name, method, &counts);
        let method = method.name();
        let mut counter = |suffix: &str, help: &str, value: u64| {
            text.counter(&format!("master_{name}_{suffix}_total"), &format!("{method}: {help}."), value);
        };
        counter("partial_successes", "calls in which some objects failed", counts.partial_successes);
        counter("items", "objects", counts.items);
        counter("failed_items", "objects that failed", counts.failed_items);
    }
}

fn requests(text: &mut MasterMetricsText, name: &str, method: RpcMethod, counts: &CallCounts) {
    let method = method.name();
    let mut counter = |suffix: &str, help: &str, value: u64| {
        text.counter(&format!("master_{name}_{suffix}_total"), &format!("{method}: {help}."), value);
    };
    counter("requests", "calls", counts.requests);
    counter("failures", "calls that failed", counts.failures);
}

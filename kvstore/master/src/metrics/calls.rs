//! Metric families of calls, by RPC.

use mooncake_wire::rpc::RpcMethod;
use moongate_runtime::metrics::MetricsWriter;

use crate::counters::RpcCounters;

/// RPCs for one object or segment, with the names of their calls and failures.
const SINGLE: [(RpcMethod, &str, &str); 25] = [
    (RpcMethod::ExistKey, "master_exist_key_requests_total", "master_exist_key_failures_total"),
    (RpcMethod::PutStart, "master_put_start_requests_total", "master_put_start_failures_total"),
    (RpcMethod::PutEnd, "master_put_end_requests_total", "master_put_end_failures_total"),
    (RpcMethod::PutRevoke, "master_put_revoke_requests_total", "master_put_revoke_failures_total"),
    (
        RpcMethod::GetReplicaList,
        "master_get_replica_list_requests_total",
        "master_get_replica_list_failures_total",
    ),
    (
        RpcMethod::GetReplicaListByRegex,
        "master_get_replica_list_by_regex_requests_total",
        "master_get_replica_list_by_regex_failures_total",
    ),
    (RpcMethod::Remove, "master_remove_requests_total", "master_remove_failures_total"),
    (
        RpcMethod::RemoveByRegex,
        "master_remove_by_regex_requests_total",
        "master_remove_by_regex_failures_total",
    ),
    (RpcMethod::RemoveAll, "master_remove_all_requests_total", "master_remove_all_failures_total"),
    (RpcMethod::MountSegment, "master_mount_segment_requests_total", "master_mount_segment_failures_total"),
    (
        RpcMethod::UnmountSegment,
        "master_unmount_segment_requests_total",
        "master_unmount_segment_failures_total",
    ),
    (
        RpcMethod::ReMountSegment,
        "master_remount_segment_requests_total",
        "master_remount_segment_failures_total",
    ),
    (RpcMethod::Ping, "master_ping_requests_total", "master_ping_failures_total"),
    (RpcMethod::CopyStart, "master_copy_start_requests_total", "master_copy_start_failures_total"),
    (RpcMethod::CopyEnd, "master_copy_end_requests_total", "master_copy_end_failures_total"),
    (RpcMethod::CopyRevoke, "master_copy_revoke_requests_total", "master_copy_revoke_failures_total"),
    (RpcMethod::MoveStart, "master_move_start_requests_total", "master_move_start_failures_total"),
    (RpcMethod::MoveEnd, "master_move_end_requests_total", "master_move_end_failures_total"),
    (RpcMethod::MoveRevoke, "master_move_revoke_requests_total", "master_move_revoke_failures_total"),
    (
        RpcMethod::EvictDiskReplica,
        "master_evict_disk_replica_requests_total",
        "master_evict_disk_replica_failures_total",
    ),
    (
        RpcMethod::CreateCopyTask,
        "master_create_copy_task_requests_total",
        "master_create_copy_task_failures_total",
    ),
    (
        RpcMethod::CreateMoveTask,
        "master_create_move_task_requests_total",
        "master_create_move_task_failures_total",
    ),
    (RpcMethod::MarkTaskToComplete, "master_update_task_requests_total", "master_update_task_failures_total"),
    (RpcMethod::QueryTask, "master_query_task_requests_total", "master_query_task_failures_total"),
    (RpcMethod::FetchTasks, "master_fetch_tasks_requests_total", "master_fetch_tasks_failures_total"),
];

/// Metric names of a batch RPC.
struct BatchMetricNames {
    method: RpcMethod,
    requests: &'static str,
    failures: &'static str,
    partial_successes: &'static str,
    items: &'static str,
    failed_items: &'static str,
}

const BATCHES: [BatchMetricNames; 7] = [
    BatchMetricNames {
        method: RpcMethod::BatchExistKey,
        requests: "master_batch_exist_key_requests_total",
        failures: "master_batch_exist_key_failures_total",
        partial_successes: "master_batch_exist_key_partial_successes_total",
        items: "master_batch_exist_key_items_total",
        failed_items: "master_batch_exist_key_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchQueryIp,
        requests: "master_batch_query_ip_requests_total",
        failures: "master_batch_query_ip_failures_total",
        partial_successes: "master_batch_query_ip_partial_successes_total",
        items: "master_batch_query_ip_items_total",
        failed_items: "master_batch_query_ip_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchReplicaClear,
        requests: "master_batch_replica_clear_requests_total",
        failures: "master_batch_replica_clear_failures_total",
        partial_successes: "master_batch_replica_clear_partial_successes_total",
        items: "master_batch_replica_clear_items_total",
        failed_items: "master_batch_replica_clear_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchGetReplicaList,
        requests: "master_batch_get_replica_list_requests_total",
        failures: "master_batch_get_replica_list_failures_total",
        partial_successes: "master_batch_get_replica_list_partial_successes_total",
        items: "master_batch_get_replica_list_items_total",
        failed_items: "master_batch_get_replica_list_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchPutStart,
        requests: "master_batch_put_start_requests_total",
        failures: "master_batch_put_start_failures_total",
        partial_successes: "master_batch_put_start_partial_successes_total",
        items: "master_batch_put_start_items_total",
        failed_items: "master_batch_put_start_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchPutEnd,
        requests: "master_batch_put_end_requests_total",
        failures: "master_batch_put_end_failures_total",
        partial_successes: "master_batch_put_end_partial_successes_total",
        items: "master_batch_put_end_items_total",
        failed_items: "master_batch_put_end_failed_items_total",
    },
    BatchMetricNames {
        method: RpcMethod::BatchPutRevoke,
        requests: "master_batch_put_revoke_requests_total",
        failures: "master_batch_put_revoke_failures_total",
        partial_successes: "master_batch_put_revoke_partial_successes_total",
        items: "master_batch_put_revoke_items_total",
        failed_items: "master_batch_put_revoke_failed_items_total",
    },
];

pub(super) fn all(writer: &mut MetricsWriter<'_>, counters: &RpcCounters) {
    for (method, requests, failures) in SINGLE {
        let counts = counters.call_counts(method);
        write(writer, method, requests, "calls", counts.requests);
        write(writer, method, failures, "calls that failed", counts.failures);
    }
    for names in &BATCHES {
        let (method, counts) = (names.method, counters.call_counts(names.method));
        write(writer, method, names.requests, "calls", counts.requests);
        write(writer, method, names.failures, "calls that failed", counts.failures);
        let partial = counts.partial_successes;
        write(writer, method, names.partial_successes, "calls in which some objects failed", partial);
        write(writer, method, names.items, "objects", counts.items);
        write(writer, method, names.failed_items, "objects that failed", counts.failed_items);
    }
}

fn write(writer: &mut MetricsWriter<'_>, method: RpcMethod, name: &str, help: &str, value: u64) {
    writer.counter(name, &format!("{}: {help}", method.name()), value);
}

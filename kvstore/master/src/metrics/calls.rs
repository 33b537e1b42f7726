//! Calls, by RPC.

use mooncake_wire::rpc::Method;

use super::text::Text;
use crate::count::{CallCounts, Counters};

/// Calls about one thing, by the names of their families.
const SINGLE: [(&str, Method); 25] = [
    ("exist_key", Method::ExistKey),
    ("put_start", Method::PutStart),
    ("put_end", Method::PutEnd),
    ("put_revoke", Method::PutRevoke),
    ("get_replica_list", Method::GetReplicaList),
    ("get_replica_list_by_regex", Method::GetReplicaListByRegex),
    ("remove", Method::Remove),
    ("remove_by_regex", Method::RemoveByRegex),
    ("remove_all", Method::RemoveAll),
    ("mount_segment", Method::MountSegment),
    ("unmount_segment", Method::UnmountSegment),
    ("remount_segment", Method::ReMountSegment),
    ("ping", Method::Ping),
    ("copy_start", Method::CopyStart),
    ("copy_end", Method::CopyEnd),
    ("copy_revoke", Method::CopyRevoke),
    ("move_start", Method::MoveStart),
    ("move_end", Method::MoveEnd),
    ("move_revoke", Method::MoveRevoke),
    ("evict_disk_replica", Method::EvictDiskReplica),
    ("create_copy_task", Method::CreateCopyTask),
    ("create_move_task", Method::CreateMoveTask),
    ("update_task", Method::MarkTaskToComplete),
    ("query_task", Method::QueryTask),
    ("fetch_tasks", Method::FetchTasks),
];

/// Calls about many objects.
const BATCHES: [(&str, Method); 7] = [
    ("batch_exist_key", Method::BatchExistKey),
    ("batch_query_ip", Method::BatchQueryIp),
    ("batch_replica_clear", Method::BatchReplicaClear),
    ("batch_get_replica_list", Method::BatchGetReplicaList),
    ("batch_put_start", Method::BatchPutStart),
    ("batch_put_end", Method::BatchPutEnd),
    ("batch_put_revoke", Method::BatchPutRevoke),
];

pub(super) fn all(text: &mut Text, counters: &Counters) {
    for (name, method) in SINGLE {
        let counts = counters.of(method);
        requests(text, name, method, &counts);
    }
    for (name, method) in BATCHES {
        let counts = counters.of(method);
        requests(text, name, method, &counts);
        let method = method.name();
        let mut counter = |what: &str, help: &str, value: u64| {
            text.counter(&format!("master_{name}_{what}_total"), &format!("{method}: {help}."), value);
        };
        counter("partial_successes", "calls in which some objects failed", counts.partial_successes);
        counter("items", "objects", counts.items);
        counter("failed_items", "objects that failed", counts.failed_items);
    }
}

fn requests(text: &mut Text, name: &str, method: Method, counts: &CallCounts) {
    let method = method.name();
    let mut counter = |what: &str, help: &str, value: u64| {
        text.counter(&format!("master_{name}_{what}_total"), &format!("{method}: {help}."), value);
    };
    counter("requests", "calls", counts.requests);
    counter("failures", "calls that failed", counts.failures);
}

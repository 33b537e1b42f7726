//! Compares the result codes of a sequence of calls.

use mooncake_wire::rpc::{
    BatchEvictDiskArguments, BatchEvictDiskReplica, BatchExistKey, BatchGetReplicaList, BatchPutEnd,
    BatchPutEndArguments, BatchPutRevoke, BatchPutRevokeArguments, BatchPutStart, BatchPutStartArguments,
    BatchRemove, BatchRemoveArguments, ClientArguments, ClientKeyArguments, CopyEnd, CopyRevoke, CopyStart,
    CopyStartArguments, CopyTaskArguments, CreateCopyTask, CreateMoveTask, EvictDiskArguments,
    EvictDiskReplica, ExistKey, FetchTasks, FetchTasksArguments, GetReplicaList, GetReplicaListByRegex,
    KeysArguments, MasterResult, MountArguments, MountLocalDiskSegment, MountSegment, MoveEnd, MoveRevoke,
    MoveStart, MoveStartArguments, MoveTaskArguments, OffloadObjectHeartbeat, OffloadingArguments, Ping,
    PollRemoveAll, PutEnd, PutEndArguments, PutRevoke, PutRevokeArguments, PutStart, PutStartArguments,
    QuerySegmentStatus, QueryTask, ReMountSegment, RemountArguments, Remove, RemoveAll, RemoveAllArguments,
    RemoveArguments, RemoveByRegex, SegmentNameArguments, TaskArguments, UnmountArguments, UnmountSegment,
    UpsertEnd, UpsertStart,
};
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_store_testkit::test_master::{TestRpcConnection, key};

const NODE: Uuid = Uuid { first: 11, second: 12 };
const OTHER: Uuid = Uuid { first: 21, second: 22 };

pub(super) fn code<T: std::fmt::Debug>(outcome: &MasterResult<T>) -> String {
    outcome.as_ref().map_or_else(ToString::to_string, |_| "ok".to_owned())
}

pub(super) fn codes<T: std::fmt::Debug>(outcomes: &[MasterResult<T>]) -> String {
    outcomes.iter().map(code).collect::<Vec<_>>().join(" ")
}

pub(super) fn segment(number: u64, size: u64) -> Segment<&'static str> {
    let name = if number == 1 { "127.0.0.1:12001" } else { "127.0.0.1:12002" };
    let (id, base) = (Uuid { first: 5, second: number }, number << 40);
    Segment { id, name, base, size, te_endpoint: name, protocol: "tcp", host_id: "", locality: None }
}

pub(super) fn start(client_id: Uuid, key: &str, size: u64) -> PutStartArguments<&str> {
    PutStartArguments { client_id, key, size, config: ReplicateConfig::default(), tenant: DEFAULT_TENANT }
}

pub(super) fn end(client_id: Uuid, key: &str) -> PutEndArguments<&str> {
    let object = ObjectMeta { key, object_checksum: None };
    PutEndArguments { client_id, object, replica_type: ReplicaType::ALL, tenant: DEFAULT_TENANT }
}

fn revoke(client_id: Uuid, key: &str) -> PutRevokeArguments<&str> {
    PutRevokeArguments { client_id, key, replica_type: ReplicaType::ALL, tenant: DEFAULT_TENANT }
}

pub(super) fn remove(key: &str, force: bool) -> RemoveArguments<&str> {
    RemoveArguments { key, force, tenant: DEFAULT_TENANT }
}

/// A connection, and one line of text per call.
pub(super) struct CallTranscript {
    pub(super) connection: TestRpcConnection,
    pub(super) lines: Vec<String>,
}

/// `note!(notes, Method, arguments)` for single calls, `note!(notes, all Method, arguments)` for batches.
macro_rules! note {
    ($notes:ident, $method:ident, $arguments:expr) => {{
        let reply = $notes.connection.call::<$method>(&$arguments).await;
        let line = format!("{} {}: {}", line!(), stringify!($method), code(&reply));
        $notes.lines.push(line);
        reply
    }};
    ($notes:ident, all $method:ident, $arguments:expr) => {{
        let response = $notes.connection.call::<$method>(&$arguments).await;
        let line = format!("{} {}: {}", line!(), stringify!($method), codes(&response));
        $notes.lines.push(line);
        response
    }};
}

pub(super) use note;

/// Result codes of a long sequence of calls.
pub(super) async fn transcript(address: &str) -> Vec<String> {
    let mut notes =
        CallTranscript { connection: TestRpcConnection::connect(address).await, lines: Vec::new() };
    nodes(&mut notes).await;
    single(&mut notes).await;
    batches(&mut notes).await;
    transfers(&mut notes).await;
    removals(&mut notes).await;
    notes.lines
}

async fn nodes(notes: &mut CallTranscript) {
    let ping = note!(notes, Ping, ClientArguments { client_id: NODE });
    notes.lines.push(format!("{ping:?}"));
    note!(notes, MountSegment, MountArguments { segment: segment(1, 64 << 20), client_id: NODE }).ok();
    note!(notes, MountSegment, MountArguments { segment: segment(1, 64 << 20), client_id: NODE }).ok();
    note!(notes, MountSegment, MountArguments { segment: segment(2, 0), client_id: NODE }).ok();
    let ping = note!(notes, Ping, ClientArguments { client_id: NODE });
    notes.lines.push(format!("{ping:?}"));
    note!(notes, ReMountSegment, RemountArguments { segments: vec![segment(1, 64 << 20)], client_id: NODE })
        .ok();
    let ping = note!(notes, Ping, ClientArguments { client_id: NODE });
    notes.lines.push(format!("{ping:?}"));
    note!(notes, QuerySegmentStatus, SegmentNameArguments { name: "127.0.0.1:12001" }).ok();
    note!(notes, QuerySegmentStatus, SegmentNameArguments { name: "nobody" }).ok();
    note!(notes, UnmountSegment, UnmountArguments { segment_id: OTHER, client_id: NODE }).ok();
    note!(notes, FetchTasks, FetchTasksArguments { client_id: NODE, limit: 16 }).ok();
    note!(notes, PollRemoveAll, ClientArguments { client_id: NODE }).ok();
    let offloading = OffloadingArguments { client_id: NODE, enable_offloading: true };
    note!(notes, MountLocalDiskSegment, offloading).ok();
    note!(notes, OffloadObjectHeartbeat, offloading).ok();
}

async fn single(notes: &mut CallTranscript) {
    note!(notes, ExistKey, key("k")).ok();
    note!(notes, PutStart, start(NODE, "", 1)).ok();
    note!(notes, PutStart, start(NODE, "k", 0)).ok();
    note!(notes, PutStart, start(NODE, "k", 1 << 40)).ok();
    note!(notes, PutEnd, end(NODE, "k")).ok();
    note!(notes, PutRevoke, revoke(NODE, "k")).ok();
    note!(notes, PutStart, start(NODE, "k", 1000)).ok();
    note!(notes, PutStart, start(NODE, "k", 1000)).ok();
    note!(notes, ExistKey, key("k")).ok();
    note!(notes, GetReplicaList, key("k")).ok();
    note!(notes, Remove, remove("k", false)).ok();
    note!(notes, PutEnd, end(OTHER, "k")).ok();
    note!(notes, PutRevoke, revoke(OTHER, "k")).ok();
    note!(notes, PutEnd, end(NODE, "k")).ok();
    note!(notes, PutEnd, end(NODE, "k")).ok();
    note!(notes, PutRevoke, revoke(NODE, "k")).ok();
    note!(notes, PutStart, start(NODE, "k", 1000)).ok();
    note!(notes, UpsertStart, start(NODE, "k", 1000)).ok();
    note!(notes, UpsertStart, start(NODE, "k", 1000)).ok();
    note!(notes, UpsertStart, start(OTHER, "k", 1000)).ok();
    note!(notes, UpsertStart, start(NODE, "k", 500)).ok();
    note!(notes, UpsertStart, start(NODE, "k", 1000)).ok();
    note!(notes, UpsertEnd, end(NODE, "k")).ok();
    note!(notes, UpsertStart, start(NODE, "u", 3000)).ok();
    note!(notes, UpsertEnd, end(NODE, "u")).ok();
    note!(notes, PutStart, start(NODE, "r", 1000)).ok();
    note!(notes, PutRevoke, revoke(NODE, "r")).ok();
    note!(notes, ExistKey, key("r")).ok();
    note!(notes, GetReplicaListByRegex, key("^[ku]$")).ok();
    note!(notes, GetReplicaListByRegex, key("(")).ok();
}

async fn batches(notes: &mut CallTranscript) {
    let (config, tenant) = (ReplicateConfig::default(), DEFAULT_TENANT);
    let batch = BatchPutStartArguments {
        client_id: NODE,
        keys: vec!["b1", "k", "b2", "b3"],
        sizes: vec![100, 100, 0, 100],
        config,
        tenant,
    };
    note!(notes, all BatchPutStart, batch);
    note!(notes, all BatchPutStart, BatchPutStartArguments { sizes: vec![100], ..batch });
    let keys = ["b1", "b2", "k", "nope"];
    let objects = keys.iter().map(|key| ObjectMeta { key: *key, object_checksum: Some(7) }).collect();
    let ends = BatchPutEndArguments { client_id: NODE, objects, replica_type: ReplicaType::ALL, tenant };
    note!(notes, all BatchPutEnd, ends);
    let query = KeysArguments { keys: vec!["b1", "b2", "b3", "k", ""], tenant };
    let existing = note!(notes, all BatchExistKey, query);
    notes.lines.push(format!("{existing:?}"));
    note!(notes, all BatchGetReplicaList, query);
    let revoked = BatchPutRevokeArguments {
        client_id: NODE,
        keys: vec!["b3", "b1", "nope"],
        replica_type: ReplicaType::ALL,
        tenant,
    };
    note!(notes, all BatchPutRevoke, revoked);
    let evicted = EvictDiskArguments { client_id: NODE, key: "k", tenant, replica_type: ReplicaType::DISK };
    note!(notes, EvictDiskReplica, evicted).ok();
    let keys = vec!["k", "nope"];
    let evicted =
        BatchEvictDiskArguments { client_id: NODE, keys, tenant, replica_type: ReplicaType::LOCAL_DISK };
    note!(notes, all BatchEvictDiskReplica, evicted);
}

async fn transfers(notes: &mut CallTranscript) {
    let (tenant, source, target) = (DEFAULT_TENANT, "127.0.0.1:12001", "127.0.0.1:12002");
    let copy = |key, targets| CopyStartArguments { client_id: NODE, key, tenant, source, targets };
    let object = |key| ClientKeyArguments { client_id: NODE, key, tenant };
    note!(notes, CopyStart, copy("nope", vec![target])).ok();
    note!(notes, CopyStart, copy("k", vec!["nobody"])).ok();
    note!(notes, CopyStart, copy("nope", vec!["nobody"])).ok();
    note!(notes, CopyEnd, object("k")).ok();
    note!(notes, CopyEnd, object("nope")).ok();
    note!(notes, MountSegment, MountArguments { segment: segment(2, 64 << 20), client_id: OTHER }).ok();
    note!(notes, CopyStart, copy("k", vec![target])).ok();
    note!(notes, CopyStart, copy("k", vec![target])).ok();
    note!(notes, Remove, remove("k", true)).ok();
    note!(notes, Remove, remove("k", false)).ok();
    note!(notes, MoveEnd, object("k")).ok();
    note!(notes, MoveRevoke, object("k")).ok();
    note!(notes, CopyRevoke, object("k")).ok();
    note!(notes, MoveEnd, object("k")).ok();
    let move_arguments =
        |key, source, target| MoveStartArguments { client_id: NODE, key, tenant, source, target };
    note!(notes, MoveStart, move_arguments("u", source, source)).ok();
    note!(notes, MoveStart, move_arguments("u", source, "nobody")).ok();
    note!(notes, MoveStart, move_arguments("nope", source, "nobody")).ok();
    note!(notes, MoveStart, move_arguments("nope", source, source)).ok();
    note!(notes, MoveStart, move_arguments("u", target, source)).ok();
    note!(notes, MoveStart, move_arguments("u", source, target)).ok();
    note!(notes, CopyEnd, object("u")).ok();
    note!(notes, CopyRevoke, object("u")).ok();
    note!(notes, MoveEnd, ClientKeyArguments { client_id: OTHER, ..object("u") }).ok();
    note!(notes, CopyEnd, ClientKeyArguments { client_id: OTHER, ..object("u") }).ok();
    note!(notes, MoveEnd, object("u")).ok();
    let task = |key, targets| CopyTaskArguments { key, tenant, targets };
    note!(notes, CreateCopyTask, task("nope", vec![target])).ok();
    note!(notes, CreateCopyTask, task("b1", vec![])).ok();
    note!(notes, CreateCopyTask, task("b1", vec!["nobody"])).ok();
    note!(notes, CreateCopyTask, task("nope", vec!["nobody"])).ok();
    note!(notes, CreateCopyTask, task("b1", vec![target])).ok();
    for (key, source, target) in [
        ("b1", source, "nobody"),
        ("b1", "nobody", target),
        ("b1", target, source),
        ("b1", source, source),
        ("nope", source, source),
        ("nope", source, "nobody"),
    ] {
        note!(notes, CreateMoveTask, MoveTaskArguments { key, tenant, source, target }).ok();
    }
    note!(notes, QueryTask, TaskArguments { task_id: OTHER }).ok();
    let fetched = note!(notes, FetchTasks, FetchTasksArguments { client_id: NODE, limit: 16 });
    notes.lines.push(format!("{:?}", fetched.map(|tasks| tasks.len())));
}

async fn removals(notes: &mut CallTranscript) {
    let tenant = DEFAULT_TENANT;
    note!(notes, Remove, remove("u", false)).ok();
    note!(notes, Remove, remove("u", true)).ok();
    note!(notes, Remove, remove("u", true)).ok();
    note!(notes, all BatchRemove, BatchRemoveArguments { keys: vec!["b1", "nope"], force: false, tenant });
    note!(notes, RemoveByRegex, remove("(", false)).ok();
    let removed = note!(notes, RemoveByRegex, remove("^b", true));
    notes.lines.push(format!("{removed:?}"));
    let removed = notes.connection.call::<RemoveAll>(&RemoveAllArguments { force: true, tenant }).await;
    notes.lines.push(format!("RemoveAll: {removed}"));
    let segment_id = segment(1, 0).id;
    note!(notes, UnmountSegment, UnmountArguments { segment_id, client_id: OTHER }).ok();
    note!(notes, UnmountSegment, UnmountArguments { segment_id, client_id: NODE }).ok();
    note!(notes, PutStart, start(NODE, "last", 100)).ok();
}

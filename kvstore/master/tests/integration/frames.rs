//! Frames on the RPC port, well-formed and malformed.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use mooncake_wire::frame::{RequestHeader, RpcFault, write_request};
use mooncake_wire::rpc::{
    ClientArguments, ExistKey, HEARTBEATS_ONLY, MEMORY_RETAINED, NoArguments, Ping, PutEnd, PutEndArguments,
    PutRevokeArguments, PutStartArguments, RpcMethod, ServiceReady, UpsertEnd, UpsertRevoke, UpsertStart,
    encode_request,
};
use mooncake_wire::types::{
    ClientStatus, DEFAULT_TENANT, ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Uuid,
};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_master::{MasterServerOptions, RpcLimits};
use moongate_master_core::ClientCounts;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::test_master::{
    TestMaster, TestRpcConnection, key, minimal_request, start_master, start_master_with,
};
use tokio::io::AsyncWriteExt as _;

/// A request with any function id and any body.
fn raw(function_id: u32, sequence: u32, body: &[u8]) -> BytesMut {
    let mut out = BytesMut::new();
    let header = RequestHeader { sequence, function_id };
    write_request(&mut out, header, |out| {
        out.extend_from_slice(body);
        Ok(())
    })
    .unwrap();
    out
}

#[tokio::test]
async fn requests_may_be_pipelined_and_come_in_pieces() {
    let master = start_master();
    let mut connection = TestRpcConnection::connect_to(&master).await;
    let mut requests = BytesMut::new();
    for sequence in 0..1000 {
        encode_request::<ExistKey, &str>(sequence, Dialect::NEWEST, &key("k"), &mut requests).unwrap();
    }
    for piece in requests.chunks(977) {
        connection.stream.write_all(piece).await.unwrap();
        tokio::task::yield_now().await;
    }
    for sequence in 0..1000 {
        let (header, body) = connection.response().await.unwrap();
        assert_eq!((header.sequence, header.error), (sequence, 0));
        assert_eq!(body[..], [0xd2, 0x00, 0xe8, 0x90, 1, 0]);
    }
    let counts = master.server.counters.call_counts(RpcMethod::ExistKey);
    assert_eq!((counts.requests, counts.failures, counts.latency.iter().sum()), (1000, 0, 1000));
}

#[tokio::test]
async fn faults_leave_the_connection_usable() {
    let master = start_master();
    let mut connection = TestRpcConnection::connect_to(&master).await;
    let exist = RpcMethod::ExistKey.function_id();
    for (request, expected) in [
        (raw(0x1234_5678, 7, b""), RpcFault::not_registered()),
        (raw(exist, 7, b""), RpcFault::invalid_argument()),
        (raw(exist, 7, b"garbage that is long enough"), RpcFault::invalid_argument()),
        // The right hash, followed by too few bytes.
        (raw(exist, 7, &[0xd8, 0x1e, 0xf9, 0x7c, 200]), RpcFault::invalid_argument()),
        // A length that exceeds the memory.
        (
            raw(exist, 7, &[0xd9, 0x1e, 0xf9, 0x7c, 0x18, 255, 255, 255, 255, 255, 255, 255, 127]),
            RpcFault::invalid_argument(),
        ),
    ] {
        connection.stream.write_all(&request).await.unwrap();
        let (header, body) = connection.response().await.unwrap();
        assert_eq!(header.sequence, 7);
        assert_eq!(RpcFault::parse(header.error, &body).unwrap(), expected);
    }
    assert_eq!(connection.call::<ExistKey>(&key("k")).await, Ok(false));
    assert_eq!(
        (master.server.counters.unknown_functions(), master.server.counters.unknown_arguments()),
        (1, 4)
    );
}

#[tokio::test]
async fn invalid_frames_close_the_connection_without_a_reply() {
    let master = start_master();
    for start in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x15, 1, 0, 0], &[0x15, 0, 1, 0]] {
        let mut connection = TestRpcConnection::connect_to(&master).await;
        // Earlier requests get their replies.
        let mut bytes = raw(RpcMethod::ServiceReady.function_id(), 1, b"");
        bytes.extend_from_slice(start);
        connection.stream.write_all(&bytes).await.unwrap();
        assert_eq!(connection.response().await.unwrap().0.sequence, 1);
        assert!(connection.response().await.is_none());
    }
}

#[tokio::test]
async fn an_excessive_frame_length_closes_the_connection() {
    let limits = RpcLimits { frame_bytes: 1 << 20, ..RpcLimits::default() };
    let master = start_master_with(MasterServerOptions { limits, ..MasterServerOptions::default() });
    let mut connection = TestRpcConnection::connect_to(&master).await;
    let mut header = raw(RpcMethod::ExistKey.function_id(), 1, b"");
    header[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    connection.stream.write_all(&header).await.unwrap();
    assert!(connection.response().await.is_none());
}

#[tokio::test]
async fn memory_of_all_connections_is_bounded() {
    let limits = RpcLimits { buffer_bytes: 1 << 20, ..RpcLimits::default() };
    let master = start_master_with(MasterServerOptions { limits, ..MasterServerOptions::default() });
    let mut connection = TestRpcConnection::connect_to(&master).await;
    let mut header = raw(RpcMethod::ExistKey.function_id(), 1, b"");
    header[12..16].copy_from_slice(&(100_u32 << 20).to_le_bytes());
    connection.stream.write_all(&header).await.unwrap();
    // The frame never completes: the connection is closed once its buffer exceeds the budget.
    let piece = vec![0; 1 << 16];
    let sent = async { while connection.stream.write_all(&piece).await.is_ok() {} };
    tokio::time::timeout(LIMIT, sent).await.unwrap();
}

#[tokio::test]
async fn partial_request_times_out_and_idle_connection_does_not() {
    let limits = RpcLimits { stall_timeout: Duration::from_millis(50), ..RpcLimits::default() };
    let master = start_master_with(MasterServerOptions { limits, ..MasterServerOptions::default() });
    let mut idle = TestRpcConnection::connect_to(&master).await;
    let mut partial = TestRpcConnection::connect_to(&master).await;
    let request = raw(RpcMethod::ServiceReady.function_id(), 1, b"");
    partial.stream.write_all(&request[..10]).await.unwrap();
    assert!(partial.response().await.is_none());
    assert_eq!(idle.call::<ServiceReady>(&NoArguments).await, Ok("2.0.0".into()));
}

#[tokio::test]
async fn more_connections_than_allowed_wait() {
    let limits = RpcLimits { connections: 1, ..RpcLimits::default() };
    let master = start_master_with(MasterServerOptions { limits, ..MasterServerOptions::default() });
    let mut first = TestRpcConnection::connect_to(&master).await;
    assert!(first.call::<ServiceReady>(&NoArguments).await.is_ok());
    let mut second = TestRpcConnection::connect_to(&master).await;
    let mut waiting = std::pin::pin!(second.call::<ServiceReady>(&NoArguments));
    let both = async {
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("the second connection is served while the first is open"),
            served = first.call::<ServiceReady>(&NoArguments) => assert!(served.is_ok()),
        }
    };
    both.await;
    drop(first);
    assert!(tokio::time::timeout(LIMIT, waiting).await.unwrap().is_ok());
}

#[tokio::test]
async fn a_client_that_reads_no_replies_is_disconnected() {
    let limits = RpcLimits { stall_timeout: Duration::from_millis(200), ..RpcLimits::default() };
    let master = start_master_with(MasterServerOptions { limits, ..MasterServerOptions::default() });
    let mut connection = TestRpcConnection::connect_to(&master).await;
    let mut requests = BytesMut::new();
    for sequence in 0..10_000 {
        encode_request::<ServiceReady, &str>(sequence, Dialect::NEWEST, &NoArguments, &mut requests).unwrap();
    }
    // Replies are never read: the sockets fill up, the server stops reading, and closes the connection after its timeout.
    let sent = async { while connection.stream.write_all(&requests).await.is_ok() {} };
    tokio::time::timeout(LIMIT, sent).await.unwrap();
}

#[tokio::test]
async fn all_methods_are_served_in_all_dialects() {
    for dialect in Dialect::ALL {
        let options = MasterServerOptions { default_dialect: dialect, ..MasterServerOptions::default() };
        let master = start_master_with(options);
        let mut connection = TestRpcConnection::connect_to(&master).await;
        for method in RpcMethod::ALL.iter().filter(|method| method.dialects().contains(dialect)) {
            let request = minimal_request(*method, dialect);
            connection.stream.write_all(&request).await.unwrap();
            let (header, body) =
                connection.response().await.unwrap_or_else(|| panic!("{method:?} {dialect}"));
            assert_eq!(header.error, 0, "{method:?} {dialect}");
            assert!(method.reply_dialects(&body).contains(dialect), "{method:?} {dialect}: {body:?}");
        }
        assert_eq!(master.server.counters.unknown_arguments(), 0);
    }
}

#[tokio::test]
async fn a_drain_sends_pending_replies_and_closes() {
    let master = start_master();
    let mut connection = TestRpcConnection::connect_to(&master).await;
    assert!(connection.call::<ServiceReady>(&NoArguments).await.is_ok());
    let running = Arc::clone(&master.server);
    master.rpc.stop();
    assert!(connection.response().await.is_none());
    master.supervisor.shutdown(LIMIT).await.unwrap();
    assert!(tokio::net::TcpStream::connect(master.rpc.address()).await.is_err());
    drop(running);
}

/// Waits until the only node is silent.
async fn is_silent(master: &TestMaster) {
    let mut recorder = master.server.recorder();
    let silent = async {
        while master.server.master.client_counts() != (ClientCounts { active: 0, silent: 1 }) {
            master.server.tick(&mut recorder);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, silent).await.unwrap();
}

#[tokio::test]
async fn a_node_is_silent_after_its_last_connection_closes() {
    let master = start_master();
    let node = Uuid { first: 1, second: 2 };
    let [mut one, mut other] =
        [TestRpcConnection::connect_to(&master).await, TestRpcConnection::connect_to(&master).await];
    one.mount(node, 1 << 24).await;
    assert!(other.call::<Ping>(&ClientArguments { client_id: node }).await.is_ok());
    one.put(node, "k", 1000).await;
    drop(one);
    assert_eq!(other.call::<ExistKey>(&key("k")).await, Ok(true));
    assert_eq!(master.server.master.client_counts(), ClientCounts { active: 1, silent: 0 });
    drop(other);
    is_silent(&master).await;
    let mut reader = TestRpcConnection::connect_to(&master).await;
    assert_ne!(reader.replicas("k").await.map(|list| list.replicas.len()), Ok(1));
    // The node recovers with all of its objects.
    reader.mount(node, 1 << 24).await;
    assert_eq!(reader.replicas("k").await.map(|list| list.replicas.len()), Ok(1));
    assert_eq!(reader.replicas("other").await.unwrap_err(), ErrorCode::OBJECT_NOT_FOUND);
}

/// Mooncake's clients send heartbeats on any connection of their pool, and close them all when calls fail.
#[tokio::test]
async fn closing_pooled_connections_does_not_expire_a_client() {
    let reconnect_time = Duration::from_secs(3600);
    let master = start_master_with(MasterServerOptions { reconnect_time, ..MasterServerOptions::default() });
    let mut recorder = master.server.recorder();
    let node = Uuid { first: 1, second: 2 };
    let ping = ClientArguments { client_id: node };
    let mut other = TestRpcConnection::connect_to(&master).await;
    assert_eq!(other.call::<ExistKey>(&key("k")).await, Ok(false));
    // Each connection holds a reference to the server.
    let baseline_references = Arc::strong_count(&master.server);
    let mut pool = Vec::new();
    for _ in 0..4 {
        pool.push(TestRpcConnection::connect_to(&master).await);
    }
    pool[0].mount(node, 1 << 24).await;
    for connection in &mut pool {
        assert!(connection.call::<Ping>(&ping).await.is_ok());
    }
    pool[0].put(node, "k", 1000).await;
    for round in 0..3 {
        pool.clear();
        let ended = async {
            while Arc::strong_count(&master.server) > baseline_references {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(LIMIT, ended).await.expect("closed connections end");
        master.server.tick(&mut recorder);
        assert_eq!(other.call::<ExistKey>(&key("k")).await, Ok(true), "round {round}");
        other.put(node, &format!("new {round}"), 1000).await;
        let mut next = TestRpcConnection::connect_to(&master).await;
        let pong = next.call::<Ping>(&ping).await.unwrap();
        assert_eq!(pong.client_status, ClientStatus::OK);
        pool.push(next);
    }
}

#[tokio::test]
async fn node_expires_with_its_heartbeat_connection() {
    let reconnect_time = Duration::from_secs(3600);
    let master = start_master_with(MasterServerOptions { reconnect_time, ..MasterServerOptions::default() });
    let node = Uuid { first: 1, second: 2 };
    let mut heartbeats = TestRpcConnection::connect_to(&master).await;
    heartbeats.attachment = HEARTBEATS_ONLY;
    heartbeats.mount(node, 1 << 24).await;
    drop(heartbeats);
    is_silent(&master).await;
}

#[tokio::test]
async fn returning_node_is_awaited_and_gets_no_allocations() {
    let master = start_master();
    let node = Uuid { first: 1, second: 2 };
    let (mut first, mut other) =
        (TestRpcConnection::connect_to(&master).await, TestRpcConnection::connect_to(&master).await);
    first.attachment = MEMORY_RETAINED;
    first.mount(node, 1 << 24).await;
    first.put(node, "k", 1000).await;
    drop(first);
    let until_disconnected = async {
        let mut tries = 0;
        while other.try_begin(node, &format!("try {tries}"), 1).await != Err(ErrorCode::NO_AVAILABLE_HANDLE) {
            tries += 1;
        }
    };
    tokio::time::timeout(LIMIT, until_disconnected).await.unwrap();
    assert_eq!(other.replicas("k").await.map(|list| list.replicas.len()), Ok(1));
    assert_eq!(master.server.master.client_counts(), ClientCounts { active: 1, silent: 0 });

    let mut next = TestRpcConnection::connect_to(&master).await;
    let pong = next.call::<Ping>(&ClientArguments { client_id: node }).await.unwrap();
    assert_eq!(pong.client_status, ClientStatus::OK);
    next.put(node, "new", 1000).await;
    // This process has not announced a restart.
    drop(next);
    is_silent(&master).await;
}

/// A client's call times out, so it writes the key again on another connection; then the first call arrives.
#[tokio::test]
async fn a_delayed_end_does_not_end_a_later_upsert() {
    let master = start_master();
    let node = Uuid { first: 1, second: 2 };
    let [mut delayed, mut next, mut reader] = [
        TestRpcConnection::connect_to(&master).await,
        TestRpcConnection::connect_to(&master).await,
        TestRpcConnection::connect_to(&master).await,
    ];
    delayed.mount(node, 1 << 24).await;
    let start = |size| PutStartArguments {
        client_id: node,
        key: "k",
        size,
        config: ReplicateConfig::default(),
        tenant: DEFAULT_TENANT,
    };
    let object = ObjectMeta { key: "k", object_checksum: None };
    let end =
        PutEndArguments { client_id: node, object, replica_type: ReplicaType::ALL, tenant: DEFAULT_TENANT };
    let revoke = PutRevokeArguments {
        client_id: node,
        key: "k",
        replica_type: ReplicaType::ALL,
        tenant: DEFAULT_TENANT,
    };
    let size = async |reader: &mut TestRpcConnection| {
        reader.replicas("k").await.map(|list| match &list.replicas[0].medium {
            ReplicaMedium::Memory(buffer) => buffer.size,
            other => panic!("{other:?}"),
        })
    };
    // The end of a put does not end an upsert.
    delayed.put(node, "k", 1000).await;
    next.call::<UpsertStart>(&start(2000)).await.unwrap();
    assert_eq!(delayed.call::<PutEnd>(&end).await, Err(ErrorCode::INVALID_WRITE));
    assert_eq!(size(&mut reader).await, Ok(1000));
    // The upsert was started once, so it may be ended on any connection.
    assert_eq!(delayed.call::<UpsertEnd>(&end).await, Ok(()));
    assert_eq!(size(&mut reader).await, Ok(2000));
    // The end of an upsert does not end the next one.
    delayed.call::<UpsertStart>(&start(3000)).await.unwrap();
    next.call::<UpsertStart>(&start(4000)).await.unwrap();
    assert_eq!(delayed.call::<UpsertEnd>(&end).await, Err(ErrorCode::INVALID_WRITE));
    assert_eq!(delayed.call::<UpsertRevoke>(&revoke).await, Err(ErrorCode::INVALID_WRITE));
    assert_eq!(size(&mut reader).await, Ok(2000));
    assert_eq!(next.call::<UpsertEnd>(&end).await, Ok(()));
    assert_eq!(size(&mut reader).await, Ok(4000));
}

/// Maximum number of connections with both ends in this process, limited to ten thousand.
fn connection_limit() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft: usize = files.split_whitespace().nth(3).unwrap().parse().unwrap_or(usize::MAX);
    (soft.saturating_sub(512) / 2).clamp(100, 10_000)
}

#[tokio::test]
async fn a_client_is_served_among_ten_thousand_hostile_ones() {
    let limits = RpcLimits { stall_timeout: Duration::from_secs(5), ..RpcLimits::default() };
    let master =
        start_master_with(MasterServerOptions { limits, threads: 2, ..MasterServerOptions::default() });
    let mut huge = raw(RpcMethod::ExistKey.function_id(), 1, b"");
    huge[12..16].copy_from_slice(&(200_u32 << 20).to_le_bytes());
    let mut served = TestRpcConnection::connect_to(&master).await;
    let node = Uuid { first: 1, second: 2 };
    served.mount(node, 1 << 24).await;
    let mut hostile = Vec::new();
    for number in 0..connection_limit() {
        let mut connection = TestRpcConnection::connect_to(&master).await;
        // A third sends nothing, a third stops within the header, a third announces more than it sends.
        let sent = [&[][..], &huge[..10], &huge[..]][number % 3];
        connection.stream.write_all(sent).await.unwrap();
        hostile.push(connection);
        if number % 100 == 0 {
            // Fails if the reply does not arrive in time.
            assert_eq!(served.call::<ExistKey>(&key("k")).await, Ok(false), "{number} hostile connections");
        }
    }
    let mut another = TestRpcConnection::connect_to(&master).await;
    another.put(node, "k", 1000).await;
    assert_eq!(another.replicas("k").await.map(|list| list.replicas.len()), Ok(1));
    // Connections with an incomplete request are closed; those that sent nothing may stay.
    for (number, connection) in hostile.iter_mut().enumerate().filter(|(number, _)| number % 3 != 0) {
        assert!(connection.response().await.is_none(), "{number}");
    }
    assert_eq!(hostile[0].call::<ExistKey>(&key("k")).await, Ok(true));
}

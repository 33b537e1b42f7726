//! Calls of clients that call the router as if it were a master.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader};
use mooncake_wire::rpc::{
    BatchExistKey, BatchPutEnd, BatchPutEndArguments, BatchPutStart, BatchPutStartArguments, BatchRemove,
    BatchRemoveArguments, ClientArguments, ExistKey, GetReplicaListByRegex, KeysArguments, Ping, RemoveAll,
    RemoveAllArguments, RemoveArguments, RemoveByRegex, encode_reply,
};
use mooncake_wire::shards::{ShardIdentity, ShardRequest, encode_identity};
use mooncake_wire::types::{
    ClientStatus, DEFAULT_TENANT, ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Uuid,
};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_master::MasterServerOptions;
use moongate_master_client::rpc::{MasterClient, MasterClientOptions};
use moongate_runtime::Supervisor;
use moongate_store_router::{RouterOptions, RunningRouter};
use moongate_store_shards::ShardCount;
use moongate_store_testkit::test_master::{
    TestMaster, TestRpcConnection, key, start_master, start_master_at, start_master_with,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Notify;

const CLIENT: Uuid = Uuid { first: 1, second: 2 };
const SHARDS: usize = 4;
const SEGMENT: u64 = 64 << 20;

fn start_shard(index: u64, count: u64) -> TestMaster {
    let shard = Some(ShardIdentity { index, count });
    start_master_with(MasterServerOptions { shard, threads: 1, ..MasterServerOptions::default() })
}

pub(crate) fn options(masters: Vec<String>) -> RouterOptions {
    RouterOptions {
        shard_admins: masters.clone(),
        shards: masters,
        listen: "127.0.0.1:0".parse().unwrap(),
        admin_listen: "127.0.0.1:0".parse().unwrap(),
        max_connections: 100,
        max_frame_bytes: 64 << 20,
        call_timeout: Duration::from_secs(2),
        stall_timeout: Duration::from_secs(2),
    }
}

struct ShardedStore {
    masters: Vec<TestMaster>,
    router: RunningRouter,
    supervisor: Supervisor,
}

impl ShardedStore {
    fn start() -> Self {
        let masters: Vec<_> = (0..SHARDS as u64).map(|index| start_shard(index, SHARDS as u64)).collect();
        let addresses = masters.iter().map(|master| master.rpc.address().to_string()).collect();
        let supervisor = Supervisor::new();
        let router = moongate_store_router::start(&options(addresses), &supervisor).unwrap();
        Self { masters, router, supervisor }
    }

    async fn connect(&self) -> TestRpcConnection {
        TestRpcConnection::connect(&self.router.address().to_string()).await
    }

    fn keys_of(&self, shard: usize) -> BTreeSet<String> {
        let (mut keys, mut cursor) = (BTreeSet::new(), Some(Default::default()));
        while let Some(from) = cursor {
            let master = &self.masters[shard].server.master;
            cursor = master.keys(from, 64, |_, key| _ = keys.insert(key.to_owned()));
        }
        keys
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("key-{number}")).collect()
}

async fn put_all(client: &mut TestRpcConnection, names: &[String]) {
    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let (config, sizes) =
        (ReplicateConfig::default(), (0..keys.len() as u64).map(|size| 100 + size).collect());
    let tenant = DEFAULT_TENANT;
    let start = BatchPutStartArguments { client_id: CLIENT, keys: keys.clone(), sizes, config, tenant };
    for (number, started) in client.call::<BatchPutStart>(&start).await.into_iter().enumerate() {
        let replicas = started.unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        // The results are those of the keys.
        assert_eq!(buffer.size, 100 + number as u64);
    }
    let objects = keys.iter().map(|key| ObjectMeta { key: *key, object_checksum: None }).collect();
    let end = BatchPutEndArguments { client_id: CLIENT, objects, replica_type: ReplicaType::ALL, tenant };
    assert!(client.call::<BatchPutEnd>(&end).await.iter().all(Result::is_ok));
}

#[tokio::test]
async fn objects_are_spread_over_shards_and_found_by_key() {
    let store = ShardedStore::start();
    let mut client = store.connect().await;
    client.mount(CLIENT, SEGMENT).await;
    let names = names(200);
    put_all(&mut client, &names).await;
    client.put(CLIENT, "single", 4096).await;

    let count = ShardCount::new(SHARDS).unwrap();
    for shard in count.iter() {
        let expected: BTreeSet<String> = names
            .iter()
            .map(String::as_str)
            .chain(["single"])
            .filter(|key| count.shard_of(key) == shard)
            .map(str::to_owned)
            .collect();
        assert!(expected.len() > 20 && store.keys_of(shard) == expected, "shard {shard}");
    }
    // Shards allocate in different parts of the segment.
    let mut ranges = Vec::new();
    for name in names.iter().map(String::as_str).chain(["single"]) {
        let list = client.replicas(name).await.unwrap();
        let ReplicaMedium::Memory(buffer) = &list.replicas[0].medium else { panic!("{list:?}") };
        ranges.push((buffer.address, buffer.address + buffer.size));
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two objects overlap");
    assert!(ranges[0].0 >= 1 << 40 && ranges.last().unwrap().1 <= (1 << 40) + SEGMENT);

    let keys = ["key-7", "absent", "key-8", "single"].to_vec();
    let found = client.call::<BatchExistKey>(&KeysArguments { keys, tenant: DEFAULT_TENANT }).await;
    assert_eq!(found, [Ok(true), Ok(false), Ok(true), Ok(true)]);
    assert_eq!(client.replicas("absent").await, Err(ErrorCode::OBJECT_NOT_FOUND));
    let matching = client.call::<GetReplicaListByRegex>(&key("^key-1.$")).await.unwrap();
    assert_eq!(matching.len(), 10);
    let removal = |key| RemoveArguments { key, force: true, tenant: DEFAULT_TENANT };
    assert_eq!(client.call::<RemoveByRegex>(&removal("^key-1.$")).await, Ok(10));
    let keys = vec!["key-20", "key-10", "key-21"];
    let removed = BatchRemoveArguments { keys, force: true, tenant: DEFAULT_TENANT };
    let removed = client.call::<BatchRemove>(&removed).await;
    assert_eq!(removed, [Ok(()), Err(ErrorCode::OBJECT_NOT_FOUND), Ok(())]);
    let all = RemoveAllArguments { force: true, tenant: DEFAULT_TENANT };
    assert_eq!(client.call::<RemoveAll>(&all).await, 201 - 10 - 2);
}

#[tokio::test]
async fn every_release_gets_replies_in_its_own_format() {
    let store = ShardedStore::start();
    for (number, dialect) in Dialect::ALL.into_iter().enumerate() {
        let mut client = store.connect().await;
        client.dialect = dialect;
        let node = Uuid { first: 9, second: number as u64 };
        client.mount(node, SEGMENT).await;
        for key in 0..8 {
            let name = format!("{dialect}-{key}");
            client.put(node, &name, 1000).await;
            assert_eq!(client.replicas(&name).await.unwrap().replicas.len(), 1);
        }
        // Its layout fits other releases, too.
        let keys: Vec<String> = (0..8).map(|key| format!("{dialect}-{key}")).collect();
        let keys = KeysArguments { keys: keys.iter().map(String::as_str).collect(), tenant: DEFAULT_TENANT };
        let found = client.call::<mooncake_wire::rpc::BatchGetReplicaList>(&keys).await;
        assert!(found.iter().all(Result::is_ok), "{dialect}: {found:?}");
    }
}

#[tokio::test]
async fn the_other_shards_serve_while_one_is_down() {
    let mut store = ShardedStore::start();
    let mut client = store.connect().await;
    client.mount(CLIENT, SEGMENT).await;
    let names = names(100);
    put_all(&mut client, &names).await;
    let count = ShardCount::new(SHARDS).unwrap();
    let is_down = |key: &str| count.shard_of(key) == 1;
    let address = store.masters[1].rpc.address();
    let downed = store.masters.remove(1);
    downed.rpc.stop();
    downed.supervisor.shutdown(Duration::from_secs(5)).await.unwrap();

    let keys: Vec<&str> = names.iter().map(String::as_str).collect();
    let query = KeysArguments { keys: keys.clone(), tenant: DEFAULT_TENANT };
    let found = client.call::<BatchExistKey>(&query).await;
    for (key, found) in keys.iter().zip(&found) {
        let expected = if is_down(key) { Err(ErrorCode::RPC_FAIL) } else { Ok(true) };
        assert_eq!(*found, expected, "{key}");
    }
    // What a shard that is down may have is not reported as absent.
    assert_eq!(client.call::<GetReplicaListByRegex>(&key("^key-1.$")).await, Err(ErrorCode::RPC_FAIL));
    assert_eq!(
        client.call::<Ping>(&ClientArguments { client_id: CLIENT }).await.unwrap().client_status,
        ClientStatus::OK
    );

    // It returns without its state: the client is to mount its segment again, which the other shards accept.
    let shard = Some(ShardIdentity { index: 1, count: SHARDS as u64 });
    let options = MasterServerOptions { shard, threads: 1, ..MasterServerOptions::default() };
    let restarted = start_master_at(address, options);
    let pinged = async {
        loop {
            let ping = client.call::<Ping>(&ClientArguments { client_id: CLIENT }).await.unwrap();
            if ping.client_status == ClientStatus::NEED_REMOUNT {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), pinged).await.expect("a shard that returns is noticed");
    client.mount(CLIENT, SEGMENT).await;
    let found = client.call::<BatchExistKey>(&query).await;
    for (key, found) in keys.iter().zip(&found) {
        assert_eq!(*found, Ok(!is_down(key)), "{key}: the other shards have kept their objects");
    }
    let lost: Vec<&str> = keys.iter().copied().filter(|key| is_down(key)).collect();
    client.put(CLIENT, lost[0], 100).await;
    assert_eq!(client.replicas(lost[0]).await.unwrap().replicas.len(), 1);
    drop(restarted);
}

#[tokio::test]
async fn a_master_that_is_another_shard_is_not_called() {
    // Two shards in the wrong order.
    let masters = [start_shard(1, 2), start_shard(0, 2)];
    let addresses = masters.iter().map(|master| master.rpc.address().to_string()).collect();
    let supervisor = Supervisor::new();
    let router = moongate_store_router::start(&options(addresses), &supervisor).unwrap();
    let mut client = TestRpcConnection::connect(&router.address().to_string()).await;
    assert_eq!(client.replicas("key").await, Err(ErrorCode::RPC_FAIL));
    // A master that is no shard.
    let single = start_master();
    let other = [single.rpc.address(), masters[0].rpc.address()].map(|address| address.to_string()).to_vec();
    let router = moongate_store_router::start(&options(other), &supervisor).unwrap();
    let mut client = TestRpcConnection::connect(&router.address().to_string()).await;
    let keys = names(20);
    let keys = KeysArguments { keys: keys.iter().map(String::as_str).collect(), tenant: DEFAULT_TENANT };
    let found = client.call::<BatchExistKey>(&keys).await;
    assert!(found.contains(&Err(ErrorCode::RPC_FAIL)) && found.contains(&Ok(false)), "{found:?}");
}

/// The only shard of a store, which replies to `ExistKey` late. `called` is notified when it has the call.
async fn slow_master(listener: TcpListener, called: Arc<Notify>) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut input = BytesMut::new();
    loop {
        while let FrameParseResult::Frame(request) =
            frame::take::<RequestHeader>(&mut input, 1 << 20).unwrap()
        {
            let (sequence, mut reply) = (request.header.sequence, BytesMut::new());
            if ShardRequest::from_function_id(request.header.function_id).is_some() {
                encode_identity(sequence, Some(ShardIdentity { index: 0, count: 1 }), &mut reply).unwrap();
            } else {
                called.notify_one();
                tokio::time::sleep(Duration::from_millis(200)).await;
                encode_reply::<ExistKey, &str>(sequence, Dialect::NEWEST, &Ok(true), &mut reply).unwrap();
            }
            stream.write_all(&reply).await.unwrap();
        }
        if stream.read_buf(&mut input).await.unwrap() == 0 {
            return;
        }
    }
}

#[tokio::test]
async fn a_shutdown_completes_calls_in_progress() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (called, supervisor) = (Arc::new(Notify::new()), Supervisor::new());
    let router = moongate_store_router::start(&options(vec![address]), &supervisor).unwrap();
    let mut client = TestRpcConnection::connect(&router.address().to_string()).await;
    let stopping = async {
        called.notified().await;
        router.stop();
        supervisor.shutdown(Duration::from_secs(5)).await.unwrap();
    };
    let exist = key("key");
    let calling = client.call::<ExistKey>(&exist);
    let (_, found, ()) = tokio::join!(slow_master(listener, Arc::clone(&called)), calling, stopping);
    assert_eq!(found, Ok(true));
    assert!(client.response().await.is_none(), "then the connection is closed");
}

#[tokio::test]
async fn calls_of_a_silent_shard_fail_at_once_until_it_responds() {
    // Its connections are accepted, but nothing is read from them.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let limit = Duration::from_secs(1);
    let supervisor = Supervisor::new();
    let options = RouterOptions { call_timeout: limit, ..options(vec![address.to_string()]) };
    let router = moongate_store_router::start(&options, &supervisor).unwrap().address().to_string();
    let mut first = TestRpcConnection::connect(&router).await;
    let mut second = TestRpcConnection::connect(&router).await;
    let (found, accepted) = tokio::join!(first.replicas("key"), silent.accept());
    assert_eq!(found, Err(ErrorCode::RPC_FAIL));
    // One call waits for it, on a connection of its own, the other does not.
    let mut third = TestRpcConnection::connect(&router).await;
    tokio::select! {
        biased;
        _ = third.replicas("key") => panic!("a call does not try again"),
        found = async {
            let _waiting = silent.accept().await;
            second.replicas("key").await
        } => assert_eq!(found, Err(ErrorCode::RPC_FAIL)),
    }
    drop((silent, accepted));
    let shard = Some(ShardIdentity { index: 0, count: 1 });
    let master = start_master_at(address, MasterServerOptions { shard, threads: 1, ..Default::default() });
    let responds = async {
        while second.replicas("key").await != Err(ErrorCode::OBJECT_NOT_FOUND) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), responds).await.expect("a shard that responds is called");
    drop(master);
}

#[tokio::test]
async fn clients_get_the_list_of_masters() {
    let store = ShardedStore::start();
    let client =
        |address: String| MasterClient::new(&address, MasterClientOptions::default(), &store.supervisor);
    let masters: Vec<String> = store.masters.iter().map(|master| master.rpc.address().to_string()).collect();
    let listed = client(store.router.address().to_string()).shards().await.unwrap();
    assert_eq!(listed.as_ref(), Some(&masters));
    assert_eq!(client(masters[0].clone()).shards().await.unwrap(), None);
}

//! Nodes that are slow, silent, broken or restarted: other replicas, other attempts, no wrong bytes.

mod node;

use std::time::Duration;

use mooncake_wire::ErrorCode;
use moongate_master::MasterServerOptions;
use moongate_master_core::MasterCoreOptions;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, KvError, PutOptions, PutOutcome, TransferLimits};
use moongate_store_testkit::test_master;

use node::{FaultyNode, FaultyNodeMode};

const SIZE: usize = 32 << 20;

struct StoreClientFixture {
    master: test_master::TestMaster,
    supervisor: Supervisor,
    nodes: Vec<FaultyNode>,
}

impl StoreClientFixture {
    async fn with(nodes: usize, settings: MasterCoreOptions) -> Self {
        let master = test_master::start_master_with(MasterServerOptions {
            core: settings,
            threads: 2,
            ..MasterServerOptions::default()
        });
        let mut world = Self { master, supervisor: Supervisor::new(), nodes: Vec::new() };
        for _ in 0..nodes {
            let node = FaultyNode::start(&world.rpc(), SIZE, 2, "tcp", &world.supervisor).await;
            world.nodes.push(node);
        }
        world
    }

    async fn new(nodes: usize) -> Self {
        Self::with(nodes, MasterCoreOptions::default()).await
    }

    fn rpc(&self) -> String {
        self.master.rpc.address().to_string()
    }

    fn client(&self, options: KvClientOptions) -> KvClient {
        KvClient::new(&self.rpc(), options, &self.supervisor).unwrap()
    }

    /// Whom a single replica of the object is on.
    async fn holder(&self, client: &KvClient, key: &str) -> &FaultyNode {
        let stat = client.stat(key).await.unwrap();
        self.nodes.iter().find(|node| node.name == stat.replicas[0].location).unwrap()
    }
}

/// Not so impatient that a busy machine is taken for a silent node.
fn short_timeout_client() -> KvClientOptions {
    let transfers = TransferLimits { stall: Duration::from_secs(1), ..TransferLimits::default() };
    KvClientOptions { transfers, slice_bytes: 1 << 20, ..KvClientOptions::default() }
}

fn copies(replicas: u64) -> PutOptions {
    PutOptions { replicas, ..PutOptions::default() }
}

fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at % 251) as u8).collect()
}

#[tokio::test]
async fn any_manner_of_one_node_leaves_the_other_replica() {
    let world = StoreClientFixture::new(2).await;
    let client = world.client(short_timeout_client());
    let bytes = content(5 << 20);
    assert_eq!(client.put("k", &bytes, &copies(2)).await.unwrap(), PutOutcome::Stored);
    assert_eq!(client.stat("k").await.unwrap().replicas.len(), 2);
    for manner in [FaultyNodeMode::Silent, FaultyNodeMode::Refusing, FaultyNodeMode::Breaking] {
        for node in &world.nodes {
            node.set_mode(manner);
            for _ in 0..3 {
                assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
            }
            node.set_mode(FaultyNodeMode::Good);
            // It is shunned for a moment only, but other tests need not wait for that.
            assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
        }
    }
}

#[tokio::test]
async fn slices_are_read_from_all_replicas() {
    let world = StoreClientFixture::new(2).await;
    // Slices that are read from this host are four times as long.
    let client = world.client(KvClientOptions { slice_bytes: 256 << 10, ..KvClientOptions::default() });
    let bytes = content(8 << 20);
    client.put("k", &bytes, &copies(2)).await.unwrap();
    let before: Vec<_> = world.nodes.iter().map(FaultyNode::requests).collect();
    assert!(client.get("k").await.unwrap() == bytes);
    let reads: Vec<_> =
        world.nodes.iter().zip(before).map(|(node, before)| node.requests() - before).collect();
    assert_eq!(reads, [4, 4], "both nodes are equally far and equally busy");
}

#[tokio::test]
async fn who_waits_for_a_node_is_not_joined_if_another_is_idle() {
    let world = StoreClientFixture::new(2).await;
    let client = world.client(KvClientOptions::default());
    client.put("here", &content(1 << 20), &copies(1)).await.unwrap();
    client.put("both", &content(1000), &copies(2)).await.unwrap();
    let busy = world.holder(&client, "here").await;
    let idle = world.nodes.iter().find(|node| node.name != busy.name).unwrap();
    // It is not answered while the others are read.
    busy.set_mode(FaultyNodeMode::Silent);
    let before = [busy.requests(), idle.requests()];
    let others = async {
        while busy.requests() == before[0] {
            tokio::task::yield_now().await;
        }
        for _ in 0..20 {
            assert_eq!(client.get("both").await.unwrap(), content(1000));
        }
        assert_eq!([busy.requests() - before[0], idle.requests() - before[1]], [1, 20]);
    };
    tokio::select! {
        got = client.get("here") => panic!("{got:?}"),
        () = others => {}
    }
}

#[tokio::test]
async fn a_put_that_fails_is_taken_back() {
    let world = StoreClientFixture::new(1).await;
    let client = world.client(KvClientOptions { attempts: 1, ..short_timeout_client() });
    let bytes = content(3 << 20);
    for manner in [FaultyNodeMode::Refusing, FaultyNodeMode::Breaking] {
        world.nodes[0].set_mode(manner);
        let failed = client.put("k", &bytes, &copies(1)).await.unwrap_err();
        assert!(matches!(failed, KvError::Transfer { .. }), "{manner:?}: {failed}");
        assert_eq!(client.exist(&["k"]).await.unwrap(), [false], "{manner:?}");
        world.nodes[0].set_mode(FaultyNodeMode::Good);
        // Nobody holds the key, so that it can be put at once.
        assert_eq!(client.put("k", &bytes, &copies(1)).await.unwrap(), PutOutcome::Stored, "{manner:?}");
        assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
        client.remove("k", true).await.unwrap();
    }
    let batch = [("a", &bytes[..10]), ("b", &[]), ("a", &bytes[..20]), ("c", &bytes[..30])];
    world.nodes[0].set_mode(FaultyNodeMode::Breaking);
    for (result, (key, bytes)) in client.put_batch(&batch, &copies(1)).await.into_iter().zip(batch) {
        match (key, bytes.len()) {
            ("b", _) => assert!(matches!(result, Err(KvError::Empty { .. }))),
            ("a", 20) => assert_eq!(result.unwrap(), PutOutcome::AlreadyExists),
            _ => assert!(matches!(result, Err(KvError::Transfer { .. })), "{key}"),
        }
    }
    assert_eq!(client.exist(&["a", "b", "c"]).await.unwrap(), [false; 3]);
    world.nodes[0].set_mode(FaultyNodeMode::Good);
    let stored = client.put_batch(&batch, &copies(1)).await;
    assert_eq!(stored.iter().filter(|it| matches!(it, Ok(PutOutcome::Stored))).count(), 2);
    assert_eq!(client.get("a").await.unwrap(), bytes[..10]);
}

#[tokio::test]
async fn a_put_that_is_dropped_is_taken_back() {
    let world = StoreClientFixture::new(1).await;
    let client = world.client(KvClientOptions::default());
    world.nodes[0].set_mode(FaultyNodeMode::Silent);
    let bytes = content(100);
    let (key, options) = ("k", copies(1));
    let put = tokio::time::timeout(Duration::from_millis(200), client.put(key, &bytes, &options)).await;
    assert!(put.is_err(), "the node is silent");
    world.nodes[0].set_mode(FaultyNodeMode::Good);
    let stored = async {
        while client.put(key, &bytes, &options).await.unwrap() != PutOutcome::Stored {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Far less than the half minute after which a master lets others put an abandoned key.
    tokio::time::timeout(Duration::from_secs(20), stored).await.unwrap();
    assert_eq!(client.get(key).await.unwrap(), bytes);
}

#[tokio::test]
async fn a_write_that_may_go_on_keeps_its_room() {
    let world = StoreClientFixture::new(1).await;
    let client = world.client(short_timeout_client());
    world.nodes[0].set_mode(FaultyNodeMode::Silent);
    let failed = client.put("k", &content(100), &copies(1)).await.unwrap_err();
    assert!(failed.to_string().contains("made no progress"), "{failed}");
    world.nodes[0].set_mode(FaultyNodeMode::Good);
    let again = client.put("k", &content(100), &copies(1)).await.unwrap();
    assert_eq!(again, PutOutcome::AlreadyExists, "the silent node may still write there");
}

#[tokio::test]
async fn a_lease_is_renewed_while_a_slow_node_is_read() {
    let settings = MasterCoreOptions { lease_ttl_ms: 1000, ..MasterCoreOptions::default() };
    let world = StoreClientFixture::with(1, settings).await;
    let client = world.client(KvClientOptions { attempts: 1, ..KvClientOptions::default() });
    let bytes = content(2 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    // 32 pieces: more than three leases.
    world.nodes[0].set_mode(FaultyNodeMode::Slow(Duration::from_millis(100)));
    assert!(client.get("k").await.unwrap() == bytes);
}

#[tokio::test]
async fn a_node_that_was_restarted_elsewhere_is_found_again() {
    let world = StoreClientFixture::new(1).await;
    let client = world.client(short_timeout_client());
    client.put("k", &content(1000), &copies(1)).await.unwrap();
    // All its connections break once.
    world.nodes[0].set_mode(FaultyNodeMode::Breaking);
    let failed = client.get("k").await.unwrap_err();
    assert!(failed.to_string().contains(&world.nodes[0].name), "{failed}");
    world.nodes[0].set_mode(FaultyNodeMode::Good);
    assert_eq!(client.get("k").await.unwrap(), content(1000));
}

#[tokio::test]
async fn nodes_of_version_1_are_written_before_the_object_is_visible() {
    let master = test_master::start_master();
    let supervisor = Supervisor::new();
    let node = FaultyNode::start(&master.rpc.address().to_string(), SIZE, 1, "tcp", &supervisor).await;
    let client =
        KvClient::new(&master.rpc.address().to_string(), short_timeout_client(), &supervisor).unwrap();
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    assert_eq!(node.requests(), 6, "each of three slices is written and its last byte read");
    assert!(client.get("k").await.unwrap() == bytes);
    node.set_mode(FaultyNodeMode::Refusing);
    assert!(client.get("k").await.is_err());
}

#[tokio::test]
async fn a_node_with_rdma_is_reached_over_tcp_too() {
    let master = test_master::start_master();
    let supervisor = Supervisor::new();
    // The node announces no device, so that there is no connection over RDMA on any machine.
    let node = FaultyNode::start(&master.rpc.address().to_string(), SIZE, 2, "rdma", &supervisor).await;
    let client =
        KvClient::new(&master.rpc.address().to_string(), short_timeout_client(), &supervisor).unwrap();
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    assert!(client.get("k").await.unwrap() == bytes);
    assert_eq!(node.requests(), 4, "each of three slices is written, and all are read at once");
}

#[tokio::test]
async fn damaged_bytes_are_never_served() {
    let world = StoreClientFixture::new(2).await;
    let client = world.client(short_timeout_client());
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(2)).await.unwrap();
    world.nodes[0].damage();
    for _ in 0..4 {
        assert!(client.get("k").await.unwrap() == bytes, "the other replica is whole");
    }
    world.nodes[1].damage();
    let damaged = client.get("k").await.unwrap_err();
    assert_eq!(damaged.code(), Some(ErrorCode::CHECKSUM_MISMATCH), "{damaged}");
    let trusting = world.client(KvClientOptions { checksums: false, ..short_timeout_client() });
    assert_eq!(trusting.get("k").await.unwrap().len(), bytes.len());
}

#[tokio::test]
async fn writes_of_a_key_by_one_client_come_one_after_the_other() {
    let world = StoreClientFixture::new(2).await;
    let client = world.client(KvClientOptions::default());
    let writes = (0..8_u8).map(async |number| {
        let bytes = vec![number; 300_000];
        for round in 0..20 {
            match round % 4 {
                0 => _ = client.put_batch(&[("k", &bytes)], &copies(1)).await.remove(0).unwrap(),
                1 => _ = client.put("k", &bytes, &copies(1)).await.unwrap(),
                2 => _ = client.upsert_batch(&[("k", &bytes)], &copies(1)).await.remove(0).unwrap(),
                _ => client.upsert("k", &bytes, &copies(1)).await.unwrap(),
            }
            // So that a put finds the key free while another is under way.
            _ = client.remove("k", true).await;
            match client.get("k").await {
                Ok(got) => assert!(got.iter().all(|byte| *byte == got[0])),
                Err(KvError::NotFound { .. } | KvError::Master { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    futures_util::future::join_all(writes).await;
}

#[tokio::test]
async fn objects_come_and_go() {
    let world = StoreClientFixture::new(2).await;
    let client = world.client(KvClientOptions::default());
    let put = async |key: &str, bytes: &[u8]| client.put(key, bytes, &copies(1)).await;
    assert!(matches!(put("k", b"").await, Err(KvError::Empty { .. })));
    assert_eq!(put("k", b"one").await.unwrap(), PutOutcome::Stored);
    assert_eq!(put("k", b"two").await.unwrap(), PutOutcome::AlreadyExists);
    assert_eq!(client.get("k").await.unwrap(), "one");
    client.upsert("k", b"three", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "three");
    let mut small = [0; 4];
    assert!(matches!(
        client.get_into("k", &mut small).await,
        Err(KvError::TooSmall { size: 5, capacity: 4, .. })
    ));
    let mut large = [9; 7];
    assert_eq!(client.get_into("k", &mut large).await.unwrap(), 5);
    assert_eq!(&large, b"three\x09\x09");
    assert!(matches!(client.get("none").await, Err(KvError::NotFound { .. })));
    assert!(matches!(client.stat("none").await, Err(KvError::NotFound { .. })));
    let leased = client.remove("k", false).await.unwrap_err();
    assert_eq!(leased.code(), Some(ErrorCode::OBJECT_HAS_LEASE));
    client.remove("k", true).await.unwrap();
    assert_eq!(client.exist(&["k", "none"]).await.unwrap(), [false, false]);
    for key in ["a1", "a2", "b1"] {
        put(key, b"x").await.unwrap();
    }
    assert_eq!(client.remove_matching("^a", false).await.unwrap(), 2);
    assert_eq!(client.exist(&["a1", "a2", "b1"]).await.unwrap(), [false, false, true]);
    assert_eq!(client.remove_all(true).await.unwrap(), 1);
    let huge = put("huge", &content(SIZE + 1)).await.unwrap_err();
    assert!(matches!(huge, KvError::NoRoom { .. }) || huge.code().is_some(), "{huge}");
}

#[tokio::test]
async fn hot_objects_are_kept_until_their_lease_ends() {
    let settings = MasterCoreOptions { lease_ttl_ms: 2000, ..MasterCoreOptions::default() };
    let world = StoreClientFixture::with(1, settings).await;
    let client = world.client(KvClientOptions { cache_bytes: 1 << 20, ..KvClientOptions::default() });
    client.put("k", b"one", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "one");
    let before = world.nodes[0].requests();
    let mut into = [0; 3];
    assert_eq!(
        (client.get("k").await.unwrap(), client.get_into("k", &mut into).await.unwrap()),
        ("one".into(), 3)
    );
    assert_eq!((&into, world.nodes[0].requests()), (b"one", before), "from here");
    // The client sees its own changes immediately.
    client.upsert("k", b"two", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "two");
    // It sees changes by other clients at the end of the lease at the latest.
    let other = world.client(KvClientOptions::default());
    other.upsert("k", b"six", &copies(1)).await.unwrap();
    let seen = async {
        while client.get("k").await.unwrap() != "six" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), seen).await.unwrap();
    assert_eq!(world.holder(&client, "k").await.name, world.nodes[0].name);
}

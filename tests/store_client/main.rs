//! Nodes that are slow, silent, broken or restarted: other replicas, other attempts, no wrong bytes.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "../../kvstore/master/tests/caller/mod.rs"]
mod caller;
mod node;

use std::time::Duration;

use mooncake_wire::ErrorCode;
use moongate_kvclient::{Client, KvError, Limits, Options, Put, PutOptions};
use moongate_kvcore::Settings;
use moongate_master::ServerOptions;
use moongate_runtime::Supervisor;

use node::{Manner, Node};

const SIZE: usize = 32 << 20;

struct World {
    master: caller::Started,
    supervisor: Supervisor,
    nodes: Vec<Node>,
}

impl World {
    async fn with(nodes: usize, settings: Settings) -> Self {
        let master =
            caller::started_with(ServerOptions { core: settings, threads: 2, ..ServerOptions::default() });
        let mut world = Self { master, supervisor: Supervisor::new(), nodes: Vec::new() };
        for _ in 0..nodes {
            let node = Node::start(&world.rpc(), SIZE, 2, "tcp", &world.supervisor).await;
            world.nodes.push(node);
        }
        world
    }

    async fn new(nodes: usize) -> Self {
        Self::with(nodes, Settings::default()).await
    }

    fn rpc(&self) -> String {
        self.master.rpc.address().to_string()
    }

    fn client(&self, options: Options) -> Client {
        Client::new(&self.rpc(), options, &self.supervisor).unwrap()
    }

    /// Whom a single replica of the object is on.
    async fn holder(&self, client: &Client, key: &str) -> &Node {
        let stat = client.stat(key).await.unwrap();
        self.nodes.iter().find(|node| node.name == stat.replicas[0].place).unwrap()
    }
}

/// Not so impatient that a busy machine is taken for a silent node.
fn impatient() -> Options {
    let transfers = Limits { stall: Duration::from_secs(1), ..Limits::default() };
    Options { transfers, slice_bytes: 1 << 20, ..Options::default() }
}

fn copies(replicas: u64) -> PutOptions {
    PutOptions { replicas, ..PutOptions::default() }
}

fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at % 251) as u8).collect()
}

#[tokio::test]
async fn any_manner_of_one_node_leaves_the_other_replica() {
    let world = World::new(2).await;
    let client = world.client(impatient());
    let bytes = content(5 << 20);
    assert_eq!(client.put("k", &bytes, &copies(2)).await.unwrap(), Put::Stored);
    assert_eq!(client.stat("k").await.unwrap().replicas.len(), 2);
    for manner in [Manner::Silent, Manner::Refusing, Manner::Breaking] {
        for node in &world.nodes {
            node.be(manner);
            for _ in 0..3 {
                assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
            }
            node.be(Manner::Good);
            // It is shunned for a moment only, but other tests need not wait for that.
            assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
        }
    }
}

#[tokio::test]
async fn slices_are_read_from_all_replicas() {
    let world = World::new(2).await;
    let client = world.client(Options { slice_bytes: 1 << 20, ..Options::default() });
    let bytes = content(8 << 20);
    client.put("k", &bytes, &copies(2)).await.unwrap();
    let before: Vec<_> = world.nodes.iter().map(Node::requests).collect();
    assert!(client.get("k").await.unwrap() == bytes);
    let reads: Vec<_> =
        world.nodes.iter().zip(before).map(|(node, before)| node.requests() - before).collect();
    assert_eq!(reads, [4, 4], "both nodes are equally far and equally busy");
}

#[tokio::test]
async fn who_waits_for_a_node_is_not_joined_if_another_is_idle() {
    let world = World::new(2).await;
    let client = world.client(Options::default());
    client.put("here", &content(1 << 20), &copies(1)).await.unwrap();
    client.put("both", &content(1000), &copies(2)).await.unwrap();
    let busy = world.holder(&client, "here").await;
    let idle = world.nodes.iter().find(|node| node.name != busy.name).unwrap();
    // It is not answered while the others are read.
    busy.be(Manner::Silent);
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
    let world = World::new(1).await;
    let client = world.client(Options { attempts: 1, ..impatient() });
    let bytes = content(3 << 20);
    for manner in [Manner::Refusing, Manner::Breaking] {
        world.nodes[0].be(manner);
        let failed = client.put("k", &bytes, &copies(1)).await.unwrap_err();
        assert!(matches!(failed, KvError::Transfer { .. }), "{manner:?}: {failed}");
        assert_eq!(client.exist(&["k"]).await.unwrap(), [false], "{manner:?}");
        world.nodes[0].be(Manner::Good);
        // Nobody holds the key, so that it can be put at once.
        assert_eq!(client.put("k", &bytes, &copies(1)).await.unwrap(), Put::Stored, "{manner:?}");
        assert!(client.get("k").await.unwrap() == bytes, "{manner:?}");
        client.remove("k", true).await.unwrap();
    }
    let batch = [("a", &bytes[..10]), ("b", &[]), ("a", &bytes[..20]), ("c", &bytes[..30])];
    world.nodes[0].be(Manner::Breaking);
    for (result, (key, bytes)) in client.put_batch(&batch, &copies(1)).await.into_iter().zip(batch) {
        match (key, bytes.len()) {
            ("b", _) => assert!(matches!(result, Err(KvError::Empty { .. }))),
            ("a", 20) => assert_eq!(result.unwrap(), Put::AlreadyThere),
            _ => assert!(matches!(result, Err(KvError::Transfer { .. })), "{key}"),
        }
    }
    assert_eq!(client.exist(&["a", "b", "c"]).await.unwrap(), [false; 3]);
    world.nodes[0].be(Manner::Good);
    let stored = client.put_batch(&batch, &copies(1)).await;
    assert_eq!(stored.iter().filter(|it| matches!(it, Ok(Put::Stored))).count(), 2);
    assert_eq!(client.get("a").await.unwrap(), bytes[..10]);
}

#[tokio::test]
async fn a_put_that_is_dropped_is_taken_back() {
    let world = World::new(1).await;
    let client = world.client(Options::default());
    world.nodes[0].be(Manner::Silent);
    let bytes = content(100);
    let (key, options) = ("k", copies(1));
    let put = tokio::time::timeout(Duration::from_millis(200), client.put(key, &bytes, &options)).await;
    assert!(put.is_err(), "the node is silent");
    world.nodes[0].be(Manner::Good);
    let stored = async {
        while client.put(key, &bytes, &options).await.unwrap() != Put::Stored {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // Far less than the half minute after which a master lets others put an abandoned key.
    tokio::time::timeout(Duration::from_secs(20), stored).await.unwrap();
    assert_eq!(client.get(key).await.unwrap(), bytes);
}

#[tokio::test]
async fn a_write_that_may_go_on_keeps_its_room() {
    let world = World::new(1).await;
    let client = world.client(impatient());
    world.nodes[0].be(Manner::Silent);
    let failed = client.put("k", &content(100), &copies(1)).await.unwrap_err();
    assert!(failed.to_string().contains("silent"), "{failed}");
    world.nodes[0].be(Manner::Good);
    let again = client.put("k", &content(100), &copies(1)).await.unwrap();
    assert_eq!(again, Put::AlreadyThere, "the silent node may still write there");
}

#[tokio::test]
async fn a_lease_is_renewed_while_a_slow_node_is_read() {
    let settings = Settings { lease_ttl_ms: 1000, ..Settings::default() };
    let world = World::with(1, settings).await;
    let client = world.client(Options { attempts: 1, ..Options::default() });
    let bytes = content(2 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    // 32 pieces: more than three leases.
    world.nodes[0].be(Manner::Slow(Duration::from_millis(100)));
    assert!(client.get("k").await.unwrap() == bytes);
}

#[tokio::test]
async fn a_node_that_was_restarted_elsewhere_is_found_again() {
    let world = World::new(1).await;
    let client = world.client(impatient());
    client.put("k", &content(1000), &copies(1)).await.unwrap();
    // All its connections break once.
    world.nodes[0].be(Manner::Breaking);
    let failed = client.get("k").await.unwrap_err();
    assert!(failed.to_string().contains(&world.nodes[0].name), "{failed}");
    world.nodes[0].be(Manner::Good);
    assert_eq!(client.get("k").await.unwrap(), content(1000));
}

#[tokio::test]
async fn nodes_of_version_1_are_written_before_the_object_is_visible() {
    let master = caller::started();
    let supervisor = Supervisor::new();
    let node = Node::start(&master.rpc.address().to_string(), SIZE, 1, "tcp", &supervisor).await;
    let client = Client::new(&master.rpc.address().to_string(), impatient(), &supervisor).unwrap();
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    assert_eq!(node.requests(), 6, "each of three slices is written and its last byte read");
    assert!(client.get("k").await.unwrap() == bytes);
    node.be(Manner::Refusing);
    assert!(client.get("k").await.is_err());
}

#[tokio::test]
async fn a_node_with_rdma_is_reached_over_tcp_too() {
    let master = caller::started();
    let supervisor = Supervisor::new();
    // It tells of no device, so there is no connection over RDMA, whatever this machine has.
    let node = Node::start(&master.rpc.address().to_string(), SIZE, 2, "rdma", &supervisor).await;
    let client = Client::new(&master.rpc.address().to_string(), impatient(), &supervisor).unwrap();
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(1)).await.unwrap();
    assert!(client.get("k").await.unwrap() == bytes);
    assert_eq!(node.requests(), 6, "each of three slices is written and read");
}

#[tokio::test]
async fn damaged_bytes_are_never_served() {
    let world = World::new(2).await;
    let client = world.client(impatient());
    let bytes = content(3 << 20);
    client.put("k", &bytes, &copies(2)).await.unwrap();
    world.nodes[0].damage();
    for _ in 0..4 {
        assert!(client.get("k").await.unwrap() == bytes, "the other replica is whole");
    }
    world.nodes[1].damage();
    let damaged = client.get("k").await.unwrap_err();
    assert_eq!(damaged.code(), Some(ErrorCode::CHECKSUM_MISMATCH), "{damaged}");
    let trusting = world.client(Options { checksums: false, ..impatient() });
    assert_eq!(trusting.get("k").await.unwrap().len(), bytes.len());
}

#[tokio::test]
async fn writes_of_a_key_by_one_client_come_one_after_the_other() {
    let world = World::new(2).await;
    let client = world.client(Options::default());
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
    let world = World::new(2).await;
    let client = world.client(Options::default());
    let put = async |key: &str, bytes: &[u8]| client.put(key, bytes, &copies(1)).await;
    assert!(matches!(put("k", b"").await, Err(KvError::Empty { .. })));
    assert_eq!(put("k", b"one").await.unwrap(), Put::Stored);
    assert_eq!(put("k", b"two").await.unwrap(), Put::AlreadyThere);
    assert_eq!(client.get("k").await.unwrap(), "one");
    client.upsert("k", b"three", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "three");
    let mut small = [0; 4];
    assert!(matches!(
        client.get_into("k", &mut small).await,
        Err(KvError::TooSmall { size: 5, room: 4, .. })
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
    let settings = Settings { lease_ttl_ms: 2000, ..Settings::default() };
    let world = World::with(1, settings).await;
    let client = world.client(Options { cache_bytes: 1 << 20, ..Options::default() });
    client.put("k", b"one", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "one");
    let before = world.nodes[0].requests();
    let mut into = [0; 3];
    assert_eq!(
        (client.get("k").await.unwrap(), client.get_into("k", &mut into).await.unwrap()),
        ("one".into(), 3)
    );
    assert_eq!((&into, world.nodes[0].requests()), (b"one", before), "from here");
    // What this client changes, it knows at once.
    client.upsert("k", b"two", &copies(1)).await.unwrap();
    assert_eq!(client.get("k").await.unwrap(), "two");
    // What others change, not later than when the lease ends.
    let other = world.client(Options::default());
    other.upsert("k", b"six", &copies(1)).await.unwrap();
    let seen = async {
        while client.get("k").await.unwrap() != "six" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), seen).await.unwrap();
    assert_eq!(world.holder(&client, "k").await.name, world.nodes[0].name);
}

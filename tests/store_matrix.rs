//! Who understands whom: this client and Mooncake's own, with either master, with nodes that speak either version
//! of the data plane, found in either way. What one client puts the other gets, byte for byte.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "../kvstore/master/tests/caller/mod.rs"]
mod caller;
#[path = "../kvstore/tests/store/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use clap::Parser as _;
use moongate_kvclient::{Client, Metadata, Options, Protocol, Put, PutOptions};
use moongate_runtime::Supervisor;
use moongate_store::{Config, Flags, RunningStore};
use parking_lot::Mutex;

use world::{HANDSHAKE, LIMIT, NEWEST, RealMaster, RealNode};

const SIZES: [usize; 10] =
    [1, 2, 4095, 4096, 65_535, 65_537, (1 << 20) + 1, 16 << 20, (16 << 20) + 4097, 64 << 20];

#[derive(Clone, Copy, Debug)]
enum Masters {
    Theirs,
    Ours,
}

#[derive(Clone, Copy, Debug)]
enum Nodes {
    Theirs,
    Ours,
}

#[derive(Clone, Copy, Debug)]
enum Found {
    ByHandshake,
    ByServer,
}

/// The newest version that clients and nodes may speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plane {
    V1,
    V2,
    /// Ours, between our client and our node; Mooncake's client speaks version 2 to the same node.
    Checked,
}

/// A master that lives as long as this.
enum Master {
    Theirs(Box<RealMaster>),
    Ours(Box<caller::Started>),
}

impl Master {
    async fn start(which: Masters) -> Self {
        match which {
            Masters::Theirs => Self::Theirs(Box::new(RealMaster::start(NEWEST).await)),
            Masters::Ours => Self::Ours(Box::new(caller::started())),
        }
    }

    fn rpc(&self) -> String {
        match self {
            Self::Theirs(master) => master.rpc.clone(),
            Self::Ours(master) => master.rpc.address().to_string(),
        }
    }
}

/// A node that lives as long as this, and lends 256 MiB.
enum Node {
    Theirs(Box<RealNode>),
    Ours(Box<RunningStore>),
}

impl Node {
    async fn start(
        which: Nodes,
        master: &str,
        metadata: &str,
        variables: &[(&str, &str)],
        supervisor: &Supervisor,
    ) -> Self {
        match which {
            Nodes::Theirs => {
                Self::Theirs(Box::new(RealNode::start_with(NEWEST, master, metadata, 256, variables).await))
            }
            Nodes::Ours => {
                let flags = Flags::parse_from(["moongate store", "--port=0", "--listen=127.0.0.1"]);
                let value = |key: &str| match key {
                    "MOONCAKE_LOCAL_HOSTNAME" => Some("127.0.0.1".to_owned()),
                    "MOONCAKE_TE_META_DATA_SERVER" => Some(metadata.to_owned()),
                    "MOONCAKE_MASTER" => Some(master.to_owned()),
                    "MOONCAKE_GLOBAL_SEGMENT_SIZE" => Some((256 << 20).to_string()),
                    _ => None,
                };
                let config = Config::read(None, &[], value).unwrap();
                Self::Ours(Box::new(moongate_store::start(flags, config, supervisor).await.unwrap()))
            }
        }
    }

    async fn stop(self) {
        match self {
            Self::Theirs(mut node) => node.close().await,
            Self::Ours(node) => node.stop().await,
        }
    }
}

type Stored = Arc<Mutex<BTreeMap<String, String>>>;
type Asked = Query<BTreeMap<String, String>>;

/// An HTTP metadata server.
async fn metadata_server(supervisor: &Supervisor) -> String {
    let read = async |State(stored): State<Stored>, Query(asked): Asked| {
        stored.lock().get(&asked["key"]).cloned().ok_or(StatusCode::NOT_FOUND)
    };
    let write = async |State(stored): State<Stored>, Query(asked): Asked, body: String| {
        stored.lock().insert(asked["key"].clone(), body);
        "metadata updated"
    };
    let remove = async |State(stored): State<Stored>, Query(asked): Asked| {
        stored.lock().remove(&asked["key"]).map(|_| "metadata deleted").ok_or(StatusCode::NOT_FOUND)
    };
    let router = axum::Router::new()
        .route("/metadata", get(read).put(write).delete(remove))
        .layer(DefaultBodyLimit::max(1 << 20))
        .with_state(Stored::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    supervisor.spawn("metadata", async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}/metadata")
}

/// What the other client puts under a key: the key, again and again.
fn content(key: &str, size: usize) -> Vec<u8> {
    let mut bytes = key.repeat(size / key.len() + 1).into_bytes();
    bytes.truncate(size);
    bytes
}

/// Both clients put objects of all sizes and get each other's.
async fn both_ways(ours: &Client, theirs: &mut RealNode, plane: Plane, what: &str) {
    for size in SIZES {
        let began = Instant::now();
        let (mine, other) = (format!("ours-{size}"), format!("theirs-{size}"));
        let put = ours.put(&mine, &content(&mine, size), &PutOptions::default()).await;
        assert_eq!(put.unwrap_or_else(|error| panic!("{what}: put {mine}: {error}")), Put::Stored, "{what}");
        theirs.put(&other, size).await;
        assert_eq!(theirs.ask(&format!("read {mine}")).await, "1", "{what}: {mine}");
        // Version 1 does not tell when a write is applied, and Mooncake's client does not wait for it.
        while theirs.ask(&format!("read {other}")).await != "1" {
            assert!(plane == Plane::V1 && began.elapsed() < LIMIT, "{what}: {other}");
        }
        for key in [mine, other] {
            let got = ours.get(&key).await.unwrap_or_else(|error| panic!("{what}: get {key}: {error}"));
            assert!(got == content(&key, size), "{what}: {key} has {} other bytes", got.len());
        }
        // The lease of what was just read does not keep room from the next ones.
        assert_eq!(ours.remove_all(true).await.unwrap(), 2, "{what}: {size}");
    }
    let keys: Vec<String> = (0..100).map(|number| format!("batch-{number}")).collect();
    let contents: Vec<Vec<u8>> = keys.iter().enumerate().map(|(n, key)| content(key, 1 + 977 * n)).collect();
    let objects: Vec<_> = keys.iter().map(String::as_str).zip(contents.iter().map(Vec::as_slice)).collect();
    for put in ours.put_batch(&objects, &PutOptions::default()).await {
        assert_eq!(put.unwrap_or_else(|error| panic!("{what}: {error}")), Put::Stored, "{what}");
    }
    assert_eq!(theirs.ask(&format!("read {}", keys.join(" "))).await, "100", "{what}");
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    for (got, wanted) in ours.get_batch(&names).await.into_iter().zip(&contents) {
        assert!(got.unwrap_or_else(|error| panic!("{what}: {error}")) == *wanted, "{what}");
    }
}

async fn check(masters: Masters, nodes: Nodes, found: Found, plane: Plane) {
    let what = format!("{masters:?} master, {nodes:?} node, {found:?}, {plane:?}");
    let supervisor = Supervisor::new();
    let master = Master::start(masters).await;
    let metadata = match found {
        Found::ByHandshake => HANDSHAKE.to_owned(),
        Found::ByServer => metadata_server(&supervisor).await,
    };
    let mut variables = vec![("BUFFER_MEBIBYTES", "160")];
    if plane == Plane::V1 {
        variables.push(("MC_TCP_PROTO", "1"));
    }
    let node = Node::start(nodes, &master.rpc(), &metadata, &variables, &supervisor).await;
    let newest_protocol = match plane {
        Plane::V1 => Protocol::V1,
        Plane::V2 => Protocol::V2,
        Plane::Checked => Protocol::Checked,
    };
    let metadata_of_ours = metadata.parse::<Metadata>().unwrap();
    let options = Options { metadata: metadata_of_ours, newest_protocol, ..Options::default() };
    let client = Client::new(&master.rpc(), options, &supervisor).unwrap();
    // A node's own process reads its own memory without the data plane, so it is another one that reads and writes.
    let mut theirs = RealNode::start_with(NEWEST, &master.rpc(), &metadata, 0, &variables).await;
    both_ways(&client, &mut theirs, plane, &what).await;
    node.stop().await;
}

/// Both ways of finding nodes, and all versions that can be spoken to the node.
async fn check_all(masters: Masters, nodes: Nodes) {
    for found in [Found::ByHandshake, Found::ByServer] {
        check(masters, nodes, found, Plane::V1).await;
        check(masters, nodes, found, Plane::V2).await;
        if matches!(nodes, Nodes::Ours) {
            check(masters, nodes, found, Plane::Checked).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn their_master_their_node() {
    check_all(Masters::Theirs, Nodes::Theirs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn their_master_our_node() {
    check_all(Masters::Theirs, Nodes::Ours).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_master_their_node() {
    check_all(Masters::Ours, Nodes::Theirs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_master_our_node() {
    check_all(Masters::Ours, Nodes::Ours).await;
}

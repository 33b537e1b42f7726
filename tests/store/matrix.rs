//! Interoperability of Moongate's and Mooncake's clients, with either master, with nodes of either version of the data
//! plane, and both ways of discovery: each client reads the other's objects byte for byte.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use clap::Parser as _;
use moongate_runtime::Supervisor;
use moongate_store_client::{
    KvClient, KvClientOptions, MetadataSource, PutOptions, PutOutcome, TransferProtocol,
};
use moongate_store_node::{NodeArgs, NodeConfig, RunningNode};
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealMaster, RealNode};
use moongate_store_testkit::test_master;
use parking_lot::Mutex;

const SIZES: [usize; 10] =
    [1, 2, 4095, 4096, 65_535, 65_537, (1 << 20) + 1, 16 << 20, (16 << 20) + 4097, 64 << 20];

#[derive(Clone, Copy, Debug)]
enum MasterImplementation {
    Mooncake,
    Moongate,
}

#[derive(Clone, Copy, Debug)]
enum NodeImplementation {
    Mooncake,
    Moongate,
}

#[derive(Clone, Copy, Debug)]
enum MetadataMode {
    Handshake,
    MetadataServer,
}

/// The newest data plane version of clients and nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataPlaneVersion {
    V1,
    V2,
    /// Moongate's version, between its client and its node; Mooncake's client uses version 2 with the same node.
    Checksummed,
}

/// A master that is stopped when dropped.
enum MatrixMaster {
    Mooncake(Box<RealMaster>),
    Moongate(Box<test_master::TestMaster>),
}

impl MatrixMaster {
    async fn start(which: MasterImplementation) -> Self {
        match which {
            MasterImplementation::Mooncake => {
                Self::Mooncake(Box::new(RealMaster::start(NEWEST_WITHOUT_CUDA).await))
            }
            MasterImplementation::Moongate => Self::Moongate(Box::new(test_master::start_master())),
        }
    }

    fn rpc(&self) -> String {
        match self {
            Self::Mooncake(master) => master.rpc.clone(),
            Self::Moongate(master) => master.rpc.address().to_string(),
        }
    }
}

/// A node with a segment of 256 MiB, stopped when dropped.
enum MatrixNode {
    Mooncake(Box<RealNode>),
    Moongate(Box<RunningNode>),
}

impl MatrixNode {
    async fn start(
        which: NodeImplementation,
        master: &str,
        metadata: &str,
        variables: &[(&str, &str)],
        supervisor: &Supervisor,
    ) -> Self {
        match which {
            NodeImplementation::Mooncake => Self::Mooncake(Box::new(
                RealNode::start_with(NEWEST_WITHOUT_CUDA, master, metadata, 256, variables).await,
            )),
            NodeImplementation::Moongate => {
                let flags = NodeArgs::parse_from(["moongate store", "--port=0", "--listen=127.0.0.1"]);
                let value = |key: &str| match key {
                    "MOONCAKE_LOCAL_HOSTNAME" => Some("127.0.0.1".to_owned()),
                    "MOONCAKE_TE_META_DATA_SERVER" => Some(metadata.to_owned()),
                    "MOONCAKE_MASTER" => Some(master.to_owned()),
                    "MOONCAKE_GLOBAL_SEGMENT_SIZE" => Some((256 << 20).to_string()),
                    _ => None,
                };
                let config = NodeConfig::read(None, &[], value).unwrap();
                Self::Moongate(Box::new(moongate_store_node::start(flags, config, supervisor).await.unwrap()))
            }
        }
    }

    async fn stop(self) {
        match self {
            Self::Mooncake(mut node) => node.close().await,
            Self::Moongate(node) => node.stop().await,
        }
    }
}

type StoredMetadata = Arc<Mutex<BTreeMap<String, String>>>;
type MetadataQuery = Query<BTreeMap<String, String>>;

/// Starts an HTTP metadata server, and returns its URL.
async fn metadata_server(supervisor: &Supervisor) -> String {
    let read = async |State(stored): State<StoredMetadata>, Query(asked): MetadataQuery| {
        stored.lock().get(&asked["key"]).cloned().ok_or(StatusCode::NOT_FOUND)
    };
    let write = async |State(stored): State<StoredMetadata>, Query(asked): MetadataQuery, body: String| {
        stored.lock().insert(asked["key"].clone(), body);
        "metadata updated"
    };
    let remove = async |State(stored): State<StoredMetadata>, Query(asked): MetadataQuery| {
        stored.lock().remove(&asked["key"]).map(|_| "metadata deleted").ok_or(StatusCode::NOT_FOUND)
    };
    let router = axum::Router::new()
        .route("/metadata", get(read).put(write).delete(remove))
        .layer(DefaultBodyLimit::max(1 << 20))
        .with_state(StoredMetadata::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    supervisor.spawn("metadata", async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}/metadata")
}

/// The value that the other client puts under a key: the key, repeated.
fn content(key: &str, size: usize) -> Vec<u8> {
    let mut bytes = key.repeat(size / key.len() + 1).into_bytes();
    bytes.truncate(size);
    bytes
}

/// Each client puts objects of all sizes and reads those of the other.
async fn both_ways(ours: &KvClient, theirs: &mut RealNode, plane: DataPlaneVersion, what: &str) {
    for size in SIZES {
        let started = Instant::now();
        let (mine, other) = (format!("ours-{size}"), format!("theirs-{size}"));
        let put = ours.put(&mine, &content(&mine, size), &PutOptions::default()).await;
        assert_eq!(
            put.unwrap_or_else(|error| panic!("{what}: put {mine}: {error}")),
            PutOutcome::Stored,
            "{what}"
        );
        theirs.put(&other, size).await;
        assert_eq!(theirs.send_command(&format!("read {mine}")).await, "1", "{what}: {mine}");
        // Version 1 does not acknowledge that a write is applied, and Mooncake's client does not wait for it.
        while theirs.send_command(&format!("read {other}")).await != "1" {
            assert!(plane == DataPlaneVersion::V1 && started.elapsed() < LIMIT, "{what}: {other}");
        }
        for key in [mine, other] {
            let got = ours.get(&key).await.unwrap_or_else(|error| panic!("{what}: get {key}: {error}"));
            assert!(got == content(&key, size), "{what}: {key} has {} other bytes", got.len());
        }
        // Leases of objects that were just read must not block space for the next ones.
        assert_eq!(ours.remove_all(true).await.unwrap(), 2, "{what}: {size}");
    }
    let keys: Vec<String> = (0..100).map(|number| format!("batch-{number}")).collect();
    let contents: Vec<Vec<u8>> = keys.iter().enumerate().map(|(n, key)| content(key, 1 + 977 * n)).collect();
    let objects: Vec<_> = keys.iter().map(String::as_str).zip(contents.iter().map(Vec::as_slice)).collect();
    for put in ours.put_batch(&objects, &PutOptions::default()).await {
        assert_eq!(put.unwrap_or_else(|error| panic!("{what}: {error}")), PutOutcome::Stored, "{what}");
    }
    assert_eq!(theirs.send_command(&format!("read {}", keys.join(" "))).await, "100", "{what}");
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    for (got, wanted) in ours.get_batch(&names).await.into_iter().zip(&contents) {
        assert!(got.unwrap_or_else(|error| panic!("{what}: {error}")) == *wanted, "{what}");
    }
}

async fn check(
    masters: MasterImplementation,
    nodes: NodeImplementation,
    found: MetadataMode,
    plane: DataPlaneVersion,
) {
    let what = format!("{masters:?} master, {nodes:?} node, {found:?}, {plane:?}");
    let supervisor = Supervisor::new();
    let master = MatrixMaster::start(masters).await;
    let metadata = match found {
        MetadataMode::Handshake => HANDSHAKE.to_owned(),
        MetadataMode::MetadataServer => metadata_server(&supervisor).await,
    };
    let mut variables = vec![("BUFFER_MEBIBYTES", "160")];
    if plane == DataPlaneVersion::V1 {
        variables.push(("MC_TCP_PROTO", "1"));
    }
    let node = MatrixNode::start(nodes, &master.rpc(), &metadata, &variables, &supervisor).await;
    let newest_protocol = match plane {
        DataPlaneVersion::V1 => TransferProtocol::V1,
        DataPlaneVersion::V2 => TransferProtocol::V2,
        DataPlaneVersion::Checksummed => TransferProtocol::Checked,
    };
    let metadata_of_ours = metadata.parse::<MetadataSource>().unwrap();
    let options =
        KvClientOptions { metadata: metadata_of_ours, newest_protocol, ..KvClientOptions::default() };
    let client = KvClient::new(&master.rpc(), options, &supervisor).unwrap();
    // A node's own process reads its memory without the data plane, so another process reads and writes.
    let mut theirs = RealNode::start_with(NEWEST_WITHOUT_CUDA, &master.rpc(), &metadata, 0, &variables).await;
    both_ways(&client, &mut theirs, plane, &what).await;
    node.stop().await;
}

/// Both ways of discovering nodes, and all data plane versions of the node.
async fn check_all(masters: MasterImplementation, nodes: NodeImplementation) {
    for found in [MetadataMode::Handshake, MetadataMode::MetadataServer] {
        check(masters, nodes, found, DataPlaneVersion::V1).await;
        check(masters, nodes, found, DataPlaneVersion::V2).await;
        if matches!(nodes, NodeImplementation::Moongate) {
            check(masters, nodes, found, DataPlaneVersion::Checksummed).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mooncake_master_mooncake_node() {
    check_all(MasterImplementation::Mooncake, NodeImplementation::Mooncake).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mooncake_master_moongate_node() {
    check_all(MasterImplementation::Mooncake, NodeImplementation::Moongate).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn moongate_master_mooncake_node() {
    check_all(MasterImplementation::Moongate, NodeImplementation::Mooncake).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn moongate_master_moongate_node() {
    check_all(MasterImplementation::Moongate, NodeImplementation::Moongate).await;
}

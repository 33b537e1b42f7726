//! Who understands whom: clients of both kinds with our node, either master, either way to find nodes, and each
//! version of the data plane. What one client puts the other gets, byte for byte.

use moongate_kvclient::{Client, Metadata, Options, Put, PutOptions};
use moongate_runtime::Supervisor;

use crate::masters::{Found, Store, Whose};
use crate::node::Node;
use crate::world::{NEWEST, RealNode, has};

const SIZES: [usize; 10] =
    [1, 2, 4095, 4096, 65_535, 65_537, (1 << 20) + 1, 16 << 20, (16 << 20) + 4097, 64 << 20];

/// What the other client puts under a key: the key, again and again.
fn content(key: &str, size: usize) -> Vec<u8> {
    key.bytes().cycle().take(size).collect()
}

pub(crate) fn client(store: &Store, supervisor: &Supervisor) -> Client {
    let metadata: Metadata = store.metadata.parse().unwrap();
    Client::new(&store.rpc, Options { metadata, ..Options::default() }, supervisor).unwrap()
}

async fn both_ways(ours: &Client, theirs: &mut RealNode, sizes: &[usize], what: &str) {
    for &size in sizes {
        let (mine, other) = (format!("ours-{size}"), format!("theirs-{size}"));
        let put = ours.put(&mine, &content(&mine, size), &PutOptions::default()).await;
        assert_eq!(put.unwrap_or_else(|error| panic!("{what}: put {mine}: {error}")), Put::Stored, "{what}");
        theirs.put(&other, size).await;
        assert_eq!(theirs.ask(&format!("read {mine} {other}")).await, "2", "{what}: {size}");
        for key in [mine, other] {
            let got = ours.get(&key).await.unwrap_or_else(|error| panic!("{what}: get {key}: {error}"));
            assert!(got == content(&key, size), "{what}: {key} has {} other bytes", got.len());
        }
        // The lease of what was just read does not keep room from the next ones.
        assert_eq!(ours.remove_all(true).await.unwrap(), 2, "{what}: {size}");
    }
}

async fn with_our_node(whose: Whose, found: Found) {
    let supervisor = Supervisor::new();
    let store = Store::start(whose, found).await;
    let node = Node::start(&store).await;
    let ours = client(&store, &supervisor);
    for (variables, protocol) in [(&[][..], "v2"), (&[("MC_TCP_PROTO", "1")][..], "v1")] {
        let what = format!("{whose:?}, {found:?}, {protocol}");
        let variables = [&[("BUFFER_MEBIBYTES", "160")], variables].concat();
        let mut theirs = RealNode::start_with(NEWEST, &store.rpc, &store.metadata, 0, &variables).await;
        both_ways(&ours, &mut theirs, &SIZES, &what).await;
        let metric = format!(r#"moongate_store_transfers_by_protocol_total{{protocol="{protocol}"}}"#);
        assert!(node.metric(&metric).await > 0, "{what}: the version was spoken");
        theirs.close().await;
    }
    let checked = r#"moongate_store_transfers_by_protocol_total{protocol="checked"}"#;
    assert!(node.metric(checked).await > 0, "our client speaks with checksums");
    for reason in ["rejected", "broken", "damaged", "malformed"] {
        let metric = format!(r#"moongate_store_transfer_failures_total{{reason="{reason}"}}"#);
        assert_eq!(node.metric(&metric).await, 0, "{reason}");
    }
    node.stop().await;
}

#[tokio::test]
async fn their_master_handshake() {
    with_our_node(Whose::Theirs, Found::ByHandshake).await;
}

#[tokio::test]
async fn their_master_metadata_server() {
    with_our_node(Whose::Theirs, Found::ByServer).await;
}

#[tokio::test]
async fn our_master_handshake() {
    with_our_node(Whose::Ours, Found::ByHandshake).await;
}

#[tokio::test]
async fn our_master_metadata_server() {
    with_our_node(Whose::Ours, Found::ByServer).await;
}

/// Clients that know neither the second version nor the host of the data plane.
#[tokio::test]
async fn older_clients() {
    let supervisor = Supervisor::new();
    for found in [Found::ByHandshake, Found::ByServer] {
        let store = Store::start(Whose::Ours, found).await;
        let node = Node::start(&store).await;
        for release in ["0.3.12.post1", "0.3.11.post1", "0.3.9"] {
            if !has(release).await {
                continue;
            }
            let mut theirs = RealNode::start_of(release, &store.rpc, &store.metadata, 0).await;
            let what = format!("{release}, {found:?}");
            both_ways(&client(&store, &supervisor), &mut theirs, &[1, 65_537, 4 << 20], &what).await;
        }
        node.stop().await;
    }
}

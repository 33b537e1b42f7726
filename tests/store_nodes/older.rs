//! Clients of older releases with our node and our master.

use moongate_kvclient::{Client, Metadata, Options, Put, PutOptions};
use moongate_runtime::Supervisor;

use crate::masters::{Found, Store, Whose};
use crate::node::{Node, until};
use crate::world::{RealNode, has};

/// What the other client puts under a key: the key, again and again.
fn content(key: &str, size: usize) -> Vec<u8> {
    key.bytes().cycle().take(size).collect()
}

pub(crate) fn client(store: &Store, supervisor: &Supervisor) -> Client {
    let metadata: Metadata = store.metadata.parse().unwrap();
    Client::new(&store.rpc, Options { metadata, ..Options::default() }, supervisor).unwrap()
}

async fn both_ways(ours: &Client, theirs: &mut RealNode, what: &str) {
    for size in [1, 65_537, 4 << 20] {
        let (mine, other) = (format!("ours-{size}"), format!("theirs-{size}"));
        let put = ours.put(&mine, &content(&mine, size), &PutOptions::default()).await;
        assert_eq!(put.unwrap_or_else(|error| panic!("{what}: put {mine}: {error}")), Put::Stored, "{what}");
        theirs.put(&other, size).await;
        // The first version of the data plane acknowledges no write: the object is there a moment before its last bytes.
        until(&format!("{what}: {other} is whole"), async || {
            ours.get(&other).await.is_ok_and(|got| got == content(&other, size))
        })
        .await;
        assert_eq!(theirs.ask(&format!("read {mine} {other}")).await, "2", "{what}: {size}");
        for key in [mine, other] {
            let got = ours.get(&key).await.unwrap_or_else(|error| panic!("{what}: get {key}: {error}"));
            assert!(got == content(&key, size), "{what}: {key} has {} other bytes", got.len());
        }
        // The lease of what was just read does not keep room from the next ones.
        assert_eq!(ours.remove_all(true).await.unwrap(), 2, "{what}: {size}");
    }
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
            both_ways(&client(&store, &supervisor), &mut theirs, &what).await;
        }
        node.stop().await;
    }
}

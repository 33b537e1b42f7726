//! Memory that outlives the node's process.

use mooncake_wire::types::ReplicateConfig;
use moongate_master_client::rpc::PutMode;
use moongate_runtime::Supervisor;
use moongate_store_client::PutOptions;
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, RealNode};

use super::masters::{MasterImplementation, MetadataMode, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;

/// A folder of its own that goes with the test.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

async fn survives_restart(whose: MasterImplementation, found: MetadataMode) {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(whose, found).await;
    let kept = folder();
    let memory = format!("--memory=folder:{}", kept.path().display());
    let node = InProcessNode::start_with(&store, &[&memory]).await;
    let name = node.running.endpoint().to_owned();
    let ours = client(&store, &supervisor);
    // This client keeps its cached state and its connections across the restart of the node.
    let mut theirs = RealNode::start_with(NEWEST_WITHOUT_CUDA, &store.rpc, &store.metadata, 0, &[]).await;
    let keys: Vec<String> = (0..20).map(|number| format!("kept-{number}")).collect();
    for (number, key) in keys.iter().enumerate() {
        if number % 2 == 0 {
            theirs.put(key, 1 + number * 40_000).await;
        } else {
            let bytes: Vec<u8> = key.bytes().cycle().take(1 + number * 40_000).collect();
            ours.put(key, &bytes, &PutOptions::default()).await.unwrap();
        }
    }
    node.stop().await;
    assert!(ours.get(&keys[0]).await.is_err(), "nobody serves it now");

    let node = InProcessNode::start_with(&store, &[&memory]).await;
    assert_eq!(node.running.endpoint(), name);
    // The master may require a remount of the segments; their objects stay.
    poll_until("a heartbeat was answered", async || node.get("/health").await.0 == 200).await;
    for key in &keys {
        let got = ours.get(key).await.unwrap();
        assert!(key.bytes().cycle().zip(got.iter()).all(|(wanted, got)| wanted == *got), "{key}");
    }
    // Mooncake's client tries a connection that has ended again after a second.
    let read = format!("read {}", keys.join(" "));
    poll_until("their client reads all", async || theirs.send_command(&read).await == "20").await;
    node.stop().await;
}

#[tokio::test]
async fn objects_are_there_after_a_restart_with_their_master() {
    survives_restart(MasterImplementation::Mooncake, MetadataMode::Handshake).await;
}

#[tokio::test]
async fn objects_are_there_after_a_restart_with_our_master() {
    survives_restart(MasterImplementation::Moongate, MetadataMode::MetadataServer).await;
}

#[tokio::test]
async fn a_node_that_shall_leave_takes_its_objects_along() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::MetadataServer).await;
    let kept = folder();
    let memory = format!("--memory=folder:{}", kept.path().display());
    let node = InProcessNode::start_with(&store, &[&memory, "--on-stop=unmount"]).await;
    let ours = client(&store, &supervisor);
    ours.put("gone", b"soon", &PutOptions::default()).await.unwrap();
    node.stop().await;
    assert_eq!(ours.exist(&["gone"]).await.unwrap(), [false]);
}

#[tokio::test]
async fn what_was_never_written_is_not_listed_after_a_restart() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let kept = folder();
    let memory = format!("--memory=folder:{}", kept.path().display());
    let node = InProcessNode::start_with(&store, &[&memory]).await;
    let ours = client(&store, &supervisor);
    ours.put("whole", b"all of it", &PutOptions::default()).await.unwrap();
    // As a client whose last bytes had not arrived when the node was killed.
    let config = ReplicateConfig { replica_num: 1, ..ReplicateConfig::default() };
    ours.objects().start(PutMode::Put, "torn", 5000, config).await.unwrap();
    ours.objects().end(PutMode::Put, "torn", None).await.unwrap();
    assert_eq!(ours.exist(&["whole", "torn"]).await.unwrap(), [true, true]);
    node.stop().await;
    let node = InProcessNode::start_with(&store, &[&memory]).await;
    assert_eq!(ours.exist(&["whole", "torn"]).await.unwrap(), [true, false]);
    assert_eq!(ours.get("whole").await.unwrap(), &b"all of it"[..]);
    node.stop().await;
}

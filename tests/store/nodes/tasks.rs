//! Tasks that the master assigns to a node, and the reaction of a node to restarts of masters and metadata servers.

use mooncake_wire::rpc::{CopyTaskArguments, CreateCopyTask, CreateMoveTask, MoveTaskArguments};
use mooncake_wire::types::{DEFAULT_TENANT, ReplicaMedium};
use moongate_runtime::Supervisor;
use moongate_store_client::KvClient;
use moongate_store_client::PutOptions;
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, RealNode};

use super::masters::{MasterImplementation, MetadataMode, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;

const KEY: &str = "an object";

async fn replica_locations(client: &KvClient) -> Vec<String> {
    let replicas = client.objects().replicas(KEY).await.map(|list| list.replicas).unwrap_or_default();
    let endpoint = |medium| match medium {
        ReplicaMedium::Memory(buffer) => Some(buffer.endpoint),
        _ => None,
    };
    let mut places: Vec<String> = replicas.into_iter().filter_map(|it| endpoint(it.medium)).collect();
    places.sort();
    places
}

async fn copies_and_moves(whose: MasterImplementation) {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(whose, MetadataMode::Handshake).await;
    let (first, second) = (InProcessNode::start(&store).await, InProcessNode::start(&store).await);
    let client = client(&store, &supervisor);
    let (here, there) = (first.running.endpoint().to_owned(), second.running.endpoint().to_owned());
    let bytes: Vec<u8> = (0..(9 << 20) + 5).map(|at: u32| (at % 251) as u8).collect();
    let options = PutOptions { preferred_segments: vec![here.clone()], ..PutOptions::default() };
    client.put(KEY, &bytes, &options).await.unwrap();
    assert_eq!(replica_locations(&client).await, std::slice::from_ref(&here));

    let master = client.objects().master();
    let copy = CopyTaskArguments { key: KEY, tenant: DEFAULT_TENANT, targets: vec![there.as_str()] };
    master.call::<CreateCopyTask, &str>(&copy).await.unwrap().unwrap();
    let mut both = [here.clone(), there.clone()];
    both.sort();
    poll_until("there is a copy", async || replica_locations(&client).await == both).await;
    assert_eq!(first.metric(r#"moongate_store_tasks_total{result="done"}"#).await, 1);

    // The copy holds the same bytes: the first node is gone.
    first.stop().await;
    poll_until("the first has left", async || replica_locations(&client).await == [there.clone()]).await;
    assert!(client.get(KEY).await.unwrap() == bytes);

    // And on to a node of Mooncake's.
    let mut theirs = RealNode::start_with(NEWEST_WITHOUT_CUDA, &store.rpc, &store.metadata, 64, &[]).await;
    let other = "find-it";
    theirs.fill(&[other.to_owned()], 100).await;
    let found = client.objects().replicas(other).await.unwrap();
    let ReplicaMedium::Memory(buffer) = &found.replicas[0].medium else { panic!("{found:?}") };
    let target = buffer.endpoint.as_str();
    let name = store.segment_at(target).await;
    let target_name = name.as_str();
    let task =
        MoveTaskArguments { key: KEY, tenant: DEFAULT_TENANT, source: there.as_str(), target: target_name };
    master.call::<CreateMoveTask, &str>(&task).await.unwrap().unwrap();
    poll_until("it has moved", async || replica_locations(&client).await == [target.to_owned()]).await;
    assert!(client.get(KEY).await.unwrap() == bytes);
    second.stop().await;
}

#[tokio::test]
async fn copies_and_moves_for_their_master() {
    copies_and_moves(MasterImplementation::Mooncake).await;
}

#[tokio::test]
async fn copies_and_moves_for_our_master() {
    copies_and_moves(MasterImplementation::Moongate).await;
}

/// An object on one of two nodes is read until it is on both. Then both copies are read.
async fn hot_objects_are_copied_and_read_from_both(whose: MasterImplementation) {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::with_copies_of_hot_objects(whose).await;
    let (first, second) = (InProcessNode::start(&store).await, InProcessNode::start(&store).await);
    let client = client(&store, &supervisor);
    let (here, there) = (first.running.endpoint().to_owned(), second.running.endpoint().to_owned());
    let bytes: Vec<u8> = (0..(1 << 20) + 7).map(|at: u32| (at % 241) as u8).collect();
    let options = PutOptions { preferred_segments: vec![here.clone()], ..PutOptions::default() };
    client.put(KEY, &bytes, &options).await.unwrap();
    // Nobody reads this one.
    client.put("cold", b"bytes", &options).await.unwrap();
    let mut both = [here.clone(), there.clone()];
    both.sort();
    poll_until("it has been copied", async || {
        assert!(client.get(KEY).await.unwrap() == bytes);
        replica_locations(&client).await == both
    })
    .await;
    const READS: &str = r#"moongate_store_transfers_total{operation="read"}"#;
    let before = [first.metric(READS).await, second.metric(READS).await];
    poll_until("both are read", async || {
        let gets = [KEY; 8].map(|key| client.get(key));
        for got in futures_util::future::join_all(gets).await {
            assert!(got.unwrap() == bytes);
        }
        first.metric(READS).await > before[0] && second.metric(READS).await > before[1]
    })
    .await;
    let cold = client.objects().replicas("cold").await.unwrap();
    assert_eq!(cold.replicas.len(), 1, "{cold:?}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn what_is_hot_is_on_two_nodes_with_their_master() {
    hot_objects_are_copied_and_read_from_both(MasterImplementation::Mooncake).await;
}

#[tokio::test]
async fn what_is_hot_is_on_two_nodes_with_our_master() {
    hot_objects_are_copied_and_read_from_both(MasterImplementation::Moongate).await;
}

#[tokio::test]
async fn a_master_that_forgets_gets_the_memory_again() {
    let supervisor = Supervisor::new();
    let mut store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    let client = client(&store, &supervisor);
    client.put(KEY, b"before", &PutOptions::default()).await.unwrap();
    poll_until("the master is there", async || {
        node.get("/health").await == (200, r#"{"status":"healthy","code":0}"#.to_owned())
    })
    .await;
    store.restart().await;
    let again = async || client.put(KEY, b"after", &PutOptions::default()).await.is_ok();
    poll_until("there is room again", again).await;
    assert_eq!(client.get(KEY).await.unwrap(), &b"after"[..]);
    assert!(node.metric("moongate_store_remounts_total").await >= 1);
    node.stop().await;
}

#[tokio::test]
async fn a_master_that_is_away_is_told_in_health() {
    let mut store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    poll_until("healthy", async || node.get("/health").await.0 == 200).await;
    store.mooncake_master.as_mut().unwrap().kill().await;
    let away = (503, r#"{"status":"master_unreachable","code":2}"#.to_owned());
    poll_until("away", async || node.get("/health").await == away).await;
    // It leaves in order all the same.
    node.stop().await;
}

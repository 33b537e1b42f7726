//! A node that is removed: its objects are moved to the others before its process ends.

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, PutOptions};
use serde_json::Value;

use super::masters::{MasterImplementation, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;

const OBJECTS: usize = 300;

fn key(number: usize) -> String {
    format!("object-{number}")
}

fn content(number: usize) -> Vec<u8> {
    let size = [64, 4096, 70_001][number % 3];
    (0..size).map(|at: usize| ((at * 7 + number) % 251) as u8).collect()
}

async fn all_are_read(client: &KvClient) {
    for number in 0..OBJECTS {
        assert!(client.get(&key(number)).await.unwrap() == content(number), "object {number}");
    }
}

async fn drain_for_removal(node: &InProcessNode) -> (u16, Value) {
    let response = reqwest::Client::new().post(node.url("/drain?reason=removal")).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn a_removed_node_loses_no_object() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::with_short_leases(MasterImplementation::Moongate).await;
    let kept = tempfile::tempdir().unwrap();
    let memory = format!("--memory=folder:{}", kept.path().display());
    let removed = InProcessNode::start_with(&store, &[&memory]).await;
    let others = [InProcessNode::start(&store).await, InProcessNode::start(&store).await];
    let client = client(&store, &supervisor);
    for number in 0..OBJECTS {
        client.put(&key(number), &content(number), &PutOptions::default()).await.unwrap();
    }
    let (status, text) = removed.get("/removal-cost").await;
    let cost: Value = serde_json::from_str(&text).unwrap();
    let mib = cost["cost"].as_u64().unwrap_or_default();
    assert!(status == 200 && (1..=4).contains(&mib), "a third of 7 MB: {cost}");
    let (status, response) = drain_for_removal(&removed).await;
    assert_eq!(status, 202, "{response}");
    assert_eq!(response["waiting_for"], "its objects to be moved to other nodes");
    poll_until("all objects have been moved", async || drain_for_removal(&removed).await.0 == 200).await;
    let moved = removed.metric(r#"moongate_store_tasks_total{result="done"}"#).await;
    assert!((60..=140).contains(&moved), "a third of the objects: {moved}");
    removed.stop().await;
    all_are_read(&client).await;
    for node in others {
        node.stop().await;
    }
}

#[tokio::test]
async fn a_cancelled_removal_reopens_the_node() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::with_short_leases(MasterImplementation::Moongate).await;
    let (drained, other) = (InProcessNode::start(&store).await, InProcessNode::start(&store).await);
    let client = client(&store, &supervisor);
    let on_drained = PutOptions {
        preferred_segments: vec![drained.running.endpoint().to_owned()],
        ..PutOptions::default()
    };
    client.put("first", b"bytes", &on_drained).await.unwrap();
    poll_until("the node is drained", async || drain_for_removal(&drained).await.0 == 200).await;
    assert_eq!(drained.metric(r#"moongate_store_tasks_total{result="done"}"#).await, 1, "moved to the other");

    let (status, response) = drained.get("/settled").await;
    assert!(status == 202 && response.contains(r#""drained":true"#), "{response}");
    let cancelled = reqwest::Client::new().delete(drained.url("/drain")).send().await.unwrap();
    assert_eq!(cancelled.status().as_u16(), 200);
    assert_eq!(drained.get("/settled").await.0, 200);
    client.put("second", b"bytes", &on_drained).await.unwrap();
    other.stop().await;
    assert_eq!(&*client.get("second").await.unwrap(), b"bytes", "on the node that stays");
    drained.stop().await;
}

#[tokio::test]
async fn a_removal_with_mooncakes_master_warns() {
    let store = StoreMasterFixture::with_short_leases(MasterImplementation::Mooncake).await;
    let node = InProcessNode::start(&store).await;
    let (status, response) = drain_for_removal(&node).await;
    assert_eq!(status, 200);
    assert!(response["warning"].as_str().unwrap().contains("lost"), "{response}");
    node.stop().await;
}

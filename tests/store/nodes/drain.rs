//! A segment that a master empties: its objects go elsewhere, nobody who reads them meanwhile notices, and then its node can go.

use std::time::Duration;

use mooncake_wire::admin::{CreateDrainJobRequest, DrainJobChangeResponse, DrainJobResponse, JobStatus};
use mooncake_wire::types::ReplicaMedium;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, PutOptions};
use moongate_store_testkit::mooncake::{NEWEST_WITHOUT_CUDA, RealNode};

use super::masters::{MasterImplementation, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;

const OBJECTS: usize = 12;
/// Objects that are read while all are moved.
const READ_MEANWHILE: usize = 4;

fn key(number: usize) -> String {
    format!("object-{number}")
}

/// Some have more bytes than a node moves at a time.
fn content(number: usize) -> Vec<u8> {
    let size = [1, 4096, 300_001, (8 << 20) + 5][number % 4];
    (0..size).map(|at: usize| ((at * 7 + number) % 251) as u8).collect()
}

async fn endpoints(client: &KvClient, key: &str) -> Vec<String> {
    let list = client.objects().replicas(key).await.unwrap();
    let endpoint = |medium| match medium {
        ReplicaMedium::Memory(buffer) => Some(buffer.endpoint),
        _ => None,
    };
    list.replicas.into_iter().filter_map(|replica| endpoint(replica.medium)).collect()
}

async fn all_are_read(client: &KvClient, objects: &[Vec<u8>]) {
    for (number, object) in objects.iter().enumerate() {
        assert!(client.get(&key(number)).await.unwrap() == object, "object {number}");
    }
}

async fn report(store: &StoreMasterFixture, id: &str) -> DrainJobResponse {
    let url = format!("http://{}/api/v1/drain_jobs/query?job_id={id}", store.admin);
    reqwest::get(url).await.unwrap().json().await.unwrap()
}

async fn a_segment_is_emptied(whose: MasterImplementation) {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::with_short_leases(whose).await;
    let (leaving, staying) = (InProcessNode::start(&store).await, InProcessNode::start(&store).await);
    let client = client(&store, &supervisor);
    let (here, there) = (leaving.running.endpoint().to_owned(), staying.running.endpoint().to_owned());
    let on_leaving = PutOptions { preferred_segments: vec![here.clone()], ..PutOptions::default() };
    let objects: Vec<Vec<u8>> = (0..OBJECTS).map(content).collect();
    for (number, object) in objects.iter().enumerate() {
        client.put(&key(number), object, &on_leaving).await.unwrap();
        assert_eq!(endpoints(&client, &key(number)).await, [here.as_str()]);
    }

    let segments = vec![store.segment_at(&here).await];
    let job = CreateDrainJobRequest { segments, target_segments: Vec::new(), max_concurrency: None };
    let url = format!("http://{}/api/v1/drain_jobs", store.admin);
    let begun = reqwest::Client::new().post(url).json(&job).send().await.unwrap();
    let begun: DrainJobChangeResponse = begun.json().await.unwrap();
    let id = begun.job_id.to_string();
    poll_until("everything has been moved", async || {
        all_are_read(&client, &objects[..READ_MEANWHILE]).await;
        let job = report(&store, &id).await;
        assert!(![JobStatus::FAILED, JobStatus::CANCELED].contains(&job.status), "{job:?}");
        // Longer than a lease: what is leased is not moved.
        tokio::time::sleep(Duration::from_secs(2)).await;
        job.status == JobStatus::SUCCEEDED
    })
    .await;
    let job = report(&store, &id).await;
    assert_eq!((job.succeeded_units, job.failed_units, job.blocked_units), (OBJECTS as u64, 0, 0), "{job:?}");
    let bytes: usize = objects.iter().map(Vec::len).sum();
    assert_eq!(job.migrated_bytes, bytes as u64);
    for number in 0..OBJECTS {
        assert_eq!(endpoints(&client, &key(number)).await, [there.as_str()]);
    }
    let done = leaving.metric(r#"moongate_store_tasks_total{result="done"}"#).await;
    assert_eq!(done, OBJECTS as u64, "the node that had them has moved them");

    // It takes nothing new, also not from those who prefer it.
    client.put("new", b"bytes", &on_leaving).await.unwrap();
    assert_eq!(endpoints(&client, "new").await, [there.as_str()]);

    leaving.stop().await;
    all_are_read(&client, &objects).await;
    let mut theirs = RealNode::start_with(NEWEST_WITHOUT_CUDA, &store.rpc, &store.metadata, 0, &[]).await;
    for (number, object) in objects.iter().enumerate() {
        assert_eq!(theirs.get(&key(number)).await, object.len(), "object {number}");
    }
    staying.stop().await;
}

#[tokio::test]
async fn a_segment_is_emptied_with_their_master() {
    a_segment_is_emptied(MasterImplementation::Mooncake).await;
}

#[tokio::test]
async fn a_segment_is_emptied_with_our_master() {
    a_segment_is_emptied(MasterImplementation::Moongate).await;
}

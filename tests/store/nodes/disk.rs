//! A node's tier on a disk: objects are moved there when memory is full, are read from there by either client, and are promoted again.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvError, PutOptions};
use moongate_store_testkit::mooncake::{NEWEST, NEWEST_WITHOUT_CUDA, RealNode};
use tokio::process::Command;

use super::masters::{MasterImplementation, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;
use crate::harness::process::MoongateProcess;

const SIZE: usize = 1 << 20;
const MEMORY: usize = 32;
const OBJECTS: usize = 48;

fn keys() -> Vec<String> {
    (0..OBJECTS).map(|number| format!("k{number}")).collect()
}

fn content(key: &str) -> Vec<u8> {
    key.bytes().cycle().take(SIZE).collect()
}

fn flags(folder: &Path) -> Vec<String> {
    vec![
        format!("-Dglobal_segment_size={MEMORY}mb"),
        "-Denable_ssd_offload=true".to_owned(),
        format!("-Dssd_offload_path={}", folder.display()),
        "--tier-size=80mb".to_owned(),
        "--tier-buffer=8mb".to_owned(),
    ]
}

async fn start(store: &StoreMasterFixture, flags: &[String]) -> InProcessNode {
    InProcessNode::start_with(store, &flags.iter().map(String::as_str).collect::<Vec<_>>()).await
}

/// Puts more than memory holds, at the pace at which there is room.
async fn fill(client: &KvClient) {
    for key in &keys() {
        let bytes = content(key);
        poll_until("there is room", async || client.put(key, &bytes, &PutOptions::default()).await.is_ok())
            .await;
    }
}

/// The media of an object's replicas. Leases it.
async fn media(client: &KvClient, key: &str) -> Vec<&'static str> {
    let stat = client.stat(key).await;
    stat.map(|stat| stat.replicas.iter().map(|replica| replica.medium).collect()).unwrap_or_default()
}

async fn only_on_disk(client: &KvClient) -> Vec<String> {
    let mut found = Vec::new();
    for key in keys() {
        if media(client, &key).await == ["local disk"] {
            found.push(key);
        }
    }
    found
}

async fn all_is_read(client: &KvClient) {
    for key in &keys() {
        let got = client.get(key).await.unwrap_or_else(|error| panic!("{key}: {error}"));
        assert!(got == content(key), "{key}");
    }
}

/// How many objects Mooncake's client reads as they were put, as many at a time as its buffer holds.
async fn read_by(theirs: &mut RealNode) -> usize {
    let mut read = 0;
    for keys in keys().chunks(4) {
        read += theirs.send_command(&format!("read {}", keys.join(" "))).await.parse::<usize>().unwrap();
    }
    read
}

async fn there_and_back(whose: MasterImplementation) {
    let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
    let store = StoreMasterFixture::with_disks(whose).await;
    let mut flags = flags(folder.path());
    flags.push(format!("--memory=folder:{}", folder.path().display()));
    let node = start(&store, &flags).await;
    let ours = client(&store, &supervisor);
    fill(&ours).await;
    let most = OBJECTS - MEMORY;
    poll_until("some are only on the disk", async || only_on_disk(&ours).await.len() >= most).await;
    all_is_read(&ours).await;
    assert!(node.metric(r#"moongate_store_offloads_total{result="done"}"#).await >= most as u64);
    assert!(node.metric(r#"moongate_store_disk_reads_total{result="done"}"#).await >= 1);
    let mut theirs = RealNode::start_with(NEWEST_WITHOUT_CUDA, &store.rpc, &store.metadata, 0, &[]).await;
    assert_eq!(read_by(&mut theirs).await, OBJECTS);

    node.stop().await;
    let node = start(&store, &flags).await;
    poll_until("a heartbeat was answered", async || node.get("/health").await.0 == 200).await;
    all_is_read(&ours).await;
    poll_until("their client reads all", async || read_by(&mut theirs).await == OBJECTS).await;

    // Room, without which nothing is brought back.
    let hot = only_on_disk(&ours).await.pop().unwrap();
    for key in keys().iter().filter(|key| **key != hot).take(OBJECTS - 8) {
        poll_until("it may be removed", async || {
            matches!(ours.remove(key, true).await, Ok(()) | Err(KvError::NotFound { .. }))
        })
        .await;
    }
    poll_until("it is brought back", async || {
        assert!(ours.get(&hot).await.unwrap() == content(&hot));
        media(&ours, &hot).await.contains(&"memory")
    })
    .await;
    assert!(ours.get(&hot).await.unwrap() == content(&hot));
    assert!(node.metric(r#"moongate_store_promotions_total{result="done"}"#).await >= 1);
    node.stop().await;
}

#[tokio::test]
async fn objects_go_to_the_disk_and_back_with_their_master() {
    there_and_back(MasterImplementation::Mooncake).await;
}

#[tokio::test]
async fn objects_go_to_the_disk_and_back_with_our_master() {
    there_and_back(MasterImplementation::Moongate).await;
}

async fn survives_memory_loss(whose: MasterImplementation) {
    let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
    let store = StoreMasterFixture::with_disks(whose).await;
    let flags = flags(folder.path());
    let node = start(&store, &flags).await;
    let ours = client(&store, &supervisor);
    fill(&ours).await;
    let most = OBJECTS - MEMORY;
    poll_until("some are only on the disk", async || only_on_disk(&ours).await.len() >= most).await;
    let kept = only_on_disk(&ours).await;
    node.stop().await;
    let node = start(&store, &flags).await;
    for key in &kept {
        poll_until("it is found again", async || ours.get(key).await.is_ok_and(|got| got == content(key)))
            .await;
    }
    node.stop().await;
}

#[tokio::test]
async fn the_disk_outlives_memory_with_their_master() {
    survives_memory_loss(MasterImplementation::Mooncake).await;
}

#[tokio::test]
async fn the_disk_outlives_memory_with_our_master() {
    survives_memory_loss(MasterImplementation::Moongate).await;
}

/// Puts more than memory holds. Returns the keys that are only on the disk then.
async fn overflow_to_disk(client: &KvClient) -> Vec<String> {
    fill(client).await;
    poll_until("some are only on the disk", async || only_on_disk(client).await.len() >= OBJECTS - MEMORY)
        .await;
    only_on_disk(client).await
}

/// At least 95 % of what was only on the disk of a killed node can be read after its restart.
async fn hits_after_restart(client: &KvClient, on_disk: &[String]) {
    poll_until("the disk is read again", async || {
        let mut hits = 0;
        for key in on_disk {
            hits += usize::from(client.get(key).await.is_ok_and(|got| got == content(key)));
        }
        hits * 100 >= on_disk.len() * 95
    })
    .await;
}

#[tokio::test]
#[ignore = "takes minutes; see CONTRIBUTING.md"]
async fn disk_of_a_killed_client_of_theirs_is_hit_again() {
    for (release, backend) in
        [(NEWEST_WITHOUT_CUDA, "file_per_key_storage_backend"), (NEWEST, "bucket_storage_backend")]
    {
        let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
        let store = StoreMasterFixture::with_disks(MasterImplementation::Moongate).await;
        let disk = [
            ("DISK", folder.path().to_str().unwrap()),
            ("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1"),
            ("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", backend),
            // Only complete buckets are written.
            ("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "2"),
        ];
        let start = async || RealNode::start_with(release, &store.rpc, &store.metadata, 32, &disk).await;
        let mut node = start().await;
        let ours = client(&store, &supervisor);
        let on_disk = overflow_to_disk(&ours).await;
        node.kill().await;
        let _node = start().await;
        hits_after_restart(&ours, &on_disk).await;
    }
}

#[tokio::test]
async fn disk_of_a_killed_node_of_ours_is_hit_again() {
    let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
    let store = StoreMasterFixture::with_disks(MasterImplementation::Moongate).await;
    let start = async || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command.args(["store", "--port=0", "--memory=process"]).args(flags(folder.path())).env_clear();
        command.env("MOONCAKE_MASTER", &store.rpc).env("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1");
        command.env("MOONCAKE_TE_META_DATA_SERVER", &store.metadata);
        let mut node = MoongateProcess::spawn(&mut command);
        node.wait_for_line("store node ready").await;
        node
    };
    let node = start().await;
    let ours = client(&store, &supervisor);
    let on_disk = overflow_to_disk(&ours).await;
    node.signal("KILL").await;
    node.wait().await;
    let _node = start().await;
    hits_after_restart(&ours, &on_disk).await;
}

#[tokio::test]
async fn damage_is_never_served_and_the_master_learns_of_it() {
    let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
    let store = StoreMasterFixture::with_disks(MasterImplementation::Moongate).await;
    let node = start(&store, &flags(folder.path())).await;
    let ours = client(&store, &supervisor);
    fill(&ours).await;
    poll_until("some are only on the disk", async || only_on_disk(&ours).await.len() >= OBJECTS - MEMORY)
        .await;
    let damaged = only_on_disk(&ours).await;
    let file =
        std::fs::File::options().read(true).write(true).open(folder.path().join("segment.tier")).unwrap();
    let len = file.metadata().unwrap().len();
    // Past the pages about blocks: one bit in every 64 KiB of what objects consist of.
    for at in ((4 << 20)..len).step_by(64 << 10) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    for key in &damaged {
        poll_until("it is gone, or in memory", async || match ours.get(key).await {
            // Some are brought back into memory meanwhile.
            Ok(got) => {
                assert!(got == content(key), "{key} was served damaged");
                media(&ours, key).await.contains(&"memory")
            }
            Err(KvError::NotFound { .. }) => true,
            Err(_) => false,
        })
        .await;
    }
    assert!(node.metric("moongate_store_disk_corrupt_objects_total").await >= 1);
    node.stop().await;
}

#[tokio::test]
async fn our_client_reads_from_the_disk_of_their_node() {
    let (supervisor, folder) = (Supervisor::new(), tempfile::tempdir().unwrap());
    let store = StoreMasterFixture::with_disks(MasterImplementation::Moongate).await;
    let path = folder.path().to_str().unwrap();
    let disk = [
        ("DISK", path),
        ("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1"),
        ("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend"),
    ];
    let _node = RealNode::start_with(NEWEST_WITHOUT_CUDA, &store.rpc, &store.metadata, 32, &disk).await;
    let ours = client(&store, &supervisor);
    fill(&ours).await;
    poll_until("some are only on the disk", async || only_on_disk(&ours).await.len() >= OBJECTS - MEMORY)
        .await;
    all_is_read(&ours).await;
}

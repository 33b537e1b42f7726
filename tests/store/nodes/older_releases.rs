//! Clients of older releases with our node and our master.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, MetadataSource, PutOptions, PutOutcome};
use moongate_store_testkit::mooncake::{RealNode, has};

use super::masters::{MasterImplementation, MetadataMode, StoreMasterFixture};
use super::node::InProcessNode;
use crate::harness::polling::poll_until;

/// What the other client puts under a key: the key, again and again.
fn content(key: &str, size: usize) -> Vec<u8> {
    key.bytes().cycle().take(size).collect()
}

pub(crate) fn client(store: &StoreMasterFixture, supervisor: &Supervisor) -> KvClient {
    let metadata: MetadataSource = store.metadata.parse().unwrap();
    KvClient::new(&store.rpc, KvClientOptions { metadata, ..KvClientOptions::default() }, supervisor).unwrap()
}

async fn both_ways(ours: &KvClient, theirs: &mut RealNode, what: &str) {
    for size in [1, 65_537, 4 << 20] {
        let (mine, other) = (format!("ours-{size}"), format!("theirs-{size}"));
        let put = ours.put(&mine, &content(&mine, size), &PutOptions::default()).await;
        assert_eq!(
            put.unwrap_or_else(|error| panic!("{what}: put {mine}: {error}")),
            PutOutcome::Stored,
            "{what}"
        );
        theirs.put(&other, size).await;
        // The first version of the data plane acknowledges no write: the object is there a moment before its last bytes.
        poll_until(&format!("{what}: {other} is whole"), async || {
            ours.get(&other).await.is_ok_and(|got| got == content(&other, size))
        })
        .await;
        assert_eq!(theirs.send_command(&format!("read {mine} {other}")).await, "2", "{what}: {size}");
        for key in [mine, other] {
            let got = ours.get(&key).await.unwrap_or_else(|error| panic!("{what}: get {key}: {error}"));
            assert!(got == content(&key, size), "{what}: {key} has {} other bytes", got.len());
        }
        // The lease of what was just read does not keep room from the next ones.
        assert_eq!(ours.remove_all(true).await.unwrap(), 2, "{what}: {size}");
    }
}

/// Clients that support neither the second version of the data plane nor its host.
#[tokio::test]
async fn older_clients() {
    let supervisor = Supervisor::new();
    for found in [MetadataMode::Handshake, MetadataMode::MetadataServer] {
        let store = StoreMasterFixture::start(MasterImplementation::Moongate, found).await;
        let node = InProcessNode::start(&store).await;
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

/// Pairs of clients: one puts objects, and the other reads them immediately.
const PAIRS: usize = 6;

/// Lets a client of the release read objects that another client has just put, `gets` times or until `end`. Returns the number of reads,
/// and of reads with wrong bytes.
async fn wrong_gets(release: &str, store: &StoreMasterFixture, gets: usize, end: Instant) -> (usize, usize) {
    let pair = async |number: usize| {
        let mut writer = RealNode::start_of(release, &store.rpc, &store.metadata, 0).await;
        let mut reader = RealNode::start_of(release, &store.rpc, &store.metadata, 0).await;
        let (mut done, mut wrong) = (0, 0);
        for round in 0..gets.div_ceil(PAIRS) {
            if Instant::now() >= end {
                break;
            }
            let (key, size) = (format!("{release}-{number}-{round}"), [1000, 64 << 10][round % 2]);
            writer.put(&key, size).await;
            wrong += usize::from(reader.send_command(&format!("read {key}")).await != "1");
            done += 1;
        }
        (done, wrong)
    };
    let pairs = join_all((0..PAIRS).map(pair)).await.into_iter();
    pairs.fold((0, 0), |(gets, wrong), (more, more_wrong)| (gets + more, wrong + more_wrong))
}

/// Clients of the first version of the data plane, which acknowledges no write, while threads of this process keep all cores busy.
/// `MOONGATE_GETS` reads by each release in `MOONGATE_RELEASES`, for at most `MOONGATE_GETS_SECONDS`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes of load: by hand"]
async fn what_older_clients_put_others_get() {
    let setting = |name, otherwise| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (gets, busy) = (setting("MOONGATE_GETS", 20_000), setting("MOONGATE_BUSY_THREADS", 20));
    let limit = Duration::from_secs(setting("MOONGATE_GETS_SECONDS", 3600) as u64);
    let releases = std::env::var("MOONGATE_RELEASES").unwrap_or_else(|_| "0.3.11.post1,0.3.9".to_owned());
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    for _ in 0..busy {
        let done = std::sync::Arc::clone(&done);
        std::thread::spawn(move || while !done.load(std::sync::atomic::Ordering::Relaxed) {});
    }
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    for release in releases.split(',') {
        if has(release).await {
            let (done, wrong) = wrong_gets(release, &store, gets, Instant::now() + limit).await;
            let waited = node.metric("moongate_store_delayed_reads_total").await;
            eprintln!("{release}: {wrong} of {done} gets were wrong, {waited} reads have waited");
            assert!(wrong == 0 && done > 0, "{release}: {wrong} of {done}");
        }
    }
    node.stop().await;
    done.store(true, std::sync::atomic::Ordering::Relaxed);
}

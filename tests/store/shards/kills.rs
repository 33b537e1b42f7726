//! Masters, nodes and the router are killed under load.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;
use moongate_runtime::{BackoffPolicy, Supervisor};
use moongate_store_client::{KvClient, KvClientOptions, PutOptions, PutOutcome};
use parking_lot::Mutex;

use super::processes::{NODES, SHARDS, ShardedStoreProcesses, StoreProcess};
use crate::harness::linearizability::{CallHistory, connect, mount, settings, start_clients};

const KILLS: usize = 30;
const WRITERS: usize = 2;
/// How long an object may not be readable after the last restart.
const SETTLING_LIMIT: Duration = Duration::from_secs(60);

/// The objects that were put, by key, with their size.
type AcknowledgedObjects = Arc<Mutex<BTreeMap<String, usize>>>;

fn content(key: &str, size: usize) -> Vec<u8> {
    key.bytes().cycle().take(size).collect()
}

fn client(store: &ShardedStoreProcesses, supervisor: &Supervisor) -> KvClient {
    let mut options = KvClientOptions::default();
    options.master.timeout = Duration::from_secs(2);
    options.master.retry =
        BackoffPolicy { initial: Duration::from_millis(5), max: Duration::from_millis(20) };
    KvClient::new(store.router(), options, supervisor).unwrap()
}

/// Puts objects, and reads some, until it is to stop. What it reads must be what was put.
async fn use_store(
    client: KvClient,
    writer: usize,
    stored: AcknowledgedObjects,
    stop: Arc<AtomicBool>,
    failed: Arc<AtomicUsize>,
) {
    for number in 0.. {
        if stop.load(Relaxed) {
            return;
        }
        let (key, size) = (format!("{writer}-{number:x}"), 1 + number * 377 % 30_000);
        match client.put(&key, &content(&key, size), &PutOptions::default()).await {
            Ok(PutOutcome::Stored) => _ = stored.lock().insert(key, size),
            Ok(other) => panic!("{key}: {other:?}"),
            Err(_) => _ = failed.fetch_add(1, Relaxed),
        }
        let some = {
            let stored = stored.lock();
            let at = fastrand::usize(..stored.len().max(1));
            stored.iter().nth(at).map(|(key, size)| (key.clone(), *size))
        };
        if let Some((key, size)) = some
            && let Ok(bytes) = client.get(&key).await
        {
            assert!(bytes == content(&key, size), "{key} has wrong bytes");
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Every acknowledged object is read by a client that calls the masters.
async fn check_all(store: &ShardedStoreProcesses, stored: &AcknowledgedObjects) -> usize {
    let supervisor = Supervisor::new();
    let client = client(store, &supervisor);
    let objects: Vec<(String, usize)> =
        stored.lock().iter().map(|(key, size)| (key.clone(), *size)).collect();
    let read_all = async {
        for (key, size) in &objects {
            loop {
                match client.get(key).await {
                    Ok(bytes) => {
                        assert!(bytes == content(key, *size), "{key} has wrong bytes");
                        break;
                    }
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        }
    };
    if tokio::time::timeout(SETTLING_LIMIT, read_all).await.is_err() {
        let mut lost = Vec::new();
        for (key, _) in &objects {
            if let Err(error) = client.get(key).await {
                lost.push(format!("{key}: {error}"));
            }
        }
        panic!("{} of {} objects are lost: {:?}", lost.len(), objects.len(), lost.first());
    }
    objects.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_kills_of_a_store_with_several_masters_lose_no_object() {
    let mut store = ShardedStoreProcesses::start().await;
    for node in 0..NODES {
        store.start_node(node).await;
    }
    let supervisor = Supervisor::new();
    let (stored, stop, failed) = (AcknowledgedObjects::default(), Arc::default(), Arc::default());
    let writers = join_all((0..WRITERS).map(|writer| {
        let client = client(&store, &supervisor);
        use_store(client, writer, Arc::clone(&stored), Arc::clone(&stop), Arc::clone(&failed))
    }));
    let (_, mut random) = settings();
    let kills = async {
        for kill in 0..KILLS {
            let before = stored.lock().len();
            let target = match random.usize(..8) {
                0..5 => StoreProcess::Shard(random.usize(..SHARDS)),
                5 => StoreProcess::Router,
                _ => StoreProcess::Node(random.usize(..NODES)),
            };
            tokio::time::sleep(Duration::from_millis(random.u64(50..250))).await;
            store.kill(target).await;
            tokio::time::sleep(Duration::from_millis(random.u64(0..100))).await;
            store.restart(target);
            // Something is stored between two kills.
            let progress = async {
                while stored.lock().len() < before + 5 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let progressed = tokio::time::timeout(SETTLING_LIMIT, progress).await;
            assert!(progressed.is_ok(), "nothing is stored after kill {kill} of {target:?}");
        }
        stop.store(true, Relaxed);
    };
    tokio::join!(writers, kills);
    let checked = check_all(&store, &stored).await;
    let failed = failed.load(Relaxed);
    eprintln!("{checked} objects checked, {failed} puts failed meanwhile");
    assert!(checked > KILLS);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_from_killed_shards_are_linearizable() {
    let mut store = ShardedStoreProcesses::start().await;
    let (duration, mut random) = settings();
    let started = std::time::Instant::now();
    let (mut seen, mut kills) = (crate::harness::linearizability::CheckedCalls::default(), 0);
    for number in 0.. {
        if started.elapsed() >= duration {
            break;
        }
        let (history, supervisor) = (Arc::new(CallHistory::new(number)), Supervisor::new());
        mount(&connect(store.router(), &supervisor)).await;
        let clients = start_clients(store.router(), &supervisor, &history, &mut random);
        let kill = async {
            for _ in 0..3 {
                let shard = StoreProcess::Shard(random.usize(..SHARDS));
                tokio::time::sleep(Duration::from_millis(random.u64(40..150))).await;
                store.kill(shard).await;
                tokio::time::sleep(Duration::from_millis(random.u64(0..50))).await;
                store.restart(shard);
                kills += 1;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            // Without a router the clients end.
            store.kill(StoreProcess::Router).await;
        };
        tokio::join!(clients, kill);
        store.restart(StoreProcess::Router);
        seen += history.check();
    }
    eprintln!("checked: {seen:?}, {kills} kills of a shard");
    assert!(seen.reads > 0 && seen.writes > 0);
}

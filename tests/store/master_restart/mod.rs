//! `moongate master --data_dir` is killed repeatedly under load: every acknowledged object exists afterwards, at the same location.

mod rebuild;
mod recovery;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{
    GetReplicaList, KeyArguments, PutEnd, PutEndArguments, PutStart, PutStartArguments, Remove,
    RemoveArguments,
};
use mooncake_wire::types::{
    DEFAULT_TENANT, ObjectMeta, ReplicaDescriptor, ReplicaMedium, ReplicaType, ReplicateConfig, Uuid,
};
use moongate_master_client::rpc::MasterClient;
use moongate_runtime::Supervisor;
use moongate_testkit::free_port;
use parking_lot::Mutex;
use tempfile::TempDir;

use crate::harness::linearizability::{self, CallHistory, CheckedCalls, connect, mount, start_clients};
use crate::harness::process::MoongateProcess;
use crate::harness::wait_until;

const CLIENT: Uuid = Uuid { first: 1, second: 1 };
const WRITERS: u64 = 4;

/// The acknowledged operations of all writers.
#[derive(Default)]
struct AcknowledgedKeys {
    next: AtomicU64,
    /// Key and length of the object at each address.
    memory: Mutex<BTreeMap<u64, (u64, String)>>,
    /// Keys with an acknowledged put and without a started removal.
    stored: Mutex<BTreeSet<String>>,
    /// Keys with an acknowledged removal.
    removed: Mutex<BTreeSet<String>>,
}

impl AcknowledgedKeys {
    /// Records a write to allocated space, which clients do at once.
    fn write(&self, key: &str, replicas: &[ReplicaDescriptor<String>]) {
        let mut memory = self.memory.lock();
        for replica in replicas {
            let (address, size) = allocation(replica);
            let below: Vec<u64> = memory.range(..address + size).rev().take(2).map(|(at, _)| *at).collect();
            for at in below {
                if at + memory[&at].0 > address {
                    memory.remove(&at);
                }
            }
            memory.insert(address, (size, key.to_owned()));
        }
    }
}

fn allocation(replica: &ReplicaDescriptor<String>) -> (u64, u64) {
    match &replica.medium {
        ReplicaMedium::Memory(buffer) => (buffer.address, buffer.size),
        other => panic!("{other:?}"),
    }
}

fn start(port: u16, folder: &Path) -> MoongateProcess {
    let (port, folder) = (format!("--rpc_port={port}"), format!("--data_dir={}", folder.display()));
    MoongateProcess::start(&[
        "master",
        &port,
        "--rpc_address=127.0.0.1",
        "--metrics_port=0",
        "--metrics_host=127.0.0.1",
        &folder,
    ])
}

fn caller(port: u16, supervisor: &Supervisor) -> MasterClient {
    connect(&format!("127.0.0.1:{port}"), supervisor)
}

/// Puts, and sometimes removes, until the master stops responding.
async fn write(master: MasterClient, known: Arc<AcknowledgedKeys>) {
    let tenant = DEFAULT_TENANT.to_owned();
    loop {
        let number = known.next.fetch_add(1, Relaxed);
        let key = format!("{number:064x}_0_k");
        let begin = PutStartArguments {
            client_id: CLIENT,
            key: key.clone(),
            size: 1 + number * 37 % 5000,
            config: ReplicateConfig::default(),
            tenant: tenant.clone(),
        };
        let Ok(replicas) = master.call::<PutStart, String>(&begin).await else { return };
        known.write(&key, &replicas.unwrap());
        if number.is_multiple_of(7) {
            // Some puts are never completed.
            continue;
        }
        let end = PutEndArguments {
            client_id: CLIENT,
            object: ObjectMeta { key: key.clone(), object_checksum: Some(number) },
            replica_type: ReplicaType::ALL,
            tenant: tenant.clone(),
        };
        let Ok(ended) = master.call::<PutEnd, String>(&end).await else { return };
        ended.unwrap();
        known.stored.lock().insert(key.clone());
        if number.is_multiple_of(5) {
            known.stored.lock().remove(&key);
            let remove = RemoveArguments { key: key.clone(), force: true, tenant: tenant.clone() };
            let Ok(removed) = master.call::<Remove, String>(&remove).await else { return };
            removed.unwrap();
            known.removed.lock().insert(key);
        }
    }
}

async fn check(master: &MasterClient, known: &AcknowledgedKeys) {
    let ask = async |key: &String| {
        let arguments = KeyArguments { key: key.clone(), tenant: DEFAULT_TENANT.to_owned() };
        master.call::<GetReplicaList, String>(&arguments).await.unwrap()
    };
    let (stored, removed) = (known.stored.lock().clone(), known.removed.lock().clone());
    for key in &stored {
        let list = ask(key).await.unwrap_or_else(|code| panic!("{key} is lost: {code}"));
        let number = u64::from_str_radix(&key[..64], 16).unwrap();
        assert_eq!(list.object_checksum, Some(number));
        for replica in &list.replicas {
            let (address, size) = allocation(replica);
            assert_eq!(known.memory.lock().get(&address), Some(&(size, key.clone())));
        }
    }
    for key in &removed {
        assert_eq!(ask(key).await.unwrap_err(), ErrorCode::OBJECT_NOT_FOUND, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_master_loses_no_acknowledged_object() {
    let folder = TempDir::new().unwrap();
    let port = free_port();
    let known = Arc::new(AcknowledgedKeys::default());
    let (mut before, mut supervisor) = (0, Supervisor::new());
    for round in 0..21_u64 {
        let master = start(port, folder.path());
        let caller = caller(port, &supervisor);
        mount(&caller).await;
        check(&caller, &known).await;
        let writers = join_all((0..WRITERS).map(|_| write(caller.clone(), known.clone())));
        let kill = async {
            // Delay after the first write, which a busy machine may delay.
            wait_until(&format!("something is written in round {round}"), || {
                known.stored.lock().len() > before
            })
            .await;
            tokio::time::sleep(Duration::from_millis(40 + round * 13 % 90)).await;
            master.signal("KILL").await;
        };
        tokio::join!(writers, kill);
        before = known.stored.lock().len();
        master.wait().await;
        supervisor = Supervisor::new();
    }
    let master = start(port, folder.path());
    let last = caller(port, &supervisor);
    mount(&last).await;
    check(&last, &known).await;
    master.signal("TERM").await;
    let ended = master.wait().await;
    assert_eq!(ended.status.code(), Some(0), "{}", ended.stderr);
    let master = start(port, folder.path());
    mount(&last).await;
    check(&last, &known).await;
    drop(master);
}

/// Reads while the master is killed repeatedly are linearizable: one register per key explains them.
#[tokio::test(flavor = "multi_thread")]
async fn reads_from_a_killed_master_are_linearizable() {
    let (duration, mut random) = linearizability::settings();
    let folder = TempDir::new().unwrap();
    let port = free_port();
    let started = Instant::now();
    let (mut seen, mut kills) = (CheckedCalls::default(), 0);
    // A history covers three runs of the master: the search for an order grows with its length.
    for number in 0.. {
        if started.elapsed() >= duration {
            break;
        }
        let history = Arc::new(CallHistory::new(number));
        for _ in 0..3 {
            let master = start(port, folder.path());
            let supervisor = Supervisor::new();
            mount(&caller(port, &supervisor)).await;
            let clients = start_clients(&format!("127.0.0.1:{port}"), &supervisor, &history, &mut random);
            let life = Duration::from_millis(random.u64(40..150));
            let kill = async {
                tokio::time::sleep(life).await;
                master.signal("KILL").await;
            };
            tokio::join!(clients, kill);
            master.wait().await;
            kills += 1;
        }
        seen += history.check();
    }
    eprintln!("checked: {seen:?}, {kills} kills of the master");
    assert!(seen.reads > 0 && seen.writes > 0);
}

//! The logs of all masters are compacted while standbys follow.

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{
    ExistKey, KeyArguments, PutEnd, PutEndArguments, PutStart, PutStartArguments, Remove, RemoveArguments,
};
use mooncake_wire::types::{DEFAULT_TENANT, ObjectMeta, ReplicaType, ReplicateConfig, Uuid};
use moongate_master_client::rpc::MasterClient;
use moongate_runtime::Supervisor;

use crate::ONE_AT_A_TIME;
use crate::cluster::{HaCluster, MASTERS, StateFolder};
use crate::harness::linearizability::{connect, mount};
use crate::network::HaNetwork;

const WRITER: Uuid = Uuid { first: 1, second: 1 };
/// Long keys make large records: a log file has 16 MiB.
const KEY_BYTES: usize = 32 << 10;
/// Objects put and removed between two looks at the logs.
const ROUND: u64 = 50;
/// Objects that stay.
const KEPT: u64 = 50;

fn key(number: u64) -> String {
    format!("{number:0KEY_BYTES$}")
}

async fn put(master: &MasterClient, number: u64) {
    let (key, tenant) = (key(number), DEFAULT_TENANT.to_owned());
    let start = PutStartArguments {
        client_id: WRITER,
        key: key.clone(),
        size: 64,
        config: ReplicateConfig::default(),
        tenant: tenant.clone(),
    };
    master.call::<PutStart, String>(&start).await.unwrap().unwrap();
    let object = ObjectMeta { key, object_checksum: None };
    let end = PutEndArguments { client_id: WRITER, object, replica_type: ReplicaType::ALL, tenant };
    master.call::<PutEnd, String>(&end).await.unwrap().unwrap();
}

async fn remove(master: &MasterClient, number: u64) {
    let arguments = RemoveArguments { key: key(number), force: true, tenant: DEFAULT_TENANT.to_owned() };
    master.call::<Remove, String>(&arguments).await.unwrap().unwrap();
}

async fn exists(master: &MasterClient, number: u64) -> Result<bool, ErrorCode> {
    let arguments = KeyArguments { key: key(number), tenant: DEFAULT_TENANT.to_owned() };
    master.call::<ExistKey, String>(&arguments).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_compacted_while_standbys_follow() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_with_frequent_snapshots(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(MASTERS).await;
    let (supervisor, leader) = (Supervisor::new(), cluster.wait_for_leader().await);
    let master = connect(cluster.address(leader), &supervisor);
    mount(&master).await;
    for number in 0..KEPT {
        put(&master, number).await;
    }
    let states =
        |cluster: &HaCluster| -> Vec<StateFolder> { (0..MASTERS).map(|it| cluster.state(it)).collect() };
    let before = states(&cluster);
    let (mut next, mut written) = (KEPT, 0);
    loop {
        for number in next..next + ROUND {
            if number % 10 == 0 {
                // The node sends no heartbeats: without another mount its memory would become unusable.
                mount(&master).await;
            }
            put(&master, number).await;
            remove(&master, number).await;
        }
        (next, written) = (next + ROUND, written + 3 * ROUND * KEY_BYTES as u64);
        let now = states(&cluster);
        if now.iter().zip(&before).all(|(now, before)| now.oldest_record > before.oldest_record) {
            break;
        }
        assert!(written < 1 << 30, "after {written} bytes: {before:?}, {now:?}");
    }
    cluster.wait_until_in_sync(MASTERS).await;
    let names = |states: Vec<StateFolder>| states.into_iter().map(|state| state.name).collect::<Vec<_>>();
    assert_eq!(names(states(&cluster)), names(before), "a standby needed a copy of the whole state");

    // The compacted log of a standby has everything.
    cluster.kill(leader).await;
    cluster
        .wait_until("another leads", async |it| it.current_leader().await.is_some_and(|it| it != leader))
        .await;
    let successor = connect(cluster.address(cluster.wait_for_leader().await), &supervisor);
    mount(&successor).await;
    for number in 0..KEPT {
        assert_eq!(exists(&successor, number).await, Ok(true), "object {number}");
    }
    assert_eq!(exists(&successor, KEPT).await, Ok(false));
}

//! Several masters, a real etcd or Kubernetes API server, and Mooncake's own client, while leaders are killed, stopped and partitioned.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panicking")]

mod certificates;
mod cluster;
#[path = "../harness"]
mod harness {
    pub(crate) mod linearizability;
}
mod lease;
mod network;
mod oplog;
mod probe;
mod recovery;
mod store_node;
mod writer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::HaCluster;
use harness::linearizability::{self, CallHistory, CheckedCalls, connect, mount, start_clients};
use moongate_runtime::Supervisor;
use moongate_store_testkit::mooncake;
use network::HaNetwork;
use probe::MasterProbe;
use store_node::HaStoreNode;
use tokio::sync::Mutex;
use writer::MooncakeWriter;

/// A cluster has a dozen processes: several clusters at a time would delay each other beyond the masters' timeouts.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Time for which a leader is stopped, long enough for another master to become the leader.
const SLEEP: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread")]
async fn no_key_is_lost_when_leaders_are_killed_or_stopped() {
    if !mooncake::has(mooncake::NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_on_disks(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let mut writer = MooncakeWriter::start(&cluster).await;
    writer.write(300).await;
    for _ in 0..2 {
        let leader = cluster.wait_for_leader().await;
        for master in 0..3 {
            let expected = if master == leader { ("leader", 200) } else { ("standby", 503) };
            let (role, status) = cluster.status(master).await;
            assert_eq!((role.as_str(), status), expected);
        }
        cluster.kill(leader).await;
        let gap = writer.write(300).await;
        eprintln!("killed a leader: clients went on after {gap:?}");
        let next = cluster.wait_for_leader().await;
        assert_ne!(next, leader);
        cluster.start_master(leader);
        cluster.wait_until_in_sync(3).await;
        writer.check().await;
    }

    let leader = cluster.wait_for_leader().await;
    let mut probe = MasterProbe::connect(&cluster, leader).await;
    assert!(probe.responds().await, "the leader answers");
    cluster.signal(leader, "STOP");
    let asleep = Instant::now();
    probe.send().await;
    let gap = writer.write(300).await;
    eprintln!("a leader fell asleep: clients went on after {gap:?}");
    assert_ne!(cluster.wait_for_leader().await, leader);
    tokio::time::sleep(SLEEP.saturating_sub(asleep.elapsed())).await;
    cluster.signal(leader, "CONT");
    assert!(!probe.receives_response().await, "a leader that had slept answered with what it remembered");
    writer.write(100).await;
    cluster.wait_until_in_sync(3).await;

    // The loss of one etcd node has no effect.
    cluster.kill_etcd(0).await;
    let gap = writer.write(300).await;
    eprintln!("killed a node of etcd: clients went on after {gap:?}");
    // On SIGTERM, a leader releases the leadership.
    let leader = cluster.wait_for_leader().await;
    cluster.signal(leader, "TERM");
    let gap = writer.write(300).await;
    eprintln!("a leader was asked to stop: clients went on after {gap:?}");
    writer.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_and_tools_of_this_project_follow_the_leader() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let own = HaStoreNode::start(&cluster);
    own.put("before").await;
    own.get("before").await;
    let leader = cluster.wait_for_leader().await;
    cluster.kill(leader).await;
    cluster
        .wait_until("another leads", async |it| it.current_leader().await.is_some_and(|it| it != leader))
        .await;
    own.get("before").await;
    own.put("after").await;
    own.get("after").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_are_killed_at_once_and_no_key_is_lost() {
    if !mooncake::has(mooncake::NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_on_disks(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let mut writer = MooncakeWriter::start(&cluster).await;
    writer.write(300).await;
    cluster.put_metadata("node", "there").await;
    for delay in [20, 120] {
        // During writes.
        let restart = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            cluster.kill_all().await;
            cluster.start_etcds();
            (0..3).for_each(|master| cluster.start_master(master));
        };
        let (gap, ()) = tokio::join!(writer.write(600), restart);
        eprintln!("killed all masters and etcd: clients went on after {gap:?}");
        cluster.wait_until_in_sync(3).await;
        writer.check().await;
        assert_eq!(cluster.metadata("node").await, "there");
    }

    // A master that was down lacks records: it must not become the leader, even if it restarts first.
    let late = (cluster.wait_for_leader().await + 1) % 3;
    cluster.kill(late).await;
    writer.write(200).await;
    cluster.wait_until_in_sync(2).await;
    cluster.kill_all().await;
    cluster.start_etcds();
    cluster.start_master(late);
    cluster.wait_until_standby(late).await;
    (0..3).filter(|master| *master != late).for_each(|master| cluster.start_master(master));
    writer.write(100).await;
    assert_ne!(cluster.wait_for_leader().await, late);
    cluster.wait_until_in_sync(3).await;
    writer.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_are_cut_off_and_no_key_is_lost() {
    if !mooncake::has(mooncake::NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let network = match HaNetwork::namespaces().await {
        Ok(network) => network,
        Err(line) => {
            eprintln!(
                "SKIPPED: nothing was cut off, since network namespaces cannot be made here: `{line}` has failed"
            );
            return;
        }
    };
    let mut cluster = HaCluster::start(network).await;
    cluster.wait_until_in_sync(3).await;
    let mut writer = MooncakeWriter::start(&cluster).await;
    writer.write(300).await;

    let leader = cluster.wait_for_leader().await;
    let mut probe = MasterProbe::connect(&cluster, leader).await;
    cluster.disconnect_from_etcd(leader).await;
    let mut gap = Duration::ZERO;
    while cluster.current_leader().await.is_none_or(|it| it == leader) {
        gap = gap.max(writer.write(10).await);
    }
    assert!(!probe.responds().await, "two masters answered at once");
    gap = gap.max(writer.write(300).await);
    eprintln!("a leader was cut off from etcd: clients went on after {gap:?}");
    assert_ne!(cluster.wait_for_leader().await, leader);
    cluster.reconnect(leader).await;
    cluster.wait_until_in_sync(3).await;
    writer.check().await;

    // Partitioned from its followers, the leader continues without them, and they must not become leaders.
    let leader = cluster.wait_for_leader().await;
    cluster.disconnect_from_masters(leader).await;
    let gap = writer.write(300).await;
    eprintln!("a leader was cut off from its followers: clients went on after {gap:?}");
    cluster.wait_until_in_sync(1).await;
    assert_eq!(cluster.wait_for_leader().await, leader);
    cluster.reconnect(leader).await;
    cluster.wait_until_in_sync(3).await;

    // All masters are in sync again, so any may become the leader.
    cluster.kill(leader).await;
    let gap = writer.write(300).await;
    eprintln!("killed a leader: clients went on after {gap:?}");
    writer.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leaders_by_a_lease_die_and_sleep_and_no_key_is_lost() {
    if !mooncake::has(mooncake::NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_with_lease().await;
    cluster.wait_until_in_sync(3).await;
    let mut writer = MooncakeWriter::start(&cluster).await;
    writer.write(300).await;
    let leader = cluster.wait_for_leader().await;
    cluster.kill(leader).await;
    let gap = writer.write(300).await;
    eprintln!("killed a leader: clients went on after {gap:?}");
    let next = cluster.wait_for_leader().await;
    assert_ne!(next, leader);
    cluster.start_master(leader);
    cluster.wait_until_in_sync(3).await;
    writer.check().await;
    // The state of its previous run has been discarded.
    cluster
        .wait_until("only the leader's pod has the label", async |it| it.lease().leaders().await == [next])
        .await;

    let leader = cluster.wait_for_leader().await;
    let mut probe = MasterProbe::connect(&cluster, leader).await;
    assert!(probe.responds().await, "the leader answers");
    cluster.signal(leader, "STOP");
    let asleep = Instant::now();
    probe.send().await;
    cluster
        .wait_until("another leads", async |it| it.current_leader().await.is_some_and(|it| it != leader))
        .await;
    tokio::time::sleep(SLEEP.saturating_sub(asleep.elapsed())).await;
    cluster.signal(leader, "CONT");
    assert!(!probe.receives_response().await, "a leader that had slept answered with what it remembered");
    let gap = writer.write(300).await;
    eprintln!("a leader fell asleep: clients went on after {gap:?}");
    cluster.wait_until_in_sync(3).await;

    // On SIGTERM, a leader releases the leadership.
    let leader = cluster.wait_for_leader().await;
    cluster.signal(leader, "TERM");
    let gap = writer.write(300).await;
    eprintln!("a leader was asked to stop: clients went on after {gap:?}");
    assert_ne!(cluster.wait_for_leader().await, leader);
    writer.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_dies_where_all_is_encrypted() {
    if !mooncake::has(mooncake::NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_secured().await;
    cluster.wait_until_in_sync(3).await;
    let mut writer = MooncakeWriter::start(&cluster).await;
    writer.write(300).await;
    let leader = cluster.wait_for_leader().await;
    cluster.kill(leader).await;
    let gap = writer.write(300).await;
    eprintln!("killed a leader: clients went on after {gap:?}");
    assert_ne!(cluster.wait_for_leader().await, leader);
    cluster.start_master(leader);
    cluster.wait_until_in_sync(3).await;
    writer.check().await;
}

/// Timeout of a first call, after which the leader has been replaced or does not serve yet.
const SERVES_WITHIN: Duration = Duration::from_secs(2);

/// Reads while leaders are killed repeatedly are linearizable: one register per key explains them.
#[tokio::test(flavor = "multi_thread")]
async fn reads_from_killed_leaders_are_linearizable() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let (duration, mut random) = linearizability::settings();
    let mut cluster = HaCluster::start_on_disks(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let started = Instant::now();
    let (mut seen, mut kills) = (CheckedCalls::default(), 0);
    // A history covers three leaders: the search for an order grows with its length.
    for number in 0.. {
        if started.elapsed() >= duration {
            break;
        }
        let history = Arc::new(CallHistory::new(number));
        for _ in 0..3 {
            let supervisor = Supervisor::new();
            let mut leader = 0;
            cluster
                .wait_until("a leader serves", async |it| {
                    let Some(now) = it.current_leader().await else { return false };
                    leader = now;
                    let caller = connect(it.address(leader), &supervisor);
                    tokio::time::timeout(SERVES_WITHIN, mount(&caller)).await.is_ok()
                })
                .await;
            let clients = start_clients(cluster.address(leader), &supervisor, &history, &mut random);
            let clients = supervisor.spawn("clients", clients);
            tokio::time::sleep(Duration::from_millis(random.u64(100..500))).await;
            cluster.kill(leader).await;
            clients.await.unwrap();
            // Restart at once: it may be the only one in sync, and then no other can become the leader.
            cluster.start_master(leader);
            kills += 1;
        }
        seen += history.check();
    }
    eprintln!("checked: {seen:?}, {kills} kills of a leader");
    assert!(seen.reads > 0 && seen.writes > 0);
}

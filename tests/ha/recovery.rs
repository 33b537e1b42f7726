//! The time until objects can be read again after the leader was killed while others stand by.

use std::time::{Duration, Instant};

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_store_testkit::mooncake::{self, HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};

use crate::ONE_AT_A_TIME;
use crate::cluster::HaCluster;
use crate::network::HaNetwork;
use crate::store_node::HaStoreNode;

/// The time that Mooncake's clients have. On a busy machine an election can take longer, so one of several deaths decides.
const STOCK_LIMIT: Duration = Duration::from_secs(5);
/// The time that Moongate's clients have.
const OWN_LIMIT: Duration = Duration::from_secs(1);
/// Generous, because it only detects a client that does not recover.
const LIMIT: Duration = Duration::from_secs(60);
const DEATHS: usize = 3;
const KEY: &str = "before";
const SIZE: usize = 100;

/// Kills the leader repeatedly. Returns how long each time `is_readable` was false.
async fn read_after_deaths(
    cluster: &mut HaCluster,
    mut is_readable: impl AsyncFnMut() -> bool,
) -> Vec<Duration> {
    let mut times = Vec::new();
    for _ in 0..DEATHS {
        cluster.wait_until_in_sync(3).await;
        let leader = cluster.wait_for_leader().await;
        cluster.kill(leader).await;
        let died = Instant::now();
        while !is_readable().await {
            assert!(died.elapsed() < LIMIT, "no read within {LIMIT:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        times.push(died.elapsed());
        cluster.start_master(leader);
    }
    times
}

#[tokio::test(flavor = "multi_thread")]
async fn our_client_reads_within_a_second_of_a_leaders_death() {
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_on_disks(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let node = HaStoreNode::start(&cluster);
    node.put(KEY).await;
    let supervisor = Supervisor::new();
    let client = KvClient::new(&cluster.entry(), KvClientOptions::default(), &supervisor).unwrap();
    assert_eq!(client.get(KEY).await.unwrap(), KEY.as_bytes());
    let times = read_after_deaths(&mut cluster, async || client.get(KEY).await.is_ok()).await;
    eprintln!("read again after a leader's death, by our client: {times:?}");
    assert!(times.iter().any(|time| *time <= OWN_LIMIT), "{times:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn stock_clients_read_within_5_s_of_a_leaders_death() {
    if !mooncake::has(NEWEST_WITHOUT_CUDA).await {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut cluster = HaCluster::start_on_disks(HaNetwork::loopback()).await;
    cluster.wait_until_in_sync(3).await;
    let mut client = RealNode::start_of(NEWEST_WITHOUT_CUDA, &cluster.entry(), HANDSHAKE, 64).await;
    client.put(KEY, SIZE).await;
    let times = read_after_deaths(&mut cluster, async || client.get(KEY).await == SIZE).await;
    eprintln!("read again after a leader's death, by Mooncake's client: {times:?}");
    assert!(times.iter().any(|time| *time <= STOCK_LIMIT), "{times:?}");
}

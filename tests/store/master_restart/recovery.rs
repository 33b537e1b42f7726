//! The time until objects can be read again after a master was killed and started again.

use std::time::{Duration, Instant};

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};
use moongate_testkit::free_port;
use tempfile::TempDir;

use super::start;

/// The time that Mooncake's clients have. On a busy machine a start can take longer, so one of several deaths decides.
const STOCK_LIMIT: Duration = Duration::from_secs(5);
/// The time that Moongate's clients have.
const OWN_LIMIT: Duration = Duration::from_secs(1);
/// Generous, because it only detects a client that does not recover.
const LIMIT: Duration = Duration::from_secs(60);
const DEATHS: usize = 3;
const KEY: &str = "before";
const SIZE: usize = 100_000;

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_readable_soon_after_a_masters_death() {
    let (folder, port, supervisor) = (TempDir::new().unwrap(), free_port(), Supervisor::new());
    let address = format!("127.0.0.1:{port}");
    let mut master = start(port, folder.path());
    master.wait_for_line("serving Mooncake clients").await;
    let mut theirs = RealNode::start_of(NEWEST_WITHOUT_CUDA, &address, HANDSHAKE, 64).await;
    let ours = KvClient::new(&address, KvClientOptions::default(), &supervisor).unwrap();
    ours.put(KEY, &vec![7; SIZE], &PutOptions::default()).await.unwrap();
    let (mut own_times, mut stock_times) = (Vec::new(), Vec::new());
    for _ in 0..DEATHS {
        master.signal("KILL").await;
        let died = Instant::now();
        master.wait().await;
        master = start(port, folder.path());
        while ours.get(KEY).await.is_err() {
            assert!(died.elapsed() < LIMIT, "our client does not read");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        own_times.push(died.elapsed());
        while theirs.get(KEY).await != SIZE {
            assert!(died.elapsed() < LIMIT, "their client does not read");
        }
        stock_times.push(died.elapsed());
    }
    eprintln!(
        "read again after a master's death: by ours after {own_times:?}, by theirs after {stock_times:?}"
    );
    assert!(stock_times.iter().any(|time| *time <= STOCK_LIMIT), "{stock_times:?}");
    assert!(own_times.iter().any(|time| *time <= OWN_LIMIT), "{own_times:?}");
}

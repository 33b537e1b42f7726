//! Mooncake's clients against this master.

use std::time::Duration;

use moongate_master::MasterServerOptions;
use moongate_master_core::{ClientCounts, MasterCoreOptions};
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST, RELEASES, RealNode, has};
use moongate_store_testkit::test_master::start_master_with;

/// Short, so that read objects can soon be removed, but long enough to read three hundred objects.
const LEASE: Duration = Duration::from_secs(3);

fn options() -> MasterServerOptions {
    let core = MasterCoreOptions { lease_ttl_ms: LEASE.as_millis() as u64, ..MasterCoreOptions::default() };
    MasterServerOptions { core, threads: 2, ..MasterServerOptions::default() }
}

/// A typical sequence of operations of a client.
async fn run_client(rpc: &str, release: &str) {
    let mut store = RealNode::start_of(release, rpc, HANDSHAKE, 32).await;
    let mut reader = RealNode::start_of(release, rpc, HANDSHAKE, 0).await;
    assert_eq!(reader.send_command("exist a").await, "0", "{release}");
    for size in [1, 1000, 70_000, 1 << 20] {
        store.put(&format!("a{size}"), size).await;
        assert_eq!(reader.get(&format!("a{size}")).await, size, "{release}");
    }
    // A repeated put succeeds without changing the object.
    store.put("a1", 1).await;
    let keys: Vec<_> = (0..300).map(|number| format!("batch-{number}")).collect();
    assert_eq!(store.fill(&keys, 5000).await, 0, "{release}");
    let keys = keys.join(" ");
    assert_eq!(
        reader.send_command(&format!("exist {keys} nope")).await,
        format!("{}0", "1".repeat(300)),
        "{release}"
    );
    assert_eq!(reader.send_command(&format!("read {keys}")).await, "300", "{release}");
    assert_eq!(reader.send_command("read a1 a1000 a70000 a1048576").await, "4", "{release}");
    assert_eq!(reader.get("nope").await, 0, "{release}");
    tokio::time::sleep(LEASE).await;
    store.remove("a1").await;
    assert_eq!(store.send_command("exist a1").await, "0", "{release}");
    assert_eq!(store.send_command("remove a1").await, "-704", "{release}");
    assert_eq!(store.send_command("clear ^batch-1.$").await, "10", "{release}");
    assert_eq!(store.send_command("empty").await, "293", "{release}");
    store.close().await;
    reader.close().await;
}

#[tokio::test]
async fn clients_of_every_release_are_served() {
    for release in RELEASES {
        if has(release).await {
            let master = start_master_with(options());
            run_client(&master.rpc.address().to_string(), release).await;
            assert_eq!(master.server.counters.unknown_arguments(), 0, "{release}");
            assert_eq!(master.server.master.key_count(), 0, "{release}");
            assert_eq!(master.server.master.segments_detail().total_segments, 0, "{release}");
        }
    }
}

#[tokio::test]
async fn leased_objects_are_removed_only_by_force() {
    let master = start_master_with(MasterServerOptions { threads: 2, ..MasterServerOptions::default() });
    let rpc = master.rpc.address().to_string();
    let mut store = RealNode::start_of(NEWEST, &rpc, HANDSHAKE, 16).await;
    store.put("k", 100).await;
    assert_eq!(store.get("k").await, 100);
    assert_eq!(store.send_command("remove k").await, "-706");
    assert_eq!(store.send_command("clear ^k$").await, "0");
    assert_eq!(store.send_command("empty").await, "0");
    assert_eq!(store.send_command("force k").await, "0");
    store.close().await;
}

#[tokio::test]
async fn killed_node_is_detected_soon_and_no_write_is_rejected() {
    let master = start_master_with(options());
    let rpc = master.rpc.address().to_string();
    let mut store = RealNode::start_of(NEWEST, &rpc, HANDSHAKE, 64).await;
    let mut writer = RealNode::start_of(NEWEST, &rpc, HANDSHAKE, 0).await;
    // Three times as much as fits.
    for number in 0..200 {
        writer.put(&format!("{number}"), 1 << 20).await;
    }
    assert_eq!(writer.send_command("exist 199").await, "1");
    store.kill().await;
    let mut recorder = master.server.recorder();
    let silent = async {
        while master.server.master.client_counts() != (ClientCounts { active: 0, silent: 1 }) {
            master.server.tick(&mut recorder);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, silent).await.unwrap();
    assert_eq!(writer.get("199").await, 0);
}

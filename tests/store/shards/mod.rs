//! A store with several masters behind a router: every program is a process of its own.

mod kills;
mod predictions;
mod processes;

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::admin::KeyReplicas;
use moongate_master_client::admin::{AdminClient, AdminClientOptions};
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions, PutOptions, PutOutcome};
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST, NEWEST_WITHOUT_CUDA, RealNode, has};

use processes::{SHARDS, ShardedStoreProcesses};

/// Mooncake's own client and node, and Moongate's node, each with the router as their master.
#[tokio::test(flavor = "multi_thread")]
async fn mooncakes_programs_use_several_masters_as_one() {
    let mut store = ShardedStoreProcesses::start().await;
    store.start_node(0).await;
    let mut client = RealNode::start_of(NEWEST_WITHOUT_CUDA, store.router(), HANDSHAKE, 64).await;
    let keys: Vec<String> = (0..40).map(|number| format!("object-{number}")).collect();
    for (number, key) in keys.iter().enumerate() {
        client.put(key, 1 + number * 10_000).await;
    }
    assert_eq!(client.send_command(&format!("read {}", keys.join(" "))).await, "40");

    // Each master has a part of the keys; the router's admin server has all of them.
    let supervisor = Supervisor::new();
    let of = |address: &str| AdminClient::new(address, AdminClientOptions::default()).unwrap();
    let mut all = BTreeSet::new();
    for shard in 0..SHARDS {
        let part = store.keys(&store.shard_admin(shard)).await;
        assert!(!part.is_empty() && part.len() < keys.len(), "shard {shard}: {part:?}");
        all.extend(part);
    }
    assert_eq!(all, keys.iter().cloned().collect());
    assert_eq!(store.keys(&store.router_admin()).await, all);
    let mut located = BTreeMap::new();
    let queried = ["object-1", "object-2", "absent"];
    let found = |key: &str, replicas: &KeyReplicas<'_>| _ = located.insert(key.to_owned(), replicas.ok);
    of(&store.router_admin()).locate(&queried, found).await.unwrap();
    let expected = [("absent", false), ("object-1", true), ("object-2", true)];
    assert_eq!(located, expected.map(|(key, ok)| (key.to_owned(), ok)).into());

    let segments = of(&store.router_admin()).segments_detail().await.unwrap().segments;
    let mut sizes: Vec<u64> = segments.iter().map(|segment| segment.size_bytes >> 20).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [64, 256], "{segments:?}");

    // Moongate's client calls the masters directly.
    let ours = KvClient::new(store.router(), KvClientOptions::default(), &supervisor).unwrap();
    assert_eq!(ours.get("object-7").await.unwrap().len(), 70_001);
    let calls = store.router_calls().await;
    for number in 0..20 {
        let key = format!("ours-{number}");
        assert_eq!(
            ours.put(&key, &[number; 5000], &PutOptions::default()).await.unwrap(),
            PutOutcome::Stored
        );
        assert_eq!(client.get(&key).await, 5000);
    }
    let names: Vec<String> = (0..20).map(|number| format!("ours-{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(ours.exist(&names).await.unwrap(), [true; 20]);
    let read = ours.get_batch(&names).await;
    assert!(
        read.iter()
            .enumerate()
            .all(|(number, bytes)| bytes.as_ref().unwrap()[0] == u8::try_from(number).unwrap())
    );
    // Those of Mooncake's client for its gets and heartbeats, and none for the puts.
    assert!(store.router_calls().await - calls < 20 * 4, "the client calls the router");
    assert_eq!(ours.remove_matching("^ours-1", true).await.unwrap(), 11);
    assert_eq!(ours.exist(&["ours-1", "ours-2", "ours-10"]).await.unwrap(), [false, true, false]);
    client.close().await;

    for release in [NEWEST, "0.3.9"] {
        if !has(release).await {
            continue;
        }
        let mut client = RealNode::start_of(release, store.router(), HANDSHAKE, 0).await;
        let keys: Vec<String> = (0..20).map(|number| format!("{release}-{number}")).collect();
        assert_eq!(client.fill(&keys, 5000).await, 0, "{release}");
        assert_eq!(client.send_command(&format!("read {}", keys.join(" "))).await, "20", "{release}");
        assert_eq!(ours.get(&keys[3]).await.unwrap().len(), 5000, "{release}");
        // They have no lease, because no client has read them.
        let matching: Vec<String> = (0..10).map(|number| format!("{release}-matching-{number}")).collect();
        assert_eq!(client.fill(&matching, 100).await, 0, "{release}");
        assert_eq!(client.send_command(&format!("clear ^{release}-matching")).await, "10", "{release}");
        client.close().await;
    }
}

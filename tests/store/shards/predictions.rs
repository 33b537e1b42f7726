//! A gateway predicts from the metadata and the events of all masters.

use moongate_master::RunningMaster;
use moongate_master::flags::{self, MasterInvocation};
use moongate_runtime::Supervisor;
use moongate_store_router::RouterOptions;
use moongate_store_shards::ShardCount;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};

use super::processes::SHARDS;
use crate::harness::metrics::metric;
use crate::harness::store_prompts::{
    SMALL_OBJECT_BYTES, objects, prompt, start_fleet_with_store, wait_for_drop_to, wait_for_growth_to,
    wait_for_metric,
};

/// A master that publishes events.
async fn start_master(shard: usize, supervisor: &Supervisor) -> RunningMaster {
    let shard = format!("--shard={shard}/{SHARDS}");
    let arguments = [
        "--rpc_address=127.0.0.1",
        "--rpc_port=0",
        "--metrics_host=127.0.0.1",
        "--metrics_port=0",
        "--default_kv_lease_ttl=50",
        "--enable_kv_events",
        "--kv_events_bind_endpoint=tcp://127.0.0.1:*",
        &shard,
    ];
    match flags::read(arguments.map(Into::into), |_| None).unwrap() {
        MasterInvocation::Serve(options) => moongate_master::start(*options, supervisor).await.unwrap(),
        MasterInvocation::PrintText(text) => panic!("{text}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_in_several_shards_are_predicted() {
    let (mut masters, mut supervisors) = (Vec::new(), Vec::new());
    for shard in 0..SHARDS {
        let supervisor = Supervisor::new();
        masters.push(start_master(shard, &supervisor).await);
        supervisors.push(supervisor);
    }
    let join = |addresses: Vec<String>| addresses.join(",");
    let admins: Vec<_> = masters.iter().map(|master| master.service_addresses().admin.to_string()).collect();
    let events = masters.iter().map(|master| format!("tcp://{}", master.service_addresses().events.unwrap()));
    let events = format!("--mooncake-events={}", join(events.collect()));
    let loopback = "127.0.0.1:0".parse().unwrap();
    let router = RouterOptions {
        shards: masters.iter().map(|master| master.rpc_address().to_string()).collect(),
        shard_admins: admins.clone(),
        listen: loopback,
        admin_listen: loopback,
        max_connections: 100,
        max_frame_bytes: 64 << 20,
        call_timeout: LIMIT,
        stall_timeout: LIMIT,
    };
    let supervisor = Supervisor::new();
    let router = moongate_store_router::start(&router, &supervisor).unwrap();
    let mut node =
        RealNode::start_of(NEWEST_WITHOUT_CUDA, &router.address().to_string(), HANDSHAKE, 64).await;
    let world = start_fleet_with_store(&join(admins), &[&events]).await;
    wait_for_metric(&world, "moongate_store_events_in_sync", |in_sync| in_sync == 1).await;
    wait_for_metric(&world, "moongate_store_nodes", |nodes| nodes == 1).await;

    let prompt = prompt(1, 12);
    let pages = objects(&prompt);
    assert_eq!(node.fill(&pages.concat(), SMALL_OBJECT_BYTES).await, 0);
    wait_for_growth_to(&world, &prompt, 12).await;
    for (left, page) in pages.iter().enumerate().rev().take(3) {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        node.remove(&page[0]).await;
        wait_for_drop_to(&world, &prompt, u32::try_from(left).unwrap()).await;
    }
    assert_eq!(metric(&world, "moongate_store_event_gaps").await, 0);

    // Without one master, its pages cannot be read: the prefix ends at the first of them.
    let shard_of = |page: &[String; 2]| ShardCount::new(SHARDS).unwrap().shard_of(&page[0]);
    let lost = shard_of(&pages[6]);
    let left = pages.iter().position(|page| shard_of(page) == lost).unwrap();
    masters[lost].stop();
    supervisors[lost].shutdown(LIMIT).await.unwrap();
    // An engine does not read a prefix of less than four pages.
    let expected = if left < 4 { 0 } else { u32::try_from(left).unwrap() };
    wait_for_metric(&world, "moongate_store_events_in_sync", |in_sync| in_sync == 0).await;
    let begun = std::time::Instant::now();
    while crate::harness::store_prompts::predicted_store_tokens(&world, &prompt).await
        != u64::from(expected * 64)
    {
        assert!(begun.elapsed() < LIMIT, "not {expected} pages");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    node.kill().await;
}

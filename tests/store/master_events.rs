//! The gateway follows the events of Moongate's master: stored pages are predicted, removed pages are not.

use crate::harness;
use crate::harness::metrics::metric;
use crate::harness::store_prompts::{
    SMALL_OBJECT_BYTES, objects, prompt, wait_for_drop_to, wait_for_growth_to, wait_for_metric,
};
use moongate_master::RunningMaster;
use moongate_master::flags::{self, MasterInvocation};
use moongate_runtime::Supervisor;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST_WITHOUT_CUDA, RealNode};

/// A master that publishes events.
async fn master(supervisor: &Supervisor) -> RunningMaster {
    let arguments = [
        "--rpc_address=127.0.0.1",
        "--rpc_port=0",
        "--metrics_host=127.0.0.1",
        "--metrics_port=0",
        "--default_kv_lease_ttl=50",
        "--enable_kv_events",
        "--kv_events_bind_endpoint=tcp://127.0.0.1:*",
        "--kv_events_backend_id=pool",
    ];
    match flags::read(arguments.map(Into::into), |_| None).unwrap() {
        MasterInvocation::Serve(options) => moongate_master::start(*options, supervisor).await.unwrap(),
        MasterInvocation::PrintText(text) => panic!("{text}"),
    }
}

#[tokio::test]
async fn stored_and_removed_pages_are_tracked() {
    let supervisor = Supervisor::new();
    let master = master(&supervisor).await;
    let faces = master.service_addresses();
    let events = format!("--mooncake-events=tcp://{}", faces.events.expect("they are published"));
    let mut node =
        RealNode::start_of(NEWEST_WITHOUT_CUDA, &master.rpc_address().to_string(), HANDSHAKE, 64).await;
    let world = harness::store_prompts::start_fleet_with_store(&faces.admin.to_string(), &[&events]).await;
    wait_for_metric(&world, "moongate_store_events_in_sync", |current| current == 1).await;
    wait_for_metric(&world, "moongate_store_nodes", |nodes| nodes == 1).await;

    let (first, second) = (prompt(1, 12), prompt(2, 12));
    for prompt in [&first, &second] {
        let keys = objects(prompt).concat();
        assert_eq!(node.fill(&keys, SMALL_OBJECT_BYTES).await, 0);
        wait_for_growth_to(&world, prompt, 12).await;
    }
    // Removes pages from the end, so that the cached prefix shrinks.
    let pages = objects(&first);
    for (left, page) in pages.iter().enumerate().rev().take(4) {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        node.remove(&page[0]).await;
        wait_for_drop_to(&world, &first, left as u32).await;
    }
    // Removes all others at once, for which Mooncake's own master publishes no event.
    let cleared = master.server().clone();
    let now_ms = cleared.clock.now_ms();
    cleared.master.remove_all(now_ms, None, true, &mut cleared.recorder());
    wait_for_drop_to(&world, &first, 0).await;
    wait_for_drop_to(&world, &second, 0).await;
    // The gateway has received the events of every stored and removed object.
    let objects = 2 * 2 * pages.len() as u64;
    wait_for_metric(&world, "moongate_store_events_total", |events| events == 2 * objects).await;
    assert_eq!(metric(&world, "moongate_store_event_gaps").await, 0);
    assert_eq!(metric(&world, "moongate_store_events_undecodable").await, 0);
    node.close().await;
    supervisor.shutdown(LIMIT).await.expect("all tasks end");
}

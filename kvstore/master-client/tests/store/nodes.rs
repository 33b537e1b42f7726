//! Store nodes that come, go and die.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use moongate_master_client::nodes::{
    MetadataSource, NodeLossReason, NodeWatchOptions, NodeWatcher, StoreNodeEvent, WatchedNode,
};
use moongate_runtime::Supervisor;
use parking_lot::Mutex;

use crate::harness::{HANDSHAKE, LIMIT, NEWEST, RealMaster, RealNode};

async fn next(watch: &mut NodeWatcher) -> StoreNodeEvent {
    tokio::time::timeout(LIMIT, watch.next()).await.expect("an event in time")
}

async fn up(watch: &mut NodeWatcher) -> WatchedNode {
    match next(watch).await {
        StoreNodeEvent::Up(node) => node,
        other => panic!("{other:?}"),
    }
}

/// Watches for a while in which nothing may happen, so that lines can be opened.
async fn quiet(watch: &mut NodeWatcher, other: impl Future<Output = ()>) {
    tokio::select! {
        event = watch.next() => panic!("{event:?}"),
        () = other => {}
    }
}

/// A node is killed while another reads and writes.
async fn a_dead_node_is_noticed(metadata: &str, options: NodeWatchOptions) {
    let master = RealMaster::start(NEWEST).await;
    let mut survivor = RealNode::start(&master, metadata, 32).await;
    survivor.put("kept", 4096).await;
    let mut watch = NodeWatcher::new(master.admin(), options);
    let survives = up(&mut watch).await;
    let mut victim = RealNode::start(&master, metadata, 32).await;
    let mut reader = RealNode::start(&master, metadata, 0).await;
    let dies = up(&mut watch).await;
    assert_ne!(survives.endpoint, dies.endpoint);

    // Longer than it takes to open the lines; all can be used meanwhile.
    let work = async {
        let until = Instant::now() + Duration::from_secs(2);
        let mut n = 0;
        while Instant::now() < until {
            let key = format!("object{n}");
            n += 1;
            victim.put(&key, 4096).await;
            assert_eq!((reader.get(&key).await, reader.get("kept").await), (4096, 4096));
        }
        assert!(n > 0);
    };
    quiet(&mut watch, work).await;

    let killed = Instant::now();
    victim.kill().await;
    let event = next(&mut watch).await;
    let after = killed.elapsed();
    assert!(
        matches!(&event, StoreNodeEvent::Lost(node, NodeLossReason::Unreachable(_)) if *node == dies),
        "{event:?}"
    );
    assert!(after < Duration::from_secs(1), "{after:?}");
    // The master has not noticed yet, and its list does not bring the node back.
    assert_eq!(master.admin().segments_detail().await.unwrap().segments.len(), 2);
    let reads = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(reader.get("kept").await, 4096);
    };
    quiet(&mut watch, reads).await;
    assert_eq!(watch.mark_up().collect::<Vec<_>>(), [&survives]);
}

#[tokio::test]
async fn a_dead_node_is_noticed_with_handshakes() {
    a_dead_node_is_noticed(HANDSHAKE, NodeWatchOptions::default()).await;
}

type MetadataEntries = Arc<Mutex<BTreeMap<String, String>>>;
type MetadataQuery = Query<BTreeMap<String, String>>;

/// An HTTP metadata server; Mooncake's own listens on all interfaces.
async fn metadata_server(supervisor: &Supervisor) -> String {
    let read = async |State(stored): State<MetadataEntries>, Query(asked): MetadataQuery| {
        stored.lock().get(&asked["key"]).cloned().ok_or(StatusCode::NOT_FOUND)
    };
    let write = async |State(stored): State<MetadataEntries>, Query(asked): MetadataQuery, body: String| {
        stored.lock().insert(asked["key"].clone(), body);
        "metadata updated"
    };
    let remove = async |State(stored): State<MetadataEntries>, Query(asked): MetadataQuery| {
        stored.lock().remove(&asked["key"]).map(|_| "metadata deleted").ok_or(StatusCode::NOT_FOUND)
    };
    let router = axum::Router::new()
        .route("/metadata", get(read).put(write).delete(remove))
        .with_state(MetadataEntries::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    supervisor.spawn("metadata", async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}/metadata")
}

#[tokio::test]
async fn a_dead_node_is_noticed_with_a_metadata_server() {
    let supervisor = Supervisor::new();
    let url = metadata_server(&supervisor).await;
    let metadata = MetadataSource::Http { url: url.clone(), cluster_id: None };
    a_dead_node_is_noticed(&url, NodeWatchOptions { metadata, ..NodeWatchOptions::default() }).await;
}

#[tokio::test]
async fn nodes_leave_and_masters_restart() {
    let mut master = RealMaster::start(NEWEST).await;
    let mut stays = RealNode::start(&master, HANDSHAKE, 32).await;
    let mut watch = NodeWatcher::new(master.admin(), NodeWatchOptions::default());
    let there = up(&mut watch).await;
    let mut leaves = RealNode::start(&master, HANDSHAKE, 32).await;
    let left = up(&mut watch).await;
    leaves.close().await;
    // The process closes its port, or the master unlists it, whichever is seen first.
    let event = next(&mut watch).await;
    assert!(matches!(&event, StoreNodeEvent::Lost(node, _) if *node == left), "{event:?}");

    master.kill().await;
    assert!(matches!(next(&mut watch).await, StoreNodeEvent::MasterLost(_)));
    assert_eq!(watch.mark_up().collect::<Vec<_>>(), [&there], "a node lives without its master");
    let _master = master.start_again().await;
    assert_eq!(next(&mut watch).await, StoreNodeEvent::MasterRecovered);
    // The node mounts its segment again, perhaps after the master has been seen without it.
    let mut events = Vec::new();
    let remounted = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        stays.put("again", 4096).await;
    };
    let mut remounted = pin!(remounted);
    loop {
        tokio::select! {
            event = watch.next() => events.push(event),
            () = &mut remounted => break,
        }
    }
    let missing =
        [StoreNodeEvent::Lost(there.clone(), NodeLossReason::Unlisted), StoreNodeEvent::Up(there.clone())];
    assert!(events.is_empty() || events == missing, "{events:?}");
    assert_eq!(watch.mark_up().collect::<Vec<_>>(), [&there]);
}

//! Detection of store nodes that join, leave and fail.

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
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST, RealMaster, RealNode};
use parking_lot::Mutex;

async fn next(watch: &mut NodeWatcher) -> StoreNodeEvent {
    tokio::time::timeout(LIMIT, watch.next()).await.expect("an event in time")
}

async fn up(watch: &mut NodeWatcher) -> WatchedNode {
    match next(watch).await {
        StoreNodeEvent::Up(node) => node,
        other => panic!("{other:?}"),
    }
}

/// Polls the watcher during `other`, and fails on any event. Connections are opened meanwhile.
async fn quiet(watch: &mut NodeWatcher, other: impl Future<Output = ()>) {
    tokio::select! {
        event = watch.next() => panic!("{event:?}"),
        () = other => {}
    }
}

/// Kills a node while others read and write.
async fn dead_node_is_detected(metadata: &str, options: NodeWatchOptions) {
    let master = RealMaster::start(NEWEST).await;
    let mut survivor = RealNode::start(&master, metadata, 32).await;
    survivor.put("kept", 4096).await;
    let mut watch = NodeWatcher::new(master.admin(), options);
    let survives = up(&mut watch).await;
    let mut victim = RealNode::start(&master, metadata, 32).await;
    let mut reader = RealNode::start(&master, metadata, 0).await;
    let dies = up(&mut watch).await;
    assert_ne!(survives.endpoint, dies.endpoint);

    // Long enough to open all connections. The nodes work normally while they are watched.
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
        matches!(&event, StoreNodeEvent::Lost(node, NodeLossReason::Unreachable { .. }) if *node == dies),
        "{event:?}"
    );
    assert!(after < Duration::from_secs(1), "{after:?}");
    // The master still lists the node, which must not bring it back.
    assert_eq!(master.admin().segments_detail().await.unwrap().segments.len(), 2);
    let reads = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(reader.get("kept").await, 4096);
    };
    quiet(&mut watch, reads).await;
    assert_eq!(watch.live_nodes().collect::<Vec<_>>(), [&survives]);
}

#[tokio::test]
async fn dead_node_is_detected_with_handshakes() {
    dead_node_is_detected(HANDSHAKE, NodeWatchOptions::default()).await;
}

type MetadataEntries = Arc<Mutex<BTreeMap<String, String>>>;
type MetadataQuery = Query<BTreeMap<String, String>>;

/// An HTTP metadata server on loopback, because Mooncake's own listens on all interfaces.
async fn metadata_server(supervisor: &Supervisor) -> String {
    let read = async |State(stored): State<MetadataEntries>, Query(query): MetadataQuery| {
        stored.lock().get(&query["key"]).cloned().ok_or(StatusCode::NOT_FOUND)
    };
    let write = async |State(stored): State<MetadataEntries>, Query(query): MetadataQuery, body: String| {
        stored.lock().insert(query["key"].clone(), body);
        "metadata updated"
    };
    let remove = async |State(stored): State<MetadataEntries>, Query(query): MetadataQuery| {
        stored.lock().remove(&query["key"]).map(|_| "metadata deleted").ok_or(StatusCode::NOT_FOUND)
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
async fn dead_node_is_detected_with_a_metadata_server() {
    let supervisor = Supervisor::new();
    let url = metadata_server(&supervisor).await;
    let metadata = MetadataSource::Http { url: url.clone(), cluster_id: None };
    dead_node_is_detected(&url, NodeWatchOptions { metadata, ..NodeWatchOptions::default() }).await;
}

#[tokio::test]
async fn node_leave_and_master_restart_are_reported() {
    let mut master = RealMaster::start(NEWEST).await;
    let mut remaining = RealNode::start(&master, HANDSHAKE, 32).await;
    let mut watch = NodeWatcher::new(master.admin(), NodeWatchOptions::default());
    let node = up(&mut watch).await;
    let mut leaver = RealNode::start(&master, HANDSHAKE, 32).await;
    let leaving = up(&mut watch).await;
    leaver.close().await;
    // Either event may come first: the process closes its port, or the master removes it from the list.
    let event = next(&mut watch).await;
    assert!(matches!(&event, StoreNodeEvent::Lost(node, _) if *node == leaving), "{event:?}");

    master.kill().await;
    assert!(matches!(next(&mut watch).await, StoreNodeEvent::MasterLost(_)));
    assert_eq!(watch.live_nodes().collect::<Vec<_>>(), [&node], "a node remaining up without its master");
    let _master = master.start_again().await;
    assert!(matches!(next(&mut watch).await, StoreNodeEvent::MasterRecovered));
    // The node remounts its segment, possibly after a poll of the master without it.
    let mut events = Vec::new();
    let remounted = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        remaining.put("again", 4096).await;
    };
    let mut remounted = pin!(remounted);
    loop {
        tokio::select! {
            event = watch.next() => events.push(event),
            () = &mut remounted => break,
        }
    }
    let is_expected = match &events[..] {
        [] => true,
        [StoreNodeEvent::Lost(lost, NodeLossReason::Unlisted), StoreNodeEvent::Up(up)] => {
            (lost, up) == (&node, &node)
        }
        _ => false,
    };
    assert!(is_expected, "{events:?}");
    assert_eq!(watch.live_nodes().collect::<Vec<_>>(), [&node]);
}

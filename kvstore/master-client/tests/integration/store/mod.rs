//! The client against Mooncake's own masters and store nodes, of several releases.

mod nodes;

use std::collections::{BTreeMap, BTreeSet};

use mooncake_wire::key::{BlockPart, SglangTensor};
use mooncake_wire::rpc::{
    ClientArguments, GetReplicaList, KeyArguments, MEMORY_RETAINED, NoArguments, Ping, ServiceReady,
};
use mooncake_wire::types::{ClientStatus, DEFAULT_TENANT, ReplicaMedium, Uuid};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_master_client::admin::{self, AdminClient, AdminError};
use moongate_master_client::rpc::{self, MasterClient, RpcError};
use moongate_master_client::snapshot;
use moongate_runtime::Supervisor;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{HANDSHAKE, NEWEST, RealMaster, RealNode, has};

/// Keys in SGLang's format: two objects for each of five blocks.
fn page_keys() -> Vec<String> {
    (0..5).flat_map(|page| ["k", "v"].map(|tensor| format!("model_{page:064x}_0_{tensor}"))).collect()
}

fn replicas(key: &str) -> KeyArguments<&str> {
    KeyArguments { key, tenant: DEFAULT_TENANT }
}

/// The endpoint of an object's only replica, by RPC.
async fn endpoint_of(client: &MasterClient, key: &str) -> String {
    let list = client.call::<GetReplicaList, &str>(&replicas(key)).await.unwrap().unwrap();
    let [replica] = &list.replicas[..] else { panic!("{list:?}") };
    let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
    assert_eq!(buffer.size, 4096);
    buffer.endpoint.clone()
}

async fn reads_what_was_written(release: &'static str, dialects: &[Dialect]) {
    let supervisor = Supervisor::new();
    let master = RealMaster::start(release).await;
    let mut node = RealNode::start(&master, HANDSHAKE, 32).await;
    let pages = page_keys();
    let is_recent = [NEWEST, "0.3.13.post1"].contains(&release);
    let odd = [if is_recent { "some/other@key:é" } else { "some/other@key" }, "x,y"];
    for key in pages.iter().map(String::as_str).chain(odd) {
        node.put(key, 4096).await;
    }

    // By RPC. This master ignores attachments of calls.
    let client = master.client(&supervisor);
    let stranger = ClientArguments { client_id: Uuid { first: 1, second: 2 } };
    let pong = client.call_with_attachment::<Ping, &str>(&stranger, MEMORY_RETAINED).await.unwrap().unwrap();
    assert_eq!(pong.client_status, ClientStatus::NEED_REMOUNT);
    assert_eq!(client.call::<ServiceReady, &str>(&NoArguments).await.unwrap().as_deref(), Ok("2.0.0"));
    let queried = vec![&*pages[0], "nothing", "x,y"];
    assert_eq!(client.exist_and_lease(queried).await.unwrap(), [Ok(true), Ok(false), Ok(true)]);
    let endpoint = endpoint_of(&client, &pages[3]).await;
    let missing = client.call::<GetReplicaList, &str>(&replicas("nothing")).await.unwrap();
    assert_eq!(missing, Err(ErrorCode::OBJECT_NOT_FOUND));
    assert!(dialects.contains(&client.dialect()), "{release}: {}", client.dialect());

    // By HTTP.
    let admin = master.admin();
    assert_eq!(admin.health().await.unwrap().role, "leader");
    assert_eq!(admin.segments().await.unwrap().len(), 1);
    let mut listed = BTreeSet::new();
    let mut keys = admin.keys().await.unwrap();
    while let Some(page) = keys.next().await.unwrap() {
        listed.extend(page.iter().map(str::to_owned));
    }
    let written: BTreeSet<_> = pages.iter().map(String::as_str).chain(odd).map(str::to_owned).collect();
    assert_eq!(listed, written, "{release}");

    let mut found = BTreeMap::new();
    let queried = [&*pages[0], &*pages[3], odd[0], odd[1], "nothing"];
    let skipped = admin.locate(&queried, |key, replicas| {
        let buffers = replicas.values.as_deref().unwrap_or_default();
        let locations: Vec<_> = buffers.iter().map(|it| (it.endpoint.to_string(), it.size)).collect();
        found.insert(key.to_owned(), locations);
    });
    assert_eq!(skipped.await.unwrap(), 1, "a key with a comma cannot be queried");
    let location = vec![(endpoint, 4096)];
    let expected =
        [(queried[0], &location), (queried[1], &location), (queried[2], &location), ("nothing", &Vec::new())];
    assert_eq!(found, expected.into_iter().map(|(k, v)| (k.to_owned(), v.clone())).collect(), "{release}");

    // By a snapshot of the key tensors of all blocks.
    let first = |key: &mooncake_wire::key::ObjectKey<'_>| match key.part {
        BlockPart::Sglang(part) => part.tensor == SglangTensor::Key,
        _ => false,
    };
    let options = snapshot::StoreSnapshotOptions {
        busy_share: 1.0,
        chunk: 2,
        ..snapshot::StoreSnapshotOptions::default()
    };
    let mut located = BTreeSet::new();
    let order = Default::default();
    let taken = snapshot::read(&admin, &options, &order, first, |key, replicas| {
        assert_eq!((key.namespace, replicas.values.as_deref().unwrap_or_default().len()), ("model", 1));
        located.insert(key.to_string());
    });
    let summary = taken.await.unwrap();
    let expected: BTreeSet<_> = pages.iter().filter(|key| key.ends_with("_k")).cloned().collect();
    assert_eq!(located, expected, "{release}");
    assert_eq!((summary.listed, summary.skipped, summary.located), (12, 7, 5), "{summary:?}");
    assert_eq!((summary.missing, summary.unqueryable), (0, 0), "{summary:?}");

    if is_recent {
        assert!(!admin.kv_events_status().await.unwrap().enabled);
    }
    if is_recent || release == "0.3.12.post1" {
        let detail = admin.segments_detail().await.unwrap();
        assert_eq!((detail.total_segments, &detail.segments[0].te_endpoint), (1, &location[0].0));
    } else {
        assert!(matches!(admin.segments_detail().await, Err(AdminError::NotFound { .. })));
    }
}

#[tokio::test]
async fn release_0_3_14() {
    reads_what_was_written(NEWEST, &[Dialect::V0_3_14]).await;
}

#[tokio::test]
async fn release_0_3_13() {
    if has("0.3.13.post1").await {
        reads_what_was_written("0.3.13.post1", &[Dialect::V0_3_13]).await;
    }
}

#[tokio::test]
async fn release_0_3_12() {
    if has("0.3.12.post1").await {
        reads_what_was_written("0.3.12.post1", &[Dialect::V0_3_12]).await;
    }
}

#[tokio::test]
async fn release_0_3_11() {
    if has("0.3.11.post1").await {
        reads_what_was_written("0.3.11.post1", &[Dialect::V0_3_11]).await;
    }
}

/// Releases with the same replica lists, which the client cannot distinguish.
const ALIKE: [Dialect; 3] = [Dialect::V0_3_9, Dialect::V0_3_10, Dialect::V0_3_10_post2];

#[tokio::test]
async fn release_0_3_10() {
    if has("0.3.10").await {
        reads_what_was_written("0.3.10", &ALIKE).await;
    }
}

#[tokio::test]
async fn release_0_3_9() {
    if has("0.3.9").await {
        reads_what_was_written("0.3.9", &ALIKE).await;
    }
}

#[tokio::test]
async fn client_reconnects_to_a_restarted_master() {
    let supervisor = Supervisor::new();
    let mut master = RealMaster::start(NEWEST).await;
    let client = master.client(&supervisor);
    assert_eq!(client.exist_and_lease(vec!["k"]).await.unwrap(), [Ok(false)]);
    master.kill().await;
    let error = client.exist_and_lease(vec!["k"]).await.unwrap_err();
    assert!(matches!(error, RpcError::Lost { .. } | RpcError::Unreachable { .. }), "{error}");
    let error = client.exist_and_lease(vec!["k"]).await.unwrap_err();
    assert!(matches!(error, RpcError::Lost { .. } | RpcError::Unreachable { .. }), "{error}");
    let _master = master.start_again().await;
    let reconnected = async {
        while client.exist_and_lease(vec!["k"]).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, reconnected).await.unwrap();
}

#[tokio::test]
async fn swapped_ports_are_reported_with_their_address() {
    let supervisor = Supervisor::new();
    let master = RealMaster::start(NEWEST).await;
    let options = rpc::MasterClientOptions {
        timeout: std::time::Duration::from_secs(3),
        ..rpc::MasterClientOptions::default()
    };
    let client = MasterClient::new(&master.admin, options, &supervisor);
    let error = client.exist_and_lease(vec!["k"]).await.unwrap_err();
    let is_expected =
        matches!(error, RpcError::NotMaster { .. } | RpcError::Lost { .. } | RpcError::TimedOut { .. });
    assert!(is_expected && error.to_string().contains(&master.admin), "{error}");

    let admin = AdminClient::new(&master.rpc, admin::AdminClientOptions::default()).unwrap();
    let error = admin.health().await.unwrap_err();
    assert!(error.to_string().contains(&master.rpc), "{error}");
}

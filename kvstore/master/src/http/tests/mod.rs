mod object_locations;
mod recorded;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::Request;
use http_body_util::BodyExt as _;
use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master_core::{CallContext, MasterCoreOptions, PutStartRequest, RemoveContext};
use tower::ServiceExt as _;

use super::chunked_body::ChunkedBody as _;
use super::*;
use crate::events::KvEventQueue;
use crate::journal::MemoryJournal;
use crate::observer::ObservingJournal;
use crate::server::{LeadershipStatus, MasterServerOptions};

const SEGMENTS: [&str; 2] = ["127.0.0.1:13102", "127.0.0.1:13681"];

pub(super) fn admin(core: MasterCoreOptions) -> Arc<AdminContext> {
    let observer = Arc::new(FactObserver::new(Some(Arc::new(KvEventQueue::new(1 << 16)))));
    let journal = ObservingJournal::new(Arc::new(MemoryJournal::new(1 << 20)), Arc::clone(&observer));
    let server = Arc::new(MasterServer::new(
        MasterServerOptions { core, ..MasterServerOptions::default() },
        Arc::new(journal),
    ));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let summary = Mutex::new(MetricsSummary::new(&server));
    Arc::new(AdminContext { server, observer, events: None, quotas: None, summary })
}

/// Settings whose leases outlast a test.
pub(super) fn settings() -> MasterCoreOptions {
    MasterCoreOptions { lease_ttl_ms: 3_600_000, client_ttl_ms: 3_600_000, ..MasterCoreOptions::default() }
}

fn id(number: u64) -> Uuid {
    Uuid { first: 10_000 + number, second: 20_000 + number }
}

/// Mounts two segments of 32 MiB.
fn mount(server: &MasterServer) {
    for (number, name) in (1..).zip(SEGMENTS) {
        let segment = Segment {
            id: id(number),
            name,
            base: 0x7f00_0000_0000 + (number << 32),
            size: 32 << 20,
            te_endpoint: name,
            protocol: "tcp",
            host_id: "",
            locality: None,
        };
        server.master.mount(server.clock.now_ms(), &segment, id(number), &mut server.recorder()).unwrap();
    }
}

fn put(server: &MasterServer, key: &str, size: u64, replicas: u64) {
    let (now, client, mut recorder) = (server.clock.now_ms(), id(1), server.recorder());
    let config = ReplicateConfig {
        replica_num: replicas,
        preferred_segment: SEGMENTS[0],
        ..ReplicateConfig::default()
    };
    let context = CallContext { now_ms: now, client, tenant: "default" };
    server.master.put_start(context, &PutStartRequest { key, size, config: &config }, &mut recorder).unwrap();
    let object = ObjectMeta { key, object_checksum: None };
    server.master.put_end(context, &object, ReplicaType::ALL, &mut recorder).unwrap();
}

struct AdminTestResponse {
    status: String,
    content_type: String,
    body: String,
}

async fn send(router: &Router, request: Request<Body>) -> AdminTestResponse {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status().to_string();
    let content_type = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    AdminTestResponse {
        status,
        content_type: content_type.unwrap_or_default(),
        body: String::from_utf8(body.into()).unwrap(),
    }
}

async fn get_path(router: &Router, path: &str) -> AdminTestResponse {
    send(router, Request::get(path).body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn quotas_are_saved_in_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    std::fs::write(&path, "version: 1\ntenants: []\n").unwrap();
    let (quotas, _) = QuotaFile::read(&path).unwrap();
    let admin = Arc::into_inner(admin(MasterCoreOptions { multi_tenant: true, ..settings() })).unwrap();
    let router = admin_router(Arc::new(AdminContext { quotas: Some(quotas), ..admin }));
    let url = "/api/v1/tenant_quotas?tenant_id=";
    for tenant in ["a", "b"] {
        let request =
            Request::put(format!("{url}{tenant}")).body(Body::from("{\"requested_quota_bytes\":5}"));
        assert_eq!(send(&router, request.unwrap()).await.status, "200 OK");
    }
    let request = Request::delete(format!("{url}a")).body(Body::empty()).unwrap();
    assert_eq!(send(&router, request).await.status, "200 OK");
    assert_eq!(QuotaFile::read(&path).unwrap().1, [("b".to_owned(), 5)]);
    let metrics = get_path(&router, "/metrics").await.body;
    assert!(metrics.contains("\nmooncake_tenant_quota_requested_bytes{tenant_id=\"b\"} 5\n"), "{metrics}");
    assert!(metrics.contains("\nmooncake_tenant_quota_requested_bytes_sum 5\n"), "{metrics}");
}

#[tokio::test]
async fn only_query_key_grants_a_lease() {
    let admin = admin(settings());
    mount(&admin.server);
    for key in ["one", "two", "three"] {
        put(&admin.server, key, 100, 1);
    }
    let router = admin_router(Arc::clone(&admin));
    for path in [
        "/query_key?key=one",
        "/batch_query_keys?keys=two",
        "/api/v1/peek?keys=two,three",
        "/api/v1/snapshot",
    ] {
        assert_eq!(get_path(&router, path).await.status, "200 OK");
    }
    let now = admin.server.clock.now_ms();
    assert_eq!(admin.server.master.remove_all(now, None, false, &mut ()), 2);
    assert_eq!(get_path(&router, "/get_all_keys").await.body, "one\n");
}

#[tokio::test]
async fn described_prompts_are_counted_and_checked() {
    let admin = admin(settings());
    mount(&admin.server);
    for key in ["m_aa_0_k", "m_aa_0_v"] {
        put(&admin.server, key, 100, 1);
    }
    let router = admin_router(Arc::clone(&admin));
    let post = |body: &str| {
        let request = Request::post("/api/v1/describe_prompts").body(Body::from(body.to_owned()));
        send(&router, request.unwrap())
    };
    let body = r#"{"prompts":[{"tokens":9000,"elapsed_ms":500,"returns":"never","parts":[["m_","_0_k"],["m_","_0_v"]],"hashes":["aa","bb"]}]}"#;
    let response = post(body).await;
    assert_eq!(response.body, r#"{"success":true,"data":{"existing":2,"announced":2}}"#);
    let metrics = get_path(&router, "/metrics").await.body;
    assert!(
        metrics.contains("\nmoongate_master_described_prompts_total{returns=\"never\"} 1\n"),
        "{metrics}"
    );
    // Members of other releases are ignored.
    let of_tenant = body.replace(r#""returns""#, r#""tenant_bucket":7,"of_a_later_release":{},"returns""#);
    assert_eq!(post(&of_tenant).await.status, "200 OK");
    let unknown = post(&body.replace("never", "maybe")).await;
    assert_eq!(unknown.status, "400 Bad Request");
    assert!(unknown.body.contains("Invalid JSON body: unknown variant `maybe`"), "{}", unknown.body);
    let hashes = vec![r#""a""#; 70_000].join(",");
    let large = format!(
        r#"{{"prompts":[{{"tokens":1,"elapsed_ms":0,"parts":[["","x"],["","y"]],"hashes":[{hashes}]}}]}}"#
    );
    let large = post(&large).await;
    assert_eq!(large.status, "400 Bad Request");
    assert!(large.body.contains("140000 objects, more than 131072"), "{}", large.body);
}

#[tokio::test]
async fn peek_lists_silent_segments() {
    let admin = admin(settings());
    let server = &admin.server;
    mount(server);
    put(server, "both", 100, 2);
    put(server, "first", 100, 1);
    server.master.client_disconnected(server.clock.now_ms(), id(1), &mut server.recorder());
    let response = get_path(&admin_router(Arc::clone(&admin)), "/api/v1/peek?keys=both,first").await;
    let response: serde_json::Value = serde_json::from_str(&response.body).unwrap();
    assert_eq!(response["silent_segments"], serde_json::json!([SEGMENTS[0]]));
    assert_eq!(response["data"]["both"]["replicas"].as_array().unwrap().len(), 1);
    assert_eq!(response["data"]["both"]["replicas"][0]["transport_endpoint_"], SEGMENTS[1]);
    assert_eq!(response["data"]["first"]["error"], "OBJECT_NOT_FOUND");
    let many: String =
        (0..20_000).map(|number| format!("{number:064x}\n")).chain(["both".to_owned()]).collect();
    let request = Request::post("/api/v1/peek").body(Body::from(many)).unwrap();
    let response = send(&admin_router(Arc::clone(&admin)), request).await;
    let response: serde_json::Value = serde_json::from_str(&response.body).unwrap();
    let data = response["data"].as_object().unwrap();
    assert_eq!((data.len(), data["both"]["ok"].as_bool()), (20_001, Some(true)));
}

#[tokio::test]
async fn standbys_reject_requests_for_data() {
    let admin = admin(settings());
    admin.server.leadership.store(Arc::new(LeadershipStatus::starting()));
    let router = admin_router(Arc::clone(&admin));
    for path in [
        "/get_all_keys",
        "/batch_query_keys?keys=a",
        "/get_segments_detail",
        "/api/v1/snapshot",
        "/api/v1/object_locations",
    ] {
        assert_eq!(get_path(&router, path).await.status, "503 Service Unavailable", "{path}");
    }
    for path in ["/health", "/role", "/metrics", "/metrics/summary", "/kv_events/status", "/leader"] {
        assert_eq!(get_path(&router, path).await.status, "200 OK", "{path}");
    }
    assert_eq!(get_path(&router, "/role").await.body, "standby");
}

#[tokio::test]
async fn all_keys_are_listed_over_many_chunks() {
    let admin = admin(settings());
    mount(&admin.server);
    let mut keys: Vec<String> = (0..5000).map(|number| format!("{number:064x}_0_k")).collect();
    keys.iter().for_each(|key| put(&admin.server, key, 1, 1));
    let router = admin_router(Arc::clone(&admin));
    let response = get_path(&router, "/get_all_keys").await.body;
    let mut lines: Vec<&str> = response.lines().collect();
    lines.sort_unstable();
    keys.sort_unstable();
    assert_eq!(lines, keys);
    let snapshot = get_path(&router, "/api/v1/snapshot").await.body;
    let lines: Vec<serde_json::Value> =
        snapshot.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().filter(|line| line["key"].is_string()).count(), 5000);
    assert_eq!(lines.last().unwrap()["objects"], 5000);
    assert!(lines.iter().filter(|line| line["segment_name"].is_string()).all(|line| line["live"] == true));
}

/// Whatever changes between two pieces of a snapshot: applying the events after its first event number yields the current state.
#[test]
fn a_snapshot_plus_later_events_equals_the_current_state() {
    let queue = Arc::new(KvEventQueue::new(1 << 16));
    let observer = Arc::new(FactObserver::new(Some(Arc::clone(&queue))));
    let journal = ObservingJournal::new(Arc::new(MemoryJournal::new(1 << 20)), Arc::clone(&observer));
    let core = MasterCoreOptions { shards: 4, ..settings() };
    let server = Arc::new(MasterServer::new(
        MasterServerOptions { core, ..MasterServerOptions::default() },
        Arc::new(journal),
    ));
    let summary = Mutex::new(MetricsSummary::new(&server));
    let admin =
        Arc::new(AdminContext { server: Arc::clone(&server), observer, events: None, quotas: None, summary });
    mount(&server);
    let key = |number: u64| format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (0..4000).for_each(|number| put(&server, &key(number), 1, 1));
    let mut pieces = snapshot::all(Arc::clone(&admin));
    let (first_event, mut out, mut step) = (queue.last(), Vec::new(), 0_u64);
    while pieces.next(&mut out) {
        // Removes objects inside and outside of the part already read, and adds others.
        for number in step * 37..step * 37 + 20 {
            let recorder = &mut server.recorder();
            server
                .master
                .remove(
                    RemoveContext { now_ms: server.clock.now_ms(), tenant: "default", force: true },
                    &key(number % 4000),
                    recorder,
                )
                .ok();
            put(&server, &key(10_000 + number), 1, 1);
        }
        step += 1;
    }
    assert!(step > 8, "{step}");
    let mut keys = std::collections::BTreeSet::new();
    for line in String::from_utf8(out).unwrap().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        keys.extend(line["key"].as_str().map(str::to_owned));
    }
    let snapshot_keys = keys.clone();
    queue.replay_after(first_event, |stored, key| {
        if stored {
            keys.insert(key.to_owned())
        } else {
            keys.remove(key)
        };
    });
    let (mut current_keys, mut from) =
        (std::collections::BTreeSet::new(), Some(moongate_master_core::ObjectCursor::default()));
    while let Some(cursor) = from {
        from = server.master.keys(cursor, 1000, |_, key| {
            current_keys.insert(key.to_owned());
        });
    }
    assert_eq!(keys, current_keys);
    assert_ne!(snapshot_keys, current_keys, "events changed the result");
}

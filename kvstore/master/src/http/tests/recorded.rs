//! Compares responses with recorded ones, and with the documentation.

use std::sync::Arc;

use axum::body::Body;
use http::Request;
use mooncake_wire::rpc::RpcMethod;
use moongate_master_core::MasterCoreOptions;
use regex::Regex;

use super::*;
use crate::metadata::{MetadataStore, metadata_router};

/// Requests and responses recorded from Mooncake 0.3.13.post1.
const SAMPLES: &str = include_str!("../../../tests/vectors/http_samples.txt");
const TENANT_SAMPLES: &str = include_str!("../../../tests/vectors/tenant_quota_samples.txt");
const METRICS: &str = include_str!("../../../tests/vectors/metrics.txt");
/// Of 0.3.14, without descriptions.
const NEWER_METRICS: &str = include_str!("../../../tests/vectors/metrics-0.3.14.txt");
/// Families of 0.3.14 that this master does not have: docs/metrics.md lists them.
const ABSENT_FAMILIES: [&str; 7] = [
    "ha_snapshot_",
    "ha_writer_",
    "master_client_liveness_recoveries_total",
    "master_client_offboarding_",
    "master_nof_heartbeat_probe_latency_ms",
    "mooncake_build_info",
    "mooncake_jemalloc_",
];

/// A recorded request and its response, parsed from a curl command.
struct RecordedAdminRequest<'a> {
    method: &'a str,
    port: &'a str,
    path: &'a str,
    body: &'a str,
    response: AdminTestResponse,
}

fn samples(text: &'static str) -> Vec<RecordedAdminRequest<'static>> {
    text.split("### ").filter(|text| !text.trim().is_empty()).map(sample).collect()
}

fn sample(text: &'static str) -> RecordedAdminRequest<'static> {
    let (request, response) = text.split_once('\n').unwrap();
    let word_after = |flag: &str| request.split_once(flag).map(|(_, rest)| rest.split(' ').next().unwrap());
    let (port, path) = request.split_once("127.0.0.1:").unwrap().1.split_at(4);
    let (head, body) =
        response.split_once("GMT\n").or_else(|| response.split_once("\n\n")).unwrap_or((response, ""));
    let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let status = head.lines().next().unwrap().strip_prefix("HTTP/1.1 ").unwrap();
    RecordedAdminRequest {
        method: word_after("-X ").unwrap_or("GET"),
        port,
        path: path.split(' ').next().unwrap(),
        body: word_after("-d ").unwrap_or_default(),
        response: AdminTestResponse {
            status: status.to_owned(),
            content_type: header("Content-Type: ").to_owned(),
            body: body.to_owned(),
        },
    }
}

/// Replaces what differs between runs, and what differs on purpose: used space is counted after rounding.
fn shape(body: &str) -> String {
    let replace = |text: String, pattern: &str, replacement: &str| {
        Regex::new(pattern).unwrap().replace_all(&text, replacement).into_owned()
    };
    let mut text = body.trim_end().to_owned();
    for (pattern, replacement) in [
        (r"\d{5,}-\d{5,}", "ID"),
        ("0x[0-9a-f]+", "ADDRESS"),
        (
            r#"("(?:buffer_address_|allocator_used_bytes|\w+_units|migrated_bytes|\w+_ms_epoch)":)\d+"#,
            "${1}N",
        ),
        (r"Used\(bytes\): \d+", "Used(bytes): N"),
        (r"\d\.\d+E-1", "SHARE"),
        ("(Invalid JSON body: ).*\"}", "${1}…\"}"),
        (r"\d+(\.\d+)? (B|KB|MB|GB)", "SIZE"),
        (r"\(\d+\.\d%\)", "(N%)"),
        (r"\d+\.\d\d", "RATE"),
        (r"(=|/|: )\d+", "${1}N"),
    ] {
        // Only the summary line has rates and sums.
        if !pattern.contains("RATE") && pattern.starts_with("(=") && !text.starts_with("role=") {
            continue;
        }
        text = replace(text, pattern, replacement);
    }
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}

async fn compare(admin: &Arc<AdminContext>, admin_port: &str, samples: Vec<RecordedAdminRequest<'_>>) {
    let (router, metadata) =
        (admin_router(Arc::clone(admin)), metadata_router(Arc::new(MetadataStore::in_memory())));
    let mut job = String::new();
    for sample in samples {
        let path = sample.path.replace("6433642746086771731-17100531213125438380", &job);
        let description = format!("{} {path} {}", sample.method, sample.body);
        let request = Request::builder().method(sample.method).uri(&path);
        let request = request.body(Body::from(sample.body.to_owned())).unwrap();
        let router = if sample.port == admin_port { &router } else { &metadata };
        let response = send(router, request).await;
        assert_eq!(response.status, sample.response.status, "{description}: {}", response.body);
        if !sample.response.content_type.is_empty() || sample.port != admin_port {
            assert_eq!(response.content_type, sample.response.content_type, "{description}");
        }
        assert_eq!(shape(&response.body), shape(&sample.response.body), "{description}");
        if path == "/api/v1/drain_jobs" && response.status == "200 OK" {
            let created: mooncake_wire::admin::DrainJobChangeResponse =
                serde_json::from_str(&response.body).unwrap();
            job = created.job_id.to_string();
            let server = &admin.server;
            server.master.tick(server.clock.now_ms() + 1000, &mut server.recorder());
        }
    }
}

#[tokio::test]
async fn responses_match_the_recorded_ones() {
    let admin = admin(settings());
    let server = &admin.server;
    mount(server);
    put(server, "hk1", 4096, 1);
    put(server, "hk2", 100_000, 2);
    put(server, "a b/c?d&e=1,2", 1, 1);
    let samples = samples(SAMPLES);
    assert_eq!(samples.len(), 49);
    compare(&admin, "9103", samples).await;
    assert_eq!(server.counters.call_counts(RpcMethod::RemoveAll).requests, 2);
    let gets = server.counters.call_counts(RpcMethod::GetReplicaList);
    assert_eq!((gets.requests, gets.failures), (5, 3));
}

#[tokio::test]
async fn quota_responses_match_the_recorded_ones() {
    let admin = admin(MasterCoreOptions { multi_tenant: true, ..settings() });
    mount(&admin.server);
    let samples = samples(TENANT_SAMPLES);
    assert_eq!(samples.len(), 8);
    compare(&admin, "9703", samples).await;
}

/// Names, types and label names of all metric families.
fn families(text: &str) -> std::collections::BTreeMap<String, (String, Vec<String>)> {
    let mut families = std::collections::BTreeMap::new();
    let mut last = String::new();
    for line in text.lines() {
        if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').unwrap();
            name.clone_into(&mut last);
            families.insert(last.clone(), (kind.to_owned(), Vec::new()));
        } else if !line.starts_with('#') {
            assert!(line.starts_with(&last), "{line} is not of {last}");
            let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            let names = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name);
            families.get_mut(&last).unwrap().1 =
                names.filter(|name| *name != "le").map(str::to_owned).collect();
        }
    }
    families
}

#[tokio::test]
async fn metrics_have_the_families_of_mooncake() {
    let admin = admin(settings());
    mount(&admin.server);
    put(&admin.server, "model_x", 70_000, 1);
    let router = admin_router(Arc::clone(&admin));
    get_path(&router, "/query_key?key=model_x").await;
    let response = get_path(&router, "/metrics").await;
    assert_eq!(response.content_type, "text/plain; version=0.0.4");
    let actual = families(&response.body);
    let expected = families(METRICS);
    assert!(expected.len() > 130, "{}", expected.len());
    for (name, expected) in &expected {
        assert_eq!(actual.get(name), Some(expected), "{name}");
    }
    let newer = families(NEWER_METRICS);
    for name in actual.keys().filter(|name| !expected.contains_key(*name)) {
        assert!(name.starts_with("moongate_") || newer.contains_key(name), "{name}");
    }
    let page = include_str!("../../../../../docs/metrics.md");
    for (name, newer) in &newer {
        match (actual.get(name), ABSENT_FAMILIES.iter().find(|absent| name.starts_with(**absent))) {
            (Some(actual), _) => assert_eq!(actual.0, newer.0, "the type of {name}"),
            (None, absent) => assert!(page.contains(absent.unwrap_or_else(|| panic!("{name}"))), "{name}"),
        }
    }
    for line in [
        "master_key_count 1",
        "master_value_size_bytes_bucket{le=\"65536.0\"} 0",
        "master_value_size_bytes_bucket{le=\"262144.0\"} 1",
        "master_value_size_bytes_sum 70000.0",
        "segment_total_capacity_bytes{segment=\"127.0.0.1:13102\"} 33554432",
        "master_get_replica_list_requests_total 1",
        "mem_cache_hit_nums_ 1",
        "moongate_master_prefix_keys{prefix=\"model\"} 1",
        "moongate_master_rpc_duration_seconds_count{method=\"GetReplicaList\"} 1",
    ] {
        assert!(response.body.lines().any(|other| other == line), "{line}\n{}", response.body);
    }
}

/// docs/master.md describes every path that Mooncake lacks.
#[tokio::test]
async fn the_page_describes_every_added_path() {
    let page = include_str!("../../../../../docs/master.md");
    let supervisor = moongate_runtime::Supervisor::new();
    let bind = "tcp://127.0.0.1:*".parse().unwrap();
    let options = crate::events::KvEventPublisherOptions {
        bind,
        replay: None,
        backend: String::new(),
        labels: crate::events::KvEventLabels::default(),
        replay_bytes: 0,
    };
    let events = KvEventPublisher::start(
        Arc::new(KvEventQueue::new(1)),
        options,
        crate::events::EventNumberAllocator::default(),
        &supervisor,
    )
    .await
    .unwrap();
    let admin = Arc::into_inner(admin(settings())).unwrap();
    mount(&admin.server);
    put(&admin.server, "model_x", 70_000, 1);
    let router = admin_router(Arc::new(AdminContext { events: Some(events), ..admin }));
    for path in ["/api/v1/peek?keys=model_x", "/api/v1/prefixes", "/api/v1/snapshot"] {
        let name = path.split('?').next().unwrap();
        assert!(page.contains(name), "{name}");
        assert_eq!(get_path(&router, path).await.status, "200 OK", "{path}");
    }
    supervisor.shutdown(std::time::Duration::from_secs(60)).await.unwrap();
}

//! Compares the HTTP ports of this master with those of Mooncake's master, and runs Mooncake's clients against them.

use std::collections::BTreeMap;

use mooncake_wire::types::Uuid;
use moongate_master::{MetadataLocation, MetadataServiceOptions};
use moongate_master_core::MasterCoreOptions;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::mooncake::{NEWEST, RealMaster, RealNode};
use moongate_store_testkit::test_master::{TestRpcConnection, start_http_master, start_http_master_with};
use serde_json::Value;

const CLIENT: Uuid = Uuid { first: 11, second: 22 };

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

/// Status, content type and body, without values that differ between masters.
async fn request(client: &reqwest::Client, method: &str, url: &str, body: &str) -> (u16, String, String) {
    let method = method.parse().unwrap();
    let response = client.request(method, url).body(body.to_owned()).send().await.unwrap();
    let status = response.status().as_u16();
    let content_type = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
    let body = response.text().await.unwrap();
    let body = match serde_json::from_str(&body) {
        Ok(mut json) => {
            mask_varying_values(&mut json);
            json.to_string()
        }
        Err(_) => {
            let mut lines: Vec<&str> = body.lines().filter(|line| !line.starts_with("Used(bytes)")).collect();
            lines.sort_unstable();
            lines.join("\n")
        }
    };
    (status, content_type.unwrap_or_default(), body)
}

fn mask_varying_values(json: &mut Value) {
    match json {
        Value::Array(values) => values.iter_mut().for_each(mask_varying_values),
        Value::Object(members) => {
            for (name, value) in members {
                match name.as_str() {
                    // Moongate allocates from the other end of a segment.
                    "buffer_address_"
                    | "job_id"
                    | "created_at_ms_epoch"
                    | "last_updated_at_ms_epoch"
                    | "message"
                    | "display_version"
                    // Moongate publishes another id, which is not usable in calls.
                    | "client_id" => *value = Value::Null,
                    // The parser's message for invalid JSON.
                    "error_message" if value.as_str().is_some_and(|value| value.starts_with("Invalid JSON")) => {
                        *value = Value::Null;
                    }
                    _ => mask_varying_values(value),
                }
            }
        }
        _ => {}
    }
}

const REQUESTS: &[(&str, &str, &str)] = &[
    ("GET", "/health", ""),
    ("GET", "/role", ""),
    ("GET", "/ha_status", ""),
    ("GET", "/leader", ""),
    ("GET", "/health/", ""),
    ("POST", "/health", ""),
    ("OPTIONS", "/health", ""),
    ("GET", "/version", ""),
    ("GET", "/api/v1/dfs/shard_count", ""),
    ("POST", "/api/v1/dfs/shard_count", "{}"),
    ("GET", "/query_key", ""),
    ("GET", "/query_key?key=", ""),
    ("GET", "/query_key?key=whole", ""),
    ("GET", "/query_key?key=half", ""),
    ("GET", "/query_key?x=1&key=whole", ""),
    ("GET", "/query_key?key=none&key=whole", ""),
    ("GET", "/query_key?key=a%20b", ""),
    ("GET", "/batch_query_keys?keys=whole,half,none,,", ""),
    ("GET", "/batch_query_keys?keys=a%20b,a+b,a%2Bb,%2C", ""),
    ("GET", "/batch_query_keys?keys=", ""),
    ("GET", "/get_all_keys", ""),
    ("GET", "/get_all_segments", ""),
    ("GET", "/get_segments_detail", ""),
    ("GET", "/query_segment", ""),
    ("GET", "/query_segment?segment=127.0.0.1:12345", ""),
    ("GET", "/query_segment?segment=127.0.0.1%3A12345", ""),
    ("GET", "/api/v1/segments/status?segment=127.0.0.1%3A12345", ""),
    ("GET", "/api/v1/segments/status?segment=none", ""),
    ("GET", "/api/v1/segments/status?segment=", ""),
    ("GET", "/api/v1/tenant_quotas", ""),
    ("GET", "/api/v1/tenant_quotas?tenant_id=t", ""),
    ("PUT", "/api/v1/tenant_quotas", "{}"),
    ("PUT", "/api/v1/tenant_quotas?tenant_id=t", "{"),
    ("PUT", "/api/v1/tenant_quotas?tenant_id=t", "{\"requested_quota_bytes\":0}"),
    ("DELETE", "/api/v1/tenant_quotas", ""),
    ("DELETE", "/api/v1/tenant_quotas?tenant_id=t", ""),
    ("POST", "/api/v1/drain_jobs", ""),
    ("POST", "/api/v1/drain_jobs", "{}"),
    ("POST", "/api/v1/drain_jobs", "{\"segments\":[\"none\"]}"),
    (
        "POST",
        "/api/v1/drain_jobs",
        "{\"segments\":[\"127.0.0.1:12345\"],\"target_segments\":[\"127.0.0.1:12345\"]}",
    ),
    ("GET", "/api/v1/drain_jobs", ""),
    ("GET", "/api/v1/drain_jobs/query?job_id=x", ""),
    ("GET", "/api/v1/drain_jobs/query?job_id=1-2", ""),
    ("POST", "/api/v1/drain_jobs/cancel", ""),
    ("POST", "/api/v1/drain_jobs/cancel?job_id=1-2", ""),
    ("GET", "/api/v1/soft_pin", ""),
    ("POST", "/api/v1/soft_pin", ""),
    ("POST", "/api/v1/soft_pin", "[]"),
    ("POST", "/api/v1/soft_pin", "{}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[],\"ttl_ms\":5}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[\"whole\"]}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[\"whole\"],\"ttl_ms\":-1}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[\"whole\",\"whole\",\"none\",\"\"],\"ttl_ms\":60000}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[\"a b\",\"half\"],\"ttl_ms\":60000,\"tenant_id\":\"default\"}"),
    ("POST", "/api/v1/soft_pin", "{\"keys\":[\"whole\"],\"ttl_ms\":99999999999999}"),
    ("POST", "/api/v1/soft_unpin", "{\"keys\":[\"a b\"],\"ttl_ms\":5}"),
    ("POST", "/api/v1/soft_unpin", "{\"keys\":[\"a b\",\"none\"]}"),
    ("POST", "/api/v1/remove_all?tenant_id=t", ""),
    ("POST", "/api/v1/remove_all?force=maybe", ""),
    ("POST", "/api/v1/remove_all?force=1&tenant_id=default", ""),
    ("GET", "/get_all_keys", ""),
    ("POST", "/api/v1/drain_jobs", "{\"segments\":[\"127.0.0.1:12345\"],\"extra\":1}"),
    ("GET", "/api/v1/segments/status?segment=127.0.0.1:12345", ""),
];

#[tokio::test]
async fn responses_equal_those_of_mooncakes_master() {
    let real = RealMaster::start(NEWEST).await;
    let master = start_http_master(None).await;
    let admin = master.services.admin.to_string();
    for rpc in [&real.rpc, &master.rpc] {
        let mut connection = TestRpcConnection::connect(rpc).await;
        connection.mount(CLIENT, 64 << 20).await;
        for (key, size) in [("whole", 32 << 20), ("a b", 100), ("a+b", 1)] {
            connection.put(CLIENT, key, size).await;
        }
        connection.begin(CLIENT, "half", 1000).await;
        // The connection stays open in the background, like a node's.
        std::mem::forget(connection);
    }
    let (client, mut differences) = (client(), Vec::new());
    for (method, path, body) in REQUESTS {
        let expected = request(&client, method, &format!("http://{}{path}", real.admin), body).await;
        let actual = request(&client, method, &format!("http://{admin}{path}"), body).await;
        if expected != actual {
            differences.push(format!("{method} {path} {body}\n  {expected:?}\n  {actual:?}"));
        }
    }
    assert!(differences.is_empty(), "Mooncake's and Moongate's:\n{}", differences.join("\n"));
}

#[tokio::test]
async fn clients_find_each_other_by_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let address = "127.0.0.1:0".parse().unwrap();
    let metadata_options = MetadataServiceOptions {
        address,
        location: MetadataLocation::Folder(folder.path().join("metadata")),
        cleanup: true,
    };
    let master = start_http_master(Some(metadata_options)).await;
    let url = format!("http://{}/metadata", master.services.metadata.unwrap());
    let mut store = RealNode::start_of(NEWEST, &master.rpc, &url, 32).await;
    let mut reader = RealNode::start_of(NEWEST, &master.rpc, &url, 0).await;
    store.put("key", 70_000).await;
    assert_eq!(reader.get("key").await, 70_000);
    let name = master.server.master.segments_detail().segments[0].segment_name.clone();
    let entry = format!("{url}?key=mooncake%2Fram%2F{}", name.replace(':', "%3A"));
    let descriptor: BTreeMap<String, Value> =
        client().get(&entry).send().await.unwrap().json().await.unwrap();
    assert!(descriptor.contains_key("protocol"), "{descriptor:?}");
    let plain = format!("{url}?key=mooncake/ram/{name}");
    assert_eq!(client().get(&plain).send().await.unwrap().status(), 200);
    store.close().await;
    reader.close().await;
    assert_eq!(client().get(&entry).send().await.unwrap().status(), 404);
}

#[tokio::test]
async fn metadata_of_an_expired_node_is_removed() {
    let metadata_options = MetadataServiceOptions {
        address: "127.0.0.1:0".parse().unwrap(),
        location: MetadataLocation::Memory,
        cleanup: true,
    };
    let core = MasterCoreOptions { client_ttl_ms: 50, client_grace_ms: 50, ..MasterCoreOptions::default() };
    let master = start_http_master_with(Some(metadata_options), core).await;
    let url = |name: &str| {
        format!("http://{}/metadata?key=mooncake%2Fram%2F{name}", master.services.metadata.unwrap())
    };
    let (gone, other) = (url("127.0.0.1%3A12345"), url("127.0.0.1%3A12346"));
    for url in [&gone, &other] {
        assert_eq!(request(&client(), "PUT", url, "{}").await.0, 200);
    }
    // Its only connection closes at once, and no heartbeat follows.
    TestRpcConnection::connect(&master.rpc).await.mount(CLIENT, 64 << 20).await;
    let is_gone = async {
        while request(&client(), "GET", &gone, "").await.0 != 404 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, is_gone).await.unwrap();
    assert_eq!(request(&client(), "GET", &other, "").await.0, 200);
}

#[tokio::test]
async fn queries_of_900_keys_are_answered() {
    let master = start_http_master(None).await;
    let mut connection = TestRpcConnection::connect(&master.rpc).await;
    connection.mount(CLIENT, 64 << 20).await;
    let keys: Vec<String> = (0..900).map(|number| format!("{number:064x}_0_k")).collect();
    for key in &keys {
        connection.put(CLIENT, key, 1).await;
    }
    let url = format!("http://{}/batch_query_keys?keys={}", master.services.admin, keys.join(","));
    let response: Value = client().get(url).send().await.unwrap().json().await.unwrap();
    let data = response["data"].as_object().unwrap();
    assert_eq!((data.len(), data.values().filter(|value| value["ok"] == true).count()), (900, 900));
}

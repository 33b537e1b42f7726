//! The REST API, as Mooncake's store service has it.

use moongate_runtime::Supervisor;
use reqwest::{Client, Method};
use serde_json::json;

use super::masters::{MasterImplementation, MetadataMode, StoreMasterFixture};
use super::node::InProcessNode;
use super::older_releases::client;
use crate::harness::polling::poll_until;

async fn send(node: &InProcessNode, method: Method, path: &str, body: &str) -> (u16, String) {
    let response = Client::new().request(method, node.url(path)).body(body.to_owned()).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

#[tokio::test]
async fn drain_reports_losses_and_a_cancelled_drain_serves_on() {
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    poll_until("it has settled", async || node.get("/settled").await.0 == 200).await;
    let (status, text) = send(&node, Method::POST, "/drain", "").await;
    assert!(status == 200 && text.contains("process memory is lost"), "{status} {text}");
    let (status, text) = node.get("/settled").await;
    assert!(status == 202 && text.contains(r#""drained":true"#), "{status} {text}");
    assert_eq!(send(&node, Method::DELETE, "/drain", "").await.0, 200);
    assert_eq!(node.get("/settled").await.0, 200);
    node.stop().await;

    let node = InProcessNode::start_with(&store, &["--allow-peers=10.0.0.0/8"]).await;
    assert_eq!(send(&node, Method::POST, "/drain", "").await.0, 403);
    node.stop().await;
}

#[tokio::test]
async fn objects_by_rest() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    for (method, path, body, status, answer) in [
        (Method::PUT, "/api/put", r#"{"key": "a b", "value": "héllo"}"#, 200, r#"{"status": "success"}"#),
        (
            Method::PUT,
            "/api/put",
            r#"{"key": "", "value": "x"}"#,
            400,
            r#"{"error": "Missing key or value"}"#,
        ),
        (Method::PUT, "/api/put", r#"{"key": "k"}"#, 400, r#"{"error": "Missing key or value"}"#),
        (
            Method::PUT,
            "/api/put",
            r#"{"key": "k", "value": ""}"#,
            500,
            r#"{"error": "PUT operation failed"}"#,
        ),
        (Method::GET, "/api/exist/a%20b", "", 200, r#"{"exists": true}"#),
        (Method::GET, "/api/exist/nope", "", 200, r#"{"exists": false}"#),
        (Method::GET, "/api/get/a%20b", "", 200, "héllo"),
        (Method::GET, "/api/get/nope", "", 404, r#"{"error": "Key not found"}"#),
        (Method::DELETE, "/api/remove/nope", "", 500, r#"{"error": "Remove operation failed"}"#),
        // The lease of what was just read.
        (Method::DELETE, "/api/remove_all", "", 200, r#"{"status": "success removed 0 keys"}"#),
        (
            Method::POST,
            "/api/mount",
            r#"{"size": 0}"#,
            400,
            r#"{"error": "Invalid size, must be a positive integer"}"#,
        ),
        (Method::POST, "/api/unmount", "{}", 400, r#"{"error": "Missing segment_ids"}"#),
        (Method::POST, "/api/unmount_local_disk", "{}", 200, r#"{"status": "success"}"#),
        (Method::POST, "/api/unmount_local_disk", "x", 400, r#"{"error": "Malformed JSON body"}"#),
        (Method::GET, "/api/put", "", 405, "405: Method Not Allowed"),
        (Method::GET, "/nothing", "", 404, "404: Not Found"),
    ] {
        let what = format!("{method} {path} {body}");
        assert_eq!(send(&node, method, path, body).await, (status, answer.to_owned()), "{what}");
    }
    let ours = client(&store, &supervisor);
    assert_eq!(ours.get("a b").await.unwrap(), "héllo".as_bytes());
    node.stop().await;
}

#[tokio::test]
async fn node_without_its_configured_devices_serves_over_tcp() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let node = InProcessNode::start_with(&store, &["-Dprotocol=rdma", "-Ddevice_name=none"]).await;
    let ours = client(&store, &supervisor);
    ours.put("k", b"moon", &Default::default()).await.unwrap();
    assert_eq!(ours.get("k").await.unwrap(), "moon");
    // The reader may have the last byte before the node has counted it.
    let read = async || node.metric("moongate_store_transfers_total{operation=\"read\"}").await == 1;
    poll_until("the node has counted what was read over TCP", read).await;
    node.stop().await;
}

#[tokio::test]
async fn further_memory_comes_and_goes() {
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::MetadataServer).await;
    let node = InProcessNode::start(&store).await;
    let (status, answer) = send(&node, Method::POST, "/api/mount", r#"{"size": 33554432}"#).await;
    assert_eq!(status, 200, "{answer}");
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["allocated_size"], 33_554_432);
    let id = answer["segment_ids"][0].as_str().unwrap();
    assert_eq!(node.metric("moongate_store_segments").await, 2);

    // Some of these are in the further segment.
    let ours = client(&store, &supervisor);
    let bytes = vec![7; 1 << 20];
    for number in 0..60 {
        ours.put(&format!("k{number}"), &bytes, &Default::default()).await.unwrap();
    }
    for number in 0..60 {
        assert!(ours.get(&format!("k{number}")).await.unwrap() == bytes);
    }
    let body = format!(r#"{{"segment_ids": ["{id}"]}}"#);
    let answer = send(&node, Method::POST, "/api/unmount", &body).await;
    assert_eq!(answer, (200, r#"{"status": "success"}"#.to_owned()));
    assert_eq!(node.metric("moongate_store_segments").await, 1);
    poll_until("it is told once", async || send(&node, Method::POST, "/api/unmount", &body).await.0 == 500)
        .await;
    node.stop().await;
}

/// Sends a request to mount or unmount a file to the node's REST API.
async fn post(node: &InProcessNode, path: &str, body: serde_json::Value) -> (u16, serde_json::Value) {
    let (status, answer) = send(node, Method::POST, path, &body.to_string()).await;
    (status, serde_json::from_str(&answer).unwrap())
}

#[tokio::test]
async fn memory_of_engines_is_lent() {
    const SIZE: u64 = 64 << 20;
    let supervisor = Supervisor::new();
    let store = StoreMasterFixture::start(MasterImplementation::Mooncake, MetadataMode::Handshake).await;
    let node = InProcessNode::start(&store).await;
    let file = tempfile::Builder::new().prefix("moongate-test").tempfile_in("/dev/shm").unwrap();
    file.as_file().set_len(SIZE + 4096).unwrap();
    let name = file.path().file_name().unwrap().to_str().unwrap();
    let part = json!({"name": format!("/{name}"), "size": SIZE, "offset": 4096});
    let (status, answer) = post(&node, "/api/mount_shm", part).await;
    assert_eq!((status, &answer["status"]), (200, &json!("success")), "{answer}");
    assert_eq!(node.metric("moongate_store_segments").await, 2);
    let ids = answer["segment_ids"].clone();

    // Some of these are in the file, and all of them are what they were.
    let ours = client(&store, &supervisor);
    let bytes = vec![7; 1 << 20];
    for number in 0..100 {
        ours.put(&format!("k{number}"), &bytes, &Default::default()).await.unwrap();
    }
    for number in 0..100 {
        assert!(ours.get(&format!("k{number}")).await.unwrap() == bytes);
    }
    let lent = std::fs::read(file.path()).unwrap();
    assert!(lent[..4096].iter().all(|byte| *byte == 0), "this part was not lent");
    assert!(lent[4096..].contains(&7));

    // As the memory of a decode, which replaces the segments mounted before.
    let decode = json!({"mode": "Decode", "path": file.path(), "size": SIZE});
    let (status, first) = post(&node, "/api/reconfigure", decode.clone()).await;
    assert_eq!((status, &first["mode"]), (200, &json!("decode")), "{first}");
    let (_, second) = post(&node, "/api/reconfigure", decode).await;
    assert_eq!(second["segment_ids"].as_array().unwrap().len(), 1);
    assert_ne!(second["segment_ids"], first["segment_ids"]);
    assert_eq!(node.metric("moongate_store_segments").await, 3);
    let nowhere = json!({"mode": "decode", "path": "/etc/passwd", "size": 4096});
    let (status, answer) = post(&node, "/api/reconfigure", nowhere).await;
    assert_eq!((status, &answer["mode"]), (500, &json!("decode")), "what is lent stays: {answer}");
    let prefills = (200, json!({"status": "success", "mode": "prefill"}));
    assert_eq!(post(&node, "/api/reconfigure", json!({"mode": "prefill"})).await, prefills);
    assert_eq!(node.metric("moongate_store_segments").await, 2);

    let body = json!({"segment_ids": ids});
    assert_eq!(post(&node, "/api/unmount_shm", body.clone()).await, (200, json!({"status": "success"})));
    let error = "Unmount failed for one or more segments";
    let refused = (500, json!({"error": error, "failed_segment_ids": ids}));
    assert_eq!(post(&node, "/api/unmount_shm", body).await, refused, "it is told once");
    for body in [json!({"size": 1}), json!({"name": "../etc/passwd", "size": 1}), json!({"name": "x"})] {
        let refused = (400, json!({"error": "Missing or invalid name or size"}));
        assert_eq!(post(&node, "/api/mount_shm", body).await, refused);
    }
    let link = std::path::PathBuf::from(format!("/dev/shm/{name}-link"));
    std::os::unix::fs::symlink(file.path(), &link).unwrap();
    let linked = json!({"name": format!("{name}-link"), "size": SIZE});
    let (status, answer) = post(&node, "/api/mount_shm", linked).await;
    std::fs::remove_file(&link).unwrap();
    assert_eq!(status, 500, "a link is not followed: {answer}");
    for (path, body) in [
        ("/api/mount", json!({"size": 1_u64 << 40})),
        ("/api/mount_shm", json!({"name": name, "size": 1_u64 << 40})),
    ] {
        let (status, answer) = post(&node, path, body).await;
        let problem = answer["error"].as_str().unwrap();
        assert!(status == 500 && problem.contains("bytes of memory of this machine"), "{path}: {answer}");
    }
    let larger = json!({"name": name, "size": 2 * SIZE});
    assert_eq!(post(&node, "/api/mount_shm", larger).await.0, 500);
    node.stop().await;
}

#[tokio::test]
async fn only_peers_may() {
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let node = InProcessNode::start_with(&store, &["--allow-peers=10.0.0.0/8"]).await;
    assert_eq!(send(&node, Method::POST, "/drain", "").await.0, 403);
    // Whoever looks after the node may look.
    assert_eq!(node.get("/metrics").await.0, 200);
    let ours = client(&store, &Supervisor::new());
    assert!(ours.put("k", b"v", &Default::default()).await.is_err());
    assert!(node.metric(r#"moongate_store_connections_refused_total{reason="not_allowed"}"#).await <= 3);
    node.stop().await;
}

#[tokio::test]
async fn a_token_guards_the_api() {
    let store = StoreMasterFixture::start(MasterImplementation::Moongate, MetadataMode::Handshake).await;
    let node = InProcessNode::start_with(&store, &["--api-token=moon"]).await;
    let (status, answer) = send(&node, Method::POST, "/api/mount", r#"{"size": 16777216}"#).await;
    assert_eq!(status, 401, "{answer}");
    assert_eq!(node.metric("moongate_store_api_requests_rejected_total").await, 1);
    let exist = Client::new().get(node.url("/api/exist/k")).bearer_auth("moon").send().await.unwrap();
    assert_eq!(exist.status(), 200);
    assert_eq!(node.get("/health").await.0, 200);
    node.stop().await;
}

//! Events, metrics and probes of the operator.

use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use moongate_operator::admin;
use moongate_runtime::{Supervisor, bind};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::test_operator::TestOperator;
use super::{TEST_TIMEOUT, eventually, group, role, settled};

/// The event with that reason about an object of that kind and name.
pub(crate) async fn event(stage: &TestOperator, kind: &str, name: &str, reason: &str) -> Event {
    let is_it = |event: &Event| {
        let object = event.regarding.clone().unwrap_or_default();
        object.kind.as_deref() == Some(kind)
            && object.name.as_deref() == Some(name)
            && event.reason.as_deref() == Some(reason)
    };
    eventually(reason, async || {
        let events = stage.api::<Event>().list(&ListParams::default()).await.unwrap().items;
        let mut found: Vec<_> = events.into_iter().filter(is_it).collect();
        assert!(found.len() < 2, "emitted twice: {found:?}");
        found.pop()
    })
    .await
}

async fn get(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: operator\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn events_record_changes_and_metrics_count_them() {
    let stage = TestOperator::begin("events").await;
    let groups: Api<RoleBasedGroup> = stage.api();
    groups.create(&PostParams::default(), &group(json!([role("a", 1, "engine:1")]))).await.unwrap();
    settled(&groups).await;
    let events = stage.api::<Event>().list(&ListParams::default()).await.unwrap().items;
    let ours = |event: &&Event| event.reporting_controller.as_deref() == Some("moongate-operator");
    assert_eq!(events.iter().filter(ours).count(), 0, "the creation of a group emits no event: {events:?}");

    let patch = |roles| Patch::Merge(json!({ "spec": { "roles": roles } }));
    let wanted = patch(json!([role("a", 1, "engine:2")]));
    groups.patch("g", &PatchParams::default(), &wanted).await.unwrap();
    settled(&groups).await;
    let updated = event(&stage, "RoleInstance", "g-a-0", "UpdatedInPlace").await;
    assert_eq!(updated.note.as_deref(), Some("g-a-0 is updated in place"));
    assert_eq!(updated.type_.as_deref(), Some("Normal"));

    let mut invalid = role("a", 1, "engine:2");
    invalid["dependencies"] = json!(["b"]);
    groups.patch("g", &PatchParams::default(), &patch(json!([invalid]))).await.unwrap();
    let refused = event(&stage, "RoleBasedGroup", "g", "InvalidSpec").await;
    assert_eq!(refused.type_.as_deref(), Some("Warning"));
    assert!(refused.note.unwrap().contains("depends on `b`"));

    // The quota allows no more pods than exist.
    let quota: ResourceQuota =
        serde_json::from_value(json!({ "metadata": { "name": "q" }, "spec": { "hard": { "pods": "1" } } }))
            .unwrap();
    stage.api().create(&PostParams::default(), &quota).await.unwrap();
    eventually("the quota is in effect", async || {
        stage.api::<ResourceQuota>().get("q").await.unwrap().status?.used
    })
    .await;
    let wanted = patch(json!([role("a", 2, "engine:2")]));
    groups.patch("g", &PatchParams::default(), &wanted).await.unwrap();
    let refused = event(&stage, "RoleInstance", "g-a-1", "WriteRefused").await;
    assert!(refused.note.unwrap().contains("exceeded quota"));

    let supervisor = Supervisor::new();
    let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    admin::start(listener, stage.metrics.clone(), &supervisor);
    assert!(get(address, "/healthz").await.ends_with("ok"));
    assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    let text = get(address, "/metrics").await;
    let counted = |line: &str| text.lines().any(|other| other.starts_with(line) && !other.ends_with(" 0"));
    for line in [
        "moongate_operator_leading 1",
        r#"moongate_operator_reconciles_total{kind="RoleBasedGroup",outcome="done"}"#,
        r#"moongate_operator_reconciles_total{kind="RoleInstance",outcome="failed"}"#,
        r#"moongate_operator_reconcile_seconds_count{kind="RoleInstance"}"#,
        r#"moongate_operator_api_requests_total{method="PATCH"}"#,
    ] {
        assert!(counted(line), "{line} in {text}");
    }
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    stage.end().await;
}

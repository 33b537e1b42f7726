//! Spans of the operator as received by a collector.

use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceQuota;
use kube::api::{Api, PostParams};
use moongate_operator::OperatorOptions;
use moongate_telemetry::{TelemetryArgs, Tracer};
use moongate_testkit::collector::{TestCollector, attribute_text, hex, spans_named};
use moongate_testkit::{ControlPlane, FakeKubelet, KubeletTimings, TestNamespace};
use opentelemetry_proto::tonic::trace::v1::Span;
use rbg_api::v1alpha2::RoleBasedGroup;
use serde_json::json;

use super::{TEST_TIMEOUT, eventually, group, install, role, run_with_operator, settled};

const WRITES: [&str; 5] = ["apply", "create", "replace", "patch", "delete"];

/// Spans that an operator exports while the scenario runs, with this sampling ratio.
async fn traced(name: &str, share: f64, scenario: impl AsyncFnOnce(&TestNamespace)) -> Vec<Span> {
    let mut collector = TestCollector::start().await;
    let options = TelemetryArgs {
        otlp_endpoint: Some(collector.endpoint.clone()),
        trace_sample_ratio: share,
        // No trace is exported for being slow.
        trace_slow: Duration::ZERO,
        ..TelemetryArgs::default()
    };
    let traces = Tracer::start(&options, "moongate-operator").unwrap();
    let plane = ControlPlane::shared().await.unwrap();
    let namespace = plane.namespace(name).await.unwrap();
    install(&namespace.client).await;
    let _kubelet = FakeKubelet::start(namespace.client.clone(), &namespace.name, KubeletTimings::default())
        .await
        .unwrap();
    let options = OperatorOptions {
        kubeconfig: Some(plane.kubeconfig()),
        namespace: Some(namespace.name.clone()),
        traces: traces.clone(),
        ..OperatorOptions::default()
    };
    run_with_operator(options, scenario(&namespace)).await;
    traces.shutdown(TEST_TIMEOUT).await.unwrap();
    let spans = collector.spans();
    namespace.delete().await.unwrap();
    spans
}

fn children<'a>(spans: &'a [Span], root: &Span) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.parent_span_id == root.span_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn effective_reconcile_is_a_trace_with_plan_and_writes() {
    let spans = traced("traces", 1.0, async |namespace| {
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(namespace.client.clone());
        groups.create(&PostParams::default(), &group(json!([role("a", 1, "engine:1")]))).await.unwrap();
        settled(&groups).await;
    })
    .await;
    let roots: Vec<&Span> = spans.iter().filter(|span| span.parent_span_id.is_empty()).collect();
    for root in &roots {
        let own = children(&spans, root);
        let (plans, writes): (Vec<&Span>, Vec<&Span>) = own.iter().partition(|span| span.name == "plan");
        assert_eq!((plans.len(), plans[0].start_time_unix_nano), (1, root.start_time_unix_nano), "{root:?}");
        assert!(writes.iter().all(|span| WRITES.contains(&span.name.as_str())), "{writes:?}");
        assert!(own.iter().all(|span| span.trace_id == root.trace_id));
        assert!(writes.iter().all(|span| span.end_time_unix_nano <= root.end_time_unix_nano));
        assert!(!writes.is_empty(), "reconciliations without steps leave no trace: {root:?}");
        if attribute_text(&root.attributes, "error.type").is_empty() {
            assert_eq!(attribute_text(&root.attributes, "moongate.steps"), writes.len().to_string());
        }
        assert_eq!(root.name, format!("reconcile {}", attribute_text(&root.attributes, "moongate.kind")));
        assert_eq!(attribute_text(&root.attributes, "moongate.group"), "g", "{root:?}");
        assert!(attribute_text(&root.attributes, "k8s.namespace.name").starts_with("traces"), "{root:?}");
    }
    let is_pod = |span: &&&Span| {
        attribute_text(&span.attributes, "moongate.kind") == "Pod"
            && attribute_text(&span.attributes, "moongate.name") == "g-a-0"
    };
    let creates = spans_named(&spans, "create");
    let created: Vec<_> = creates.iter().filter(is_pod).collect();
    assert_eq!(created.len(), 1, "{creates:?}");
    let created = created[0];
    assert_eq!(attribute_text(&created.attributes, "moongate.reason"), "pod g-a-0 is missing");
    assert_eq!(attribute_text(&created.attributes, "moongate.status"), "false");
    let root = roots.iter().find(|root| hex(&root.span_id) == hex(&created.parent_span_id)).unwrap();
    assert_eq!(
        (root.name.as_str(), attribute_text(&root.attributes, "moongate.name").as_str()),
        ("reconcile RoleInstance", "g-a-0")
    );
    // The gate is opened by a write to the pod's status.
    let patches = spans_named(&spans, "patch");
    let gates: Vec<_> = patches.iter().filter(is_pod).collect();
    assert!(
        gates.iter().any(|span| attribute_text(&span.attributes, "moongate.status") == "true"),
        "{patches:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_writes_are_exported_regardless_of_sampling() {
    let spans = traced("traces-refused", 0.0, async |namespace| {
        let quota = json!({ "metadata": { "name": "q" }, "spec": { "hard": { "pods": "0" } } });
        let quotas: Api<ResourceQuota> = Api::default_namespaced(namespace.client.clone());
        quotas.create(&PostParams::default(), &serde_json::from_value(quota).unwrap()).await.unwrap();
        eventually("the quota is in effect", async || quotas.get("q").await.unwrap().status?.used).await;
        let groups: Api<RoleBasedGroup> = Api::default_namespaced(namespace.client.clone());
        groups.create(&PostParams::default(), &group(json!([role("a", 1, "engine:1")]))).await.unwrap();
        let events: Api<k8s_openapi::api::events::v1::Event> =
            Api::default_namespaced(namespace.client.clone());
        eventually("the write is rejected", async || {
            let events = events.list(&kube::api::ListParams::default()).await.unwrap().items;
            events.iter().any(|event| event.reason.as_deref() == Some("WriteRefused")).then_some(())
        })
        .await;
    })
    .await;
    let roots: Vec<&Span> = spans.iter().filter(|span| span.parent_span_id.is_empty()).collect();
    assert!(!roots.is_empty());
    for root in roots {
        assert_eq!(root.name, "reconcile RoleInstance", "nothing else has failed: {root:?}");
        assert_eq!(attribute_text(&root.attributes, "moongate.kept"), "error");
        assert_eq!(attribute_text(&root.attributes, "error.type"), "Forbidden");
        let own = children(&spans, root);
        let refused =
            own.iter().find(|span| !attribute_text(&span.attributes, "error.type").is_empty()).unwrap();
        assert_eq!(
            (refused.name.as_str(), attribute_text(&refused.attributes, "moongate.kind").as_str()),
            ("create", "Pod")
        );
        assert!(refused.status.as_ref().unwrap().message.contains("exceeded quota"), "{refused:?}");
    }
}

use serde_json::{Value, json};

use super::*;

/// Pods of a live group, as recorded: two SGLang engines of a standalone role and the two pods of a leader-worker one.
const RECORDED: &str = include_str!("../../tests/data/rbg-pods.yaml");

fn recorded(name: &str) -> Pod {
    let pods: Vec<Pod> = serde_saphyr::from_str(RECORDED).unwrap();
    pods.into_iter().find(|pod| pod.metadata.name.as_deref() == Some(name)).unwrap()
}

fn options() -> KubernetesDiscoveryOptions {
    KubernetesDiscoveryOptions::default()
}

fn pod(role: &str, change: impl FnOnce(&mut Value)) -> Pod {
    let mut value = json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": {},
            "labels": {"rolebasedgroup.workloads.x-k8s.io/role": role}},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"containerPort": 30000, "name": "http"}]}]},
        "status": {"phase": "Running", "podIP": "10.1.0.10", "conditions": [{"type": "Ready", "status": "True"}]}
    });
    change(&mut value);
    serde_json::from_value(value).unwrap()
}

#[test]
fn recorded_decode_pod() {
    let listed = to_listed_instance(&recorded("sglang-pd-with-mooncake-decode-0"), &options()).unwrap();
    assert_eq!(listed.role, EngineRole::Decode);
    assert_eq!(listed.url, "http://10.1.0.10:8000");
    assert_eq!(listed.unavailable_reason, None);
    assert_eq!(
        &*listed.id.0,
        "default/sglang-pd-with-mooncake-decode-0@2df75664-7d00-4a39-8789-c92d9a479685"
    );
    assert_eq!((listed.location.node.as_deref(), listed.location.zone.as_deref()), (Some("n0"), Some("z0")));
    let workload = KubernetesWorkload {
        group: Some("sglang-pd-with-mooncake".to_owned()),
        role: Some("decode".to_owned()),
        revision: Some("599f8f96f6".to_owned()),
        image: Some("lmsysorg/sglang:v0.5.5".to_owned()),
    };
    assert_eq!(listed.workload, workload);
}

#[test]
fn recorded_leader_serves_and_its_follower_does_not() {
    let options = KubernetesDiscoveryOptions {
        roles: crate::roles::RoleNames { plain: vec!["lw".into()], ..Default::default() },
        ..options()
    };
    assert_eq!(to_listed_instance(&recorded("sl-lw-0-0"), &options).unwrap().role, EngineRole::Plain);
    assert_eq!(to_listed_instance(&recorded("sl-lw-0-1"), &options), None);
}

#[test]
fn pods_without_an_engine_have_a_location() {
    let store = pod("store", |pod| {
        pod["metadata"]["annotations"]["moongate.io/rack"] = "r7".into();
        pod["status"]["podIPs"] = json!([{"ip": "10.1.0.10"}, {"ip": "fd00::10"}]);
    });
    assert_eq!(to_listed_instance(&store, &options()), None);
    let host = to_listed_host(&store).unwrap();
    assert_eq!(host.names, ["p", "10.1.0.10", "fd00::10"]);
    assert_eq!((host.location.node.as_deref(), host.location.rack.as_deref()), (Some("n1"), Some("r7")));
}

#[test]
fn legacy_role_labels_are_recognised() {
    let prefill = to_listed_instance(&pod("prefill", |_| {}), &options()).unwrap();
    assert_eq!((prefill.role, prefill.url.as_str()), (EngineRole::Prefill, "http://10.1.0.10:30000"));
    assert_eq!(to_listed_instance(&pod("router", |_| {}), &options()), None);
}

#[test]
fn a_pod_that_must_not_serve_stays_listed_with_the_reason() {
    let reason = |change: &dyn Fn(&mut Value)| {
        to_listed_instance(&pod("decode", change), &options()).unwrap().unavailable_reason
    };
    assert_eq!(
        reason(&|pod| pod["status"]["conditions"][0] =
            json!({"type": "Ready", "status": "False", "message": "warming"})),
        Some("pod is not Ready: warming".into())
    );
    assert_eq!(reason(&|pod| pod["status"]["conditions"] = json!([])), Some("pod is not Ready yet".into()));
    assert_eq!(
        reason(&|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")),
        Some("pod is terminating".into())
    );
    assert_eq!(reason(&|pod| pod["status"]["phase"] = json!("Pending")), Some("pod is Pending".into()));
}

#[test]
fn a_pod_without_address_or_that_has_ended_is_not_listed() {
    assert_eq!(
        to_listed_instance(&pod("decode", |pod| pod["status"]["podIP"] = Value::Null), &options()),
        None
    );
    assert_eq!(
        to_listed_instance(&pod("decode", |pod| pod["status"]["phase"] = json!("Failed")), &options()),
        None
    );
}

#[test]
fn annotations_override_and_complete_ports() {
    let annotated = pod("prefill", |pod| {
        pod["metadata"]["annotations"] = json!({
            "moongate.io/port": "9000", "moongate.io/bootstrap-port": "9998", "moongate.io/kv-connector": "mooncake",
            "moongate.io/models": "a, b,", "moongate.io/rack": "r7", "moongate.io/zone": "z1"});
        pod["status"]["podIP"] = json!("fd00::7");
    });
    let listed = to_listed_instance(&annotated, &options()).unwrap();
    assert_eq!(listed.url, "http://[fd00::7]:9000");
    assert_eq!(listed.host, "fd00::7");
    assert_eq!(
        listed.declared,
        DeclaredFacts {
            engine: Some(EngineKind::Vllm),
            connector: Some(KvConnector::Mooncake),
            bootstrap_port: Some(9998),
            models: vec!["a".into(), "b".into()],
            ..DeclaredFacts::default()
        }
    );
    assert_eq!((listed.location.rack.as_deref(), listed.location.zone.as_deref()), (Some("r7"), Some("z1")));
}

#[test]
fn role_annotation_overrides_labels_and_bad_port_is_ignored() {
    let moved = pod("engine", |pod| {
        pod["metadata"]["annotations"] = json!({"moongate.io/role": "plain", "moongate.io/port": "http"});
    });
    let listed_plain = to_listed_instance(&moved, &options()).unwrap();
    assert_eq!((listed_plain.role, listed_plain.url.as_str()), (EngineRole::Plain, "http://10.1.0.10:30000"));
    let hidden = pod("prefill", |pod| pod["metadata"]["annotations"] = json!({"moongate.io/role": "none"}));
    assert_eq!(to_listed_instance(&hidden, &options()), None);
}

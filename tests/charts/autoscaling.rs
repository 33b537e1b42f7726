//! Autoscaling of engines: targets of prefill and decode, by a HorizontalPodAutoscaler or KEDA, and down to zero.

use serde_json::{Value, json};

use super::rendered::{Rendered, rejected};

/// Pairs whose roles have their own targets.
const PAIR: &str = "--set=engines.prefill.engine=sglang,engines.prefill.model=m,engines.prefill.mode=prefill,\
                    engines.decode.engine=sglang,engines.decode.model=m,engines.decode.mode=decode";
const TARGETS: &str = "--set-json=engines.prefill.autoscaling={\"queueSeconds\":0.5,\"ttftSeconds\":3,\"pendingPrefillTokens\":60000},\
                       engines.decode.autoscaling={\"runningRequests\":64,\"decodeTokens\":2000000}";
const KEDA: &str =
    "--set=engineAutoscaling.kind=ScaledObject,engineAutoscaling.prometheus=http://prometheus:9090";

fn limits(min: u32) -> String {
    let of = |role: &str| {
        let key = format!("engines.{role}.autoscaling");
        format!("{key}.enabled=true,{key}.minReplicas={min},{key}.maxReplicas=8")
    };
    format!("--set={},{}", of("prefill"), of("decode"))
}

/// Name, role and target of each metric.
fn metrics(rendered: &Rendered, name: &str) -> Vec<(String, Value, Value)> {
    let autoscaler = rendered.object("HorizontalPodAutoscaler", name);
    let metrics = autoscaler["spec"]["metrics"].as_array().unwrap();
    let parts = metrics.iter().map(|metric| {
        let (external, labels) =
            (&metric["external"], &metric["external"]["metric"]["selector"]["matchLabels"]);
        assert_eq!(labels["job"], "release-gateway");
        let name = external["metric"]["name"].as_str().unwrap().to_owned();
        (name, labels["role"].clone(), external["target"].clone())
    });
    parts.collect()
}

#[test]
fn prefill_and_decode_scale_by_separate_metrics() {
    let rendered = Rendered::with(&[PAIR, TARGETS, &limits(2)]);
    let value = |value: &str| json!({ "type": "Value", "value": value });
    let average = |value: &str| json!({ "type": "AverageValue", "averageValue": value });
    let target = |name: &str, role: Value, target: Value| (name.to_owned(), role, target);
    assert_eq!(
        metrics(&rendered, "release-prefill"),
        [
            target("moongate_queue_seconds", Value::Null, value("0.5")),
            target("moongate:ttft_seconds:p99_5m", Value::Null, value("3")),
            target("moongate_role_pending_prefill_tokens", json!("prefill"), average("60000")),
        ]
    );
    assert_eq!(
        metrics(&rendered, "release-decode"),
        [
            target("moongate_role_active_decode_tokens", json!("decode"), average("2000000")),
            target("moongate_role_requests_in_flight", json!("decode"), average("64")),
        ]
    );
    let rendered = Rendered::with(&[PAIR, &limits(2)]);
    for (name, expected) in [
        (
            "release-prefill",
            target("moongate_role_pending_prefill_tokens", json!("prefill"), average("60000")),
        ),
        ("release-decode", target("moongate_role_requests_in_flight", json!("decode"), average("64"))),
    ] {
        assert_eq!(metrics(&rendered, name), [expected], "the default target");
        let autoscaler = &rendered.object("HorizontalPodAutoscaler", name)["spec"];
        assert_eq!(autoscaler["scaleTargetRef"]["name"], name);
        assert_eq!(autoscaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"], 900);
    }
    let plain = "--set=engines.w.engine=vllm,engines.w.model=m,engines.w.autoscaling.enabled=true,\
                 engines.w.autoscaling.minReplicas=1,engines.w.autoscaling.maxReplicas=2";
    assert_eq!(
        metrics(&Rendered::with(&[plain]), "release-w"),
        [target("moongate_queue_seconds", Value::Null, value("1"))]
    );
}

#[test]
fn keda_reads_the_same_targets_from_prometheus() {
    let authentication = "--set=engineAutoscaling.triggerAuthentication=token";
    let rendered = Rendered::with(&[PAIR, TARGETS, KEDA, authentication, &limits(2)]);
    assert!(rendered.find("HorizontalPodAutoscaler", "release-prefill").is_none(), "KEDA creates it");
    let spec = &rendered.object("ScaledObject", "release-decode")["spec"];
    assert_eq!(spec["scaleTargetRef"]["kind"], "RoleBasedGroupScalingAdapter");
    assert_eq!([&spec["minReplicaCount"], &spec["maxReplicaCount"]], [2, 8]);
    let query =
        "max(moongate_role_active_decode_tokens{job=\"release-gateway\",namespace=\"here\",role=\"decode\"})";
    assert_eq!(
        spec["triggers"][0],
        json!({
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": { "serverAddress": "http://prometheus:9090", "query": query, "threshold": "2000000" },
            "authenticationRef": { "name": "token" },
        })
    );
    let prefill = rendered.object("ScaledObject", "release-prefill");
    let types: Vec<_> =
        prefill["spec"]["triggers"].as_array().unwrap().iter().map(|it| &it["metricType"]).collect();
    assert_eq!(types, ["Value", "Value", "AverageValue"]);
}

#[test]
fn a_role_without_requests_can_have_no_engines() {
    let message = rejected(&[PAIR, &limits(0)]);
    assert!(message.contains("set engineAutoscaling.kind to ScaledObject"), "{message}");
    let idle = "--set=engineAutoscaling.idleSeconds=600";
    let rendered = Rendered::with(&[PAIR, TARGETS, KEDA, idle, &limits(0)]);
    for name in ["prefill", "decode"] {
        let spec = &rendered.object("ScaledObject", &format!("release-{name}"))["spec"];
        assert_eq!([&spec["minReplicaCount"], &spec["cooldownPeriod"]], [0, 600]);
        let start = spec["triggers"].as_array().unwrap().last().unwrap();
        let query = start["metadata"]["query"].as_str().unwrap();
        assert!(query.contains("moongate_requests_total{job=\"release-gateway\","), "any request: {query}");
        assert_eq!(rendered.role(name)["replicas"], 0);
    }
}

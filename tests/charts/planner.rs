//! The planner: its file of deployments, its permissions, and what it excludes.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::rendered::{Rendered, rejected};

const PAIR: &str = "--set=planner.enabled=true,\
                    engines.prefill.engine=sglang,engines.prefill.model=m,engines.prefill.mode=prefill,\
                    engines.prefill.planner.max=8,engines.decode.engine=sglang,engines.decode.model=m,\
                    engines.decode.mode=decode,engines.decode.tensorParallel=2";
const SETTINGS: &str = "--set-json=planner.settings={\"targets\":{\"tpot_s\":0.04},\"gpu_budget\":24},planner.decodeKvTokens=4000000";

/// The planner's file of deployments.
fn file(rendered: &Rendered) -> String {
    let config = rendered.object("ConfigMap", "release-planner");
    config["data"]["deployments.yaml"].as_str().unwrap().to_owned()
}

#[test]
fn the_release_is_a_deployment_that_the_planner_accepts() {
    let rendered = Rendered::with(&[PAIR, SETTINGS]);
    let text = file(&rendered);
    let parsed: Value = serde_saphyr::from_str(&text).unwrap();
    let deployment = &parsed["deployments"][0];
    let adapter = "rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/release-decode";
    assert_eq!(deployment["scale"]["decode"], adapter);
    assert_eq!(deployment["decode_kv_tokens"], 4_000_000);
    assert_eq!(deployment["settings"]["decode"]["gpus_per_replica"], 2);
    assert_eq!(deployment["settings"]["prefill"], json!({ "max": 8, "gpus_per_replica": 1 }));
    assert_eq!(deployment["settings"]["gpu_budget"], 24);
    for role in ["prefill", "decode"] {
        assert_eq!(rendered.role(role)["scalingAdapter"], json!({ "enable": true }));
        assert!(rendered.find("HorizontalPodAutoscaler", &format!("release-{role}")).is_none());
    }
    let service = rendered.object("Service", "release-planner-gateways");
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["publishNotReadyAddresses"]),
        (&json!("None"), &json!(true))
    );

    // Without a cluster, only the file decides how the planner ends.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deployments.yaml");
    let problem = |text: &str| {
        fs::write(&path, text).unwrap();
        let mut planner = Command::new(env!("CARGO_BIN_EXE_moongate"));
        planner
            .args(["planner", "--admin-listen=127.0.0.1:0", "--kubeconfig=none", "--deployments"])
            .arg(&path);
        String::from_utf8(planner.output().unwrap().stderr).unwrap()
    };
    let accepted = problem(&text);
    assert!(accepted.contains("--kubeconfig none"), "{accepted}");
    let rejected = problem(&text.replace("max: 8", "most: 8"));
    assert!(rejected.contains("deployment here/release: unknown field `most`"), "{rejected}");
}

#[test]
fn plain_engines_have_the_same_bounds_in_both_roles() {
    let plain = "--set=planner.enabled=true,engines.worker.engine=vllm,engines.worker.model=m,engines.worker.planner.max=3";
    let parsed: Value = serde_saphyr::from_str(&file(&Rendered::with(&[plain]))).unwrap();
    let deployment = &parsed["deployments"][0];
    assert_eq!(deployment["scale"].as_object().unwrap().keys().collect::<Vec<_>>(), ["plain"]);
    assert_eq!(deployment["settings"]["prefill"], deployment["settings"]["decode"]);
    assert_eq!(deployment["settings"]["decode"]["max"], 3);
}

#[test]
fn a_planner_excludes_autoscalers_and_unclear_roles() {
    let autoscaled = "--set=engines.decode.autoscaling.enabled=true,engines.decode.autoscaling.minReplicas=1,engines.decode.autoscaling.maxReplicas=2";
    let message = rejected(&[PAIR, autoscaled]);
    assert!(
        message.contains("engines.decode.autoscaling and planner.enabled would both scale the role decode"),
        "{message}"
    );
    let second = "--set=engines.other.engine=sglang,engines.other.model=m,engines.other.mode=decode";
    let message = rejected(&[PAIR, second]);
    assert!(message.contains("engines.decode and engines.other have the mode decode"), "{message}");
    let message = rejected(&[PAIR, "--set=engines.decode=null"]);
    assert!(message.contains("and this one has prefill"), "{message}");
    let message = rejected(&[PAIR, "--set=gateway.enabled=false"]);
    assert!(message.contains("planner.enabled requires gateway.enabled"), "{message}");
}

#[test]
fn a_planner_may_only_scale_list_pods_and_keep_its_state() {
    let other = "--set-json=planner.deployments=[{\"name\":\"other\",\"namespace\":\"there\",\"gateways\":[\"http://g:9000/metrics\"],\"scale\":{\"plain\":\"deployments.v1.apps/e\"}}]";
    let rendered = Rendered::with(&[PAIR, other]);
    let own = &rendered.object("Role", "release-planner")["rules"];
    assert_eq!(own[0], json!({ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"] }));
    assert_eq!(
        own[1]["resourceNames"],
        json!(["moongate-planner.here.release", "moongate-planner.there.other"])
    );
    assert_eq!(own[1]["verbs"], json!(["get", "patch"]));
    let targets = &rendered.object("Role", "here-release-planner-targets")["rules"];
    for rule in targets.as_array().unwrap() {
        let is_pods = rule["resources"] == json!(["pods"]);
        let is_scale =
            rule["resources"].as_array().unwrap().iter().all(|it| it.as_str().unwrap().ends_with("/scale"));
        let verbs = if is_pods { json!(["list", "watch"]) } else { json!(["get", "patch"]) };
        assert!((is_pods || is_scale) && rule["verbs"] == verbs, "{rule}");
    }
    let dry = Rendered::with(&[PAIR, "--set=planner.dryRun=true,monitoring.podMonitors=true"]);
    let spec = &dry.object("Deployment", "release-planner")["spec"];
    assert_eq!((&spec["replicas"], &spec["strategy"]["type"]), (&json!(1), &json!("Recreate")));
    let arguments = spec["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
    assert!(arguments.contains(&json!("--dry-run")), "{arguments:?}");
    assert_eq!(
        dry.object("PodMonitor", "release-planner")["spec"]["podMetricsEndpoints"][0]["port"],
        "admin"
    );
}

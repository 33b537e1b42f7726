use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn container(name: &str, state: &Value, image_id: &str) -> ContainerStatus {
    let status = json!({ "name": name, "image": "i", "imageID": image_id, "ready": false, "restartCount": 0, "state": state });
    serde_json::from_value(status).unwrap()
}

#[test]
fn pull_container_is_done_once_its_image_is_present() {
    let waiting = |reason: &str| json!({ "waiting": { "reason": reason } });
    let ended = |reason: &str, code: i32| json!({ "terminated": { "reason": reason, "exitCode": code } });
    let preload = |state: Value, id: &str| outcome(&container("image-preload-0", &state, id));
    assert_eq!(preload(ended("Completed", 0), ""), Some(false));
    assert_eq!(preload(ended("StartError", 128), ""), Some(false));
    assert_eq!(preload(ended("ContainerCannotRun", 127), ""), Some(false));
    assert_eq!(preload(ended("Error", 1), "sha256:1"), Some(false));
    assert_eq!(preload(waiting("CreateContainerError"), ""), Some(true));
    assert_eq!(preload(waiting("RunContainerError"), ""), Some(true));
    for reason in ["ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ContainerCreating"] {
        assert_eq!(preload(waiting(reason), ""), None, "{reason}");
    }
    assert_eq!(preload(ended("ContainerStatusUnknown", 137), ""), None);
    assert_eq!(preload(json!({ "running": {} }), "sha256:1"), None, "the container is still running");
    let custom = |state: Value| outcome(&container("custom-0", &state, "sha256:1"));
    assert_eq!(custom(ended("Completed", 0)), Some(false));
    assert_eq!(custom(ended("StartError", 128)), None);
    assert_eq!(custom(waiting("CreateContainerError")), None);
}

/// Pod `index` on the node of that number.
fn pod(index: usize, node: u8, phase: &str, is_terminating: bool, second: i64) -> Pod {
    let mut pod = json!({
        "metadata": { "name": format!("p{index}"), "uid": format!("u{index}"),
            "labels": { keys::WARMUP_NODE: format!("n{node}") },
            "creationTimestamp": Timestamp::from_second(second).unwrap().to_string() },
        "spec": { "containers": [{ "name": "custom-0" }] },
        "status": { "phase": phase },
    });
    if is_terminating {
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    serde_json::from_value(pod).unwrap()
}

const NOW: i64 = 1_790_000_000;

proptest! {
    #[test]
    fn pods_stay_within_the_parallelism_and_one_per_node(
        pods in prop::collection::vec(
            (0_u8..6, prop::sample::select(vec!["", "Pending", "Running", "Succeeded", "Failed"]), prop::bool::weighted(0.1), 0_i64..900), 0..12),
        parallelism in prop::option::of(1_i32..4),
        limit in prop::option::of(0_i32..3),
        tolerated in prop::option::of(0_i32..3),
        timeout in prop::option::of(1_i64..600),
        started in prop::option::of(0_i64..900),
        paused in any::<bool>(),
        phase in prop::sample::select(vec!["", "Running", "Paused", "Completed", "Failed"]),
    ) {
        let pods: Vec<Pod> = pods.into_iter().enumerate()
            .map(|(index, (node, phase, is_terminating, age))| pod(index, node, phase, is_terminating, NOW - age)).collect();
        let started = started.map(|ago| Timestamp::from_second(NOW - ago).unwrap().to_string());
        let tolerated = tolerated.filter(|_| limit.is_some());
        let warmup: RoleBasedGroupWarmup = serde_json::from_value(json!({
            "metadata": { "name": "w", "namespace": "n", "uid": "w" },
            "spec": {
                "paused": paused,
                "policies": { "parallelism": parallelism, "backoffLimitPerNode": limit, "maxFailedNodes": tolerated,
                    "globalTimeoutSeconds": timeout },
                "targetNodes": { "nodeNames": ["n0", "n1", "n2", "n3"], "imagePreload": { "images": ["i"] } },
            },
            "status": { "phase": phase, "desired": 0, "active": 0, "succeeded": 0, "failed": 0, "startTime": started },
        })).unwrap();
        let nodes = BTreeMap::new();
        let now = Timestamp::from_second(NOW).unwrap();
        let input = WarmupInput { warmup: &warmup, pods: &pods, nodes: &nodes, group: None, now };
        let plan = super::warmup(input).unwrap();
        let created: Vec<&str> = plan.steps.iter().filter_map(|step| match &step.action {
            WriteAction::Create(manifest) => manifest.label(keys::WARMUP_NODE),
            _ => None,
        }).collect();
        let active = pods.iter().filter(|pod| !has_ended(pod)).count();
        if let Some(parallelism) = parallelism.and_then(|limit| usize::try_from(limit).ok()) {
            prop_assert!(created.is_empty() || active + created.len() <= parallelism);
        }
        for node in &created {
            let phases: Vec<&str> = pods_of(input, node).iter().map(|pod| super::phase(pod)).collect();
            prop_assert!(phases.iter().all(|phase| *phase == "Failed"), "{node} has {phases:?}");
            prop_assert!(limit.is_none_or(|limit| phases.len() <= usize::try_from(limit).unwrap()));
            prop_assert_eq!(created.iter().filter(|other| *other == node).count(), 1);
        }
        prop_assert!(created.is_empty() || !paused && !matches!(phase, "Completed" | "Failed"));
        for step in &plan.steps {
            let WriteAction::Patch { status: true, body, .. } = &step.action else { continue };
            let count = |name: &str| body["status"][name].as_i64().unwrap();
            prop_assert_eq!(count("desired"), 4);
            prop_assert!(count("active") + count("succeeded") + count("failed") <= 4);
            let completed = body["status"]["phase"] == "Completed";
            prop_assert!(!completed || count("succeeded") + count("failed") == 4);
        }
        if matches!(phase, "Completed" | "Failed") {
            let is_unfinished = |pod: &Pod| !has_ended(pod) && !is_terminating(pod);
            prop_assert_eq!(plan.steps.len(), pods.iter().filter(|pod| is_unfinished(pod)).count());
        }
    }
}

//! Instances with crashing pods.

use moongate_operator::ResourceKind;
use moongate_operator_testkit::OperatorSimulation;
use serde_json::{Value, json};

use super::{is, pods, template, unsettled, up};

fn together(extra: Value) -> Value {
    let mut pattern = json!({ "size": 2, "template": template("i:1") });
    if let (Value::Object(pattern), Value::Object(extra)) = (&mut pattern, extra) {
        pattern.extend(extra);
    }
    json!([{ "name": "t", "replicas": 1, "leaderWorkerPattern": pattern }])
}

fn crash(cluster: &mut OperatorSimulation, pod: &str) {
    cluster.edit(ResourceKind::Pod, pod, |pod| {
        let status = &mut pod["status"]["containerStatuses"][0];
        status["restartCount"] = (status["restartCount"].as_i64().unwrap() + 1).into();
        status["ready"] = false.into();
    });
}

fn fail(cluster: &mut OperatorSimulation, pod: &str) {
    cluster.edit(ResourceKind::Pod, pod, |pod| pod["status"]["phase"] = "Failed".into());
}

fn count(cluster: &OperatorSimulation) -> i64 {
    cluster.server.get(ResourceKind::Instance, "g-t-0").unwrap()["status"]["restartCount"]
        .as_i64()
        .unwrap_or(0)
}

#[test]
fn crash_recreates_the_instance_with_growing_backoff() {
    let policy = json!({ "restartPolicyConfig": { "type": "RecreateRoleInstanceOnPodRestart", "baseDelaySeconds": 20, "maxDelaySeconds": 60 } });
    for seed in 0..5 {
        let mut cluster = up(together(policy.clone()), seed);
        let mut last = None;
        for (crashes, delay) in [(1, 0), (2, 20), (3, 40), (4, 60), (5, 60)] {
            let before = pods(&cluster.server);
            crash(&mut cluster, "g-t-0-1");
            cluster.run(|_| {});
            assert_eq!(unsettled(&cluster.server), [""; 0]);
            let after = pods(&cluster.server);
            assert!(after.iter().all(|(name, (uid, ..))| *uid != before[name].0), "seed {seed}");
            assert_eq!(count(&cluster), crashes, "seed {seed}");
            let instance = cluster.server.get(ResourceKind::Instance, "g-t-0").unwrap();
            assert!(is(instance, "Restarting", "False"));
            let at: k8s_openapi::jiff::Timestamp =
                instance["status"]["lastRestartTime"].as_str().unwrap().parse().unwrap();
            if let Some(last) = last.replace(at) {
                assert!(at.duration_since(last).as_secs() >= delay, "seed {seed}, crash {crashes}");
            }
        }
    }
}

#[test]
fn restart_backoff_survives_a_failover() {
    let policy = json!({ "restartPolicyConfig": { "type": "RecreateRoleInstanceOnPodRestart", "baseDelaySeconds": 30, "maxDelaySeconds": 60 } });
    for killed_after in 1..=12 {
        let mut cluster = up(together(policy.clone()), 1);
        crash(&mut cluster, "g-t-0-0");
        cluster.run(|_| {});
        let first = cluster.server.now;
        crash(&mut cluster, "g-t-0-1");
        cluster.kill_after_writes = Some(cluster.writes + killed_after);
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0]);
        assert_eq!(count(&cluster), 2, "killed after {killed_after}");
        assert!(cluster.server.now.duration_since(first).as_secs() >= 25, "killed after {killed_after}");
    }
}

#[test]
fn without_the_policy_only_the_failed_pod_is_replaced() {
    let mut cluster = up(together(json!({ "restartPolicyConfig": { "type": "None" } })), 1);
    let before = pods(&cluster.server);
    fail(&mut cluster, "g-t-0-1");
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    let after = pods(&cluster.server);
    assert_eq!(after["g-t-0-0"], before["g-t-0-0"]);
    assert_ne!(after["g-t-0-1"].0, before["g-t-0-1"].0);
}

#[test]
fn crashes_of_ignored_pods_restart_no_others() {
    let mut roles = together(json!({}));
    roles[0]["leaderWorkerPattern"]["template"]["metadata"] =
        json!({ "annotations": { "rbg.workloads.x-k8s.io/restart-trigger-policy": "Ignore" } });
    let mut cluster = up(roles, 1);
    crash(&mut cluster, "g-t-0-1");
    cluster.run(|_| {});
    assert!(cluster.ended.is_empty());
    assert_eq!(count(&cluster), 0);
}

#[test]
fn restarts_by_in_place_updates_are_not_crashes() {
    for seed in 0..5 {
        let mut cluster = up(together(json!({})), seed);
        cluster.edit(ResourceKind::Group, "g", |group| {
            group["spec"]["roles"][0]["leaderWorkerPattern"]["template"] = template("i:2");
        });
        cluster.run(|_| {});
        assert!(cluster.ended.is_empty(), "seed {seed}");
        assert!(pods(&cluster.server).values().all(|(_, restarts, _)| *restarts == 1));
        crash(&mut cluster, "g-t-0-0");
        cluster.run(|_| {});
        assert_eq!(cluster.ended.len(), 2, "seed {seed}: the next restart is a crash");
    }
}

/// As upstream resolves the fields: `restartPolicyConfig.type` before the deprecated `restartPolicy`, before the pattern's default.
#[test]
fn the_type_takes_precedence_over_the_deprecated_field() {
    let recreate = "RecreateRoleInstanceOnPodRestart";
    for (fields, ended) in [
        (json!({ "restartPolicy": "None", "restartPolicyConfig": { "type": recreate } }), 2),
        (json!({ "restartPolicy": recreate, "restartPolicyConfig": { "type": "None" } }), 1),
        (json!({ "restartPolicy": recreate }), 2),
        (json!({ "restartPolicy": recreate, "restartPolicyConfig": { "baseDelaySeconds": 1 } }), 2),
        (json!({ "restartPolicy": "None" }), 1),
        (json!({}), 2),
    ] {
        let mut cluster = up(together(fields.clone()), 1);
        fail(&mut cluster, "g-t-0-1");
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "{fields}");
        assert_eq!(cluster.ended.len(), ended, "{fields}");
    }
}

#[test]
fn a_crash_during_the_first_start_recreates_nothing() {
    let mut roles = together(json!({}));
    roles[0]["leaderWorkerPattern"]["template"] = template("stuck:1");
    let mut cluster = OperatorSimulation::new(super::server(), 1);
    let group = json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } });
    cluster.create(ResourceKind::Group, group);
    cluster.run(|_| {});
    crash(&mut cluster, "g-t-0-1");
    cluster.run(|_| {});
    assert!(cluster.ended.is_empty(), "the instance was never ready");
    assert_eq!(count(&cluster), 0);
}

#[test]
fn the_backoff_starts_again_after_a_stable_time() {
    let policy = json!({ "restartPolicyConfig": { "type": "RecreateRoleInstanceOnPodRestart", "baseDelaySeconds": 20, "maxDelaySeconds": 60 } });
    let mut cluster = up(together(policy), 1);
    for (pause, restarts) in [(0, 1), (0, 2), (3600, 1)] {
        cluster.server.now = cluster.server.now.checked_add(std::time::Duration::from_secs(pause)).unwrap();
        crash(&mut cluster, "g-t-0-1");
        cluster.run(|_| {});
        assert_eq!(count(&cluster), restarts, "after {pause} s");
    }
}

#[test]
fn an_update_proceeds_during_the_backoff() {
    let policy = json!({ "restartPolicyConfig": { "type": "RecreateRoleInstanceOnPodRestart", "baseDelaySeconds": 300, "maxDelaySeconds": 300 } });
    let mut cluster = up(together(policy), 1);
    crash(&mut cluster, "g-t-0-1");
    cluster.run(|_| {});
    let first = cluster.server.now;
    crash(&mut cluster, "g-t-0-1");
    // Up to the wait for the end of the backoff.
    while cluster.step() {}
    assert_eq!(count(&cluster), 1);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0]["leaderWorkerPattern"]["template"] = template("i:2");
    });
    let mut updated = None;
    cluster.run(|server| {
        let is_updated = pods(server).values().all(|(.., image)| image == "i:2");
        updated = updated.or_else(|| is_updated.then_some(server.now));
    });
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    let took = updated.unwrap().duration_since(first).as_secs();
    assert!(took < 60, "{took} s");
}

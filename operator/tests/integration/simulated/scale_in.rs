//! Removal of instances: their pods drain first, and roles shrink in proportion.

use std::collections::{BTreeMap, BTreeSet};

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{condition, is, names, pods, role, template, unsettled, up};

/// Roles with hooks: ordered, unordered, and a leader with hooks whose worker has none; and an unordered one without hooks.
fn roles(timeout: &str) -> Value {
    let hooks = json!({ keys::UPGRADE_HOOKS: "8080", keys::UPGRADE_TIMEOUT: timeout });
    let mut unordered = hooks.clone();
    unordered[keys::ROLE_INSTANCE_PATTERN] = "Stateless".into();
    let role = |name: &str, replicas: i32, annotations: &Value| {
        json!({ "name": name, "replicas": replicas, "annotations": annotations,
            "standalonePattern": { "template": template("i:1") } })
    };
    let pairs = json!({ "name": "t", "replicas": 2, "annotations": hooks,
        "leaderWorkerPattern": { "size": 2, "template": template("i:1") } });
    let free = json!({ keys::ROLE_INSTANCE_PATTERN: "Stateless" });
    json!([role("o", 3, &hooks), role("u", 3, &unordered), pairs, role("f", 2, &free)])
}

fn scale(cluster: &mut OperatorSimulation, replicas: &[i32]) {
    cluster.edit(ResourceKind::Group, "g", |group| {
        for (role, replicas) in group["spec"]["roles"].as_array_mut().unwrap().iter_mut().zip(replicas) {
            role["replicas"] = (*replicas).into();
        }
    });
}

fn of_role(server: &SimulatedApiServer, kind: ResourceKind, role: &str) -> Vec<String> {
    let all = server.all(kind).filter(|object| object["metadata"]["labels"][keys::ROLE_NAME] == role);
    all.map(|object| object["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

fn has_hooks(pod: &Value) -> bool {
    pod["metadata"]["annotations"].get(keys::UPGRADE_HOOKS).is_some()
}

/// Two unordered roles, of which the second pod is worth least: pods of the first report it, those of the other are annotated.
struct RemovalCosts {
    cheapest: [String; 2],
    reported: BTreeMap<String, i32>,
}

impl RemovalCosts {
    fn new(server: &mut SimulatedApiServer) -> Self {
        let [reporting, annotated] = ["u", "f"].map(|role| of_role(server, ResourceKind::Pod, role));
        for (name, cost) in annotated.iter().zip([7, -3]) {
            let mut pod = server.get(ResourceKind::Pod, name).unwrap().clone();
            pod["metadata"]["annotations"][keys::POD_DELETION_COST] = cost.to_string().into();
            server.put(ResourceKind::Pod, pod);
        }
        Self {
            cheapest: [reporting[1].clone(), annotated[1].clone()],
            reported: reporting.into_iter().zip([7, 3, 9]).collect(),
        }
    }

    fn simulation(&self, server: &SimulatedApiServer, seed: u64) -> OperatorSimulation {
        let mut cluster = OperatorSimulation::new(server.clone(), seed);
        cluster.hooks.removal_costs.clone_from(&self.reported);
        cluster
    }
}

/// Scales all roles down by one instance. Only the expected instances end, after all of their pods with hooks have drained.
fn is_scaled_once(cluster: &mut OperatorSimulation, cheapest: &[String; 2], what: &str) {
    let before = pods(&cluster.server);
    let hooked: Vec<String> = cluster
        .server
        .all(ResourceKind::Pod)
        .filter(|pod| has_hooks(pod))
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    scale(cluster, &[2, 2, 1, 1]);
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
    let after = pods(&cluster.server);
    let ended: BTreeSet<&str> = before
        .iter()
        .filter(|(name, pod)| after.get(*name) != Some(pod))
        .map(|(name, _)| name.as_str())
        .collect();
    let expected = BTreeSet::from(["g-o-2", "g-t-1-0", "g-t-1-1", &cheapest[0], &cheapest[1]]);
    assert_eq!(ended, expected, "{what}");
    assert_eq!(after.len() + ended.len(), before.len(), "{what}");
    let undrained: Vec<_> =
        cluster.hooks.ended_undrained.iter().filter(|name| hooked.contains(name)).collect();
    assert_eq!(undrained, [""; 0], "{what}");
    assert_eq!((cluster.hooks.violations.as_slice(), cluster.hooks.left_draining()), (&[][..], 0), "{what}");
    let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
    assert!(is(group, "ScalingIn", "False"), "{what}: {}", group["status"]);
}

#[test]
fn removed_instances_drain_first_after_any_kill() {
    let mut ready = up(roles("30s"), 1).server;
    let costs = RemovalCosts::new(&mut ready);
    let cheapest = &costs.cheapest;
    let mut undisturbed = costs.simulation(&ready, 7);
    is_scaled_once(&mut undisturbed, cheapest, "undisturbed");
    let (writes, responses) = (undisturbed.writes, undisturbed.hooks.response_count);
    assert!(writes > 20 && responses > 8, "{writes} and {responses}");
    for killed_after in 1..=writes {
        let mut cluster = costs.simulation(&ready, 7);
        cluster.kill_after_writes = Some(killed_after);
        is_scaled_once(&mut cluster, cheapest, &format!("killed after write {killed_after}"));
    }
    for killed_after in (1..=responses).step_by(3) {
        let mut cluster = costs.simulation(&ready, 7);
        cluster.kill_after_responses = Some(killed_after);
        is_scaled_once(&mut cluster, cheapest, &format!("killed after response {killed_after}"));
    }
    for seed in 0..4 {
        let mut cluster = costs.simulation(&ready, seed);
        cluster.write_failure_percent = 20;
        is_scaled_once(&mut cluster, cheapest, &format!("seed {seed}"));
    }
}

/// Advances until the operator has called a hook of each pod that is to be removed.
fn until_draining(cluster: &mut OperatorSimulation, pods: usize) {
    for _ in 0..10_000 {
        if cluster.hooks.left_draining() == pods {
            return;
        }
        cluster.run_for(1, |_| {});
    }
    panic!("{} of {pods} pods drain", cluster.hooks.left_draining());
}

#[test]
fn scaling_up_returns_draining_instances_to_service() {
    let ready = up(roles("1h"), 1).server;
    let before = pods(&ready);
    for kills_per_mille in [0, 5, 30] {
        let mut cluster = OperatorSimulation::new(ready.clone(), 5);
        cluster.hooks.not_ready_responses = usize::MAX;
        scale(&mut cluster, &[1, 2, 1, 2]);
        until_draining(&mut cluster, 4);
        cluster.run_for(300, |_| {});
        let group = cluster.server.get(ResourceKind::Group, "g").unwrap();
        assert!(is(group, "Ready", "True") && is(group, "Progressing", "True"), "{}", group["status"]);
        scale(&mut cluster, &[3, 3, 2, 2]);
        cluster.kills_per_mille = kills_per_mille;
        // No drain ends before the operator has observed the change.
        while in_service(&cluster.server).values().sum::<usize>() < 10 {
            cluster.run_for(1, |_| {});
        }
        cluster.hooks.not_ready_responses = 2;
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0]);
        assert_eq!(pods(&cluster.server), before, "{kills_per_mille}");
        assert_eq!(cluster.hooks.left_draining(), 0, "{kills_per_mille}: a pod does not serve");

        scale(&mut cluster, &[1, 2, 2, 2]);
        cluster.run(|_| {});
        assert_eq!(pods(&cluster.server).len(), before.len() - 3, "{kills_per_mille}");
        assert_eq!(cluster.hooks.ended_undrained, [""; 0], "{kills_per_mille}: they drain again");
    }
}

#[test]
fn status_names_draining_instances_and_silent_pods_time_out() {
    let mut cluster = OperatorSimulation::new(up(roles("30s"), 1).server, 3);
    cluster.hooks.unresponsive = true;
    scale(&mut cluster, &[1, 3, 2, 2]);
    let started_at = cluster.server.now;
    let (mut messages, mut late) = (BTreeSet::new(), BTreeSet::new());
    cluster.run(|server| {
        let text = |object: &Value, kind: &str| {
            condition(object, kind).map(|one| one["message"].as_str().unwrap_or_default().to_owned())
        };
        let group = server.get(ResourceKind::Group, "g").unwrap();
        messages.extend(text(group, "ScalingIn"));
        late.extend(
            server.all(ResourceKind::Instance).filter_map(|instance| text(instance, "WaitingForHooks")),
        );
    });
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(of_role(&cluster.server, ResourceKind::Pod, "o"), ["g-o-0"]);
    assert!(messages.contains("draining 2 instances: g-o-1, g-o-2"), "{messages:?}");
    assert!(late.iter().any(|text| text.contains("g-o-2 has yet to drain")), "{late:?}");
    assert!(late.iter().any(|text| text.contains("g-o-2 did not drain within 30s")), "{late:?}");
    let took = cluster.server.now.duration_since(started_at).as_secs();
    assert!((30..45).contains(&took), "{took} s: both drain at once");
}

#[test]
fn a_failed_pod_of_a_draining_instance_is_not_replaced() {
    let mut cluster = OperatorSimulation::new(up(roles("1h"), 1).server, 3);
    cluster.hooks.not_ready_responses = usize::MAX;
    scale(&mut cluster, &[2, 3, 1, 2]);
    until_draining(&mut cluster, 2);
    let before = pods(&cluster.server);
    cluster.edit(ResourceKind::Pod, "g-o-2", |pod| pod["status"]["phase"] = "Failed".into());
    cluster.edit(ResourceKind::Pod, "g-t-1-1", |pod| pod["status"]["phase"] = "Failed".into());
    cluster.run_for(500, |server| {
        let unknown = |(name, pod): &(String, (String, i64, String))| before[name].0 != pod.0;
        assert_eq!(pods(server).into_iter().find(unknown), None);
    });
    assert_eq!(cluster.hooks.left_draining(), 2);
}

#[test]
fn a_draining_instance_stays_the_one_that_goes() {
    let mut cluster = OperatorSimulation::new(up(roles("1h"), 1).server, 3);
    cluster.hooks.not_ready_responses = usize::MAX;
    scale(&mut cluster, &[3, 2, 2, 2]);
    until_draining(&mut cluster, 1);
    let leaving = |server: &SimulatedApiServer| -> Vec<String> {
        let state =
            |instance: &&Value| instance["metadata"]["labels"][keys::LIFECYCLE_STATE] == "PreparingDelete";
        server
            .all(ResourceKind::Instance)
            .filter(state)
            .map(|one| one["metadata"]["name"].to_string())
            .collect()
    };
    let chosen = leaving(&cluster.server);
    for pod in of_role(&cluster.server, ResourceKind::Pod, "u") {
        cluster.edit(ResourceKind::Pod, &pod, |pod| {
            // Another instance fails, and is now worth less.
            let is_other = !chosen[0].contains(pod["metadata"]["name"].as_str().unwrap());
            pod["metadata"]["annotations"][keys::POD_DELETION_COST] =
                if is_other { "-1" } else { "1" }.into();
            if is_other {
                pod["status"]["phase"] = "Failed".into();
            }
        });
    }
    cluster.run_for(500, |server| assert_eq!(leaving(server), chosen));
}

#[test]
fn removed_roles_and_components_drain_first() {
    let hooks = json!({ keys::UPGRADE_HOOKS: "8080" });
    let component = |name: &str| json!({ "name": name, "size": 1, "template": template("i:1") });
    let custom = json!({ "name": "c", "replicas": 1, "annotations": hooks,
        "customComponentsPattern": { "components": [component("x"), component("y")] } });
    let mut roles = roles("30s");
    roles.as_array_mut().unwrap().push(custom);
    let ready = up(roles, 1).server;
    let mut undisturbed = OperatorSimulation::new(ready.clone(), 9);
    let drained = |cluster: &mut OperatorSimulation, what: &str| {
        cluster.edit(ResourceKind::Group, "g", |group| {
            let roles = group["spec"]["roles"].as_array_mut().unwrap();
            roles.retain(|role| role["name"] != "o" && role["name"] != "u");
            roles.last_mut().unwrap()["customComponentsPattern"]["components"].as_array_mut().unwrap().pop();
        });
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
        let undrained = &cluster.hooks.ended_undrained;
        assert!(
            !undrained.iter().any(|name| ["g-o", "g-u", "g-c"].iter().any(|role| name.starts_with(role))),
            "{what}: {undrained:?}"
        );
        assert_eq!(names(&cluster.server, ResourceKind::Set), ["g-c", "g-f", "g-t"], "{what}");
        assert_eq!(of_role(&cluster.server, ResourceKind::Pod, "c").len(), 1, "{what}");
    };
    drained(&mut undisturbed, "undisturbed");
    assert!(undisturbed.hooks.response_count > 7 * 2, "{}", undisturbed.hooks.response_count);
    for killed_after in (1..=undisturbed.writes).step_by(5) {
        let mut cluster = OperatorSimulation::new(ready.clone(), 9);
        cluster.kill_after_writes = Some(killed_after);
        drained(&mut cluster, &format!("killed after write {killed_after}"));
    }
}

fn policy(max_skew: &str) -> Value {
    let rule = json!({ "name": "both", "roles": ["p", "d"], "strategy": {
        "scaling": { "maxSkew": max_skew, "progression": "OrderReady" } } });
    json!({ "metadata": { "name": "g" }, "spec": { "policies": [rule] } })
}

/// Number of instances in service by role: those that are not being removed.
fn in_service(server: &SimulatedApiServer) -> BTreeMap<String, usize> {
    let mut serving = BTreeMap::new();
    for instance in server.all(ResourceKind::Instance) {
        let labels = &instance["metadata"]["labels"];
        let role = labels[keys::ROLE_NAME].as_str().unwrap().to_owned();
        let count: &mut usize = serving.entry(role).or_default();
        *count += usize::from(labels[keys::LIFECYCLE_STATE] != "PreparingDelete");
    }
    serving
}

#[test]
fn roles_of_a_policy_shrink_in_its_ratio_after_any_kill() {
    let hooks = json!({ keys::UPGRADE_HOOKS: "8080" });
    let with_hooks = |name: &str, replicas: i32| {
        let mut role = role(name, replicas, "i:1");
        role["annotations"] = hooks.clone();
        role
    };
    let mut cluster = up(json!([with_hooks("p", 8), with_hooks("d", 4)]), 1);
    cluster.create(ResourceKind::Policy, policy("10%"));
    cluster.run(|_| {});
    let ready = cluster.server;
    let shrink = |cluster: &mut OperatorSimulation, what: &str| {
        scale(cluster, &[6, 3]);
        let mut seen = vec![(8, 4)];
        cluster.run(|server| {
            let serving = in_service(server);
            let now = (serving["p"], serving["d"]);
            if seen.last() != Some(&now) {
                seen.push(now);
            }
        });
        assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
        assert_eq!(seen, [(8, 4), (7, 4), (7, 3), (6, 3)], "{what}");
        assert_eq!(cluster.hooks.ended_undrained, [""; 0], "{what}");
        assert_eq!(pods(&cluster.server).len(), 9, "{what}");
    };
    let mut undisturbed = OperatorSimulation::new(ready.clone(), 3);
    shrink(&mut undisturbed, "undisturbed");
    for killed_after in 1..=undisturbed.writes {
        let mut cluster = OperatorSimulation::new(ready.clone(), 3);
        cluster.kill_after_writes = Some(killed_after);
        shrink(&mut cluster, &format!("killed after write {killed_after}"));
    }
}

#[test]
fn roles_shrink_although_a_dependency_is_broken() {
    let mut dependent = role("d", 4, "i:1");
    dependent["dependencies"] = json!(["p"]);
    let mut cluster = up(json!([role("p", 4, "i:1"), dependent]), 1);
    cluster.create(ResourceKind::Policy, policy("10%"));
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0]["standalonePattern"]["template"]["spec"]["containers"][0]["image"] =
            "stuck:2".into();
    });
    cluster.run(|_| {});
    scale(&mut cluster, &[3, 2]);
    cluster.run(|_| {});
    let left = ["p", "d"].map(|role| of_role(&cluster.server, ResourceKind::Pod, role).len());
    assert_eq!(left, [3, 2]);
}

//! Forecasts of changes.

use k8s_openapi::jiff::Timestamp;
use moongate_operator::forecast::{ReadyVersions, RolloutForecast, SimulatedApiServer, StepEffect, forecast};
use moongate_operator::kubectl::{ImageAssignment, KubectlError, restart_pods, set_images, set_paused};
use moongate_operator::{GangScheduler, ResourceKind};
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::keys;
use serde_json::{Value, json};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/examples");
const V1ALPHA1: &str = "deprecated/v1alpha1/mooncake/pd-disaggregated-with-mooncake.yaml";
const V1ALPHA2: &str =
    "inference/ecosystem/mooncake/mooncake-store/pd-disagg-kvcache-reuse-with-mooncake.yaml";

/// The group of an example, unchanged.
fn example(file: &str) -> Value {
    let text = std::fs::read_to_string(format!("{EXAMPLES}/{file}")).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().find(|object| object["kind"] == "RoleBasedGroup").unwrap()
}

fn role(name: &str, replicas: i32) -> Value {
    json!({ "name": name, "replicas": replicas, "standalonePattern": { "template": { "spec": { "containers": [
        { "name": "engine", "image": "engine:1" }, { "name": "side", "image": "side:1" }] } } } })
}

fn group(roles: &Value) -> Value {
    json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
        "metadata": { "name": "g" }, "spec": { "roles": roles } })
}

/// A cluster in which the group is up, with the forecast of its creation.
fn up(group: &Value) -> (SimulatedApiServer, RolloutForecast) {
    let mut server = SimulatedApiServer::new(Timestamp::from_second(1_790_000_000).unwrap());
    server.create(ResourceKind::Group, convert(group, ApiVersion::V1alpha2).unwrap());
    let outcome = forecast(&mut server, GangScheduler::default(), &[]);
    assert!(outcome.problems.is_empty(), "{:?}", outcome.problems);
    (server, outcome)
}

/// Forecast of a change of the only group.
fn forecast_change(
    server: &mut SimulatedApiServer,
    change: impl FnOnce(&mut Value) -> Result<(), KubectlError>,
) -> RolloutForecast {
    let mut group = server.all(ResourceKind::Group).next().unwrap().clone();
    change(&mut group).unwrap();
    server.put(ResourceKind::Group, group);
    forecast(server, GangScheduler::default(), &[])
}

/// Steps about pods, as effect and name.
fn pods(forecast: &RolloutForecast) -> Vec<(StepEffect, &str)> {
    let pods = forecast.steps.iter().filter(|step| step.kind == "Pod");
    pods.map(|step| (step.effect, step.name.as_str())).collect()
}

fn assignment(text: &str) -> ImageAssignment {
    text.parse().unwrap()
}

#[test]
fn image_change_restarts_the_three_stores_in_place() {
    for (file, container) in [(V1ALPHA1, "store"), (V1ALPHA2, "sglang")] {
        let mut written = example(file);
        let (mut server, outcome) = up(&written);
        assert!(pods(&outcome).iter().all(|(what, _)| *what == StepEffect::Create), "{file}");
        set_images(&mut written, &[assignment("mooncake-store=lmsysorg/sglang:v0.5.6")]).unwrap();
        let mut wanted = convert(&written, ApiVersion::V1alpha2).unwrap();
        let update = forecast_change(&mut server, |group| {
            group["spec"] = wanted["spec"].take();
            Ok(())
        });
        let restarts: Vec<_> =
            update.steps.iter().filter(|step| step.effect == StepEffect::RestartInPlace).collect();
        assert_eq!(restarts.len(), 3, "{file}: {:?}", update.steps);
        for step in restarts {
            assert_eq!(step.role, "mooncake-store", "{file}");
            let image = &step.images[0];
            assert_eq!((image.container.as_str(), image.to.as_str()), (container, "lmsysorg/sglang:v0.5.6"));
        }
        let others = pods(&update)
            .into_iter()
            .filter(|(what, _)| !matches!(what, StepEffect::RestartInPlace | StepEffect::Drain));
        assert_eq!(others.count(), 0, "{file}");
        let stores = update.roles.iter().find(|role| role.name == "mooncake-store").unwrap();
        assert_eq!((stores.pods, stores.restarted, stores.out_of_service), (3, 3, 1), "{file}");
    }
}

#[test]
fn recreation_starts_from_the_highest_instance() {
    let (mut server, _) = up(&group(&json!([role("a", 2), role("b", 1)])));
    let update = forecast_change(&mut server, |group| {
        group["spec"]["roles"][0]["standalonePattern"]["template"]["spec"]["containers"][0]["args"] =
            json!(["-v"]);
        Ok(())
    });
    let expected = [
        (StepEffect::Delete, "g-a-1"),
        (StepEffect::Create, "g-a-1"),
        (StepEffect::Delete, "g-a-0"),
        (StepEffect::Create, "g-a-0"),
    ];
    assert_eq!(pods(&update), expected);
    assert!(update.steps.iter().any(|step| step.reason.contains("other fields than its images")));
}

#[test]
fn scale_in_drains_and_removes_the_cheapest_instances() {
    let mut engines = role("a", 3);
    engines["annotations"] = json!({ keys::UPGRADE_HOOKS: "8080", keys::ROLE_INSTANCE_PATTERN: "Stateless" });
    let (mut server, _) = up(&group(&json!([engines, role("b", 2)])));
    let created: Vec<Value> = server.all(ResourceKind::Pod).cloned().collect();
    for (mut pod, cost) in created.iter().cloned().zip(["30", "10", "20"]) {
        pod["metadata"]["annotations"][keys::POD_DELETION_COST] = cost.into();
        server.put(ResourceKind::Pod, pod);
    }
    let update = forecast_change(&mut server, |group| {
        group["spec"]["roles"][0]["replicas"] = 1.into();
        group["spec"]["roles"][1]["replicas"] = 1.into();
        Ok(())
    });
    let name = |at: usize| created[at]["metadata"]["name"].as_str().unwrap();
    let of_a: Vec<_> = pods(&update).into_iter().filter(|(_, name)| name.starts_with("g-a")).collect();
    let expected = [
        (StepEffect::Drain, name(1)),
        (StepEffect::Drain, name(2)),
        (StepEffect::Delete, name(1)),
        (StepEffect::Delete, name(2)),
    ];
    assert_eq!(of_a, expected);
    let of_b: Vec<_> = pods(&update).into_iter().filter(|(_, name)| name.starts_with("g-b")).collect();
    assert_eq!(of_b, [(StepEffect::Delete, "g-b-1")], "without hooks, nothing drains");
    let drain = update.steps.iter().find(|step| step.effect == StepEffect::Drain).unwrap();
    assert!(drain.reason.contains("drains: the instance is beyond the set's replicas"), "{}", drain.reason);
    let engines = update.roles.iter().find(|role| role.name == "a").unwrap();
    assert_eq!((engines.pods, engines.deleted, engines.out_of_service), (3, 2, 2));
}

/// The largest difference between the parts of the ready prefills and of the ready decodes that have new images.
fn widest_skew(update: &RolloutForecast) -> f64 {
    let part = |ready: ReadyVersions| ready.new as f64 / (ready.old + ready.new).max(1) as f64;
    let skews = update.version_mixes.iter().map(|mix| part(mix.ready["decode"]) - part(mix.ready["prefill"]));
    skews.map(f64::abs).fold(0.0, f64::max)
}

#[test]
fn forecasts_show_how_many_engines_of_both_versions_are_ready() {
    let policy = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "CoordinatedPolicy",
        "metadata": { "name": "g" }, "spec": { "policies": [{ "name": "pairs", "roles": ["prefill", "decode"],
            "strategy": { "rollingUpdate": { "maxSkew": "10%" } } }] } });
    let mut widest = Vec::new();
    for is_coordinated in [true, false] {
        let (mut server, created) =
            up(&group(&json!([role("prefill", 8), role("decode", 4), role("router", 2)])));
        assert_eq!(created.version_mixes, [], "there are no old images");
        if is_coordinated {
            server.create(ResourceKind::Policy, policy.clone());
        }
        let update = forecast_change(&mut server, |group| {
            set_images(group, &[assignment("prefill/engine=engine:2"), assignment("decode/engine=engine:2")])
        });
        let versions = |old, new| ReadyVersions { old, new };
        let mixes = &update.version_mixes;
        let first = [("decode", versions(4, 0)), ("prefill", versions(8, 0))];
        let last = [("decode", versions(0, 4)), ("prefill", versions(0, 8))];
        for (mix, expected) in [(mixes.first(), first), (mixes.last(), last)] {
            let expected = expected.map(|(role, ready)| (role.to_owned(), ready));
            assert_eq!(mix.unwrap().ready, expected.into_iter().collect(), "{mixes:?}");
        }
        widest.push(widest_skew(&update));
    }
    assert!(widest[0] <= 0.25 && widest[1] > 0.5, "{widest:?}");
}

#[test]
fn pods_of_a_stateful_set_are_reported_as_recreated() {
    let mut stateful = role("a", 3);
    stateful["annotations"] = json!({ "rbg.workloads.x-k8s.io/role-workload-type": "apps/v1/StatefulSet" });
    let (mut server, created) = up(&group(&json!([stateful])));
    assert_eq!(created.roles[0].created, 3);
    let scaled = forecast_change(&mut server, |group| {
        group["spec"]["roles"][0]["replicas"] = 4.into();
        Ok(())
    });
    assert_eq!(pods(&scaled), [(StepEffect::Create, "g-a-3")]);
    let update = forecast_change(&mut server, |group| set_images(group, &[assignment("engine:2")]));
    let recreated = |ordinal: u32| {
        let name = format!("g-a-{ordinal}");
        [(StepEffect::Delete, name.clone()), (StepEffect::Create, name)]
    };
    let expected: Vec<_> = (0..4).rev().flat_map(recreated).collect();
    let steps: Vec<_> = pods(&update).into_iter().map(|(effect, name)| (effect, name.to_owned())).collect();
    assert_eq!(steps, expected);
    let role = &update.roles[0];
    assert_eq!((role.pods, role.created, role.deleted, role.out_of_service), (4, 4, 4, 1));
    let partition = forecast_change(&mut server, |group| {
        group["spec"]["roles"][0]["rolloutStrategy"] =
            json!({ "type": "RollingUpdate", "rollingUpdate": { "partition": 3 } });
        set_images(group, &[assignment("engine:3")])
    });
    assert_eq!(pods(&partition), [(StepEffect::Delete, "g-a-3"), (StepEffect::Create, "g-a-3")]);
}

#[test]
fn restarts_recreate_pods_and_pauses_hold_updates_back() {
    let (mut server, _) = up(&group(&json!([role("a", 1), role("b", 1)])));
    let names = ["b".to_owned()];
    let restart = forecast_change(&mut server, |group| restart_pods(group, &names, "2026-01-01T00:00:00Z"));
    assert_eq!(pods(&restart), [(StepEffect::Delete, "g-b-0"), (StepEffect::Create, "g-b-0")]);
    assert!(forecast_change(&mut server, |group| set_paused(group, &[], true)).steps.is_empty());
    let image = [assignment("a/engine=engine:2")];
    assert_eq!(pods(&forecast_change(&mut server, |group| set_images(group, &image))), []);
    let resumed = forecast_change(&mut server, |group| set_paused(group, &["a".to_owned()], false));
    assert_eq!(pods(&resumed), [(StepEffect::RestartInPlace, "g-a-0")]);
}

#[test]
fn steps_report_delays_without_real_time() {
    let mut slow = role("a", 2);
    slow["rolloutStrategy"] = json!({ "type": "RollingUpdate", "rollingUpdate": {
        "inPlaceUpdateStrategy": { "gracePeriodSeconds": 30 } } });
    let (mut server, _) = up(&group(&json!([slow])));
    let update = forecast_change(&mut server, |group| set_images(group, &[assignment("engine:2")]));
    let expected = [
        (StepEffect::Drain, "g-a-1"),
        (StepEffect::RestartInPlace, "g-a-1"),
        (StepEffect::Drain, "g-a-0"),
        (StepEffect::RestartInPlace, "g-a-0"),
    ];
    assert_eq!(pods(&update), expected);
    let delays: Vec<i64> =
        update.steps.iter().filter(|step| step.kind == "Pod").map(|step| step.delay_seconds).collect();
    assert_eq!(delays, [0, 30, 30, 60]);
}

#[test]
fn errors_list_the_existing_names() {
    let refused = |text: &str| {
        let mut group = group(&json!([role("a", 1)]));
        set_images(&mut group, &[assignment(text)]).unwrap_err().to_string()
    };
    assert_eq!(refused("z=engine:2"), "the group has no role `z`; existing: a");
    assert_eq!(refused("a/z=engine:2"), "role `a` has no container `z`; existing: engine, side");
    assert!(refused("a=other:2").starts_with("role `a` has several containers: use a/CONTAINER=other:2"));
    assert!(refused("other:2").starts_with("no container runs another tag of other:2"));
    let mut group = group(&json!([role("a", 1)]));
    set_images(&mut group, &[assignment("a=engine:2")]).unwrap();
    let containers = &group["spec"]["roles"][0]["standalonePattern"]["template"]["spec"]["containers"];
    assert_eq!((&containers[0]["image"], &containers[1]["image"]), (&json!("engine:2"), &json!("side:1")));
}

#[test]
fn shared_templates_are_not_changed() {
    let shared = |name: &str| {
        json!({ "name": name, "replicas": 1, "standalonePattern": {
            "templateRef": { "name": "t", "patch": {} } } })
    };
    let mut written = group(&json!([shared("a"), shared("b")]));
    let template = json!({ "spec": { "containers": [{ "name": "engine", "image": "engine:1" }] } });
    written["spec"]["roleTemplates"] = json!([{ "name": "t", "template": template }]);
    let (mut server, _) = up(&written);
    let update = forecast_change(&mut server, |group| set_images(group, &[assignment("a=engine:2")]));
    assert_eq!(pods(&update), [(StepEffect::RestartInPlace, "g-a-0")]);
}

//! Statuses are true at every moment.

use moongate_operator::ResourceKind;
use moongate_operator::forecast::SimulatedApiServer;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{claims_settled, is, pods, role, template, unsettled, up};

/// Images of a role's pods that are running and ready.
fn running<'a>(server: &'a SimulatedApiServer, role: &'a str) -> impl Iterator<Item = &'a str> {
    let own =
        server.all(ResourceKind::Pod).filter(move |pod| pod["metadata"]["labels"][keys::ROLE_NAME] == role);
    own.filter(|pod| is(pod, "Ready", "True"))
        .filter_map(|pod| pod["status"]["containerStatuses"][0]["image"].as_str())
}

/// If a group reports that it is settled, all pods of every role run the image of the spec and are ready.
pub(crate) fn check(server: &SimulatedApiServer) {
    for group in server.all(ResourceKind::Group).filter(|group| claims_settled(group)) {
        for spec in group["spec"]["roles"].as_array().unwrap() {
            let image =
                spec["standalonePattern"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap();
            let images: Vec<&str> = running(server, spec["name"].as_str().unwrap()).collect();
            let wanted = vec![image; usize::try_from(spec["replicas"].as_i64().unwrap()).unwrap()];
            assert_eq!(images, wanted, "{}", group["status"]);
        }
    }
}

#[test]
fn a_group_reports_an_update_only_when_its_pods_have_it() {
    for seed in 0..5 {
        let mut cluster = up(json!([role("a", 3, "i:1"), role("b", 2, "i:1")]), seed);
        for image in ["i:2", "i:3"] {
            cluster.edit(ResourceKind::Group, "g", |group| {
                group["spec"]["roles"][0]["standalonePattern"]["template"] = template(image);
            });
            cluster.run(check);
            assert_eq!(unsettled(&cluster.server), [""; 0]);
            let updated = &cluster.server.get(ResourceKind::Group, "g").unwrap()["status"]["roleStatuses"][0]
                ["updatedReplicas"];
            assert_eq!(*updated, 3);
        }
    }
}

/// A crash that the operator has not observed yet does not lead it to set the pod to ready.
#[test]
fn pods_are_ready_only_if_their_containers_are() {
    let check = |server: &SimulatedApiServer| {
        for pod in server.all(ResourceKind::Pod).filter(|pod| is(pod, "Ready", "True")) {
            assert!(is(pod, "ContainersReady", "True"), "{}", pod["status"]);
        }
    };
    for moves in 0..60 {
        let mut cluster = up(json!([role("a", 1, "i:1")]), moves);
        cluster.edit(ResourceKind::Group, "g", |group| {
            group["spec"]["roles"][0]["standalonePattern"]["template"] = template("i:2");
        });
        cluster.run_for(usize::try_from(moves).unwrap(), check);
        cluster.edit(ResourceKind::Pod, "g-a-0", |pod| {
            pod["status"]["containerStatuses"][0]["ready"] = false.into();
            for condition in pod["status"]["conditions"].as_array_mut().unwrap() {
                if condition["type"] == "ContainersReady" || condition["type"] == "Ready" {
                    condition["status"] = "False".into();
                }
            }
        });
        cluster.run(check);
        assert_eq!(unsettled(&cluster.server), [""; 0]);
    }
}

#[test]
fn removed_roles_are_not_in_the_status() {
    let mut cluster = up(json!([role("a", 1, "i:1"), role("b", 1, "i:1")]), 1);
    cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = json!([role("b", 1, "i:1")]));
    cluster.run(check);
    let roles = cluster.server.get(ResourceKind::Group, "g").unwrap()["status"]["roleStatuses"].clone();
    assert_eq!(roles.as_array().unwrap().iter().map(|role| &role["name"]).collect::<Vec<_>>(), ["b"]);
    assert_eq!(pods(&cluster.server).into_keys().collect::<Vec<_>>(), ["g-b-0"]);
}

#[test]
fn pod_ordinals_match_names_before_and_after_in_place_update() {
    let workers = json!({ "name": "w", "replicas": 2, "leaderWorkerPattern": { "size": 2, "template": template("i:1") } });
    let mut cluster = up(json!([role("a", 3, "i:1"), workers]), 3);
    let check = |server: &SimulatedApiServer| {
        for pod in server.all(ResourceKind::Pod) {
            let (name, labels) = (pod["metadata"]["name"].as_str().unwrap(), &pod["metadata"]["labels"]);
            let ordinal = name.split('-').nth(2).unwrap();
            assert_eq!(labels[keys::ROLE_INSTANCE_INDEX], ordinal, "{name}");
            assert_eq!(
                labels[keys::POD_NAME],
                name.rsplitn(if name.starts_with("g-w") { 2 } else { 1 }, '-').last().unwrap()
            );
        }
    };
    check(&cluster.server);
    cluster.edit(ResourceKind::Group, "g", |group| {
        group["spec"]["roles"][0]["standalonePattern"]["template"] = template("i:2");
        group["spec"]["roles"][1]["leaderWorkerPattern"]["template"] = template("i:2");
    });
    cluster.run(check);
    assert!(pods(&cluster.server).values().all(|(_, restarts, image)| *restarts == 1 && image == "i:2"));
}

#[test]
fn the_discovery_file_follows_the_number_of_replicas() {
    let mut cluster = up(json!([role("a", 1, "i:1")]), 1);
    // Upstream writes no file when this is missing or `legacy`, although pods mount it.
    for (replicas, annotations) in [(2, json!({})), (3, json!({ keys::DISCOVERY_CONFIG_MODE: "legacy" }))] {
        cluster.edit(ResourceKind::Group, "g", |group| {
            group["spec"]["roles"][0]["replicas"] = replicas.into();
            group["metadata"]["annotations"] = annotations;
        });
        cluster.run(check);
        let file = &cluster.server.get(ResourceKind::ConfigMap, "g").unwrap()["data"]["config.yaml"];
        assert!(file.as_str().unwrap().contains(&format!("g-a-{}.s-g-a", replicas - 1)), "{file}");
    }
}

#[test]
fn instances_have_a_selector_of_their_pods() {
    let cluster = up(json!([role("a", 1, "i:1")]), 1);
    let status = |kind: ResourceKind, name: &str| -> Value {
        cluster.server.get(kind, name).unwrap()["status"]["labelSelector"].clone()
    };
    assert_eq!(status(ResourceKind::Instance, "g-a-0"), format!("{}=g-a-0", keys::ROLE_INSTANCE_NAME));
    assert!(status(ResourceKind::Set, "g-a").as_str().unwrap().contains(&format!("{}=a", keys::ROLE_NAME)));
}

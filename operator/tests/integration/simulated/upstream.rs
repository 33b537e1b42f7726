//! Cases of upstream's end-to-end tests that belong to no other subject; docs/upstream-tests.md lists all of them.

use moongate_operator::ResourceKind;
use moongate_operator_testkit::OperatorSimulation;
use rbg_api::keys;
use serde_json::{Value, json};

use super::{names, pods, role, server, template, unsettled, up};

fn set_role(cluster: &mut OperatorSimulation, index: usize, edit: impl FnOnce(&mut Value)) {
    cluster.edit(ResourceKind::Group, "g", |group| edit(&mut group["spec"]["roles"][index]));
}

fn set_image(cluster: &mut OperatorSimulation, index: usize, image: &str) {
    set_role(cluster, index, |role| role["standalonePattern"]["template"] = template(image));
}

/// Images of the pods, by name.
fn images(cluster: &OperatorSimulation) -> Vec<(String, String)> {
    pods(&cluster.server).into_iter().map(|(name, (_, _, image))| (name, image)).collect()
}

fn named(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, image)| ((*name).to_owned(), (*image).to_owned())).collect()
}

#[test]
fn an_edit_of_a_role_template_updates_its_roles_and_is_undone() {
    let referring = |name: &str| json!({ "name": name, "replicas": 1, "standalonePattern": { "templateRef": { "name": "t", "patch": {} } } });
    let mut cluster = OperatorSimulation::new(server(), 1);
    let templates = |image: &str| json!([{ "name": "t", "template": template(image) }]);
    let spec = json!({ "roleTemplates": templates("i:1"),
        "roles": [referring("a"), referring("b"), role("c", 1, "i:1")] });
    cluster.create(ResourceKind::Group, json!({ "metadata": { "name": "g" }, "spec": spec }));
    cluster.run(|_| {});
    let before = pods(&cluster.server);
    let revision = |cluster: &OperatorSimulation| {
        let labels = cluster.server.get(ResourceKind::Set, "g-a").unwrap()["metadata"]["labels"].clone();
        labels[format!("{}a", keys::ROLE_REVISION_PREFIX)].clone()
    };
    let revisions = |cluster: &OperatorSimulation| {
        let all = cluster.server.all(ResourceKind::Revision);
        let of_group = all.filter(|one| one["metadata"]["ownerReferences"][0]["kind"] == "RoleBasedGroup");
        of_group.filter_map(|one| one["revision"].as_i64()).collect::<Vec<_>>()
    };
    let first = revision(&cluster);
    assert_eq!(revisions(&cluster), [1]);
    for (image, numbers, is_first) in [("i:2", 2, false), ("i:1", 3, true)] {
        cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roleTemplates"] = templates(image));
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0]);
        let expected = [("g-a-0", image), ("g-b-0", image), ("g-c-0", "i:1")];
        assert_eq!(images(&cluster), named(&expected));
        assert_eq!(revisions(&cluster).into_iter().max(), Some(numbers));
        assert_eq!(revision(&cluster) == first, is_first, "{image}");
    }
    let after = pods(&cluster.server);
    assert_eq!(after["g-c-0"], before["g-c-0"], "a role with its own template");
    assert!(after.iter().all(|(name, (uid, ..))| *uid == before[name].0), "all updates are in place");
}

#[test]
fn adapters_follow_the_settings_of_the_roles() {
    let adapted = |name: &str, enable: Value| {
        let mut role = role(name, 1, "i:1");
        role["scalingAdapter"] = json!({ "enable": enable });
        role
    };
    let mut cluster = up(json!([adapted("a", true.into()), role("b", 1, "i:1")]), 1);
    for (roles, adapters) in [
        (
            json!([adapted("a", true.into()), adapted("b", true.into()), adapted("c", true.into())]),
            &["g-a", "g-b", "g-c"][..],
        ),
        (json!([adapted("a", false.into()), role("b", 1, "i:1"), adapted("c", true.into())]), &["g-c"]),
        (json!([adapted("a", true.into())]), &["g-a"]),
    ] {
        cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = roles);
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0]);
        assert_eq!(names(&cluster.server, ResourceKind::Adapter), adapters);
    }
}

#[test]
fn a_change_of_one_role_touches_no_other() {
    let mut cluster = up(json!([role("a", 2, "i:1"), role("b", 2, "i:1")]), 1);
    let of_other = |cluster: &OperatorSimulation| {
        let of_b = |kind: ResourceKind| {
            let all =
                cluster.server.all(kind).filter(|one| one["metadata"]["labels"][keys::ROLE_NAME] == "b");
            all.cloned().collect::<Vec<_>>()
        };
        [ResourceKind::Set, ResourceKind::Instance, ResourceKind::Pod].map(of_b)
    };
    let before = of_other(&cluster);
    set_image(&mut cluster, 0, "i:2");
    cluster.run(|_| {});
    set_role(&mut cluster, 0, |role| role["replicas"] = 3.into());
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    assert_eq!(images(&cluster)[..3], named(&[("g-a-0", "i:2"), ("g-a-1", "i:2"), ("g-a-2", "i:2")]));
    assert_eq!(of_other(&cluster), before);
}

#[test]
fn scaling_in_the_middle_of_an_update_converges() {
    for (replicas, seed) in [(5, 0), (1, 1), (5, 2), (1, 3)] {
        for steps in (5..60).step_by(11) {
            let mut cluster = up(json!([role("a", 3, "i:1")]), seed);
            set_image(&mut cluster, 0, "i:2");
            cluster.run_for(steps, |_| {});
            set_role(&mut cluster, 0, |role| role["replicas"] = replicas.into());
            cluster.run(|_| {});
            let what = format!("{replicas} after {steps} steps");
            assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
            let images: Vec<String> = images(&cluster).into_iter().map(|(_, image)| image).collect();
            assert_eq!(images, vec!["i:2"; usize::try_from(replicas).unwrap()], "{what}");
        }
    }
}

#[test]
fn edits_of_a_workload_by_others_are_undone() {
    let mut cluster = up(json!([role("a", 2, "i:1")]), 1);
    let before = pods(&cluster.server);
    cluster.edit(ResourceKind::Set, "g-a", |set| {
        set["spec"]["replicas"] = 1.into();
        set["spec"]["roleInstanceTemplate"]["components"][0]["template"]["spec"]["containers"][0]["image"] =
            "other:1".into();
        set["metadata"]["generation"] = 2.into();
        set["metadata"]["annotations"]["example.com/owner"] = "team".into();
    });
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    let set = cluster.server.get(ResourceKind::Set, "g-a").unwrap();
    let container =
        &set["spec"]["roleInstanceTemplate"]["components"][0]["template"]["spec"]["containers"][0];
    assert_eq!((&set["spec"]["replicas"], &container["image"]), (&json!(2), &json!("i:1")));
    assert_eq!(set["metadata"]["annotations"]["example.com/owner"], "team", "fields of others stay");
    assert_eq!(images(&cluster), named(&[("g-a-0", "i:1"), ("g-a-1", "i:1")]));
    assert_eq!(pods(&cluster.server)["g-a-0"].0, before["g-a-0"].0);
}

#[test]
fn roles_with_one_instance_are_updated_under_a_policy() {
    for skew in [json!("1%"), json!(0), json!("50%")] {
        let mut cluster = up(json!([role("a", 1, "i:1"), role("b", 1, "i:1")]), 1);
        let update = json!({ "rollingUpdate": { "maxSkew": skew, "maxUnavailable": "10%" } });
        let rule = json!({ "name": "p", "roles": ["a", "b"], "strategy": update });
        cluster.create(
            ResourceKind::Policy,
            json!({ "metadata": { "name": "g" }, "spec": { "policies": [rule] } }),
        );
        cluster.edit(ResourceKind::Group, "g", |group| {
            for role in group["spec"]["roles"].as_array_mut().unwrap() {
                role["standalonePattern"]["template"] = template("i:2");
            }
        });
        cluster.run(|_| {});
        assert_eq!(unsettled(&cluster.server), [""; 0], "{skew}");
        assert_eq!(images(&cluster), named(&[("g-a-0", "i:2"), ("g-b-0", "i:2")]), "{skew}");
    }
}

#[test]
fn an_evicted_pod_is_replaced_alone() {
    let mut cluster = up(json!([role("a", 2, "i:1")]), 1);
    let before = pods(&cluster.server);
    cluster.edit(ResourceKind::Pod, "g-a-0", |pod| {
        pod["status"]["phase"] = "Failed".into();
        pod["status"]["reason"] = "Evicted".into();
    });
    cluster.run(|_| {});
    assert_eq!(unsettled(&cluster.server), [""; 0]);
    let after = pods(&cluster.server);
    assert_ne!(after["g-a-0"].0, before["g-a-0"].0);
    assert_eq!(after["g-a-1"], before["g-a-1"]);
}

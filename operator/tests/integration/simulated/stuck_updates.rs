//! Failed updates, and their recovery.

use moongate_operator::ResourceKind;
use moongate_operator_testkit::OperatorSimulation;
use serde_json::json;

use super::{pods, role, server, status_truth, template, unsettled, up};

#[test]
fn broken_update_costs_one_instance_and_the_next_fixes_it() {
    for seed in 0..5 {
        let mut cluster = up(json!([role("a", 3, "i:1")]), seed);
        for (image, expected) in [("broken:2", ["i:1", "i:1", "broken:2"]), ("i:3", ["i:3"; 3])] {
            cluster.edit(ResourceKind::Group, "g", |group| {
                group["spec"]["roles"][0]["standalonePattern"]["template"] = template(image);
            });
            cluster.run(status_truth::check);
            let images: Vec<String> = pods(&cluster.server).into_values().map(|(.., image)| image).collect();
            assert_eq!(images, expected, "seed {seed}");
            assert_eq!(unsettled(&cluster.server).len(), usize::from(image == "broken:2"));
        }
        assert!(cluster.ended.is_empty(), "seed {seed}: {:?}", cluster.ended);
    }
}

#[test]
fn the_last_of_several_quick_edits_is_applied() {
    for seed in 0..5 {
        let mut cluster = up(json!([role("a", 2, "i:1")]), seed);
        for (round, image) in ["i:2", "i:3", "i:2", "i:4"].into_iter().enumerate() {
            cluster.edit(ResourceKind::Group, "g", |group| {
                group["spec"]["roles"][0]["standalonePattern"]["template"] = template(image);
            });
            cluster.run_for(20 * round, status_truth::check);
        }
        cluster.run(status_truth::check);
        assert_eq!(unsettled(&cluster.server), [""; 0], "seed {seed}");
        assert!(pods(&cluster.server).values().all(|(.., image)| image == "i:4"), "seed {seed}");
    }
}

#[test]
fn a_rollback_at_any_point_of_an_update_keeps_the_pods() {
    for image in ["i:2", "broken:2", "absent:2"] {
        for steps in (0..90).step_by(9) {
            let mut cluster = up(json!([role("a", 3, "i:1")]), u64::try_from(steps).unwrap());
            let uids = |cluster: &OperatorSimulation| -> Vec<String> {
                pods(&cluster.server).into_values().map(|(uid, ..)| uid).collect()
            };
            let before = uids(&cluster);
            for image in [image, "i:1"] {
                cluster.edit(ResourceKind::Group, "g", |group| {
                    group["spec"]["roles"][0]["standalonePattern"]["template"] = template(image);
                });
                cluster.run_for(steps, status_truth::check);
            }
            cluster.run(status_truth::check);
            let what = format!("{image}, rolled back after {steps} steps");
            assert_eq!(unsettled(&cluster.server), [""; 0], "{what}");
            assert_eq!(uids(&cluster), before, "{what}");
            assert!(pods(&cluster.server).values().all(|(.., image)| image == "i:1"), "{what}");
        }
    }
}

/// The first edit's image has not been set yet when the second edit changes another one.
#[test]
fn edits_of_two_images_in_one_grace_period_are_both_applied() {
    for steps in (0..60).step_by(6) {
        let rolling = json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": 30 } });
        let wanted = |first: &str, second: &str| {
            let container = |name: &str, image: &str| json!({ "name": name, "image": image });
            let containers = [container("c", first), container("d", second)];
            json!([{ "name": "a", "replicas": 2, "rolloutStrategy": { "rollingUpdate": rolling },
                "standalonePattern": { "template": { "spec": { "containers": containers } } } }])
        };
        let mut cluster = up(wanted("i:1", "i:1"), u64::try_from(steps).unwrap());
        for roles in [wanted("i:2", "i:1"), wanted("i:2", "i:3")] {
            cluster.edit(ResourceKind::Group, "g", |group| group["spec"]["roles"] = roles);
            cluster.run_for(steps, status_truth::check);
        }
        cluster.run(status_truth::check);
        assert_eq!(unsettled(&cluster.server), [""; 0], "{steps} steps");
        assert!(cluster.ended.is_empty(), "{steps} steps");
        for pod in cluster.server.all(ResourceKind::Pod) {
            let images = [0, 1].map(|index| &pod["status"]["containerStatuses"][index]["image"]);
            assert_eq!(images, ["i:2", "i:3"], "{steps} steps");
        }
    }
}

#[test]
fn a_broken_template_costs_a_set_one_group_until_fixed() {
    for seed in 0..5 {
        let mut cluster = OperatorSimulation::new(server(), seed);
        let spec = |image: &str| json!({ "roles": [role("a", 1, image)] });
        cluster.create(
            ResourceKind::GroupSet,
            json!({ "metadata": { "name": "s" },
                "spec": { "replicas": 3, "groupTemplate": { "spec": spec("i:1") } } }),
        );
        cluster.run(|_| {});
        for (image, expected) in [
            ("broken:2", ["i:1", "i:1", "broken:2"]),
            ("absent:3", ["i:1", "i:1", "absent:3"]),
            ("i:1", ["i:1"; 3]),
            ("broken:4", ["i:1", "i:1", "broken:4"]),
            ("i:5", ["i:5"; 3]),
        ] {
            cluster.edit(ResourceKind::GroupSet, "s", |set| {
                set["spec"]["groupTemplate"]["spec"] = spec(image);
            });
            cluster.run(|_| {});
            let images: Vec<String> = pods(&cluster.server).into_values().map(|(.., image)| image).collect();
            assert_eq!(images, expected, "seed {seed}");
        }
    }
}

//! Failed updates, and their recovery.

use moongate_operator::ResourceKind;
use serde_json::json;

use super::{pods, role, status_truth, template, unsettled, up};

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

//! How many writes a group costs: two roles of two instances, as in the measurements of upstream's controller.

use moongate_operator::ResourceKind;
use serde_json::json;

use crate::{role, template, up};

#[test]
fn a_group_is_made_and_updated_in_place_with_few_writes() {
    for seed in 0..5 {
        let mut cluster = up(json!([role("a", 2, "i:1"), role("b", 2, "i:1")]), seed);
        let made = cluster.writes;
        assert!(made <= 50, "seed {seed}: {made} writes");
        cluster.edit(ResourceKind::Group, "g", |group| {
            for role in group["spec"]["roles"].as_array_mut().unwrap() {
                role["standalonePattern"]["template"] = template("i:2");
            }
        });
        cluster.run(|_| {});
        let updated = cluster.writes - made;
        assert!(updated <= 70, "seed {seed}: {updated} writes");
        // What is as it shall be costs nothing.
        let before = cluster.writes;
        cluster
            .edit(ResourceKind::Group, "g", |group| group["metadata"]["labels"] = json!({ "some": "label" }));
        cluster.run(|_| {});
        assert_eq!(cluster.writes, before);
    }
}

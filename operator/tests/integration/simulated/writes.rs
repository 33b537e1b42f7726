//! Number of writes per group: two roles of two instances, as in the measurements of upstream's controller.

use moongate_operator::ResourceKind;
use serde_json::json;

use super::{role, template, up};

#[test]
fn group_creation_and_update_need_few_writes() {
    for seed in 0..5 {
        let mut cluster = up(json!([role("a", 2, "i:1"), role("b", 2, "i:1")]), seed);
        let created = cluster.writes;
        assert!(created <= 50, "seed {seed}: {created} writes");
        cluster.edit(ResourceKind::Group, "g", |group| {
            for role in group["spec"]["roles"].as_array_mut().unwrap() {
                role["standalonePattern"]["template"] = template("i:2");
            }
        });
        cluster.run(|_| {});
        let updated = cluster.writes - created;
        assert!(updated <= 70, "seed {seed}: {updated} writes");
        // Objects that match their desired state cause no writes.
        let before = cluster.writes;
        cluster
            .edit(ResourceKind::Group, "g", |group| group["metadata"]["labels"] = json!({ "some": "label" }));
        cluster.run(|_| {});
        assert_eq!(cluster.writes, before);
    }
}

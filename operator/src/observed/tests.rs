use serde_json::Value;

use super::*;

fn pod(uid: &str, version: u64) -> DynamicObject {
    serde_json::from_value(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": {
        "namespace": "n", "name": "p", "uid": uid, "resourceVersion": version.to_string(),
        "ownerReferences": [{ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleInstance",
            "name": "i", "uid": "owner", "controller": true }],
    }}))
    .unwrap()
}

#[test]
fn old_news_do_not_count() {
    let mut observed = Observed::default();
    let owner = Key { kind: Kind::Instance, namespace: "n".into(), name: "i".into() };
    assert_eq!(observed.take(Kind::Pod, pod("a", 5)), vec![owner.clone()]);
    assert!(observed.take(Kind::Pod, pod("a", 4)).is_empty());
    let key = observed.children("owner", Kind::Pod)[0].key.clone();
    assert_eq!(observed.lose(&key, "a"), vec![owner.clone()]);
    assert!(observed.take(Kind::Pod, pod("a", 6)).is_empty(), "it is gone for good");
    assert_eq!(observed.take(Kind::Pod, pod("b", 7)), [owner]);
    assert!(observed.lose(&key, "a").is_empty(), "another one has the name now");
    assert_eq!(observed.children("owner", Kind::Pod).len(), 1);
}

#[test]
fn only_what_is_looked_at_of_a_node_concerns_a_warmup() {
    let object = |kind: &str, member: &str, value: Value, version: u64| -> DynamicObject {
        let meta = json!({ "name": "a", "uid": kind, "resourceVersion": version.to_string(), "labels": { "rack": "x" } });
        let mut object = json!({ "apiVersion": "v1", "kind": kind, "metadata": meta });
        object[member] = value;
        serde_json::from_value(object).unwrap()
    };
    let mut observed = Observed::default();
    observed.take(Kind::Warmup, object("RoleBasedGroupWarmup", "spec", json!({}), 1));
    let warmup = Key { kind: Kind::Warmup, namespace: String::new(), name: "a".into() };
    let node = |beat: u64, version: u64| object("Node", "status", json!({ "beat": beat }), version);
    assert_eq!(observed.take(Kind::Node, node(1, 2)), std::slice::from_ref(&warmup));
    assert!(observed.take(Kind::Node, node(2, 3)).is_empty());
    let mut moved = node(3, 4);
    moved.metadata.labels = None;
    assert_eq!(observed.take(Kind::Node, moved), [warmup]);
}

#[test]
fn a_list_ends_what_it_does_not_have_but_not_what_was_written_meanwhile() {
    let mut observed = Observed::default();
    observed.take(Kind::Pod, pod("a", 5));
    let era = observed.begin_list();
    observed.take(Kind::Pod, pod("a", 5));
    assert!(observed.end_list(Kind::Pod, era).is_empty());
    let era = observed.begin_list();
    assert_eq!(observed.end_list(Kind::Pod, era).len(), 1);
    assert!(observed.children("owner", Kind::Pod).is_empty());
}

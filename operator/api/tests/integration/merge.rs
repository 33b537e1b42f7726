//! Strategic merge of pod templates: the rules in Kubernetes' documentation.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use proptest::prelude::*;
use rbg_api::PodTemplate;
use rbg_api::merge::{MergeError, pod_template};
use serde_json::{Value, json};

fn merged(base: Value, patch: Value) -> Value {
    Value::Object(try_merge(base, patch).unwrap().0)
}

fn try_merge(base: Value, patch: Value) -> Result<PodTemplate, MergeError> {
    pod_template(&serde_json::from_value(base).unwrap(), Some(&patch))
}

/// The pod template of the documentation's example, with these containers.
fn containers(containers: Value) -> Value {
    json!({ "spec": { "containers": containers } })
}

#[test]
fn an_item_with_a_new_key_is_prepended() {
    // As `kubectl patch` does: first the patch's list, then the existing items.
    let merged = merged(
        containers(json!([{ "name": "patch-demo-ctr", "image": "nginx" }])),
        containers(json!([{ "name": "patch-demo-ctr-2", "image": "redis" }])),
    );
    assert_eq!(
        merged,
        containers(json!([
            { "name": "patch-demo-ctr-2", "image": "redis" },
            { "name": "patch-demo-ctr", "image": "nginx" },
        ]))
    );
}

#[test]
fn items_with_the_same_key_are_merged_in_place() {
    let merged = merged(
        containers(json!([
            { "name": "a", "image": "a:1", "env": [{ "name": "X", "value": "1" }, { "name": "Y", "value": "2" }] },
            { "name": "b", "image": "b:1" },
        ])),
        containers(
            json!([{ "name": "b", "image": "b:2" }, { "name": "a", "env": [{ "name": "Y", "value": "3" }] }]),
        ),
    );
    assert_eq!(
        merged,
        containers(json!([
            { "name": "b", "image": "b:2" },
            { "name": "a", "image": "a:1", "env": [{ "name": "X", "value": "1" }, { "name": "Y", "value": "3" }] },
        ])),
        "the patch's order takes precedence"
    );
}

#[test]
fn every_list_has_its_own_key() {
    let base = containers(json!([{
        "name": "c",
        "ports": [{ "containerPort": 80, "name": "http" }],
        "volumeMounts": [{ "mountPath": "/a", "name": "a" }],
    }]));
    let patch = containers(json!([{
        "name": "c",
        "ports": [{ "containerPort": 80, "protocol": "TCP" }],
        "volumeMounts": [{ "mountPath": "/b", "name": "a" }],
    }]));
    assert_eq!(
        merged(base, patch),
        containers(json!([{
            "name": "c",
            "ports": [{ "containerPort": 80, "name": "http", "protocol": "TCP" }],
            "volumeMounts": [{ "mountPath": "/b", "name": "a" }, { "mountPath": "/a", "name": "a" }],
        }]))
    );
    let base = json!({ "spec": { "tolerations": [{ "key": "a" }], "nodeSelector": { "a": "1" } } });
    let patch = json!({ "spec": { "tolerations": [{ "key": "b" }], "nodeSelector": { "b": "2" } } });
    assert_eq!(
        merged(base, patch),
        json!({ "spec": { "tolerations": [{ "key": "b" }], "nodeSelector": { "a": "1", "b": "2" } } }),
        "tolerations have no key and are replaced"
    );
}

#[test]
fn null_removes_a_field_and_is_never_stored() {
    let base = json!({ "metadata": { "labels": { "a": "1", "b": "2" } } });
    let patch = json!({ "metadata": { "labels": { "a": null, "c": null }, "annotations": { "x": null } } });
    assert_eq!(merged(base, patch), json!({ "metadata": { "labels": { "b": "2" }, "annotations": {} } }));
}

#[test]
fn directives_replace_and_delete() {
    let base = containers(json!([{ "name": "a", "image": "a:1" }, { "name": "b", "image": "b:1" }]));
    let patch = containers(json!([{ "name": "a", "$patch": "delete" }]));
    assert_eq!(merged(base.clone(), patch), containers(json!([{ "name": "b", "image": "b:1" }])));
    let patch = containers(json!([{ "name": "c" }, { "$patch": "replace" }]));
    assert_eq!(merged(base.clone(), patch), containers(json!([{ "name": "c" }])));
    let patch = containers(json!([{ "name": "a", "resources": { "$patch": "replace", "limits": {} } }]));
    assert_eq!(
        merged(base.clone(), patch).pointer("/spec/containers/0/resources"),
        Some(&json!({ "limits": {} }))
    );
    let patch = json!({ "spec": { "$patch": "replace", "hostNetwork": true } });
    assert_eq!(merged(base.clone(), patch), json!({ "spec": { "hostNetwork": true } }));
    let patch = json!({ "spec": { "$patch": "delete" } });
    assert_eq!(merged(base, patch), json!({ "spec": {} }));
}

#[test]
fn retain_keys_allows_changing_the_kind_of_a_volume() {
    let base = json!({ "spec": { "volumes": [{ "name": "v", "emptyDir": { "medium": "Memory" } }] } });
    let patch = json!({ "spec": { "volumes": [{
        "name": "v",
        "$retainKeys": ["name", "hostPath"],
        "hostPath": { "path": "/x" },
    }] } });
    assert_eq!(
        merged(base, patch),
        json!({ "spec": { "volumes": [{ "name": "v", "hostPath": { "path": "/x" } }] } })
    );
}

#[test]
fn set_element_order_sorts_items() {
    let base = containers(json!([{ "name": "a" }, { "name": "b" }, { "name": "c" }]));
    let patch = json!({ "spec": {
        "$setElementOrder/containers": [{ "name": "c" }, { "name": "n" }, { "name": "a" }],
        "containers": [{ "name": "n" }],
    } });
    let names = |value: &Value| {
        let list = value.pointer("/spec/containers").unwrap().as_array().unwrap();
        list.iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&merged(base.clone(), patch)), ["b", "c", "n", "a"]);
    let patch = json!({ "spec": { "$setElementOrder/containers": [{ "name": "c" }, { "name": "b" }, { "name": "a" }] } });
    assert_eq!(names(&merged(base, patch)), ["c", "b", "a"]);
}

#[test]
fn lists_of_strings_are_sets() {
    let base = json!({ "metadata": { "finalizers": ["a", "b", "c"] } });
    let patch = json!({ "metadata": {
        "finalizers": ["d", "b"],
        "$deleteFromPrimitiveList/finalizers": ["c"],
    } });
    assert_eq!(merged(base, patch), json!({ "metadata": { "finalizers": ["d", "a", "b"] } }));
}

#[test]
fn errors_name_what_cannot_be_merged() {
    let base = || containers(json!([{ "name": "a" }]));
    let no_key = MergeError::NoKey { list: "containers".into(), key: "name" };
    assert_eq!(try_merge(base(), containers(json!([{ "image": "x" }]))), Err(no_key));
    assert_eq!(try_merge(base(), json!([1])), Err(MergeError::NotAMap("a list")));
    assert_eq!(
        try_merge(base(), json!({ "spec": { "$patch": "repalce" } })),
        Err(MergeError::Directive("\"repalce\"".into()))
    );
    let mut deep = json!({});
    for _ in 0..100 {
        deep = json!({ "spec": deep });
    }
    assert_eq!(try_merge(base(), deep), Err(MergeError::TooDeep));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0..4i64).prop_map(Value::from),
        "[ab]".prop_map(Value::from),
    ];
    let name = prop_oneof![
        Just("spec"),
        Just("containers"),
        Just("name"),
        Just("env"),
        Just("$patch"),
        Just("$setElementOrder/containers"),
        Just("metadata"),
        Just("finalizers"),
    ];
    leaf.prop_recursive(6, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::btree_map(name.clone().prop_map(str::to_owned), inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_patch_panics_and_no_directive_survives(base in any_json(), patch in any_json()) {
        let base = match base {
            Value::Object(base) => PodTemplate(base),
            _ => PodTemplate::default(),
        };
        // A base contains no directives of its own.
        let text = serde_json::to_string(&base).unwrap();
        if let (false, Ok(merged)) = (text.contains('$'), pod_template(&base, Some(&patch))) {
            // Lists that are replaced as a whole keep their contents.
            if !patch.to_string().contains('[') {
                prop_assert!(!serde_json::to_string(&merged).unwrap().contains('$'));
            }
        }
    }

    #[test]
    fn an_empty_patch_changes_nothing(base in any_json()) {
        if let Value::Object(base) = base {
            let base = PodTemplate(base);
            prop_assert_eq!(pod_template(&base, Some(&json!({}))).unwrap(), base);
        }
    }
}

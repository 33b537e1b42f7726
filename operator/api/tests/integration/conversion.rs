//! Conversion in both directions: nothing is lost, and edits through either version survive.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use proptest::prelude::*;
use rbg_api::conversion::{ApiVersion, ConversionError, convert, without_mirrors};
use rbg_api::{v1alpha1, v1alpha2};
use serde_json::{Map, Value, json};

fn up(object: &Value) -> Value {
    convert(object, ApiVersion::V1alpha2).unwrap()
}

fn down(object: &Value) -> Value {
    convert(object, ApiVersion::V1alpha1).unwrap()
}

fn group(version: &str, metadata: Value, spec: Value) -> Value {
    json!({ "apiVersion": version, "kind": "RoleBasedGroup", "metadata": metadata, "spec": spec })
}

fn v1(spec: Value) -> Value {
    group("workloads.x-k8s.io/v1alpha1", json!({ "name": "g" }), spec)
}

fn v2(spec: Value) -> Value {
    group("workloads.x-k8s.io/v1alpha2", json!({ "name": "g" }), spec)
}

#[test]
fn workload_template_and_restart_policy_become_a_pattern() {
    let template = json!({ "spec": { "containers": [{ "name": "c" }] } });
    let converted = up(&v1(json!({ "roles": [
        { "name": "a", "template": template, "workload": { "apiVersion": "apps/v1", "kind": "StatefulSet" } },
        { "name": "b", "templateRef": { "name": "t" }, "templatePatch": { "spec": {} },
          "workload": { "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "InstanceSet" } },
        { "name": "c", "template": template, "restartPolicy": "None",
          "leaderWorkerSet": { "size": 2, "patchLeaderTemplate": { "x": 1 } } },
        { "name": "d", "components": [{ "name": "x", "template": template }] },
    ] })));
    let roles = &converted["spec"]["roles"];
    let kind = "rbg.workloads.x-k8s.io/role-workload-type";
    assert_eq!(roles[0]["standalonePattern"], json!({ "template": template }));
    assert_eq!(roles[0]["annotations"][kind], "apps/v1/StatefulSet");
    assert_eq!(
        roles[1]["standalonePattern"],
        json!({ "templateRef": { "name": "t", "patch": { "spec": {} } } })
    );
    assert_eq!(roles[1]["annotations"][kind], "workloads.x-k8s.io/v1alpha1/InstanceSet");
    assert_eq!(
        roles[2]["leaderWorkerPattern"],
        json!({
            "size": 2, "template": template, "leaderTemplatePatch": { "x": 1 },
            "restartPolicyConfig": { "type": "None" },
        })
    );
    assert_eq!(roles[2]["annotations"][kind], "apps/v1/StatefulSet", "v1alpha1's default");
    assert_eq!(roles[3]["customComponentsPattern"]["components"][0]["name"], "x");
    serde_json::from_value::<v1alpha2::RoleBasedGroup>(converted).unwrap();
}

#[test]
fn gang_and_coordination_become_annotations() {
    let object = v1(json!({
        "roles": [],
        "podGroupPolicy": { "kubeScheduling": { "scheduleTimeoutSeconds": 90 } },
        "coordination": [{ "name": "c", "roles": ["a"] }],
    }));
    let converted = up(&object);
    let annotations = &converted["metadata"]["annotations"];
    assert_eq!(annotations["rbg.workloads.x-k8s.io/group-gang-scheduling"], "true");
    assert_eq!(annotations["rbg.workloads.x-k8s.io/group-gang-scheduling-timeout"], "90");
    assert_eq!(
        annotations["conversion.workloads.x-k8s.io/v1alpha1-coordination"],
        r#"[{"name":"c","roles":["a"]}]"#
    );
    assert_eq!(down(&converted), object);
}

#[test]
fn edits_through_v1alpha1_keep_fields_it_lacks() {
    let template = json!({ "spec": { "containers": [{ "name": "c", "image": "i:1" }] } });
    let object = v2(json!({ "roles": [{
        "name": "a",
        "podManagementPolicy": "OrderedReady",
        "scalingAdapter": { "enable": true, "labels": { "x": "y" } },
        "leaderWorkerPattern": {
            "template": template,
            "sharedServiceSelection": "All",
            "restartPolicyConfig": { "type": "None", "baseDelaySeconds": 5 },
        },
    }, {
        "name": "b",
        "customComponentsPattern": { "components": [{ "name": "x", "labels": { "l": "1" }, "template": template }] },
    }] }));
    let mut older = down(&object);
    serde_json::from_value::<v1alpha1::RoleBasedGroup>(older.clone()).unwrap();
    older["spec"]["roles"][0]["template"]["spec"]["containers"][0]["image"] = "i:2".into();
    older["spec"]["roles"][0]["restartPolicy"] = "RecreateRoleInstanceOnPodRestart".into();
    older["spec"]["roles"][1]["components"][0]["template"]["spec"]["containers"][0]["image"] = "i:3".into();
    let mut expected = object;
    let pattern = &mut expected["spec"]["roles"][0]["leaderWorkerPattern"];
    pattern["template"]["spec"]["containers"][0]["image"] = "i:2".into();
    pattern["restartPolicyConfig"]["type"] = "RecreateRoleInstanceOnPodRestart".into();
    let components = &mut expected["spec"]["roles"][1]["customComponentsPattern"]["components"];
    components[0]["template"]["spec"]["containers"][0]["image"] = "i:3".into();
    assert_eq!(up(&older), expected);
}

#[test]
fn edits_through_v1alpha2_win_over_stored_fields() {
    let object =
        v1(json!({ "roles": [{ "name": "a", "template": {}, "components": [], "restartPolicy": "None" }] }));
    let mut newer = up(&object);
    newer["spec"]["roles"][0]["standalonePattern"]["template"] = json!({ "spec": { "hostNetwork": true } });
    newer["spec"]["roles"][0]["annotations"]["rbg.workloads.x-k8s.io/role-workload-type"] =
        "apps/v1/Deployment".into();
    let role = &down(&newer)["spec"]["roles"][0];
    assert_eq!(role["template"], json!({ "spec": { "hostNetwork": true } }));
    assert_eq!(role["workload"], json!({ "apiVersion": "apps/v1", "kind": "Deployment" }));
    assert_eq!(role["restartPolicy"], "None", "the field was not edited");
}

#[test]
fn a_forged_annotation_changes_no_metadata() {
    let change = |at: Value, is: Value| json!([{ "at": at, "is": is }]).to_string();
    let name = json!({ "at": ["metadata", "name"], "was": "g", "is": "other" });
    for remainder in [
        json!([name]).to_string(),
        change(json!(["kind"]), json!("Pod")),
        change(json!(["metadata", "finalizers"]), json!(["x"])),
        change(json!(["metadata", "annotations", "a"]), json!(1)),
        change(json!([]), json!(1)),
        "[[[".to_owned(),
    ] {
        let mut object = v2(json!({ "roles": [] }));
        let expected = down(&object);
        object["metadata"]["annotations"] =
            json!({ "conversion.workloads.x-k8s.io/v1alpha1-remainder": remainder });
        assert_eq!(down(&object), expected, "{remainder}");
    }
}

#[test]
fn the_recreate_update_type_has_two_names() {
    let role = |kind: &str| json!({ "rolloutStrategy": { "type": "RollingUpdate", "rollingUpdate": { "type": kind } } });
    let kind = |object: &Value| object.pointer("/spec/roles/0/rolloutStrategy/rollingUpdate/type").cloned();
    let converted = up(&v1(json!({ "roles": [role("Recreate")] })));
    assert_eq!(kind(&converted), Some("RecreatePod".into()));
    assert_eq!(kind(&down(&converted)), Some("Recreate".into()));
}

#[test]
fn sets_keep_gang_and_templates() {
    let object = json!({
        "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroupSet", "metadata": { "name": "s" },
        "spec": { "replicas": 2, "template": {
            "podGroupPolicy": { "volcanoScheduling": { "queue": "q" } },
            "roleTemplates": [{ "name": "t", "template": {} }],
            "roles": [{ "name": "a", "templateRef": { "name": "t" } }],
        } },
    });
    let converted = up(&object);
    let template = &converted["spec"]["groupTemplate"];
    assert_eq!(template["annotations"]["rbg.workloads.x-k8s.io/group-gang-scheduling-volcano-queue"], "q");
    assert_eq!(template["spec"]["roleTemplates"][0]["name"], "t");
    assert_eq!(down(&converted), object);
    serde_json::from_value::<v1alpha2::RoleBasedGroupSet>(converted).unwrap();
}

#[test]
fn errors_name_what_is_not_converted() {
    assert_eq!(convert(&json!(1), ApiVersion::V1alpha1), Err(ConversionError::NotAMap));
    let other = json!({ "apiVersion": "v1", "kind": "Pod" });
    assert_eq!(convert(&other, ApiVersion::V1alpha1), Err(ConversionError::Version("v1".into())));
    let set = json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "InstanceSet" });
    assert_eq!(convert(&set, ApiVersion::V1alpha2), Err(ConversionError::Kind("InstanceSet".into())));
    let adapter =
        json!({ "apiVersion": "workloads.x-k8s.io/v1alpha1", "kind": "RoleBasedGroupScalingAdapter" });
    assert_eq!(convert(&adapter, ApiVersion::V1alpha2).unwrap()["apiVersion"], "workloads.x-k8s.io/v1alpha2");
}

/// Arbitrary JSON whose keys have a meaning in either version.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0..3i64).prop_map(Value::from),
        prop::sample::select(vec![
            "",
            "a",
            "Recreate",
            "RecreatePod",
            "RecreateRBGOnPodRestart",
            "apps/v1",
            "/",
            "[]"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, |inner| {
        prop_oneof![prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Array), object_of(inner)]
    })
}

fn object_of(inner: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
    const NAMES: &[&str] = &[
        "name",
        "annotations",
        "labels",
        "workload",
        "apiVersion",
        "kind",
        "template",
        "templateRef",
        "templatePatch",
        "patch",
        "leaderWorkerSet",
        "components",
        "restartPolicy",
        "restartPolicyConfig",
        "type",
        "standalonePattern",
        "leaderWorkerPattern",
        "customComponentsPattern",
        "sharedServiceSelection",
        "scalingAdapter",
        "enable",
        "podManagementPolicy",
        "rolloutStrategy",
        "rollingUpdate",
        "baseDelaySeconds",
        "podGroupPolicy",
        "kubeScheduling",
        "scheduleTimeoutSeconds",
        "volcanoScheduling",
        "queue",
        "coordination",
        "roles",
        "spec",
        "groupTemplate",
        "unknown",
        "rbg.workloads.x-k8s.io/role-workload-type",
        "rbg.workloads.x-k8s.io/group-gang-scheduling",
        "rolebasedgroup.workloads.x-k8s.io/exclusive-topology",
        "conversion.workloads.x-k8s.io/v1alpha1-coordination",
        "conversion.workloads.x-k8s.io/origin",
    ];
    prop::collection::vec((prop::sample::select(NAMES), inner), 0..6).prop_map(|members| {
        Value::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    })
}

/// Metadata as the API server allows it: annotations are strings, and the map is not empty.
fn metadata() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec![
        "a",
        "rbg.workloads.x-k8s.io/group-gang-scheduling",
        "rbg.workloads.x-k8s.io/group-exclusive-topology",
        "rolebasedgroup.workloads.x-k8s.io/exclusive-topology",
        "conversion.workloads.x-k8s.io/v1alpha1-coordination",
        "conversion.workloads.x-k8s.io/v1alpha1-pod-group-policy",
        "conversion.workloads.x-k8s.io/origin",
    ]);
    let value = prop::sample::select(vec!["", "true", "x", "[]", "{\"kubeScheduling\": {}}", "v1alpha1"]);
    prop::option::of(prop::collection::btree_map(key, value, 1..4)).prop_map(
        |annotations| match annotations {
            Some(annotations) => json!({ "name": "g", "annotations": annotations }),
            None => json!({ "name": "g" }),
        },
    )
}

fn any_object(version: &'static str) -> impl Strategy<Value = Value> {
    let kind = prop::sample::select(vec!["RoleBasedGroup", "RoleBasedGroupSet"]);
    let roles =
        prop::collection::vec((prop::sample::select(vec!["a", "b", "c"]), object_of(any_value())), 0..3);
    (kind, metadata(), object_of(any_value()), roles).prop_map(move |(kind, metadata, spec, roles)| {
        let roles = roles.into_iter().map(|(name, mut role)| {
            role["name"] = name.into();
            role
        });
        let mut inner = spec;
        inner["roles"] = Value::Array(roles.collect());
        let spec = match (kind, version) {
            ("RoleBasedGroup", _) => inner,
            (_, "workloads.x-k8s.io/v1alpha1") => json!({ "template": inner }),
            _ => json!({ "groupTemplate": { "spec": inner } }),
        };
        let members =
            [("apiVersion", version.into()), ("kind", kind.into()), ("metadata", metadata), ("spec", spec)];
        Value::Object(
            members.map(|(name, value)| (name.to_owned(), value)).into_iter().collect::<Map<_, _>>(),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn round_trip_from_v1alpha1_is_lossless(object in any_object("workloads.x-k8s.io/v1alpha1")) {
        prop_assert_eq!(down(&up(&object)), object);
    }

    /// A group that was written as v1alpha1 gets mirrors of its templates, which change nothing else.
    #[test]
    fn round_trip_from_v1alpha2_is_lossless(object in any_object("workloads.x-k8s.io/v1alpha2")) {
        let returned = up(&down(&object));
        prop_assert_eq!(without_mirrors(&returned), object);
        prop_assert_eq!(up(&down(&returned)), returned);
    }
}

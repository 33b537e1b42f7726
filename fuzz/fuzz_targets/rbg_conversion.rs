//! Converting a group or set to the other version and back returns the same object, for any content with metadata that an API server
//! admits. An object that deserializes into a typed version also survives serialization and deserialization.
//!
//! The first byte selects version and kind. The rest is JSON; bytes that are not JSON generate an object from member names that have a
//! meaning in either version.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rbg_api::conversion::{ApiVersion, PREFIX, convert};
use rbg_api::{v1alpha1, v1alpha2};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

const MAX_DEPTH: usize = 8;
const NAMES: [&str; 40] = [
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
    "size",
    "replicas",
    "rbg.workloads.x-k8s.io/role-workload-type",
    "rbg.workloads.x-k8s.io/group-gang-scheduling",
    "rolebasedgroup.workloads.x-k8s.io/exclusive-topology",
    "RecreatePod",
];

fn generate(bytes: &mut std::slice::Iter<'_, u8>, depth: usize) -> Value {
    let Some(first) = bytes.next() else { return Value::Null };
    let count = usize::from(first / 8) % 6;
    match first % 8 {
        0 => Value::Null,
        1 => Value::Bool(first & 8 == 8),
        2 => Value::from(i64::from(*first / 8) - 2),
        3 => Value::from(NAMES[usize::from(*first / 8)]),
        4 => Value::from(if first & 8 == 8 { "" } else { "apps/v1/StatefulSet" }),
        5 if depth < MAX_DEPTH => (0..count).map(|_| generate(bytes, depth + 1)).collect(),
        _ if depth < MAX_DEPTH => {
            let mut members = Map::new();
            for _ in 0..count {
                let Some(name) = bytes.next() else { break };
                members
                    .insert(NAMES[usize::from(*name) % NAMES.len()].to_owned(), generate(bytes, depth + 1));
            }
            Value::Object(members)
        }
        _ => Value::Null,
    }
}

/// Whether the metadata is valid input for the round trip: annotations are strings, and their map is not empty. Annotations with
/// `PREFIX` are excluded, because conversion itself stores lost fields in them.
fn is_admitted(metadata: Option<&Value>) -> bool {
    let Some(Value::Object(metadata)) = metadata else { return false };
    match metadata.get("annotations") {
        None => true,
        Some(Value::Object(annotations)) => {
            let is_valid = |(name, value): (&String, &Value)| value.is_string() && !name.starts_with(PREFIX);
            !annotations.is_empty() && annotations.iter().all(is_valid)
        }
        Some(_) => false,
    }
}

fn check_typed<T: Serialize + DeserializeOwned>(object: &Value) {
    let Ok(typed) = serde_json::from_value::<T>(object.clone()) else { return };
    let written = serde_json::to_value(&typed).expect("a typed object serializes");
    let again: T = serde_json::from_value(written.clone()).expect("a serialized object deserializes");
    assert_eq!(serde_json::to_value(&again).expect("a typed object serializes"), written);
}

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else { return };
    let [from, to] = match first & 1 {
        0 => [ApiVersion::V1alpha1, ApiVersion::V1alpha2],
        _ => [ApiVersion::V1alpha2, ApiVersion::V1alpha1],
    };
    let kind = if first & 2 == 0 { "RoleBasedGroup" } else { "RoleBasedGroupSet" };
    let mut object = match serde_json::from_slice(rest) {
        Ok(Value::Object(object)) => object,
        _ => {
            let spec = generate(&mut rest.iter(), 0);
            json!({ "metadata": { "name": "g" }, "spec": spec }).as_object().cloned().unwrap_or_default()
        }
    };
    object.insert("apiVersion".to_owned(), from.api_version().into());
    object.insert("kind".to_owned(), kind.into());
    let is_admitted = is_admitted(object.get("metadata"));
    let object = Value::Object(object);
    let converted = convert(&object, to).expect("groups and sets convert");
    assert_eq!(converted["apiVersion"], to.api_version());
    let back = convert(&converted, from).expect("a converted group or set converts back");
    if is_admitted {
        assert_eq!(back, object);
    }
    match (first & 1, first & 2) {
        (0, 0) => check_typed::<v1alpha1::RoleBasedGroup>(&object),
        (_, 0) => check_typed::<v1alpha2::RoleBasedGroup>(&object),
        (1, _) => check_typed::<v1alpha2::RoleBasedGroupSet>(&object),
        _ => {}
    }
});

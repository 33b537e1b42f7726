//! Conversion of groups and sets.

use serde_json::{Map, Value};

use super::role;
use super::{ApiVersion, COORDINATION, ORIGIN, POD_GROUP_POLICY, drop_empty_annotations};
use crate::keys;
use crate::template::{member_list, member_object};

type JsonObject = Map<String, Value>;

/// Location of the groups' spec in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpecLocation {
    /// The object is a group.
    Group,
    /// The object is a set: v1alpha1 has the spec in `spec.template`, v1alpha2 in `spec.groupTemplate.spec`.
    Set,
}

/// The object in that version, without fields that the version cannot express.
pub(super) fn convert_object(object: &Value, to: ApiVersion, location: SpecLocation) -> Value {
    let Value::Object(object) = object else { return object.clone() };
    let mut object = object.clone();
    object.insert("apiVersion".to_owned(), to.api_version().into());
    match (location, to) {
        (SpecLocation::Group, ApiVersion::V1alpha2) => {
            let mut spec = take_object(&mut object, "spec");
            let annotations = member_object(member_object(&mut object, "metadata"), "annotations");
            if let Some(spec) = &mut spec {
                spec_to_v1alpha2(spec, annotations);
            }
            put_object(&mut object, "spec", spec);
        }
        (SpecLocation::Group, ApiVersion::V1alpha1) => {
            let mut spec = take_object(&mut object, "spec");
            let mut metadata = take_object(&mut object, "metadata").unwrap_or_default();
            if let Some(spec) = &mut spec {
                spec_to_v1alpha1(spec, member_object(&mut metadata, "annotations"));
            }
            put_object(&mut object, "metadata", Some(metadata));
            put_object(&mut object, "spec", spec);
        }
        (SpecLocation::Set, ApiVersion::V1alpha2) => set_to_v1alpha2(member_object(&mut object, "spec")),
        (SpecLocation::Set, ApiVersion::V1alpha1) => set_to_v1alpha1(member_object(&mut object, "spec")),
    }
    drop_empty_annotations(&mut object);
    Value::Object(object)
}

fn set_to_v1alpha2(spec: &mut JsonObject) {
    let Some(mut inner) = take_object(spec, "template") else { return };
    let template = member_object(spec, "groupTemplate");
    spec_to_v1alpha2(&mut inner, member_object(template, "annotations"));
    drop_empty(template, "annotations");
    put_object(template, "spec", Some(inner));
}

fn set_to_v1alpha1(spec: &mut JsonObject) {
    let Some(mut template) = take_object(spec, "groupTemplate") else { return };
    if let Some(mut inner) = take_object(&mut template, "spec") {
        spec_to_v1alpha1(&mut inner, member_object(&mut template, "annotations"));
        put_object(spec, "template", Some(inner));
    }
}

fn spec_to_v1alpha2(spec: &mut JsonObject, annotations: &mut JsonObject) {
    annotations.insert(ORIGIN.to_owned(), "v1alpha1".into());
    if let Some(policy) = spec.remove("podGroupPolicy") {
        annotations.extend(gang_annotations(&policy));
        annotations.insert(POD_GROUP_POLICY.to_owned(), policy.to_string().into());
    }
    if let Some(coordination) = spec.remove("coordination") {
        annotations.insert(COORDINATION.to_owned(), coordination.to_string().into());
    }
    if let Some(topology) = annotations.get(keys::legacy::EXCLUSIVE_TOPOLOGY).cloned() {
        annotations.insert(keys::GROUP_EXCLUSIVE_TOPOLOGY.to_owned(), topology);
    }
    each_role(spec, role::role_to_v1alpha2);
}

fn spec_to_v1alpha1(spec: &mut JsonObject, annotations: &mut JsonObject) {
    annotations.remove(ORIGIN);
    if let Some(policy) = take_json(annotations, POD_GROUP_POLICY) {
        for (key, value) in gang_annotations(&policy) {
            if annotations.get(&key) == Some(&value) {
                annotations.remove(&key);
            }
        }
        spec.insert("podGroupPolicy".to_owned(), policy);
    }
    if let Some(coordination) = take_json(annotations, COORDINATION) {
        spec.insert("coordination".to_owned(), coordination);
    }
    let topology = annotations.get(keys::legacy::EXCLUSIVE_TOPOLOGY);
    if topology.is_some() && topology == annotations.get(keys::GROUP_EXCLUSIVE_TOPOLOGY) {
        annotations.remove(keys::GROUP_EXCLUSIVE_TOPOLOGY);
    }
    each_role(spec, role::role_to_v1alpha1);
}

fn each_role(spec: &mut JsonObject, map: impl Fn(&mut JsonObject)) {
    if spec.get("roles").is_some_and(Value::is_array) {
        member_list(spec, "roles").iter_mut().filter_map(Value::as_object_mut).for_each(map);
    }
}

/// Annotations of v1alpha2 for v1alpha1's `podGroupPolicy`.
fn gang_annotations(policy: &Value) -> Vec<(String, Value)> {
    let text =
        |pointer: &str| policy.pointer(pointer).and_then(Value::as_str).filter(|text| !text.is_empty());
    let mut annotations = Vec::new();
    if policy.get("kubeScheduling").is_some_and(Value::is_object) {
        annotations.push((keys::GANG_SCHEDULING, "true".to_owned()));
        if let Some(seconds) =
            policy.pointer("/kubeScheduling/scheduleTimeoutSeconds").and_then(Value::as_i64)
        {
            annotations.push((keys::GANG_SCHEDULING_TIMEOUT, seconds.to_string()));
        }
    } else if policy.get("volcanoScheduling").is_some_and(Value::is_object) {
        annotations.push((keys::GANG_SCHEDULING, "true".to_owned()));
        let queue =
            text("/volcanoScheduling/queue").map(|queue| (keys::GANG_SCHEDULING_VOLCANO_QUEUE, queue));
        let class = text("/volcanoScheduling/priorityClassName");
        let class = class.map(|class| (keys::GANG_SCHEDULING_VOLCANO_PRIORITY, class));
        annotations.extend(queue.into_iter().chain(class).map(|(key, value)| (key, value.to_owned())));
    }
    annotations.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()
}

/// Removes an annotation and parses it as JSON; an invalid one stays.
fn take_json(annotations: &mut JsonObject, key: &str) -> Option<Value> {
    let value = serde_json::from_str(annotations.get(key)?.as_str()?).ok()?;
    annotations.remove(key);
    Some(value)
}

/// Removes a field if it is an object.
pub(super) fn take_object(parent: &mut JsonObject, name: &str) -> Option<JsonObject> {
    match parent.remove(name)? {
        Value::Object(object) => Some(object),
        other => {
            parent.insert(name.to_owned(), other);
            None
        }
    }
}

pub(super) fn put_object(parent: &mut JsonObject, name: &str, object: Option<JsonObject>) {
    if let Some(object) = object {
        parent.insert(name.to_owned(), Value::Object(object));
    }
}

pub(super) fn drop_empty(parent: &mut JsonObject, name: &str) {
    if parent.get(name).and_then(Value::as_object).is_some_and(Map::is_empty) {
        parent.remove(name);
    }
}

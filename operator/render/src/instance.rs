//! Renders the RoleInstances of a RoleInstanceSet.

use rbg_api::v1alpha2::RoleInstanceSet;
use rbg_api::{conversion, keys};
use serde_json::{Value, json};

use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::{RenderError, names};

/// Number of letters of an instance's id.
pub const ID_LENGTH: usize = 5;
/// Maximum length of an instance's name: its pod has the same name, which is a host name.
const MAX_NAME: usize = 63;
/// Readiness gate of an instance that is updated in place.
const IN_PLACE_UPDATE_READY: &str = "RoleInstanceInPlaceUpdateReady";

/// Annotations that instances inherit from their set.
pub const INHERITED: [&str; 9] = [
    keys::INSTANCE_GANG_SCHEDULING,
    keys::INPLACE_SCHEDULING,
    keys::INPLACE_SCHEDULING_GRANULARITY,
    keys::INPLACE_SCHEDULING_AVOID,
    keys::GRACE_PERIOD_SECONDS,
    keys::TOPOLOGY,
    keys::KUEUE_QUEUE,
    keys::VOLCANO_QUEUE,
    conversion::ORIGIN,
];

/// Name of an ordered instance.
#[must_use]
pub fn ordered_name(set: &str, ordinal: i32) -> String {
    format!("{set}-{ordinal}")
}

/// Name of an unordered instance; `id` has [`ID_LENGTH`] letters.
#[must_use]
pub fn unordered_name(set: &str, id: &str) -> String {
    format!("{}-{id}", names::truncate_with_hash_to(set, MAX_NAME.saturating_sub(id.len() + 1)))
}

/// Renders an instance with an ordinal. `revision` is the full name of the set's revision.
///
/// # Errors
/// [`RenderError::NoMetadata`].
pub fn ordered(set: &RoleInstanceSet, ordinal: i32, revision: &str) -> Result<Manifest, RenderError> {
    let set = InstanceRenderer::from_set(set)?;
    let name = ordered_name(set.name, ordinal);
    let mut labels = set.labels();
    labels.insert(keys::CONTROLLER_REVISION_HASH.to_owned(), revision.to_owned());
    labels.insert(keys::POD_NAME.to_owned(), name.clone());
    labels.insert(keys::ROLE_INSTANCE_INDEX.to_owned(), ordinal.to_string());
    Ok(set.instance(&name, labels, set.annotations(), None))
}

/// Renders an unordered instance. `hash` is that of the set's revision, `now` the time in RFC 3339.
///
/// # Errors
/// [`RenderError::NoMetadata`].
pub fn unordered(set: &RoleInstanceSet, id: &str, hash: &str, now: &str) -> Result<Manifest, RenderError> {
    let set = InstanceRenderer::from_set(set)?;
    let mut labels = set.labels();
    labels.insert(keys::CONTROLLER_REVISION_HASH.to_owned(), hash.to_owned());
    labels.insert(keys::ROLE_INSTANCE_ID.to_owned(), id.to_owned());
    labels.insert(keys::ROLE_INSTANCE_OWNER.to_owned(), set.uid.to_owned());
    labels.insert(keys::LIFECYCLE_STATE.to_owned(), "Normal".to_owned());
    let mut annotations = set.annotations();
    annotations.insert(keys::LIFECYCLE_TIMESTAMP.to_owned(), now.to_owned());
    Ok(set.instance(&unordered_name(set.name, id), labels, annotations, Some(IN_PLACE_UPDATE_READY)))
}

struct InstanceRenderer<'a> {
    object: &'a RoleInstanceSet,
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
}

impl<'a> InstanceRenderer<'a> {
    fn from_set(object: &'a RoleInstanceSet) -> Result<Self, RenderError> {
        let name = object.metadata.name.as_deref().ok_or(RenderError::NoMetadata("name"))?;
        let namespace = object.metadata.namespace.as_deref().ok_or(RenderError::NoMetadata("namespace"))?;
        let uid = object.metadata.uid.as_deref().ok_or(RenderError::NoMetadata("uid"))?;
        Ok(Self { object, name, namespace, uid })
    }

    fn labels(&self) -> StringMap {
        let mut labels = self.object.metadata.labels.clone().unwrap_or_default();
        let selector = self.object.spec.selector.as_ref();
        labels.extend(selector.and_then(|selector| selector.match_labels.clone()).unwrap_or_default());
        labels
    }

    /// Includes ports that all pods of a component share: `<component>.<port name>`.
    fn annotations(&self) -> StringMap {
        let components = &self.object.spec.role_instance_template.components;
        let is_port = |key: &str| {
            let (component, _) = key.split_once('.').unwrap_or(("", ""));
            components.iter().any(|entry| entry.name == component)
        };
        let all = self.object.metadata.annotations.iter().flatten();
        let inherited = all
            .filter(|(key, value)| INHERITED.contains(&key.as_str()) || (is_port(key) && is_number(value)));
        inherited.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    fn instance(
        &self,
        name: &str,
        labels: StringMap,
        annotations: StringMap,
        gate: Option<&str>,
    ) -> Manifest {
        let owner = OwnerRef {
            api_version: conversion::ApiVersion::V1alpha2.api_version().to_owned(),
            kind: "RoleInstanceSet".to_owned(),
            name: self.name.to_owned(),
            uid: self.uid.to_owned(),
            controller: true,
        };
        let mut spec = serde_json::to_value(&self.object.spec.role_instance_template).unwrap_or_default();
        if let Value::Object(spec) = &mut spec {
            spec.entry("readyPolicy").or_insert_with(|| "AllPodReady".into());
            if let Some(gate) = gate {
                let gates = rbg_api::template::member_list(spec, "readinessGates");
                let gate = json!({ "conditionType": gate });
                if !gates.contains(&gate) {
                    gates.push(gate);
                }
            }
        }
        let metadata =
            ManifestMetadata { name, namespace: self.namespace, labels, annotations, owner: Some(&owner) };
        let version = conversion::ApiVersion::V1alpha2.api_version();
        Manifest::new(version, "RoleInstance", metadata, json!({ "spec": spec }))
    }
}

fn is_number(text: &str) -> bool {
    text.parse::<u16>().is_ok()
}

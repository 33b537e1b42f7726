//! Renders the groups of a RoleBasedGroupSet.

use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupSet};
use rbg_api::{conversion, keys};
use serde_json::json;

use crate::error::RenderError;
use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::names::truncate_with_hash;

/// Name of a group of a set that has no group with that index yet.
#[must_use]
pub fn name(set: &str, index: i32) -> String {
    truncate_with_hash(&format!("{set}-{index}"))
}

/// A group of a set. For an existing group, replicas set by an autoscaler stay as they are.
///
/// # Errors
/// [`RenderError::NoMetadata`].
pub fn group(
    set: &RoleBasedGroupSet,
    index: i32,
    name: &str,
    live: Option<&RoleBasedGroup>,
) -> Result<Manifest, RenderError> {
    let set_name = set.metadata.name.as_deref().ok_or(RenderError::NoMetadata("name"))?;
    let namespace = set.metadata.namespace.as_deref().ok_or(RenderError::NoMetadata("namespace"))?;
    let template = &set.spec.group_template;
    let mut spec = template.spec.clone();
    for role in &mut spec.roles {
        let is_scaled = role.scaling_adapter.as_ref().is_some_and(|adapter| adapter.enable);
        if let Some(live) = live.and_then(|live| live.spec.role(&role.name)).filter(|_| is_scaled) {
            role.replicas = live.replicas;
        }
    }
    let mut labels = template.labels.clone();
    if let Some(metadata) = &template.metadata {
        labels.extend(metadata.labels.clone());
    }
    labels.insert(keys::GROUPSET_NAME.to_owned(), set_name.to_owned());
    labels.insert(keys::GROUPSET_INDEX.to_owned(), index.to_string());
    let owner = OwnerRef {
        api_version: conversion::ApiVersion::V1alpha2.api_version().to_owned(),
        kind: "RoleBasedGroupSet".to_owned(),
        name: set_name.to_owned(),
        uid: set.metadata.uid.clone().unwrap_or_default(),
        controller: true,
    };
    let metadata =
        ManifestMetadata { name, namespace, labels, annotations: annotations(set), owner: Some(&owner) };
    let version = conversion::ApiVersion::V1alpha2.api_version();
    let mut manifest = Manifest::new(version, "RoleBasedGroup", metadata, json!({}));
    // Inserted directly: `Manifest::new` would drop the nulls of patches.
    manifest.0.insert("spec".to_owned(), serde_json::to_value(&spec).unwrap_or_default());
    Ok(manifest)
}

/// Annotations of the set's groups. In v1alpha1 they are on the set itself.
#[must_use]
pub fn annotations(set: &RoleBasedGroupSet) -> StringMap {
    let template = &set.spec.group_template;
    let set_annotations = set.metadata.annotations.iter().flatten();
    let inherited = set_annotations.filter(|(key, _)| key.as_str() == keys::legacy::EXCLUSIVE_TOPOLOGY);
    let template_annotations = template.metadata.iter().flat_map(|metadata| &metadata.annotations);
    let all = inherited.chain(&template.annotations).chain(template_annotations);
    all.map(|(key, value)| (key.clone(), value.clone())).collect()
}

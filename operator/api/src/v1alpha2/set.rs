//! RoleBasedGroupSet: equal groups.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RoleBasedGroupSpec, UnknownFields, one};
use crate::Condition;

/// What a RoleBasedGroupSet shall be.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleBasedGroupSet",
    plural = "rolebasedgroupsets",
    shortname = "rbgs",
    namespaced,
    status = "RoleBasedGroupSetStatus",
    derive = "Default",
    derive = "PartialEq",
    scale(spec_replicas_path = ".spec.replicas", status_replicas_path = ".status.replicas"),
    printcolumn = r#"{"name":"DESIRED","type":"string","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"READY","type":"string","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupSetSpec {
    /// Groups.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// What each of them is.
    pub group_template: GroupTemplate,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What each group of a set is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupTemplate {
    /// Labels of the groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Labels and annotations where every other template has them. They win over those beside them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<GroupTemplateMetadata>,
    /// The groups' spec.
    pub spec: RoleBasedGroupSpec,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Labels and annotations of the groups of a set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupTemplateMetadata {
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What a RoleBasedGroupSet is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupSetStatus {
    /// Generation of the spec that the rest speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Groups that exist.
    #[serde(default)]
    pub replicas: i32,
    /// Groups that are ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

//! RoleBasedGroupSet: a number of equal groups.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RoleBasedGroupSpec, UnknownFields, one};
use crate::Condition;

/// Desired state of a RoleBasedGroupSet.
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
    /// Number of groups; 1 by default.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Template from which the groups are created.
    pub group_template: GroupTemplate,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Template of a set's groups.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupTemplate {
    /// Labels of the set's groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the set's groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Labels and annotations in the usual form of templates. They take precedence over `labels` and `annotations`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<GroupTemplateMetadata>,
    /// Spec that all groups of the set get.
    pub spec: RoleBasedGroupSpec,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Labels and annotations of the groups of a set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupTemplateMetadata {
    /// Labels of the set's groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the set's groups.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Observed state of a RoleBasedGroupSet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupSetStatus {
    /// Generation of the spec that this status refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of groups that exist now.
    #[serde(default)]
    pub replicas: i32,
    /// Number of groups that are ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Conditions of types Ready and RollingUpdateInProgress.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

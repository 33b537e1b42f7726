//! RoleBasedGroupWarmup: images and files brought to nodes before pods need them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::is_false;
use crate::{Condition, schema};

/// What a RoleBasedGroupWarmup shall do.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleBasedGroupWarmup",
    plural = "rolebasedgroupwarmups",
    shortname = "rbgwarmup",
    namespaced,
    status = "RoleBasedGroupWarmupStatus",
    derive = "Default",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "has(self.targetNodes) || has(self.targetRoleBasedGroup)",
        "message": "either targetNodes or targetRoleBasedGroup must be specified",
    },
    {
        "rule": "!(has(self.targetNodes) && has(self.targetRoleBasedGroup))",
        "message": "targetNodes and targetRoleBasedGroup are mutually exclusive",
    },
]))]
pub struct RoleBasedGroupWarmupSpec {
    /// Whether no new pod is started.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Tolerations of the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::objects")]
    pub tolerations: Vec<Value>,
    /// How fast, and how often to try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<WarmupPolicies>,
    /// Nodes by name or label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_nodes: Option<TargetNodes>,
    /// Nodes where a group's pods run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_role_based_group: Option<TargetRoleBasedGroup>,
}

/// How fast, and how often to try.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!has(self.maxFailedNodes) || has(self.backoffLimitPerNode)",
    "message": "backoffLimitPerNode must be set when maxFailedNodes is specified",
}]))]
pub struct WarmupPolicies {
    /// Nodes at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub parallelism: Option<i32>,
    /// Further attempts on one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub backoff_limit_per_node: Option<i32>,
    /// Nodes that may fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_failed_nodes: Option<i32>,
    /// Seconds for the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub global_timeout_seconds: Option<i64>,
    /// Seconds after the end when the object is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Nodes by name or label, and what to do there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "has(self.nodeNames) || has(self.nodeSelector)",
        "message": "either nodeNames or nodeSelector must be specified",
    },
    {
        "rule": "!(has(self.nodeNames) && has(self.nodeSelector))",
        "message": "nodeNames and nodeSelector are mutually exclusive",
    },
    {
        "rule": "has(self.imagePreload) || has(self.customizedAction)",
        "message": "at least one of imagePreload or customizedAction must be specified",
    },
]))]
pub struct TargetNodes {
    /// Names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1))]
    pub node_names: Vec<String>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("minProperties" = 1))]
    pub node_selector: BTreeMap<String, String>,
    /// Images to pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_preload: Option<ImagePreload>,
    /// Containers to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

impl TargetNodes {
    /// What to do there.
    #[must_use]
    pub fn actions(&self) -> WarmupActions {
        WarmupActions {
            image_preload: self.image_preload.clone(),
            customized_action: self.customized_action.clone(),
        }
    }
}

/// A group, and what to do on the nodes of each of its roles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetRoleBasedGroup {
    /// The group.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Per role.
    #[schemars(extend("minProperties" = 1))]
    pub roles: BTreeMap<String, WarmupActions>,
}

/// What to do on a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.imagePreload) || has(self.customizedAction)",
    "message": "at least one of imagePreload or customizedAction must be specified",
}]))]
pub struct WarmupActions {
    /// Images to pull.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_preload: Option<ImagePreload>,
    /// Containers to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

/// Images to pull.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImagePreload {
    /// The images.
    #[schemars(length(min = 1))]
    pub images: Vec<String>,
    /// Secrets for the registries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<LocalObjectReference>,
}

/// The name of an object in the same namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct LocalObjectReference {
    /// The name.
    #[serde(default)]
    pub name: String,
}

/// Containers to run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomizedAction {
    /// The containers.
    #[schemars(schema_with = "schema::named_objects", length(min = 1))]
    pub containers: Vec<Value>,
    /// Volumes of the containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub volumes: Vec<Value>,
}

/// How far a RoleBasedGroupWarmup is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupWarmupStatus {
    /// Empty, `Running`, `Paused`, `Completed` or `Failed`.
    #[serde(default)]
    pub phase: String,
    /// Nodes to reach.
    #[serde(default)]
    pub desired: i32,
    /// Nodes that are worked on.
    #[serde(default)]
    pub active: i32,
    /// Nodes that are done.
    #[serde(default)]
    pub succeeded: i32,
    /// Nodes that failed.
    #[serde(default)]
    pub failed: i32,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub start_time: Option<Time>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub completion_time: Option<Time>,
    /// Complete, Failed, VolumeConflict.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

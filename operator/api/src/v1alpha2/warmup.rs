//! RoleBasedGroupWarmup: images and files that are brought to nodes in advance.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::is_false;
use crate::{Condition, schema};

/// Desired state of a RoleBasedGroupWarmup.
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
    /// Whether the creation of pods is paused.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Tolerations of the warmup's pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::objects")]
    pub tolerations: Vec<Value>,
    /// Parallelism, retries and timeouts of the warmup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<WarmupPolicies>,
    /// Nodes by name or label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_nodes: Option<TargetNodes>,
    /// Nodes on which a group's pods run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_role_based_group: Option<TargetRoleBasedGroup>,
}

/// Parallelism, retries and timeouts of a warmup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!has(self.maxFailedNodes) || has(self.backoffLimitPerNode)",
    "message": "backoffLimitPerNode must be set when maxFailedNodes is specified",
}]))]
pub struct WarmupPolicies {
    /// Maximum number of nodes to warm up concurrently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub parallelism: Option<i32>,
    /// Maximum number of retries on one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub backoff_limit_per_node: Option<i32>,
    /// Maximum number of failed nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_failed_nodes: Option<i32>,
    /// Timeout of the whole warmup, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub global_timeout_seconds: Option<i64>,
    /// Seconds after the end until the object is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Nodes by name or label, with the actions to perform.
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
    /// Names of the nodes to warm up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1))]
    pub node_names: Vec<String>,
    /// Labels that the nodes to warm up have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("minProperties" = 1))]
    pub node_selector: BTreeMap<String, String>,
    /// Images to pull to the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_preload: Option<ImagePreload>,
    /// Containers to run on the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

impl TargetNodes {
    /// The actions to perform on each node.
    #[must_use]
    pub fn actions(&self) -> WarmupActions {
        WarmupActions {
            image_preload: self.image_preload.clone(),
            customized_action: self.customized_action.clone(),
        }
    }
}

/// A group, with the actions to perform on the nodes of each role.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetRoleBasedGroup {
    /// Name of the group, in the same namespace.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Actions to perform, by role name.
    #[schemars(extend("minProperties" = 1))]
    pub roles: BTreeMap<String, WarmupActions>,
}

/// Actions to perform on a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "has(self.imagePreload) || has(self.customizedAction)",
    "message": "at least one of imagePreload or customizedAction must be specified",
}]))]
pub struct WarmupActions {
    /// Images to pull to the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_preload: Option<ImagePreload>,
    /// Containers to run on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

/// Images to pull to a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImagePreload {
    /// Images to pull, at least one.
    #[schemars(length(min = 1))]
    pub images: Vec<String>,
    /// Pull secrets for the registries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<LocalObjectReference>,
}

/// Reference to an object in the same namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct LocalObjectReference {
    /// Name of the object in the namespace.
    #[serde(default)]
    pub name: String,
}

/// Containers to run on a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomizedAction {
    /// Containers to run, at least one.
    #[schemars(schema_with = "schema::named_objects", length(min = 1))]
    pub containers: Vec<Value>,
    /// Volumes that the containers mount.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub volumes: Vec<Value>,
}

/// Observed state of a RoleBasedGroupWarmup.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupWarmupStatus {
    /// Phase: empty, `Running`, `Paused`, `Completed` or `Failed`.
    #[serde(default)]
    pub phase: String,
    /// Number of nodes to warm up.
    #[serde(default)]
    pub desired: i32,
    /// Number of nodes with a running pod.
    #[serde(default)]
    pub active: i32,
    /// Number of nodes that are warmed up.
    #[serde(default)]
    pub succeeded: i32,
    /// Number of nodes without further attempts.
    #[serde(default)]
    pub failed: i32,
    /// Time at which the first pod was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub start_time: Option<Time>,
    /// Time at which the warmup finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub completion_time: Option<Time>,
    /// Conditions of types Complete, Failed and VolumeConflict.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

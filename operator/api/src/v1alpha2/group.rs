//! RoleBasedGroup: roles that together are one inference service.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    CustomComponentsPattern, LeaderWorkerPattern, RolloutStrategy, StandalonePattern, UnknownFields,
    is_false, is_zero, one,
};
use crate::int_or_percent::IntOrPercent;
use crate::{Condition, PodTemplate, schema};

/// What a RoleBasedGroup shall be.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleBasedGroup",
    plural = "rolebasedgroups",
    shortname = "rbg",
    namespaced,
    status = "RoleBasedGroupStatus",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"READY","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupSpec {
    /// Pod templates that roles refer to by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub role_templates: Vec<RoleTemplate>,
    /// The roles.
    #[schemars(
        length(min = 1),
        extend(
            "x-kubernetes-list-type" = "map",
            "x-kubernetes-list-map-keys" = ["name"],
            "x-kubernetes-preserve-unknown-fields" = true
        )
    )]
    pub roles: Vec<RoleSpec>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

impl RoleBasedGroupSpec {
    /// The role of that name.
    #[must_use]
    pub fn role(&self, name: &str) -> Option<&RoleSpec> {
        self.roles.iter().find(|role| role.name == name)
    }
}

/// A pod template that several roles share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleTemplate {
    /// What roles call it.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
    /// The template.
    #[schemars(schema_with = "schema::pod_template")]
    pub template: PodTemplate,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// One role: a number of equal instances.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!(has(self.standalonePattern) && has(self.leaderWorkerPattern))",
        "message": "standalonePattern and leaderWorkerPattern are mutually exclusive",
    },
    {
        "rule": "!has(self.leaderWorkerPattern) || !has(self.leaderWorkerPattern.sharedServiceSelection) || self.leaderWorkerPattern.sharedServiceSelection != 'LeaderOnly' || !has(self.annotations) || !('rbg.workloads.x-k8s.io/role-workload-type' in self.annotations) || self.annotations['rbg.workloads.x-k8s.io/role-workload-type'] == 'workloads.x-k8s.io/v1alpha2/RoleInstanceSet'",
        "message": "leaderWorkerPattern.sharedServiceSelection=LeaderOnly is only supported for RoleInstanceSet + leaderWorkerPattern",
    },
]))]
pub struct RoleSpec {
    /// Name inside the group; part of the names of its workload, service and pods.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Labels of the workload.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the workload; some of them choose how the role runs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Instances.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Roles that must be ready before this one is made or changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<String>,
    /// Seconds for which an instance must be ready to count as available.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(extend("default" = 0))]
    pub min_ready_seconds: i32,
    /// `Parallel` (default) or `OrderedReady`: whether instances are made at once or one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "Parallel", "enum" = ["OrderedReady", "Parallel"]))]
    pub pod_management_policy: Option<String>,
    /// Ports that the discovery file names for this role.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub service_ports: Vec<ServicePort>,
    /// Profiles of containers put beside the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine_runtimes: Vec<EngineRuntime>,
    /// Whether something else scales the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling_adapter: Option<ScalingAdapter>,
    /// How a change reaches the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout_strategy: Option<RolloutStrategy>,
    /// An instance is one pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standalone_pattern: Option<StandalonePattern>,
    /// An instance is a leader and its workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_worker_pattern: Option<LeaderWorkerPattern>,
    /// An instance is a set of components of any kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custom_components_pattern: Option<CustomComponentsPattern>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A port of a role. Only `name` and `port` are used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    /// Name; the discovery file has it in lower case with `_` for `-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The port.
    pub port: i32,
    /// Protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "TCP"))]
    pub protocol: Option<String>,
    /// Protocol above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_protocol: Option<String>,
    /// Port of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub target_port: Option<IntOrPercent>,
    /// Port of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_port: Option<i32>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A ClusterEngineRuntimeProfile that a role's pods get.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineRuntime {
    /// The profile.
    pub profile_name: String,
    /// Without effect; accepted because manifests have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject_containers: Vec<String>,
    /// Environment and arguments to add to the profile's containers of the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub containers: Vec<Value>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Lets an autoscaler set a role's replicas.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingAdapter {
    /// Whether there is an adapter.
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("default" = false))]
    pub enable: bool,
    /// Labels of the adapter.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What a RoleBasedGroup is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupStatus {
    /// Generation of the spec that the rest speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Progressing, RollingUpdateInProgress.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// One entry per role.
    #[serde(default)]
    pub role_statuses: Vec<RoleStatus>,
}

/// Instances of one role.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleStatus {
    /// The role.
    pub name: String,
    /// Instances that exist.
    pub replicas: i32,
    /// Instances that are ready.
    pub ready_replicas: i32,
    /// Instances of the current revision.
    pub updated_replicas: i32,
}

//! RoleBasedGroup: roles that together form one inference service.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    CustomComponentsPattern, FaultStatus, LeaderWorkerPattern, RolloutStrategy, StandalonePattern,
    UnknownFields, is_false, is_zero, one,
};
use crate::int_or_percent::IntOrPercent;
use crate::{Condition, PodTemplate, schema};

/// Desired state of a RoleBasedGroup.
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
    /// Roles of the group, at least one.
    #[schemars(
        length(min = 1),
        extend(
            "x-kubernetes-list-type" = "map",
            "x-kubernetes-list-map-keys" = ["name"],
            "x-kubernetes-preserve-unknown-fields" = true
        )
    )]
    pub roles: Vec<RoleSpec>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

impl RoleBasedGroupSpec {
    /// Looks up a role by its name.
    #[must_use]
    pub fn role(&self, name: &str) -> Option<&RoleSpec> {
        self.roles.iter().find(|role| role.name == name)
    }
}

/// A pod template that several roles share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleTemplate {
    /// Name by which roles reference the template.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
    /// Pod template that the roles share.
    #[schemars(schema_with = "schema::pod_template")]
    pub template: PodTemplate,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A role: a number of equal instances.
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
    /// Labels of the role's workload.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the workload; some of them choose how the role runs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Number of instances; 1 by default.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Roles that must be ready before this role is created or changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<String>,
    /// Seconds for which an instance must be ready to count as available.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(extend("default" = 0))]
    pub min_ready_seconds: i32,
    /// `Parallel` (default) or `OrderedReady`: whether instances are created in parallel or one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "Parallel", "enum" = ["OrderedReady", "Parallel"]))]
    pub pod_management_policy: Option<String>,
    /// Ports of the role in the discovery file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub service_ports: Vec<ServicePort>,
    /// Profiles of containers to add to the engine's pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine_runtimes: Vec<EngineRuntime>,
    /// Adapter through which an autoscaler scales the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling_adapter: Option<ScalingAdapter>,
    /// How changes are rolled out to the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout_strategy: Option<RolloutStrategy>,
    /// Pattern for instances of one pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standalone_pattern: Option<StandalonePattern>,
    /// Pattern for instances of a leader and workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_worker_pattern: Option<LeaderWorkerPattern>,
    /// Pattern for instances of several named components.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub custom_components_pattern: Option<CustomComponentsPattern>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A port of a role. Only `name` and `port` are used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    /// Name of the port; in the discovery file it is in lower case with `_` for `-`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Port number, from 1 to 65535.
    pub port: i32,
    /// Transport protocol of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "TCP"))]
    pub protocol: Option<String>,
    /// Application protocol of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_protocol: Option<String>,
    /// Port number or name in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub target_port: Option<IntOrPercent>,
    /// Port number on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_port: Option<i32>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A ClusterEngineRuntimeProfile that is applied to a role's pods.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineRuntime {
    /// Name of the ClusterEngineRuntimeProfile to apply.
    pub profile_name: String,
    /// Without effect; accepted because existing manifests contain it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject_containers: Vec<String>,
    /// Environment and arguments to add to the profile's containers of the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub containers: Vec<Value>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Settings of the adapter through which an autoscaler sets a role's replicas.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingAdapter {
    /// Whether an adapter is created for the role.
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("default" = false))]
    pub enable: bool,
    /// Labels of the RoleBasedGroupScalingAdapter to create.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Observed state of a RoleBasedGroup.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupStatus {
    /// Generation of the spec that this status refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions of types Ready, Progressing, RollingUpdateInProgress and FaultRecovery.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// Status of the roles, one entry per role.
    #[serde(default)]
    pub role_statuses: Vec<RoleStatus>,
    /// Faults that a CoordinatedPolicy has dealt with, oldest first: per rule as many as its `maxPerHour`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultStatus>,
}

/// Numbers of instances of one role.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleStatus {
    /// Name of the role in the group.
    pub name: String,
    /// Number of instances that exist now.
    pub replicas: i32,
    /// Number of instances that are ready.
    pub ready_replicas: i32,
    /// Number of instances at the current revision.
    pub updated_replicas: i32,
}

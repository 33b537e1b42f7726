//! RoleBasedGroup and RoleBasedGroupSet as they were.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::v1alpha2::{
    EngineRuntime, RoleBasedGroupSetStatus, RoleBasedGroupStatus, RoleTemplate, RolloutStrategy,
    ScalingAdapter, ServicePort, UnknownFields,
};
use crate::{PodTemplate, schema};

use crate::v1alpha2::{is_zero, one};

/// What a RoleBasedGroup shall be.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "RoleBasedGroup",
    plural = "rolebasedgroups",
    shortname = "rbg",
    namespaced,
    status = "RoleBasedGroupStatus",
    storage = false,
    deprecated = "workloads.x-k8s.io/v1alpha1 RoleBasedGroup is deprecated; use workloads.x-k8s.io/v1alpha2 RoleBasedGroup",
    printcolumn = r#"{"name":"READY","type":"string","jsonPath":".status.conditions[?(@.type=='Ready')].status"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupSpec {
    /// Roles that are updated and scaled together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub coordination: Vec<Coordination>,
    /// Whether all pods are scheduled at once or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_group_policy: Option<PodGroupPolicy>,
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

/// Roles, and what keeps them together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Coordination {
    /// Name of the rule.
    pub name: String,
    /// The roles.
    pub roles: Vec<String>,
    /// What keeps them together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<CoordinationStrategy>,
}

/// What keeps roles together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationStrategy {
    /// While they are updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<CoordinationRollingUpdate>,
    /// While they are scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<CoordinationScaling>,
}

/// Bounds while roles are updated together, as percentages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationRollingUpdate {
    /// Most by which the updated share of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_skew: Option<String>,
    /// Replaces each role's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_unavailable: Option<String>,
    /// Replaces each role's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub partition: Option<String>,
}

/// Bounds while roles are scaled together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationScaling {
    /// Most by which the share of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_skew: Option<String>,
    /// `OrderScheduled` (default) or `OrderReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "OrderScheduled", "enum" = ["OrderScheduled", "OrderReady"]))]
    pub progression: Option<String>,
}

/// Whether all pods are scheduled at once or not at all, and by whom.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodGroupPolicy {
    /// By scheduler-plugins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_scheduling: Option<KubeScheduling>,
    /// By Volcano.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volcano_scheduling: Option<VolcanoScheduling>,
}

/// Settings of scheduler-plugins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeScheduling {
    /// Seconds to wait for the whole group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 60))]
    pub schedule_timeout_seconds: Option<i32>,
}

/// Settings of Volcano.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolcanoScheduling {
    /// Priority class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
}

/// One role: a number of equal instances.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.templateRef) || !has(self.workload) || self.workload.kind != 'InstanceSet'",
        "message": "templateRef is not supported for InstanceSet workloads",
    },
    {
        "rule": "!has(self.templateRef) || !has(self.workload) || self.workload.kind != 'LeaderWorkerSet'",
        "message": "templateRef is not supported for LeaderWorkerSet workloads",
    },
    {
        "rule": "(has(self.template) != has(self.templateRef)) || (has(self.workload) && self.workload.kind == 'InstanceSet')",
        "message": "template or templateRef must be set for non-InstanceSet workloads",
    },
    {
        "rule": "!(has(self.template) && has(self.templateRef))",
        "message": "template and templateRef are mutually exclusive",
    },
]))]
pub struct RoleSpec {
    /// Name inside the group.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Labels of the workload.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the workload.
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
    /// What a crash of one pod does to the others. `RecreateRBGOnPodRestart`, of early releases, is taken for
    /// `RecreateRoleInstanceOnPodRestart`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart", "RecreateRBGOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// What runs the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = { "apiVersion": "apps/v1", "kind": "StatefulSet" }))]
    pub workload: Option<WorkloadRef>,
    /// The pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// The pod, as a role template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<RoleTemplateRef>,
    /// Strategic merge patch of the role template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub template_patch: Option<Value>,
    /// An instance is a leader and its workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_worker_set: Option<LeaderWorkerTemplate>,
    /// An instance is a set of components.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<RoleComponent>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What runs a role's instances.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadRef {
    /// `group/version`.
    #[serde(default = "apps_v1")]
    #[schemars(regex(pattern = schema::API_VERSION))]
    pub api_version: String,
    /// The kind.
    #[serde(default = "stateful_set")]
    pub kind: String,
}

fn apps_v1() -> String {
    "apps/v1".to_owned()
}

fn stateful_set() -> String {
    "StatefulSet".to_owned()
}

/// The name of a role template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RoleTemplateRef {
    /// The name.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
}

/// A leader and its workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaderWorkerTemplate {
    /// Pods of an instance, the leader included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 1))]
    pub size: Option<i32>,
    /// Strategic merge patch for the leader's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub patch_leader_template: Option<Value>,
    /// Strategic merge patch for the workers' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub patch_worker_template: Option<Value>,
}

/// A number of equal pods of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleComponent {
    /// Name inside the instance.
    pub name: String,
    /// Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Service that makes the pods' names resolvable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// The pods.
    #[schemars(schema_with = "schema::any_value")]
    pub template: PodTemplate,
}

/// What a RoleBasedGroupSet shall be.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "RoleBasedGroupSet",
    plural = "rolebasedgroupsets",
    shortname = "rbgs",
    namespaced,
    status = "RoleBasedGroupSetStatus",
    storage = false,
    deprecated = "workloads.x-k8s.io/v1alpha1 RoleBasedGroupSet is deprecated; use workloads.x-k8s.io/v1alpha2 RoleBasedGroupSet",
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
    pub template: RoleBasedGroupSpec,
}

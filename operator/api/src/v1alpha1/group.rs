//! RoleBasedGroup and RoleBasedGroupSet in v1alpha1.

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

/// Desired state of a RoleBasedGroup.
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
    /// Rules for roles that are updated and scaled together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub coordination: Vec<Coordination>,
    /// Gang scheduling: all pods are scheduled together or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_group_policy: Option<PodGroupPolicy>,
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

/// A rule for roles that are updated and scaled together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Coordination {
    /// Name of the rule, unique in the list.
    pub name: String,
    /// Names of the roles that the rule applies to.
    pub roles: Vec<String>,
    /// Bounds for updates and scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<CoordinationStrategy>,
}

/// Bounds for updates and scaling of the roles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationStrategy {
    /// Bounds that apply to rolling updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<CoordinationRollingUpdate>,
    /// Bounds that apply to scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<CoordinationScaling>,
}

/// Bounds for updates of several roles, as percentages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationRollingUpdate {
    /// Maximum percentage by which the updated share of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_skew: Option<String>,
    /// Replaces each role's own `maxUnavailable`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_unavailable: Option<String>,
    /// Replaces each role's own `partition`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub partition: Option<String>,
}

/// Bounds for scaling of several roles.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinationScaling {
    /// Maximum percentage by which the share of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = schema::PERCENT))]
    pub max_skew: Option<String>,
    /// State that instances must reach before the next ones are created: `OrderScheduled` (default) or `OrderReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "OrderScheduled", "enum" = ["OrderScheduled", "OrderReady"]))]
    pub progression: Option<String>,
}

/// Gang scheduling: all pods are scheduled together or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodGroupPolicy {
    /// Settings for gang scheduling by scheduler-plugins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_scheduling: Option<KubeScheduling>,
    /// Settings for gang scheduling by Volcano.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volcano_scheduling: Option<VolcanoScheduling>,
}

/// Settings for the PodGroup of scheduler-plugins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeScheduling {
    /// Seconds to wait for the whole group; 60 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 60))]
    pub schedule_timeout_seconds: Option<i32>,
}

/// Settings for the PodGroup of Volcano.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolcanoScheduling {
    /// Name of the PodGroup's priority class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<String>,
    /// Name of the PodGroup's Volcano queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
}

/// A role: a number of equal instances.
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
    /// Name of the role, unique in the group.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Labels of the role's workload.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the role's workload.
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
    /// Effect of a pod's crash on the other pods of the instance. `RecreateRBGOnPodRestart`, of early releases, means
    /// `RecreateRoleInstanceOnPodRestart`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart", "RecreateRBGOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// Workload that runs the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = { "apiVersion": "apps/v1", "kind": "StatefulSet" }))]
    pub workload: Option<WorkloadRef>,
    /// Pod template of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// Role template that the role uses as its pod template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<RoleTemplateRef>,
    /// Strategic merge patch of the role template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub template_patch: Option<Value>,
    /// Leader and workers, for instances of several pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader_worker_set: Option<LeaderWorkerTemplate>,
    /// Components of an instance, for workload InstanceSet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<RoleComponent>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Kind of a role's workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadRef {
    /// API version of the workload, as `group/version`.
    #[serde(default = "apps_v1")]
    #[schemars(regex(pattern = schema::API_VERSION))]
    pub api_version: String,
    /// Kind of the workload, for example `StatefulSet`.
    #[serde(default = "stateful_set")]
    pub kind: String,
}

fn apps_v1() -> String {
    "apps/v1".to_owned()
}

fn stateful_set() -> String {
    "StatefulSet".to_owned()
}

/// Reference to a role template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RoleTemplateRef {
    /// Name of the role template.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
}

/// A leader and its workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaderWorkerTemplate {
    /// Number of pods of an instance, including the leader.
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

/// A component: a number of equal pods of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleComponent {
    /// Name of the component, unique in the instance.
    pub name: String,
    /// Number of pods; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Service that makes the pods' names resolvable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Pod template of the component.
    #[schemars(schema_with = "schema::any_value")]
    pub template: PodTemplate,
}

/// Desired state of a RoleBasedGroupSet.
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
    /// Number of groups; 1 by default.
    #[serde(default = "one")]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Template of the groups' specs.
    pub template: RoleBasedGroupSpec,
}

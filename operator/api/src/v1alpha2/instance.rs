//! RoleInstance: pods that are scheduled, updated and restarted as a unit.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RestartPolicyConfig, UnknownFields};
use crate::{Condition, PodTemplate, schema};

/// Desired state of a RoleInstance.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleInstance",
    plural = "roleinstances",
    shortname = "rins",
    namespaced,
    status = "RoleInstanceStatus",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"READY","type":"string","description":"Whether the instance is ready","jsonPath":".status.conditions[?(@.type=='RoleInstanceReady')].status"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleInstanceSpec {
    /// Components that each instance consists of.
    pub components: Vec<InstanceComponent>,
    /// Conditions that must be true for the instance to be ready, in addition to its pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readiness_gates: Vec<ReadinessGate>,
    /// Readiness policy: `AllPodReady` (default) or `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "AllPodReady"))]
    pub ready_policy: Option<String>,
    /// Deprecated: set `restartPolicyConfig.type` instead of this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// Effect of a pod's crash on the other pods of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A component: a number of equal pods of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceComponent {
    /// Name of the component, unique in the instance.
    pub name: String,
    /// Number of pods; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Service that makes the pods' names resolvable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Labels of the component's pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the component's pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Pod template of the component.
    #[schemars(schema_with = "schema::any_value")]
    pub template: PodTemplate,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

impl InstanceComponent {
    /// Number of pods of this component, at least 0.
    #[must_use]
    pub fn size(&self) -> i32 {
        self.size.unwrap_or(1).max(0)
    }
}

/// A condition that must be true for an instance to be ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReadinessGate {
    /// Type of the condition that must be true.
    pub condition_type: String,
}

/// Observed state of a RoleInstance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleInstanceStatus {
    /// Generation of the spec that this status refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Last revision that all pods had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_revision: Option<String>,
    /// Name of the spec's revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_revision: Option<String>,
    /// Number of hash collisions, which is added to a revision's hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision_count: Option<i32>,
    /// Label selector of the instance's pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// Status of the components, one entry per component.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub component_statuses: Vec<ComponentStatus>,
    /// Conditions of type RoleInstanceReady and others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// State of containers at the start of an in-place update, by pod and container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub in_place_update_container_baselines: BTreeMap<String, BTreeMap<String, ContainerBaseline>>,
    /// Number of consecutive recreations after crashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_count: Option<i32>,
    /// Time at which the instance was last recreated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub last_restart_time: Option<Time>,
}

/// Numbers of pods of one component.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ComponentStatus {
    /// Name of the component in the instance.
    pub name: String,
    /// Desired number of pods in the component.
    pub size: i32,
    /// Number of pods that are ready.
    pub ready_replicas: i32,
    /// Number of pods that have been ready for `minReadySeconds`.
    pub available_replicas: i32,
    /// Number of pods with a node.
    pub scheduled_replicas: i32,
    /// Number of pods at the current revision.
    pub updated_replicas: i32,
    /// Number of ready pods at the current revision.
    pub updated_ready_replicas: i32,
}

/// State of a container at the start of its in-place update.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerBaseline {
    /// Number of restarts before the update.
    pub restart_count: i32,
    /// Image ID before the update.
    #[serde(rename = "imageID", default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
}

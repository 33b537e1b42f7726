//! RoleInstance: pods that live and die together.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RestartPolicyConfig, UnknownFields};
use crate::{Condition, PodTemplate, schema};

/// What a RoleInstance shall be.
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
    /// The components.
    pub components: Vec<InstanceComponent>,
    /// Conditions that must be true for the instance to be ready, beside its pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readiness_gates: Vec<ReadinessGate>,
    /// `AllPodReady` (default) or `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "AllPodReady"))]
    pub ready_policy: Option<String>,
    /// Deprecated form of `restartPolicyConfig.type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// What a crash of one pod does to the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A number of equal pods of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceComponent {
    /// Name inside the instance.
    pub name: String,
    /// Pods; 1 if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    /// Service that makes the pods' names resolvable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_name: Option<String>,
    /// Labels of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The pods.
    #[schemars(schema_with = "schema::any_value")]
    pub template: PodTemplate,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

impl InstanceComponent {
    /// Pods of this component.
    #[must_use]
    pub fn size(&self) -> i32 {
        self.size.unwrap_or(1).max(0)
    }
}

/// A condition that must be true for an instance to be ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReadinessGate {
    /// Type of the condition.
    pub condition_type: String,
}

/// What a RoleInstance is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleInstanceStatus {
    /// Generation of the spec that the rest speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Revision that all pods had last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_revision: Option<String>,
    /// Revision of the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_revision: Option<String>,
    /// Added to a revision's hash to keep two of the same hash apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision_count: Option<i32>,
    /// Selector of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// One entry per component.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub component_statuses: Vec<ComponentStatus>,
    /// RoleInstanceReady and others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// Per pod and container: what it was like when its update in place began.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub in_place_update_container_baselines: BTreeMap<String, BTreeMap<String, ContainerBaseline>>,
    /// Recreations in a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_count: Option<i32>,
    /// When the instance was last recreated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub last_restart_time: Option<Time>,
}

/// Pods of one component.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ComponentStatus {
    /// The component.
    pub name: String,
    /// Pods that it shall have.
    pub size: i32,
    /// Ready pods.
    pub ready_replicas: i32,
    /// Pods that have been ready for long enough.
    pub available_replicas: i32,
    /// Pods that have a node.
    pub scheduled_replicas: i32,
    /// Pods of the current revision.
    pub updated_replicas: i32,
    /// Ready pods of the current revision.
    pub updated_ready_replicas: i32,
}

/// A container when its update in place began.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerBaseline {
    /// Restarts so far.
    pub restart_count: i32,
    /// The image that it ran.
    #[serde(rename = "imageID", default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
}

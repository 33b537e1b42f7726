//! InstanceSet and Instance. Their CRDs exist so that manifests with them can be applied; no controller reconciles them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::group::{PodGroupPolicy, RoleComponent};
use crate::int_or_percent::IntOrPercent;
use crate::schema;
use crate::v1alpha2::{Lifecycle, ReadinessGate, RoleInstanceSetStatus, RoleInstanceStatus, UpdateStrategy};

/// Desired state of a Instance.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "Instance",
    plural = "instances",
    shortname = "ins",
    namespaced,
    status = "RoleInstanceStatus",
    deprecated = "workloads.x-k8s.io/v1alpha1 Instance is deprecated; use workloads.x-k8s.io/v1alpha2 RoleInstance",
    printcolumn = r#"{"name":"READY","type":"string","jsonPath":".status.conditions[?(@.type=='InstanceReady')].status"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct InstanceSpec {
    /// Components that each instance consists of.
    pub components: Vec<RoleComponent>,
    /// Gang scheduling: all pods are scheduled together or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_group_policy: Option<PodGroupPolicy>,
    /// Conditions that must be true for the instance to be ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readiness_gates: Vec<ReadinessGate>,
    /// Readiness policy: `AllPodReady` (default) or `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "AllPodReady"))]
    pub ready_policy: Option<String>,
    /// Effect of a pod's crash on the other pods of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
}

/// Desired state of a InstanceSet.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "InstanceSet",
    plural = "instancesets",
    shortname = "is",
    namespaced,
    status = "RoleInstanceSetStatus",
    deprecated = "workloads.x-k8s.io/v1alpha1 InstanceSet is deprecated; use workloads.x-k8s.io/v1alpha2 RoleInstanceSet",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.labelSelector"
    ),
    printcolumn = r#"{"name":"DESIRED","type":"integer","jsonPath":".spec.replicas"}"#,
    printcolumn = r#"{"name":"UPDATED","type":"integer","jsonPath":".status.updatedReplicas"}"#,
    printcolumn = r#"{"name":"UPDATED_READY","type":"integer","jsonPath":".status.updatedReadyReplicas"}"#,
    printcolumn = r#"{"name":"READY","type":"integer","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"TOTAL","type":"integer","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"SELECTOR","type":"string","priority":1,"jsonPath":".status.labelSelector"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct InstanceSetSpec {
    /// Number of instances to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: Option<LabelSelector>,
    /// Template from which the instances are created.
    #[schemars(schema_with = "schema::any_value")]
    pub instance_template: InstanceSpec,
    /// Seconds for which an instance must be ready to count as available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Number of old revisions to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 10))]
    pub revision_history_limit: Option<i32>,
    /// How changes are rolled out to the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
    /// How instances are created and deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<InstanceScaleStrategy>,
    /// Hooks that delay the deletion or in-place update of an instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

/// How instances are created and deleted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceScaleStrategy {
    /// Number or percentage of instances that may be unavailable while others are created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Names of instances to delete first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instance_to_delete: Vec<String>,
}

//! InstanceSet and Instance. Their CRDs are there so that manifests that have them apply; nothing runs them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::group::{PodGroupPolicy, RoleComponent};
use crate::int_or_percent::IntOrPercent;
use crate::schema;
use crate::v1alpha2::{Lifecycle, ReadinessGate, RoleInstanceSetStatus, RoleInstanceStatus, UpdateStrategy};

/// What an Instance shall be.
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
    /// The components.
    pub components: Vec<RoleComponent>,
    /// Whether all pods are scheduled at once or not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_group_policy: Option<PodGroupPolicy>,
    /// Conditions that must be true for the instance to be ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readiness_gates: Vec<ReadinessGate>,
    /// `AllPodReady` (default) or `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "AllPodReady"))]
    pub ready_policy: Option<String>,
    /// What a crash of one pod does to the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
}

/// What an InstanceSet shall be.
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
    /// Instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Selector of the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: Option<LabelSelector>,
    /// What each instance is.
    #[schemars(schema_with = "schema::any_value")]
    pub instance_template: InstanceSpec,
    /// Seconds for which an instance must be ready to count as available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Old revisions that are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 10))]
    pub revision_history_limit: Option<i32>,
    /// How a change reaches the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
    /// How instances are added and removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<InstanceScaleStrategy>,
    /// Who is asked before an instance is deleted or updated in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
}

/// How instances are added and removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InstanceScaleStrategy {
    /// Instances that may be unavailable while others are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Instances to remove first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instance_to_delete: Vec<String>,
}

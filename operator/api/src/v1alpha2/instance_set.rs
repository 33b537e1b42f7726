//! RoleInstanceSet: a number of equal RoleInstances.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{InPlaceUpdateStrategy, RoleInstanceSpec, UnknownFields, is_false};
use crate::int_or_percent::IntOrPercent;
use crate::{Condition, schema};

/// Desired state of a RoleInstanceSet.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleInstanceSet",
    plural = "roleinstancesets",
    shortname = "ris",
    namespaced,
    status = "RoleInstanceSetStatus",
    derive = "Default",
    derive = "PartialEq",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.labelSelector"
    ),
    printcolumn = r#"{"name":"DESIRED","type":"integer","description":"Desired instances","jsonPath":".spec.replicas"}"#,
    printcolumn = r#"{"name":"UPDATED","type":"integer","description":"Instances of the current revision","jsonPath":".status.updatedReplicas"}"#,
    printcolumn = r#"{"name":"UPDATED_READY","type":"integer","description":"Ready instances of the current revision","jsonPath":".status.updatedReadyReplicas"}"#,
    printcolumn = r#"{"name":"READY","type":"integer","description":"Ready instances","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"TOTAL","type":"integer","description":"Instances that exist","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#,
    printcolumn = r#"{"name":"SELECTOR","type":"string","priority":1,"description":"Selector of the pods","jsonPath":".status.labelSelector"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleInstanceSetSpec {
    /// Number of instances; 1 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the instances and their pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: Option<LabelSelector>,
    /// Template from which the instances are created.
    #[schemars(schema_with = "schema::any_value")]
    pub role_instance_template: RoleInstanceSpec,
    /// Seconds for which an instance must be ready to count as available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_ready_seconds: Option<i32>,
    /// Pod management policy: `Parallel` (default) or `OrderedReady`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "Parallel", "enum" = ["OrderedReady", "Parallel"]))]
    pub pod_management_policy: Option<String>,
    /// Number of old revisions to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 10))]
    pub revision_history_limit: Option<i32>,
    /// How changes are rolled out to the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
    /// How instances are created and deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<ScaleStrategy>,
    /// Hooks that delay the deletion or in-place update of an instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<Lifecycle>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// How changes are rolled out to the instances.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdateStrategy {
    /// Update type: `InPlaceIfPossible` or `RecreatePod`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Instances with a lower ordinal keep their revision; for stateless sets, this number of instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub partition: Option<IntOrPercent>,
    /// Number or percentage of instances that may be unavailable at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Number or percentage of instances that may exist beyond `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_surge: Option<IntOrPercent>,
    /// Whether the update is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Settings for updates of pods in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update_strategy: Option<InPlaceUpdateStrategy>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// How instances are created and deleted.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScaleStrategy {
    /// Number or percentage of instances that may be unavailable while others are created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Names of instances to delete first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub role_instance_to_delete: Vec<String>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Hooks that delay the deletion or in-place update of an instance.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// Hook before an instance is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pre_delete: Option<LifecycleHook>,
    /// Hook before an instance is updated in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update: Option<LifecycleHook>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Labels and finalizers that must be removed before the instance is changed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LifecycleHook {
    /// Labels, by key and value, that block the change.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels_handler: BTreeMap<String, String>,
    /// Finalizers that block the change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finalizers_handler: Vec<String>,
    /// Whether pods are taken out of service while they wait.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mark_pod_not_ready: bool,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Observed state of a RoleInstanceSet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleInstanceSetStatus {
    /// Generation of the spec that this status refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Number of instances that exist now.
    #[serde(default)]
    pub replicas: i32,
    /// Number of instances that are ready.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Number of instances that have been ready for `minReadySeconds`.
    #[serde(default)]
    pub available_replicas: i32,
    /// Number of instances at `currentRevision`.
    #[serde(default)]
    pub current_replicas: i32,
    /// Number of instances at `updateRevision`.
    #[serde(default)]
    pub updated_replicas: i32,
    /// Number of ready instances at `updateRevision`.
    #[serde(default)]
    pub updated_ready_replicas: i32,
    /// Number of instances to update to `updateRevision`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_updated_replicas: Option<i32>,
    /// Last revision that all instances had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_revision: Option<String>,
    /// Name of the spec's revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_revision: Option<String>,
    /// Number of hash collisions, which is added to a revision's hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collision_count: Option<i32>,
    /// Label selector of the instances' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_selector: Option<String>,
    /// Conditions of the set, for example WaitingForHooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

//! RoleBasedGroupScalingAdapter: a scale subresource for one role.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// Desired state of a RoleBasedGroupScalingAdapter.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "RoleBasedGroupScalingAdapter",
    plural = "rolebasedgroupscalingadapters",
    shortname = "rbgsa",
    namespaced,
    status = "RoleBasedGroupScalingAdapterStatus",
    derive = "Default",
    derive = "PartialEq",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn = r#"{"name":"PHASE","type":"string","description":"Whether the role was found","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"REPLICAS","type":"integer","description":"Instances of the role","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"READY_REPLICAS","type":"integer","description":"Ready instances of the role","jsonPath":".status.readyReplicas"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupScalingAdapterSpec {
    /// Desired number of replicas of the role; set by an autoscaler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// The role of a group to scale.
    pub scale_target_ref: ScaleTargetRef,
}

/// Reference to a role of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScaleTargetRef {
    /// Name of the group, in the same namespace.
    pub name: String,
    /// Name of the role in the group.
    pub role: String,
}

/// Observed state of a RoleBasedGroupScalingAdapter.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupScalingAdapterStatus {
    /// `Bound`, `NotBound`, or empty before the first reconciliation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Number of instances of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Number of ready instances of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Selector of the role's pods, for autoscalers that read their metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Time at which the role was last scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub last_scale_time: Option<Time>,
}

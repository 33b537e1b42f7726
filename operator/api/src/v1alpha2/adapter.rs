//! RoleBasedGroupScalingAdapter: a scale subresource for one role.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schema;

/// What a RoleBasedGroupScalingAdapter shall be.
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
    /// Replicas that the role shall have; an autoscaler writes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// The role.
    pub scale_target_ref: ScaleTargetRef,
}

/// A role of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScaleTargetRef {
    /// The group.
    pub name: String,
    /// The role in it.
    pub role: String,
}

/// What a RoleBasedGroupScalingAdapter is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupScalingAdapterStatus {
    /// `Bound`, `NotBound`, or empty before the first look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Instances of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Ready instances of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Selector of the role's pods, for autoscalers that read their metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// When the role was last scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub last_scale_time: Option<Time>,
}

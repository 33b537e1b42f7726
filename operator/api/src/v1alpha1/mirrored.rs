//! Kinds with the same structure in both versions.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::schema;
use crate::v1alpha2::{
    ClusterEngineRuntimeProfileStatus, RoleBasedGroupScalingAdapterStatus, ScaleTargetRef,
};

/// Adapter in v1alpha1, with the fields of v1alpha2.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "RoleBasedGroupScalingAdapter",
    plural = "rolebasedgroupscalingadapters",
    shortname = "rbgsa",
    namespaced,
    status = "RoleBasedGroupScalingAdapterStatus",
    storage = false,
    deprecated = "workloads.x-k8s.io/v1alpha1 RoleBasedGroupScalingAdapter is deprecated; use workloads.x-k8s.io/v1alpha2 RoleBasedGroupScalingAdapter",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn = r#"{"name":"PHASE","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"REPLICAS","type":"integer","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct RoleBasedGroupScalingAdapterSpec {
    /// Desired number of replicas of the role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// The role of a group to scale.
    pub scale_target_ref: ScaleTargetRef,
}

/// Profile in v1alpha1, with the fields of v1alpha2.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha1",
    kind = "ClusterEngineRuntimeProfile",
    plural = "clusterengineruntimeprofiles",
    status = "ClusterEngineRuntimeProfileStatus",
    storage = false,
    deprecated = "workloads.x-k8s.io/v1alpha1 ClusterEngineRuntimeProfile is deprecated; use workloads.x-k8s.io/v1alpha2 ClusterEngineRuntimeProfile"
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterEngineRuntimeProfileSpec {
    /// Init containers to add to the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub init_containers: Vec<Value>,
    /// Containers to add to the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub containers: Vec<Value>,
    /// Volumes to add to the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub volumes: Vec<Value>,
    /// Update strategy: `NoUpdate` (default) or `RollingUpdate`.
    #[serde(default = "no_update")]
    #[schemars(extend("enum" = ["NoUpdate", "RollingUpdate"]))]
    pub update_strategy: String,
}

fn no_update() -> String {
    "NoUpdate".to_owned()
}

//! ClusterEngineRuntimeProfile: containers that are added to engines' pods.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::UnknownFields;
use crate::schema;

/// Containers and volumes for the pods of roles that reference the profile. Those with the same name in the pod take
/// precedence.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "ClusterEngineRuntimeProfile",
    plural = "clusterengineruntimeprofiles",
    status = "ClusterEngineRuntimeProfileStatus",
    derive = "Default",
    derive = "PartialEq"
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
    /// Whether changes of the profile are applied to running pods: `NoUpdate` (default) or `RollingUpdate`.
    #[serde(default = "no_update")]
    #[schemars(extend("enum" = ["NoUpdate", "RollingUpdate"]))]
    pub update_strategy: String,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

fn no_update() -> String {
    "NoUpdate".to_owned()
}

/// Status of a profile, without fields so far.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterEngineRuntimeProfileStatus {}

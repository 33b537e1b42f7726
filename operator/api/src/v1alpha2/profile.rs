//! ClusterEngineRuntimeProfile: containers put beside engines.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::UnknownFields;
use crate::schema;

/// What a role's pods get that names the profile. What a pod has already by name, it keeps.
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
    /// Init containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub init_containers: Vec<Value>,
    /// Containers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub containers: Vec<Value>,
    /// Volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_objects")]
    pub volumes: Vec<Value>,
    /// `NoUpdate` (default) or `RollingUpdate`: whether a change of the profile reaches pods that run.
    #[serde(default = "no_update")]
    #[schemars(extend("enum" = ["NoUpdate", "RollingUpdate"]))]
    pub update_strategy: String,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

fn no_update() -> String {
    "NoUpdate".to_owned()
}

/// Nothing yet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ClusterEngineRuntimeProfileStatus {}

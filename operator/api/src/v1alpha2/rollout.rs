//! Rollout strategies of roles.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{UnknownFields, is_false};
use crate::int_or_percent::IntOrPercent;
use crate::schema;

/// How changes are rolled out to the instances of a role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStrategy {
    /// Type of the rollout, only `RollingUpdate`.
    #[serde(rename = "type", default = "rolling_update")]
    #[schemars(extend("enum" = ["RollingUpdate"]))]
    pub kind: String,
    /// Settings of the rolling update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

fn rolling_update() -> String {
    "RollingUpdate".to_owned()
}

/// Update of a few instances at a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RollingUpdate {
    /// Update type: `InPlaceIfPossible` (default) or `RecreatePod`; v1alpha1's `Recreate` means the latter.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Instances with a lower ordinal keep their revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 0))]
    pub partition: Option<IntOrPercent>,
    /// Number or percentage of instances that may be unavailable at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 1))]
    pub max_unavailable: Option<IntOrPercent>,
    /// Number or percentage of instances that may exist beyond `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 0))]
    pub max_surge: Option<IntOrPercent>,
    /// Whether the update is paused.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Settings for updates of pods in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update_strategy: Option<InPlaceUpdateStrategy>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Settings for updates of pods in place.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateStrategy {
    /// Seconds between taking a pod out of its Services and changing its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_period_seconds: Option<i32>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

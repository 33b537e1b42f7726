//! How a change reaches the instances of a role.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{UnknownFields, is_false};
use crate::int_or_percent::IntOrPercent;
use crate::schema;

/// How a change reaches the instances of a role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStrategy {
    /// Only `RollingUpdate`.
    #[serde(rename = "type", default = "rolling_update")]
    #[schemars(extend("enum" = ["RollingUpdate"]))]
    pub kind: String,
    /// Details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<RollingUpdate>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

fn rolling_update() -> String {
    "RollingUpdate".to_owned()
}

/// A few instances at a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RollingUpdate {
    /// `InPlaceIfPossible` (default) or `RecreatePod`; v1alpha1's `Recreate` means the latter.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Instances with a lower ordinal keep their revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 0))]
    pub partition: Option<IntOrPercent>,
    /// Instances that may be unavailable at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 1))]
    pub max_unavailable: Option<IntOrPercent>,
    /// Instances that may exist beyond `replicas`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string", extend("default" = 0))]
    pub max_surge: Option<IntOrPercent>,
    /// Whether the update stands still.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// Details of updates in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place_update_strategy: Option<InPlaceUpdateStrategy>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Details of updates in place.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InPlaceUpdateStrategy {
    /// Seconds between a pod's being taken out of its services and the change of its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_period_seconds: Option<i32>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

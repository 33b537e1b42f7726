//! CoordinatedPolicy: roles that are updated and scaled together.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::UnknownFields;
use crate::int_or_percent::IntOrPercent;
use crate::{Condition, schema};

/// What a CoordinatedPolicy shall do. It has the name of the group that it is for.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "::kube_core"),
    group = "workloads.x-k8s.io",
    version = "v1alpha2",
    kind = "CoordinatedPolicy",
    plural = "coordinatedpolicies",
    shortname = "cpolicy",
    namespaced,
    status = "CoordinatedPolicyStatus",
    derive = "Default",
    derive = "PartialEq",
    printcolumn = r#"{"name":"AGE","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedPolicySpec {
    /// The rules.
    #[schemars(length(min = 1), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub policies: Vec<PolicyRule>,
}

/// Roles, and what keeps them together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRule {
    /// Name of the rule.
    #[schemars(length(min = 1))]
    pub name: String,
    /// The roles.
    #[schemars(length(min = 1))]
    pub roles: Vec<String>,
    /// What keeps them together.
    pub strategy: PolicyStrategy,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What keeps roles together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyStrategy {
    /// While they are updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<CoordinatedRollingUpdate>,
    /// While they are scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<CoordinatedScaling>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Bounds while roles are updated together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedRollingUpdate {
    /// Most by which the updated share (or number) of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_skew: Option<IntOrPercent>,
    /// Replaces each role's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Replaces each role's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub partition: Option<IntOrPercent>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Bounds while roles are scaled together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedScaling {
    /// Most by which the share (or number) of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_skew: Option<IntOrPercent>,
    /// `OrderScheduled` or `OrderReady`: what instances must be before the next ones are made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["OrderScheduled", "OrderReady"]))]
    pub progression: Option<String>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What a CoordinatedPolicy is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedPolicyStatus {
    /// Generation of the spec that the rest speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

//! CoordinatedPolicy: coordinated updates, scaling, scheduling and fault recovery of several roles.

use std::collections::BTreeMap;

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CoordinatedFaultRecovery, UnknownFields};
use crate::int_or_percent::IntOrPercent;
use crate::{Condition, schema};

/// Desired state of a CoordinatedPolicy, which applies to the group of the same name.
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
    /// Rules of the policy, at least one.
    #[schemars(length(min = 1), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub policies: Vec<PolicyRule>,
}

/// A rule for roles that are updated, scaled and recovered together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyRule {
    /// Name of the rule, unique in the list.
    #[schemars(length(min = 1))]
    pub name: String,
    /// Names of the roles that the rule applies to.
    #[schemars(length(min = 1))]
    pub roles: Vec<String>,
    /// Bounds for updates and scaling, scheduling, and recovery from faults.
    pub strategy: PolicyStrategy,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Bounds for updates and scaling of the roles, their scheduling, and their recovery from faults.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PolicyStrategy {
    /// Bounds that apply to rolling updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolling_update: Option<CoordinatedRollingUpdate>,
    /// Bounds that apply to scaling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<CoordinatedScaling>,
    /// Scheduling of the roles' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<CoordinatedScheduling>,
    /// Recovery from faults of the roles' instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_recovery: Option<CoordinatedFaultRecovery>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Bounds for updates of several roles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedRollingUpdate {
    /// Maximum number or percentage of instances by which the update of one role may be ahead of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_skew: Option<IntOrPercent>,
    /// Replaces each role's own `maxUnavailable`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_unavailable: Option<IntOrPercent>,
    /// Replaces each role's own `partition`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub partition: Option<IntOrPercent>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Bounds for scaling of several roles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedScaling {
    /// Maximum number or percentage of instances by which one role may be ahead of another, while they grow or while they shrink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::int_or_string")]
    pub max_skew: Option<IntOrPercent>,
    /// State that instances must reach before the next ones are created: `OrderScheduled` or `OrderReady`. With either, instances that
    /// are removed must be gone before the next ones are removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["OrderScheduled", "OrderReady"]))]
    pub progression: Option<String>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Scheduling of several roles.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedScheduling {
    /// Schedules pods of the roles together or not at all. Takes precedence over the group's annotation
    /// `rbg.workloads.x-k8s.io/group-gang-scheduling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gang: Option<CoordinatedGang>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A gang: pods that are scheduled together or not at all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedGang {
    /// Minimum number of instances, by role of this rule, that are scheduled together: at least 1, and at most the role's replicas.
    /// Further instances, and roles that are not listed, are scheduled by themselves. Default: all instances of all roles of this rule.
    /// Requires Volcano 1.14.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub min_replicas: BTreeMap<String, i32>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Observed state of a CoordinatedPolicy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedPolicyStatus {
    /// Generation of the spec that this status refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions of the policy, as `meta/v1` defines them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

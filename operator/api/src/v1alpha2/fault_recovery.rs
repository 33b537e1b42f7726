//! Recovery from faults, as part of a CoordinatedPolicy. Upstream has no such fields.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::UnknownFields;
use crate::schema;

fn fault_conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "enum": ["Restarted", "Failed", "NodeLost"] } })
}

/// How the roles of a rule recover when one of their instances fails or loses its node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatedFaultRecovery {
    /// What a fault in one role does to instances of other roles. Links are not transitive: an action is never a fault.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<FaultLink>,
    /// Topology level (`node`, `nvlink-domain`, `rack`, `zone`) or node label. When a node is lost, all instances of the rule's roles in
    /// its domain are replaced together: in the same domain if it has room, otherwise together in another one. Not set: Kubernetes
    /// moves the pods of the lost node only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    pub replacement_domain: Option<String>,
    /// Seconds after which a node that is not ready or unreachable counts as lost. Default: 300, as Kubernetes' own toleration. A
    /// deleted node is lost at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub node_lost_seconds: Option<i32>,
    /// Seconds after which an instance that was in service and whose containers are not ready counts as failed. Not set: it does not,
    /// since engines may need minutes to load a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub unready_seconds: Option<i32>,
    /// Seconds for which pods of a replacement may be unschedulable before the next domain is tried. Default: 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub placement_seconds: Option<i32>,
    /// Seconds between two actions on the same instance; later faults wait. Default: 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub backoff_seconds: Option<i32>,
    /// Faults per hour that this rule acts on; it only reports further ones. Default: 10, which bounds the damage of a fault that no
    /// restart cures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 60))]
    pub max_per_hour: Option<i32>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A link from faults of one role to actions on others.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultLink {
    /// Faults that trigger the actions.
    pub when: FaultTrigger,
    /// Instances that are associated with the failed one: those with the same `Ordinal`, in the same `Domain`, or all of the `Group`.
    #[schemars(extend("enum" = ["Ordinal", "Domain", "Group"]))]
    pub scope: String,
    /// Topology level or node label of the scope `Domain`. Default: `replacementDomain`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 317))]
    pub domain: Option<String>,
    /// Actions on associated instances, one per role.
    #[schemars(length(min = 1))]
    pub then: Vec<LinkedAction>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Faults of one role.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultTrigger {
    /// Role whose instances are watched.
    #[schemars(length(min = 1))]
    pub role: String,
    /// Kinds of faults: `Restarted` (a container exited and was restarted), `Failed` (a pod failed, was evicted, or was not ready for
    /// too long) and `NodeLost`. Default: all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "fault_conditions")]
    pub conditions: Vec<String>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// An action on the associated instances of one role.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LinkedAction {
    /// Role whose instances are acted on.
    #[schemars(length(min = 1))]
    pub role: String,
    /// `Restart`: the main container of each pod restarts in place. `Drain`: pods drain as before an upgrade, and are recreated.
    /// `Replace`: pods are recreated at once.
    #[schemars(extend("enum" = ["Restart", "Drain", "Replace"]))]
    pub action: String,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A fault of an instance that a policy has dealt with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultStatus {
    /// Name of the policy's rule.
    pub policy: String,
    /// Identity of the fault, unique in the group.
    pub fault: String,
    /// Name of the RoleInstance at fault.
    pub instance: String,
    /// Time at which the rule acted on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::time")]
    pub time: Option<Time>,
    /// Number of instances acted on; 0 if the rule had used up `maxPerHour`.
    pub actions: i32,
    /// The fault, its cause and the actions.
    pub message: String,
}

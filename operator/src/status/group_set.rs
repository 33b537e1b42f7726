//! Status of a RoleBasedGroupSet.

use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroupSet, RoleBasedGroupSetStatus};

use super::set_condition;

/// What the plan has found out about a set of groups.
#[derive(Debug, Clone, Default)]
pub struct ObservedGroupSet {
    /// Groups that it shall have.
    pub desired: i32,
    /// Groups that exist.
    pub replicas: i32,
    /// Ready ones.
    pub ready: i32,
    /// Names of groups that are not yet what the template says.
    pub updating: Vec<String>,
    /// Names that groups of the set shall have, and others have.
    pub conflicting_names: Vec<String>,
}

/// The status.
#[must_use]
pub fn group_set(
    set: &RoleBasedGroupSet,
    facts: &ObservedGroupSet,
    now: Timestamp,
) -> RoleBasedGroupSetStatus {
    let mut status = set.status.clone().unwrap_or_default();
    status.observed_generation = set.metadata.generation;
    status.replicas = facts.replicas;
    status.ready_replicas = facts.ready;
    let waiting = format!("Waiting for replicas to be ready ({}/{})", facts.ready, facts.desired);
    let taken =
        format!("there are groups of other owners with these names: {}", facts.conflicting_names.join(", "));
    let is_ready = facts.replicas == facts.desired && facts.ready == facts.desired;
    let text = match (is_ready, facts.conflicting_names.is_empty()) {
        (true, _) => ("AllReplicasReady", "All replicas are ready"),
        (false, true) => ("ReplicasNotReady", waiting.as_str()),
        (false, false) => ("NamesTaken", taken.as_str()),
    };
    set_condition(&mut status.conditions, "Ready", is_ready, text, now);
    let updating = format!("being updated: {}", facts.updating.join(", "));
    let is_updating = !facts.updating.is_empty();
    let text = if is_updating { ("GroupsUpdating", updating.as_str()) } else { ("UpToDate", "") };
    set_condition(&mut status.conditions, "RollingUpdateInProgress", is_updating, text, now);
    status
}

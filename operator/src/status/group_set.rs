//! Status of a RoleBasedGroupSet.

use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroupSet, RoleBasedGroupSetStatus};

use super::{set_condition, set_stalled};

/// Observed state of a RoleBasedGroupSet.
#[derive(Debug, Clone, Default)]
pub struct ObservedGroupSet {
    pub desired: i32,
    pub replicas: i32,
    pub ready: i32,
    /// Names of groups that do not match the template yet.
    pub updating: Vec<String>,
    /// Names of the set's groups that groups of other owners have.
    pub conflicting_names: Vec<String>,
    /// Why the set is not planned: the reason and the error.
    pub spec_error: Option<(&'static str, String)>,
}

/// Computes the status of a RoleBasedGroupSet.
#[must_use]
pub fn group_set(
    set: &RoleBasedGroupSet,
    observed: &ObservedGroupSet,
    now: Timestamp,
) -> RoleBasedGroupSetStatus {
    let mut status = set.status.clone().unwrap_or_default();
    status.observed_generation = set.metadata.generation;
    status.replicas = observed.replicas;
    status.ready_replicas = observed.ready;
    let waiting = format!("Waiting for replicas to be ready ({}/{})", observed.ready, observed.desired);
    let conflict =
        format!("groups of other owners have these names: {}", observed.conflicting_names.join(", "));
    let is_ready = observed.replicas == observed.desired && observed.ready == observed.desired;
    let spec_error = observed.spec_error.as_ref().map(|(reason, error)| (*reason, error.as_str()));
    let text = match (is_ready, observed.conflicting_names.is_empty()) {
        _ if let Some(text) = spec_error => text,
        (true, _) => ("AllReplicasReady", "All replicas are ready"),
        (false, true) => ("ReplicasNotReady", waiting.as_str()),
        (false, false) => ("NameConflict", conflict.as_str()),
    };
    set_condition(&mut status.conditions, "Ready", is_ready && spec_error.is_none(), text, now);
    let updating = format!("being updated: {}", observed.updating.join(", "));
    let is_updating = !observed.updating.is_empty();
    let text = if is_updating { ("GroupsUpdating", updating.as_str()) } else { ("UpToDate", "") };
    set_condition(&mut status.conditions, "RollingUpdateInProgress", is_updating, text, now);
    if let Some(text) = spec_error {
        set_stalled(&mut status.conditions, text, now);
    }
    status
}

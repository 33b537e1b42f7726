//! Status of a RoleBasedGroup.

use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupStatus, RoleStatus};

use super::{has, set_condition, set_stalled};

/// Observed state of one role.
#[derive(Debug, Clone, Default)]
pub struct ObservedRoleStatus {
    pub name: String,
    pub desired: i32,
    /// Number of instances at this moment, which coordination may keep below `desired`.
    pub requested: i32,
    /// Number of instances to update: fewer than `desired` if some are held back.
    pub expected_updated: i32,
    pub replicas: i32,
    pub ready: i32,
    /// Number of instances at the group's present spec.
    pub updated: i32,
    /// Whether the numbers refer to the group's present spec.
    pub current: bool,
    /// Why the role is not reconciled now.
    pub blocked_by: Option<String>,
}

impl ObservedRoleStatus {
    /// Whether all desired instances exist and are ready. Others may still be draining.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.current && self.desired <= self.replicas && self.desired <= self.ready
    }

    /// Whether all instances requested at this moment exist and are ready. Others may still be draining.
    #[must_use]
    pub fn is_at_requested(&self) -> bool {
        self.current && self.requested <= self.replicas && self.requested == self.ready
    }

    fn is_rolling(&self) -> bool {
        self.replicas > 0 && (!self.current || self.updated < self.expected_updated)
    }
}

/// Whether all roles of the group are ready at its present spec.
#[must_use]
pub fn is_group_ready(group: &RoleBasedGroup) -> bool {
    let Some(status) = &group.status else { return false };
    status.observed_generation == group.metadata.generation && has(&status.conditions, "Ready")
}

/// Whether the group is ready and no part of its present spec is pending.
#[must_use]
pub fn is_group_settled(group: &RoleBasedGroup) -> bool {
    let has_condition = |kind| group.status.as_ref().is_some_and(|status| has(&status.conditions, kind));
    is_group_ready(group) && !has_condition("Progressing") && !has_condition("RollingUpdateInProgress")
}

/// Computes the status. For a spec that cannot be planned, `spec_error` is the reason and the error, and the roles' numbers
/// stay as they are.
#[must_use]
pub fn group(
    group: &RoleBasedGroup,
    roles: &[ObservedRoleStatus],
    spec_error: Option<(&str, &str)>,
    now: Timestamp,
) -> RoleBasedGroupStatus {
    let mut status = group.status.clone().unwrap_or_default();
    status.observed_generation = group.metadata.generation;
    let role_status = |role: &ObservedRoleStatus| RoleStatus {
        name: role.name.clone(),
        replicas: role.replicas,
        ready_replicas: role.ready,
        updated_replicas: role.updated,
    };
    if spec_error.is_none() {
        status.role_statuses = roles.iter().map(role_status).collect();
    }
    let names = |which: &dyn Fn(&ObservedRoleStatus) -> bool| {
        let names: Vec<&str> =
            roles.iter().filter(|role| which(role)).map(|role| role.name.as_str()).collect();
        names.join(", ")
    };
    let unready = names(&|role| !role.is_ready());
    let rolling = names(&|role| role.is_rolling());
    let has_surplus = roles.iter().any(|role| role.replicas > role.desired);
    let conditions = &mut status.conditions;
    let waiting = format!("not ready: {unready}");
    let (ready, reason, message) = match spec_error {
        Some((reason, why)) => (false, reason, why),
        None if unready.is_empty() => (true, "AllRolesReady", "All roles are ready"),
        None => (false, "RoleNotReady", waiting.as_str()),
    };
    set_condition(conditions, "Ready", ready, (reason, message), now);
    let blocked = roles.iter().find_map(|role| role.blocked_by.as_deref());
    let is_settled = unready.is_empty() && rolling.is_empty() && !has_surplus;
    let is_progressing = spec_error.is_none() && !is_settled;
    let text = match (spec_error, blocked) {
        (Some(text), _) => text,
        (None, Some(blocked)) => ("WaitingForDependency", blocked),
        (None, None) if is_progressing => ("RolesChanging", ""),
        (None, None) => ("Settled", ""),
    };
    set_condition(conditions, "Progressing", is_progressing, text, now);
    let updating = format!("being updated: {rolling}");
    let text = if rolling.is_empty() { ("UpToDate", "") } else { ("RolesUpdating", updating.as_str()) };
    set_condition(conditions, "RollingUpdateInProgress", !rolling.is_empty(), text, now);
    if let Some(text) = spec_error {
        set_stalled(conditions, text, now);
    }
    status
}

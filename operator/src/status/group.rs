//! Status of a RoleBasedGroup.

use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupStatus, RoleStatus};

use super::{has, set_condition};

/// What is known of one role.
#[derive(Debug, Clone, Default)]
pub struct ObservedRoleStatus {
    /// The role.
    pub name: String,
    /// Instances that it shall have.
    pub desired: i32,
    /// Instances that it shall have now, which coordination may keep below what is desired.
    pub requested: i32,
    /// Instances of the new revision that it shall have: fewer where some are held back.
    pub expected_updated: i32,
    /// Instances that exist.
    pub replicas: i32,
    /// Ready ones.
    pub ready: i32,
    /// Of the group's present spec.
    pub updated: i32,
    /// Whether the numbers speak of the group's present spec.
    pub current: bool,
    /// Why nothing is done for the role now.
    pub blocked_by: Option<String>,
}

impl ObservedRoleStatus {
    /// Whether all that is desired is there and ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.current && self.desired == self.replicas && self.desired == self.ready
    }

    /// Whether all that it shall have now is there and ready.
    #[must_use]
    pub fn is_at_requested(&self) -> bool {
        self.current && self.requested == self.replicas && self.requested == self.ready
    }

    fn is_rolling(&self) -> bool {
        self.replicas > 0 && (!self.current || self.updated < self.expected_updated)
    }
}

/// Whether all roles of the group are ready as its present spec wants them.
#[must_use]
pub fn is_group_ready(group: &RoleBasedGroup) -> bool {
    let Some(status) = &group.status else { return false };
    status.observed_generation == group.metadata.generation && has(&status.conditions, "Ready")
}

/// Whether the group is ready and nothing of its present spec is still to come.
#[must_use]
pub fn is_group_settled(group: &RoleBasedGroup) -> bool {
    let is_moving = |kind| group.status.as_ref().is_some_and(|status| has(&status.conditions, kind));
    is_group_ready(group) && !is_moving("Progressing") && !is_moving("RollingUpdateInProgress")
}

/// The status. It says nothing of a spec that has not reached the pods.
#[must_use]
pub fn group(
    group: &RoleBasedGroup,
    roles: &[ObservedRoleStatus],
    refused: Option<&str>,
    now: Timestamp,
) -> RoleBasedGroupStatus {
    let mut status = group.status.clone().unwrap_or_default();
    status.observed_generation = group.metadata.generation;
    let one = |role: &ObservedRoleStatus| RoleStatus {
        name: role.name.clone(),
        replicas: role.replicas,
        ready_replicas: role.ready,
        updated_replicas: role.updated,
    };
    if refused.is_none() {
        status.role_statuses = roles.iter().map(one).collect();
    }
    let names = |which: &dyn Fn(&ObservedRoleStatus) -> bool| {
        let names: Vec<&str> =
            roles.iter().filter(|role| which(role)).map(|role| role.name.as_str()).collect();
        names.join(", ")
    };
    let unready = names(&|role| !role.is_ready());
    let rolling = names(&|role| role.is_rolling());
    let conditions = &mut status.conditions;
    let waiting = format!("not ready: {unready}");
    let (ready, reason, message) = match refused {
        Some(why) => (false, "InvalidSpec", why),
        None if unready.is_empty() => (true, "AllRolesReady", "All roles are ready"),
        None => (false, "RoleNotReady", waiting.as_str()),
    };
    set_condition(conditions, "Ready", ready, (reason, message), now);
    let held = roles.iter().find_map(|role| role.blocked_by.as_deref());
    let moving = refused.is_none() && !(unready.is_empty() && rolling.is_empty());
    let text = match (refused, held) {
        (Some(why), _) => ("InvalidSpec", why),
        (None, Some(held)) => ("WaitingForDependency", held),
        (None, None) if moving => ("RolesChanging", ""),
        (None, None) => ("Settled", ""),
    };
    set_condition(conditions, "Progressing", moving, text, now);
    let updating = format!("being updated: {rolling}");
    let text = if rolling.is_empty() { ("UpToDate", "") } else { ("RolesUpdating", updating.as_str()) };
    set_condition(conditions, "RollingUpdateInProgress", !rolling.is_empty(), text, now);
    status
}

//! Environment names that RBG injects into containers, and what they tell a process about itself.

/// Name of the group.
pub const GROUP_NAME: &str = "RBG_GROUP_NAME";
/// Name of the process's own role.
pub const ROLE_NAME: &str = "RBG_ROLE_NAME";
/// Ordinal of the instance; upstream HEAD leaves it wrong or empty at times, so never an identity.
pub const ROLE_INDEX: &str = "RBG_ROLE_INDEX";
/// Name of the RoleInstance.
pub const ROLE_INSTANCE_NAME: &str = "RBG_ROLE_INSTANCE_NAME";
/// Component of the RoleInstance.
pub const COMPONENT_NAME: &str = "RBG_COMPONENT_NAME";
/// Ordinal inside the component.
pub const COMPONENT_INDEX: &str = "RBG_COMPONENT_INDEX";
/// Leader-worker: `<instance>-0.s-<group>-<role>.<namespace>`.
pub const LWP_LEADER_ADDRESS: &str = "RBG_LWP_LEADER_ADDRESS";
/// Leader-worker: 0 is the leader.
pub const LWP_WORKER_INDEX: &str = "RBG_LWP_WORKER_INDEX";
/// Leader-worker: pods per instance.
pub const LWP_GROUP_SIZE: &str = "RBG_LWP_GROUP_SIZE";

/// Names of the v1alpha1 era.
pub mod legacy {
    /// As [`super::GROUP_NAME`].
    pub const GROUP_NAME: &str = "GROUP_NAME";
    /// As [`super::ROLE_NAME`].
    pub const ROLE_NAME: &str = "ROLE_NAME";
    /// As [`super::ROLE_INDEX`].
    pub const ROLE_INDEX: &str = "ROLE_INDEX";
    /// As [`super::ROLE_INSTANCE_NAME`].
    pub const INSTANCE_NAME: &str = "INSTANCE_NAME";
    /// As [`super::COMPONENT_NAME`].
    pub const COMPONENT_NAME: &str = "COMPONENT_NAME";
    /// As [`super::COMPONENT_INDEX`].
    pub const COMPONENT_INDEX: &str = "COMPONENT_INDEX";
    /// As [`super::LWP_LEADER_ADDRESS`].
    pub const LWS_LEADER_ADDRESS: &str = "LWS_LEADER_ADDRESS";
    /// As [`super::LWP_WORKER_INDEX`].
    pub const LWS_WORKER_INDEX: &str = "LWS_WORKER_INDEX";
    /// As [`super::LWP_GROUP_SIZE`].
    pub const LWS_GROUP_SIZE: &str = "LWS_GROUP_SIZE";
}

/// What RBG told this process about itself. Everything is optional: outside RBG nothing is set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RbgIdentity {
    /// The group.
    pub group: Option<String>,
    /// Its role in the group.
    pub role: Option<String>,
    /// Its RoleInstance.
    pub instance: Option<String>,
    /// Its component.
    pub component: Option<String>,
    /// Address of its leader, in a leader-worker role.
    pub leader_address: Option<String>,
}

impl RbgIdentity {
    /// Reads the new names, and the v1alpha1 names where a new one is absent or empty.
    ///
    /// `lookup` answers the value of an environment name; the process environment is the caller's to read.
    #[must_use]
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let get = |new: &str, old: &str| {
            lookup(new)
                .filter(|value| !value.is_empty())
                .or_else(|| lookup(old).filter(|value| !value.is_empty()))
        };
        Self {
            group: get(GROUP_NAME, legacy::GROUP_NAME),
            role: get(ROLE_NAME, legacy::ROLE_NAME),
            instance: get(ROLE_INSTANCE_NAME, legacy::INSTANCE_NAME),
            component: get(COMPONENT_NAME, legacy::COMPONENT_NAME),
            leader_address: get(LWP_LEADER_ADDRESS, legacy::LWS_LEADER_ADDRESS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_names_win_and_an_empty_one_counts_as_absent() {
        let identity = RbgIdentity::from_env(|name| match name {
            GROUP_NAME => Some("new".into()),
            legacy::GROUP_NAME | legacy::ROLE_NAME => Some("old".into()),
            ROLE_NAME => Some(String::new()),
            _ => None,
        });
        assert_eq!(identity.group.as_deref(), Some("new"));
        assert_eq!(identity.role.as_deref(), Some("old"));
        assert_eq!(identity.instance, None);
    }
}

//! Environment variables that RBG injects into containers, and the identity that a process reads from them.

pub const GROUP_NAME: &str = "RBG_GROUP_NAME";
/// Name of the process's own role.
pub const ROLE_NAME: &str = "RBG_ROLE_NAME";
/// Ordinal of the instance; upstream HEAD sometimes sets it wrong or empty, so it is no identity.
pub const ROLE_INDEX: &str = "RBG_ROLE_INDEX";
pub const ROLE_INSTANCE_NAME: &str = "RBG_ROLE_INSTANCE_NAME";
/// Name of the component in the RoleInstance.
pub const COMPONENT_NAME: &str = "RBG_COMPONENT_NAME";
/// Ordinal of the pod inside the component.
pub const COMPONENT_INDEX: &str = "RBG_COMPONENT_INDEX";
/// Leader-worker: address of the leader, `<instance>-0.s-<group>-<role>.<namespace>`.
pub const LWP_LEADER_ADDRESS: &str = "RBG_LWP_LEADER_ADDRESS";
/// Leader-worker: position in the instance, 0 is the leader.
pub const LWP_WORKER_INDEX: &str = "RBG_LWP_WORKER_INDEX";
/// Leader-worker: number of pods per instance.
pub const LWP_GROUP_SIZE: &str = "RBG_LWP_GROUP_SIZE";

/// Names of the variables in v1alpha1.
pub mod legacy {
    pub const GROUP_NAME: &str = "GROUP_NAME";
    pub const ROLE_NAME: &str = "ROLE_NAME";
    pub const ROLE_INDEX: &str = "ROLE_INDEX";
    pub const INSTANCE_NAME: &str = "INSTANCE_NAME";
    pub const COMPONENT_NAME: &str = "COMPONENT_NAME";
    pub const COMPONENT_INDEX: &str = "COMPONENT_INDEX";
    pub const LWS_LEADER_ADDRESS: &str = "LWS_LEADER_ADDRESS";
    pub const LWS_WORKER_INDEX: &str = "LWS_WORKER_INDEX";
    pub const LWS_GROUP_SIZE: &str = "LWS_GROUP_SIZE";
}

/// Identity of this process in RBG. All fields are optional: outside RBG nothing is set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RbgIdentity {
    pub group: Option<String>,
    pub role: Option<String>,
    pub instance: Option<String>,
    pub component: Option<String>,
    /// Address of its leader, in leader-worker roles.
    pub leader_address: Option<String>,
}

impl RbgIdentity {
    /// Reads the present names, and the v1alpha1 names where a present one is absent or empty.
    ///
    /// `lookup` returns the value of an environment variable; the caller reads the process environment.
    #[must_use]
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str, legacy_name: &str| {
            lookup(name)
                .filter(|value| !value.is_empty())
                .or_else(|| lookup(legacy_name).filter(|value| !value.is_empty()))
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
    fn present_names_take_precedence_unless_empty() {
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

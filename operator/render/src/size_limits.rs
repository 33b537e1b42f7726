//! Limits on the number of objects that one object may request. Without them, a mistyped number would exhaust the memory of the
//! operator or of the API server.

use rbg_api::v1alpha2::InstanceComponent;

use crate::role::ResolvedRole;
use crate::size_limit_error::SizeLimitError;

/// Maximum size of the discovery file in bytes: the API server rejects a ConfigMap with more data.
pub(crate) const MAX_DISCOVERY_FILE: usize = 1 << 20;

/// Maximum numbers of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeLimits {
    /// Pods of a group or of a RoleInstanceSet. An instance without pods counts as one.
    pub pods_per_group: u32,
    pub pods_per_instance: u32,
    pub groups_per_set: u32,
}

impl SizeLimits {
    pub const DEFAULT_PODS_PER_GROUP: u32 = 10_000;
    pub const DEFAULT_PODS_PER_INSTANCE: u32 = 1000;
    pub const DEFAULT_GROUPS_PER_SET: u32 = 1000;
}

impl Default for SizeLimits {
    fn default() -> Self {
        Self {
            pods_per_group: Self::DEFAULT_PODS_PER_GROUP,
            pods_per_instance: Self::DEFAULT_PODS_PER_INSTANCE,
            groups_per_set: Self::DEFAULT_GROUPS_PER_SET,
        }
    }
}

impl SizeLimits {
    /// Checks a group's roles, each with its number of replicas.
    ///
    /// # Errors
    /// [`SizeLimitError`].
    pub fn check_roles<'a>(
        self,
        roles: impl Iterator<Item = (&'a ResolvedRole<'a>, i32)>,
    ) -> Result<(), SizeLimitError> {
        let mut pods = 0_u64;
        let mut largest: Option<(&ResolvedRole<'_>, u64, i32)> = None;
        for (role, replicas) in roles {
            let of_instance = count(role.instance_size());
            if of_instance > self.pods_per_instance.into() {
                let (role, limit) = (role.spec.name.clone(), self.pods_per_instance);
                return Err(SizeLimitError::RoleInstanceSize { role, pods: of_instance, limit });
            }
            let of_role = count(replicas).saturating_mul(of_instance.max(1));
            pods = pods.saturating_add(of_role);
            if largest.is_none_or(|(_, most, _)| of_role > most) {
                largest = Some((role, of_role, replicas));
            }
        }
        match largest {
            Some((role, of_role, replicas)) if pods > self.pods_per_group.into() => {
                let (role, limit) = (role.spec.name.clone(), self.pods_per_group);
                Err(SizeLimitError::PodsPerGroup { pods, role, of_role, replicas, limit })
            }
            _ => Ok(()),
        }
    }

    /// Checks the components of one instance.
    ///
    /// # Errors
    /// [`SizeLimitError::PodsPerInstance`].
    pub fn check_instance(self, components: &[InstanceComponent]) -> Result<(), SizeLimitError> {
        let (pods, limit) = (pods(components), self.pods_per_instance);
        if pods > limit.into() { Err(SizeLimitError::PodsPerInstance { pods, limit }) } else { Ok(()) }
    }

    /// Checks a RoleInstanceSet.
    ///
    /// # Errors
    /// [`SizeLimitError`].
    pub fn check_instance_set(
        self,
        replicas: i32,
        components: &[InstanceComponent],
    ) -> Result<(), SizeLimitError> {
        self.check_instance(components)?;
        let pods = count(replicas).saturating_mul(pods(components).max(1));
        let limit = self.pods_per_group;
        if pods > limit.into() {
            return Err(SizeLimitError::PodsPerInstanceSet { replicas, pods, limit });
        }
        Ok(())
    }

    /// Checks the number of groups of a set.
    ///
    /// # Errors
    /// [`SizeLimitError::GroupsPerSet`].
    pub fn check_group_set(self, replicas: i32) -> Result<(), SizeLimitError> {
        let limit = self.groups_per_set;
        if count(replicas) > limit.into() {
            return Err(SizeLimitError::GroupsPerSet { replicas, limit });
        }
        Ok(())
    }
}

fn pods(components: &[InstanceComponent]) -> u64 {
    components.iter().map(|component| count(component.size())).sum()
}

/// Negative numbers count as 0.
fn count(number: i32) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use rbg_api::v1alpha2::RoleBasedGroup;
    use serde_json::{Value, json};

    use super::*;
    use crate::{GangScheduler, GroupContext, RuntimeProfiles};

    const LIMITS: SizeLimits = SizeLimits { pods_per_group: 10, pods_per_instance: 4, groups_per_set: 2 };

    fn check(roles: Value) -> Result<(), SizeLimitError> {
        let object = json!({ "metadata": { "name": "g", "namespace": "n" }, "spec": { "roles": roles } });
        let group: RoleBasedGroup = serde_json::from_value(object).unwrap();
        let profiles = RuntimeProfiles::default();
        let context = GroupContext::new(&group, &profiles, GangScheduler::default()).unwrap();
        let roles: Vec<_> =
            group.spec.roles.iter().map(|role| ResolvedRole::new(context, role).unwrap()).collect();
        LIMITS.check_roles(roles.iter().map(|role| (role, role.replicas())))
    }

    fn leader_worker(replicas: i32, size: i32) -> Value {
        json!({ "name": "lw", "replicas": replicas, "leaderWorkerPattern": { "size": size } })
    }

    fn standalone(replicas: i32) -> Value {
        json!({ "name": "s", "replicas": replicas, "standalonePattern": {} })
    }

    #[test]
    fn a_group_is_limited_by_the_pods_of_all_roles() {
        assert_eq!(check(json!([leader_worker(2, 3), standalone(4)])), Ok(()));
        let error = check(json!([leader_worker(2, 3), standalone(5)])).unwrap_err().to_string();
        for part in
            ["11 pods", "6 of them in role `lw` with 2 replicas", "at most 10", "--max-pods-per-group"]
        {
            assert!(error.contains(part), "{error}");
        }
        let huge = check(json!([leader_worker(i32::MAX, 4), standalone(i32::MAX)])).unwrap_err();
        assert!(matches!(huge, SizeLimitError::PodsPerGroup { pods: 10_737_418_235, .. }), "{huge}");
    }

    #[test]
    fn the_pods_of_an_instance_are_limited() {
        let error = check(json!([leader_worker(1, i32::MAX)])).unwrap_err().to_string();
        for part in ["role `lw`", "2147483647 pods", "at most 4", "leaderWorkerPattern.size"] {
            assert!(error.contains(part), "{error}");
        }
        let component = |size| json!({ "name": "c", "size": size, "template": {} });
        let custom = |size| {
            let pattern = json!({ "components": [component(size), component(size)] });
            json!([{ "name": "c", "replicas": 1, "customComponentsPattern": pattern }])
        };
        assert_eq!(check(custom(2)), Ok(()));
        assert!(matches!(check(custom(i32::MAX)), Err(SizeLimitError::RoleInstanceSize { .. })));
    }

    #[test]
    fn instances_without_pods_count_as_well() {
        let empty = json!({ "components": [{ "name": "c", "size": 0, "template": {} }] });
        let error = check(json!([{ "name": "c", "replicas": 11, "customComponentsPattern": empty }]));
        assert!(matches!(error, Err(SizeLimitError::PodsPerGroup { pods: 11, .. })));
    }

    #[test]
    fn sets_and_instances_are_limited_by_themselves() {
        let components = |size: i32| -> Vec<InstanceComponent> {
            serde_json::from_value(json!([{ "name": "c", "size": size, "template": {} }])).unwrap()
        };
        assert_eq!(LIMITS.check_instance_set(5, &components(2)), Ok(()));
        let error = LIMITS.check_instance_set(i32::MAX, &components(1)).unwrap_err();
        assert!(matches!(error, SizeLimitError::PodsPerInstanceSet { .. }), "{error}");
        let error = LIMITS.check_instance_set(1, &components(5)).unwrap_err();
        assert_eq!(error, SizeLimitError::PodsPerInstance { pods: 5, limit: 4 });
        assert_eq!(LIMITS.check_group_set(2), Ok(()));
        assert_eq!(LIMITS.check_group_set(3), Err(SizeLimitError::GroupsPerSet { replicas: 3, limit: 2 }));
        assert_eq!(LIMITS.check_group_set(-1), Ok(()));
    }
}

//! The gang of a CoordinatedPolicy: which pods are scheduled together or not at all.

use std::collections::{BTreeMap, BTreeSet};

use rbg_api::v1alpha2::{CoordinatedGang, CoordinatedPolicySpec, PolicyRule, RoleBasedGroup};

use crate::group::GangScheduler;
use crate::workload_kind::WorkloadKind;

/// The gang of a group, merged from all rules of its policy. Only members wait for each other; all other pods are scheduled by
/// themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GangPolicy {
    /// Roles with members.
    roles: BTreeSet<String>,
    /// Number of instances of each of these roles that are scheduled together. Empty if all instances are.
    min_replicas: BTreeMap<String, i32>,
}

/// Why the gang of a policy cannot be scheduled; its text is shown to the user who wrote the policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GangPolicyError {
    #[error(
        "policy `{policy}`: scheduling.gang.minReplicas has the role `{role}`, which is not in the rule's roles; add it there"
    )]
    NotListed { policy: String, role: String },
    #[error(
        "policy `{policy}`: scheduling.gang.minReplicas of role `{role}` must be at least 1, not {minimum}"
    )]
    OutOfRange { policy: String, role: String, minimum: i32 },
    #[error(
        "scheduling.gang.minReplicas needs Volcano 1.14, but the operator runs with --scheduler-name scheduler-plugins, whose PodGroup has \
         only a total number of pods; remove minReplicas to schedule all instances of the roles together"
    )]
    UnsupportedScheduler,
    #[error("scheduling.gang of the group's policy: `{0}` is no role of the group")]
    NoSuchRole(String),
    #[error(
        "scheduling.gang.minReplicas of role `{role}` is {minimum}, but the role has {replicas} replicas, so its gang could never be \
         scheduled; lower the minimum, or raise the replicas"
    )]
    TooFewReplicas {
        role: String,
        minimum: i32,
        /// Replicas of the role.
        replicas: i32,
    },
    #[error(
        "scheduling.gang.minReplicas: role `{role}` runs as {kind}, whose pods do not name their instance; per-role minimums need a \
         RoleInstanceSet"
    )]
    ForeignRole { role: String, kind: &'static str },
}

impl GangPolicy {
    /// The gang of a policy; `None` if no rule has one. A rule without `minReplicas` requires all instances of its roles, which includes
    /// the minimums of other rules. Of several minimums of a role, the largest applies.
    ///
    /// # Errors
    /// An error that depends neither on the group nor on the scheduler.
    pub fn resolve(policy: &CoordinatedPolicySpec) -> Result<Option<Self>, GangPolicyError> {
        let rules: Vec<(&PolicyRule, &CoordinatedGang)> = policy
            .policies
            .iter()
            .filter_map(|rule| Some((rule, rule.strategy.scheduling.as_ref()?.gang.as_ref()?)))
            .collect();
        let mut gang = Self::default();
        for (rule, own) in &rules {
            gang.add(rule, &own.min_replicas)?;
        }
        if rules.iter().any(|(_, own)| own.min_replicas.is_empty()) {
            gang.min_replicas.clear();
        } else {
            gang.roles = gang.min_replicas.keys().cloned().collect();
        }
        Ok((!rules.is_empty()).then_some(gang))
    }

    fn add(
        &mut self,
        rule: &PolicyRule,
        min_replicas: &BTreeMap<String, i32>,
    ) -> Result<(), GangPolicyError> {
        for (role, minimum) in min_replicas {
            let (policy, role, minimum) = (rule.name.clone(), role.clone(), *minimum);
            if !rule.roles.contains(&role) {
                return Err(GangPolicyError::NotListed { policy, role });
            }
            if minimum < 1 {
                return Err(GangPolicyError::OutOfRange { policy, role, minimum });
            }
            let largest = self.min_replicas.entry(role).or_insert(minimum);
            *largest = minimum.max(*largest);
        }
        self.roles.extend(rule.roles.iter().cloned());
        Ok(())
    }

    /// Whether the scheduler can hold back the pods of this gang.
    ///
    /// # Errors
    /// [`GangPolicyError::UnsupportedScheduler`].
    pub fn check_scheduler(&self, scheduler: GangScheduler) -> Result<(), GangPolicyError> {
        match scheduler {
            GangScheduler::SchedulerPlugins if self.has_minimums() => {
                Err(GangPolicyError::UnsupportedScheduler)
            }
            _ => Ok(()),
        }
    }

    /// Whether the group's roles can form this gang.
    ///
    /// # Errors
    /// The first error of a role.
    pub fn check_roles(&self, group: &RoleBasedGroup) -> Result<(), GangPolicyError> {
        for name in &self.roles {
            let role = group.spec.role(name).ok_or_else(|| GangPolicyError::NoSuchRole(name.clone()))?;
            let Some(minimum) = self.min_replicas.get(name).copied() else { continue };
            if minimum > role.replicas {
                let (role, replicas) = (name.clone(), role.replicas);
                return Err(GangPolicyError::TooFewReplicas { role, minimum, replicas });
            }
            // A kind that is unknown has an error of its own.
            if let Ok(kind) = WorkloadKind::from_role(role)
                && kind != WorkloadKind::RoleInstanceSet
            {
                return Err(GangPolicyError::ForeignRole { role: name.clone(), kind: kind.kind() });
            }
        }
        Ok(())
    }

    /// Whether some instances of the roles are enough.
    #[must_use]
    pub fn has_minimums(&self) -> bool {
        !self.min_replicas.is_empty()
    }

    pub(crate) fn has_role(&self, role: &str) -> bool {
        self.roles.contains(role)
    }

    /// Number of instances of the role that are scheduled together, of this number of replicas.
    pub(crate) fn minimum(&self, role: &str, replicas: i32) -> i32 {
        match self.min_replicas.get(role) {
            Some(minimum) => (*minimum).min(replicas),
            None if self.has_role(role) => replicas,
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policy(rules: &Value) -> CoordinatedPolicySpec {
        let rule = |(index, (roles, gang)): (usize, &(Value, Value))| json!({ "name": index.to_string(), "roles": roles, "strategy": { "scheduling": { "gang": gang } } });
        let rules: Vec<(Value, Value)> = serde_json::from_value(rules.clone()).unwrap();
        let rules: Vec<Value> = rules.iter().enumerate().map(rule).collect();
        serde_json::from_value(json!({ "policies": rules })).unwrap()
    }

    fn resolve(rules: &Value) -> Result<GangPolicy, GangPolicyError> {
        Ok(GangPolicy::resolve(&policy(rules))?.unwrap())
    }

    fn minimums(rules: &Value) -> Vec<i32> {
        let gang = resolve(rules).unwrap();
        ["a", "b", "c"].map(|role| gang.minimum(role, 9)).to_vec()
    }

    #[test]
    fn rules_are_merged_to_the_strictest() {
        let spec = json!({ "policies": [{ "name": "x", "roles": ["a"], "strategy": {} }] });
        assert_eq!(GangPolicy::resolve(&serde_json::from_value(spec).unwrap()), Ok(None));
        assert_eq!(minimums(&json!([[["a", "b"], {}]])), [9, 9, 0]);
        let some = json!([["a", "b", "c"], { "minReplicas": { "a": 2, "b": 1 } }]);
        assert_eq!(minimums(&json!([some])), [2, 1, 0], "roles without a minimum are no members");
        let other = json!([["b", "c"], { "minReplicas": { "b": 3, "c": 1 } }]);
        assert_eq!(minimums(&json!([some, other])), [2, 3, 1]);
        assert_eq!(minimums(&json!([some, [["b"], {}]])), [9, 9, 9], "one rule requires all instances");
    }

    #[test]
    fn errors_say_what_to_change() {
        let error = |gang: Value| resolve(&json!([[["a"], gang]])).unwrap_err().to_string();
        let text = error(json!({ "minReplicas": { "b": 1 } }));
        assert!(
            text.contains("policy `0`") && text.contains("`b`, which is not in the rule's roles"),
            "{text}"
        );
        let text = error(json!({ "minReplicas": { "a": 0 } }));
        assert!(text.contains("role `a` must be at least 1, not 0"), "{text}");
        let some = resolve(&json!([[["a"], { "minReplicas": { "a": 1 } }]])).unwrap();
        let text = some.check_scheduler(GangScheduler::SchedulerPlugins).unwrap_err().to_string();
        assert!(text.contains("Volcano 1.14"), "{text}");
        assert_eq!(some.check_scheduler(GangScheduler::Volcano), Ok(()));
        let all = resolve(&json!([[["a"], {}]])).unwrap();
        assert_eq!(all.check_scheduler(GangScheduler::SchedulerPlugins), Ok(()));
    }

    #[test]
    fn roles_must_be_able_to_reach_their_minimum() {
        let group = |replicas: i32, kind: &str| -> RoleBasedGroup {
            let annotations = json!({ rbg_api::keys::ROLE_WORKLOAD_TYPE: kind });
            let roles = json!([{ "name": "a", "replicas": replicas, "annotations": annotations }]);
            serde_json::from_value(json!({ "metadata": { "name": "g" }, "spec": { "roles": roles } }))
                .unwrap()
        };
        let sets = "workloads.x-k8s.io/v1alpha2/RoleInstanceSet";
        let gang = |gang: Value| resolve(&json!([[["a"], gang]])).unwrap();
        let two = gang(json!({ "minReplicas": { "a": 2 } }));
        assert_eq!(two.check_roles(&group(2, sets)), Ok(()));
        let text = two.check_roles(&group(1, sets)).unwrap_err().to_string();
        assert!(text.contains("role `a` is 2, but the role has 1 replicas"), "{text}");
        let text = two.check_roles(&group(2, "apps/v1/StatefulSet")).unwrap_err().to_string();
        assert!(text.contains("role `a` runs as StatefulSet"), "{text}");
        assert_eq!(gang(json!({})).check_roles(&group(0, "apps/v1/StatefulSet")), Ok(()));
        let unknown = resolve(&json!([[["a", "b"], {}]])).unwrap();
        assert_eq!(unknown.check_roles(&group(1, sets)), Err(GangPolicyError::NoSuchRole("b".to_owned())));
    }
}

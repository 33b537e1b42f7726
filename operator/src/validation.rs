//! Validation of groups and sets. Pure functions.
//!
//! Rejects what upstream's webhooks reject, and specs that no controller can run. An update is not rejected for errors that
//! the stored object already has, so that finalizers can be removed and roles scaled without fixing other errors first.

mod mirror;

use moongate_render::{
    GangPolicy, GangPolicyError, GangScheduler, GroupContext, GroupTopology, PodLocations, PreservedFields,
    RenderError, ResolvedRole, RoleTarget, RuntimeProfiles, SizeLimitError, SizeLimits, discovery_config_map,
    group_set, render_workload,
};
use rbg_api::conversion::fold_group;
use rbg_api::v1alpha2::{
    CoordinatedPolicy, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet, RoleSpec,
    RollingUpdate,
};
use rbg_api::{IntOrPercent, RoundingMode};

use crate::plan::{self, FaultPolicyError, FaultRules, GroupPlanError};

/// Maximum length of a DNS label.
const MAX_LABEL: usize = 63;

/// Validation error; its text is shown to the user who sent the object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValidationError {
    /// The name is unusable for pods and services.
    #[error(
        "metadata.name `{0}` must be a DNS label, since pods and services are named after it: letters a-z, digits \
         and `-`, a letter or digit at both ends, at most 63 in all"
    )]
    Name(String),
    /// The set's name is unusable for its groups.
    #[error(
        "metadata.name `{0}` is too long or not a DNS label: the set's groups are named `{0}-0` and so on, which must have \
         at most 63 letters a-z, digits and `-`"
    )]
    SetName(String),
    /// The role's name is unusable for pods.
    #[error("spec.roles: the name `{0}` must be a DNS label: letters a-z, digits and `-`, at most 63 in all")]
    RoleName(String),
    /// The value is neither a count nor a percentage.
    #[error(
        "role `{role}`: rolloutStrategy.rollingUpdate.{member} must be a non-negative number or a percentage, \
         not `{value}`"
    )]
    InvalidAmount { role: String, member: &'static str, value: String },
    /// The update could never start.
    #[error(
        "role `{role}`: of {replicas} replicas, maxUnavailable (rounded down) and maxSurge (rounded up) both amount to 0, \
         so that no update can start; raise one of them"
    )]
    NoProgress {
        role: String,
        /// Number of replicas of the role.
        replicas: i32,
    },
    /// The partition holds back every instance.
    #[error(
        "role `{role}`: rolloutStrategy.rollingUpdate.partition amounts to {partition}, which must be less than its \
         {replicas} replicas; to hold back the whole update, set `paused`"
    )]
    Partition {
        role: String,
        /// Resolved value of the partition.
        partition: i32,
        /// Number of replicas of the role.
        replicas: i32,
    },
    /// A scaling adapter sets the replicas.
    #[error(
        "role `{role}`: its replicas are set by the RoleBasedGroupScalingAdapter `{adapter}`, which requests {replicas}; \
         scale the adapter instead of setting {wanted} here, or disable scalingAdapter"
    )]
    Scaled {
        role: String,
        adapter: String,
        /// Replicas that the adapter requests.
        replicas: i32,
        /// Replicas in the new spec.
        wanted: i32,
    },
    /// The object requests too many objects.
    #[error(transparent)]
    Limit(#[from] SizeLimitError),
    /// The API server would reject the template in the role's pattern.
    #[error("role `{role}`: {problem}")]
    MirroredTemplate { role: String, problem: String },
    /// The error that the controller would report for the spec.
    #[error(transparent)]
    Spec(#[from] GroupPlanError),
    #[error(transparent)]
    FaultRecovery(#[from] FaultPolicyError),
    #[error(transparent)]
    Gang(#[from] GangPolicyError),
}

/// Validates a group as the operator will run it, with edits of mirrored templates; `old` is the stored object.
#[must_use]
pub fn validate_group(
    new: &RoleBasedGroup,
    old: Option<&RoleBasedGroup>,
    limits: SizeLimits,
) -> Vec<ValidationError> {
    let (folded, folded_old) = (fold_group(new), old.and_then(fold_group));
    let new = folded.as_ref().map_or(new, |folded| &folded.group);
    let old = folded_old.as_ref().map(|folded| &folded.group).or(old);
    let mut errors: Vec<_> = folded.iter().flat_map(mirror::edited_template_errors).collect();
    let name = new.metadata.name.clone().unwrap_or_default();
    if old.is_none() && !is_label(&name) {
        errors.push(ValidationError::Name(name));
    }
    errors.extend(validate_spec(new, old, limits));
    errors
}

/// Validates the gang of a policy by itself, since the group may change before or after it; `old` is the stored object.
#[must_use]
pub fn validate_gang(
    new: &CoordinatedPolicy,
    old: Option<&CoordinatedPolicy>,
    scheduler: GangScheduler,
) -> Option<ValidationError> {
    let error = |policy: &CoordinatedPolicy| match GangPolicy::resolve(&policy.spec) {
        Ok(gang) => gang.and_then(|gang| gang.check_scheduler(scheduler).err()),
        Err(error) => Some(error),
    };
    let before = old.and_then(error);
    error(new).filter(|error| before.as_ref() != Some(error)).map(Into::into)
}

/// Validates the fault recovery of a policy; `old` is the stored object, `group` the group of the same name, if it exists.
#[must_use]
pub fn validate_fault_recovery(
    new: &CoordinatedPolicy,
    old: Option<&CoordinatedPolicy>,
    group: Option<&RoleBasedGroup>,
) -> Option<ValidationError> {
    let error = |policy: &CoordinatedPolicy| match group {
        Some(group) => FaultRules::for_group(&policy.spec, group, None).err(),
        None => FaultRules::resolve(&policy.spec, None).err(),
    };
    let before = old.and_then(error);
    error(new).filter(|error| before.as_ref() != Some(error)).map(Into::into)
}

/// Validates a set of groups; `old` is the stored object.
#[must_use]
pub fn validate_group_set(
    new: &RoleBasedGroupSet,
    old: Option<&RoleBasedGroupSet>,
    limits: SizeLimits,
) -> Vec<ValidationError> {
    let mut errors = Vec::new();
    let name = new.metadata.name.clone().unwrap_or_default();
    if old.is_none() && !is_label(&format!("{name}-0")) {
        errors.push(ValidationError::SetName(name));
    }
    let limit_error = |set: &RoleBasedGroupSet| limits.check_group_set(set.spec.replicas).err();
    let before = old.and_then(limit_error);
    errors.extend(limit_error(new).filter(|error| before.as_ref() != Some(error)).map(Into::into));
    errors.extend(validate_spec(&first_group(new), old.map(first_group).as_ref(), limits));
    errors
}

/// A group of the set, with the fields that validation needs.
fn first_group(set: &RoleBasedGroupSet) -> RoleBasedGroup {
    let mut group = RoleBasedGroup::new("group", set.spec.group_template.spec.clone());
    group.metadata.annotations = Some(group_set::annotations(set));
    group
}

/// Roles with an adapter whose replicas change; each has to be checked with [`validate_scaled_replicas`].
pub fn scaled_roles<'a>(
    new: &'a RoleBasedGroup,
    old: &'a RoleBasedGroup,
) -> impl Iterator<Item = &'a RoleSpec> {
    new.spec.roles.iter().filter(|role| {
        let has_adapter = role.scaling_adapter.as_ref().is_some_and(|adapter| adapter.enable);
        has_adapter && old.spec.role(&role.name).is_some_and(|old| old.replicas != role.replicas)
    })
}

/// Whether the adapter forbids a role's replicas. An adapter without replicas takes over the role's.
#[must_use]
pub fn validate_scaled_replicas(
    role: &RoleSpec,
    adapter: &RoleBasedGroupScalingAdapter,
) -> Option<ValidationError> {
    let replicas = adapter.spec.replicas.filter(|replicas| *replicas != role.replicas)?;
    Some(ValidationError::Scaled {
        role: role.name.clone(),
        adapter: adapter.metadata.name.clone().unwrap_or_default(),
        replicas,
        wanted: role.replicas,
    })
}

fn validate_spec(
    new: &RoleBasedGroup,
    old: Option<&RoleBasedGroup>,
    limits: SizeLimits,
) -> Vec<ValidationError> {
    let mut errors = spec_errors(new, limits);
    if let Some(before) = old.map(|old| spec_errors(old, limits)) {
        errors.retain(|error| !before.contains(error));
    }
    for role in &new.spec.roles {
        let before = old.and_then(|old| old.spec.role(&role.name)).and_then(rolling_update);
        if let Some(rolling) = rolling_update(role)
            && before != Some(rolling)
        {
            errors.extend(rolling_update_errors(role, rolling));
        }
    }
    errors
}

/// Errors of the spec that do not depend on the cluster.
fn spec_errors(group: &RoleBasedGroup, limits: SizeLimits) -> Vec<ValidationError> {
    let spec = &group.spec;
    let names = spec.roles.iter().map(|role| &role.name);
    let mut errors: Vec<_> =
        names.filter(|name| !is_label(name)).map(|name| ValidationError::RoleName(name.clone())).collect();
    // The group's own name does not matter here, and topology levels are checked once for all roles.
    let mut object = RoleBasedGroup::new("group", spec.clone());
    object.metadata.namespace = Some("namespace".to_owned());
    if let Err(error) = GroupTopology::from_group(group, &[]) {
        errors.push(ValidationError::Spec(error.into()));
    }
    if let Err(error) = moongate_render::queue(group) {
        errors.push(ValidationError::Spec(error.into()));
    }
    if let Err(error) = plan::check_dependencies(&object) {
        errors.push(ValidationError::Spec(error));
    }
    // A profile may be created after the groups that use it.
    let runtimes = spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let profiles: RuntimeProfiles =
        runtimes.map(|runtime| (runtime.profile_name.clone(), Default::default())).collect();
    for role in &spec.roles {
        match render(&object, &profiles, role) {
            // Checked with the role's replicas instead.
            Ok(()) | Err(RenderError::NoProgress(_)) => {}
            Err(error) => errors.push(ValidationError::Spec(error.into())),
        }
    }
    errors.extend(size_error(group, &profiles, limits).map(Into::into));
    errors
}

/// Whether the group is too large. Roles that cannot be rendered do not count; their errors are reported as well.
fn size_error(
    group: &RoleBasedGroup,
    profiles: &RuntimeProfiles,
    limits: SizeLimits,
) -> Option<SizeLimitError> {
    let mut object =
        RoleBasedGroup::new(group.metadata.name.as_deref().unwrap_or("group"), group.spec.clone());
    object.metadata.namespace = Some("namespace".to_owned());
    let context = GroupContext::new(&object, profiles, GangScheduler::default()).ok()?;
    let roles: Vec<ResolvedRole<'_>> =
        object.spec.roles.iter().filter_map(|role| ResolvedRole::new(context, role).ok()).collect();
    if let Err(error) = limits.check_roles(roles.iter().map(|role| (role, role.replicas()))) {
        return Some(error);
    }
    let targets = object.spec.roles.iter().map(|role| (role.name.clone(), RoleTarget::of(role))).collect();
    match discovery_config_map(context, &targets, &PodLocations::new()) {
        Err(RenderError::Limit(error)) => Some(error),
        _ => None,
    }
}

fn render(object: &RoleBasedGroup, profiles: &RuntimeProfiles, role: &RoleSpec) -> Result<(), RenderError> {
    let group = GroupContext::new(object, profiles, GangScheduler::default())?;
    let resolved = ResolvedRole::new(group, role)?;
    render_workload(&resolved, &RoleTarget::of(role), &PreservedFields::default()).map(|_| ())
}

fn rolling_update(role: &RoleSpec) -> Option<&RollingUpdate> {
    role.rollout_strategy.as_ref()?.rolling_update.as_ref()
}

fn rolling_update_errors(role: &RoleSpec, rolling: &RollingUpdate) -> Vec<ValidationError> {
    let RollingUpdate { partition, max_unavailable, max_surge, .. } = rolling;
    let fields = [("partition", partition), ("maxUnavailable", max_unavailable), ("maxSurge", max_surge)];
    let invalid: Vec<_> = fields
        .into_iter()
        .filter_map(|(member, value)| Some((member, value.as_ref()?)))
        .filter(|(_, value)| value.of(100, RoundingMode::Down).is_none_or(|count| count < 0))
        .map(|(member, value)| {
            let value = match value {
                IntOrPercent::Int(count) => count.to_string(),
                IntOrPercent::Text(text) => text.clone(),
            };
            ValidationError::InvalidAmount { role: role.name.clone(), member, value }
        })
        .collect();
    if role.replicas <= 0 || !invalid.is_empty() {
        return invalid;
    }
    let (name, replicas) = (role.name.clone(), role.replicas);
    let count = |value: &Option<IntOrPercent>, round, default| {
        value.as_ref().and_then(|value| value.of(replicas, round)).unwrap_or(default)
    };
    let mut errors = Vec::new();
    if count(max_unavailable, RoundingMode::Down, 1) == 0 && count(max_surge, RoundingMode::Up, 0) == 0 {
        errors.push(ValidationError::NoProgress { role: name.clone(), replicas });
    }
    let partition = count(partition, RoundingMode::Up, 0);
    if partition >= replicas {
        errors.push(ValidationError::Partition { role: name, partition, replicas });
    }
    errors
}

/// RFC 1123 label, as Kubernetes defines it.
fn is_label(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
    name.len() <= MAX_LABEL
        && name.bytes().all(is_inner)
        && is_end(name.bytes().next())
        && is_end(name.bytes().next_back())
}

#[cfg(test)]
mod tests {
    use rbg_api::keys;
    use serde_json::{Value, json};

    use super::*;

    const LIMITS: SizeLimits = SizeLimits { pods_per_group: 100, pods_per_instance: 10, groups_per_set: 5 };

    fn group_named(name: &str, roles: Value) -> RoleBasedGroup {
        serde_json::from_value(json!({ "metadata": { "name": name }, "spec": { "roles": roles } })).unwrap()
    }

    fn role(replicas: i32, rolling: Value) -> Value {
        json!({ "name": "r", "replicas": replicas, "rolloutStrategy": { "rollingUpdate": rolling },
            "standalonePattern": { "template": { "spec": { "containers": [{ "name": "c" }] } } } })
    }

    fn group_of(role: Value) -> RoleBasedGroup {
        group_named("g", json!([role]))
    }

    fn errors(new: &RoleBasedGroup, old: Option<&RoleBasedGroup>) -> String {
        validate_group(new, old, LIMITS).iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn new_objects_need_dns_labels_as_names() {
        let good = json!([role(1, json!({}))]);
        for name in ["g", "0-g", &"g".repeat(63)] {
            assert_eq!(validate_group(&group_named(name, good.clone()), None, LIMITS), []);
        }
        for name in ["", "a.b", "A", "-a", "a-", "ä", &"g".repeat(64)] {
            let new = group_named(name, good.clone());
            assert_eq!(validate_group(&new, None, LIMITS), [ValidationError::Name(name.to_owned())]);
            assert_eq!(validate_group(&new, Some(&new), LIMITS), []);
        }
        let mut role = role(1, json!({}));
        role["name"] = "R".into();
        assert!(
            validate_group(&group_of(role), None, LIMITS)
                .contains(&ValidationError::RoleName("R".to_owned()))
        );
    }

    #[test]
    fn a_policy_is_validated_against_its_group() {
        let policy = |role: &str| -> CoordinatedPolicy {
            let recovery = json!({ "replacementDomain": "node" });
            let rule = json!({ "name": "p", "roles": [role], "strategy": { "faultRecovery": recovery } });
            serde_json::from_value(json!({ "metadata": { "name": "g" }, "spec": { "policies": [rule] } }))
                .unwrap()
        };
        let group = group_of(role(1, json!({})));
        assert_eq!(validate_fault_recovery(&policy("r"), None, Some(&group)), None);
        assert_eq!(
            validate_fault_recovery(&policy("other"), None, None),
            None,
            "the group may be created later"
        );
        let unknown = validate_fault_recovery(&policy("other"), None, Some(&group)).unwrap();
        assert!(unknown.to_string().contains("`other` is no role of the group"), "{unknown}");
        let stored = policy("other");
        assert_eq!(
            validate_fault_recovery(&stored, Some(&stored), Some(&group)),
            None,
            "it is stored already"
        );
    }

    #[test]
    fn a_gang_is_validated_against_the_scheduler() {
        let policy = |role: &str| -> CoordinatedPolicy {
            let gang = json!({ "gang": { "minReplicas": { "r": 1 } } });
            let rule = json!({ "name": "p", "roles": [role], "strategy": { "scheduling": gang } });
            serde_json::from_value(json!({ "metadata": { "name": "g" }, "spec": { "policies": [rule] } }))
                .unwrap()
        };
        let good = policy("r");
        assert_eq!(validate_gang(&good, None, GangScheduler::Volcano), None);
        let refused = validate_gang(&good, None, GangScheduler::SchedulerPlugins);
        assert_eq!(refused, Some(ValidationError::Gang(GangPolicyError::UnsupportedScheduler)));
        assert_eq!(validate_gang(&good, Some(&good), GangScheduler::SchedulerPlugins), None, "it is stored");
        let refused = validate_gang(&policy("s"), Some(&good), GangScheduler::Volcano).unwrap();
        assert!(refused.to_string().contains("`r`, which is not in the rule's roles"), "{refused}");
    }

    #[test]
    fn a_set_is_validated_by_its_template() {
        let set_of = |name: &str, roles: Value| -> RoleBasedGroupSet {
            let spec = json!({ "groupTemplate": { "spec": { "roles": roles } } });
            serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec })).unwrap()
        };
        let good = json!([role(1, json!({}))]);
        assert_eq!(validate_group_set(&set_of(&"s".repeat(61), good.clone()), None, LIMITS), []);
        let long = "s".repeat(62);
        assert_eq!(validate_group_set(&set_of(&long, good), None, LIMITS), [ValidationError::SetName(long)]);
        let refused =
            validate_group_set(&set_of("s", json!([role(2, json!({ "partition": 2 }))])), None, LIMITS);
        assert!(matches!(refused[..], [ValidationError::Partition { partition: 2, .. }]));
    }

    #[test]
    fn an_update_must_be_able_to_start_and_to_reach_a_pod() {
        for (replicas, rolling, text) in [
            (3, json!({ "maxUnavailable": 0 }), "both amount to 0"),
            (3, json!({ "maxUnavailable": "30%", "maxSurge": 0 }), "both amount to 0"),
            (3, json!({ "partition": 3 }), "amounts to 3, which must be less than its 3 replicas"),
            (3, json!({ "partition": "70%" }), "amounts to 3"),
            (3, json!({ "maxSurge": "x" }), "rollingUpdate.maxSurge must be a non-negative number"),
            (3, json!({ "maxUnavailable": -1 }), "not `-1`"),
            (0, json!({ "partition": "-1%" }), "not `-1%`"),
        ] {
            let refused = errors(&group_of(role(replicas, rolling.clone())), None);
            assert!(refused.contains(text), "{rolling}: {refused}");
        }
        for (replicas, rolling) in [
            (3, json!({ "maxUnavailable": 0, "maxSurge": "1%" })),
            (3, json!({ "partition": "60%" })),
            (0, json!({ "partition": 7, "maxUnavailable": "10%" })),
        ] {
            assert_eq!(validate_group(&group_of(role(replicas, rolling)), None, LIMITS), []);
        }
    }

    #[test]
    fn errors_of_the_stored_object_do_not_block_updates() {
        let rolling = json!({ "partition": 2, "maxUnavailable": "30%" });
        let old = group_of(role(5, rolling.clone()));
        let scaled_down = group_of(role(2, rolling));
        assert_eq!(validate_group(&scaled_down, Some(&old), LIMITS), []);
        let other_partition = group_of(role(2, json!({ "partition": 3 })));
        assert!(errors(&other_partition, Some(&old)).contains("amounts to 3"));

        let broken = group_of(json!({ "name": "r" }));
        assert!(errors(&broken, None).contains("none of standalonePattern"));
        assert_eq!(validate_group(&broken, Some(&broken), LIMITS), []);
        let mut worse = broken.clone();
        worse.spec.roles[0].dependencies = vec!["other".to_owned()];
        assert!(errors(&worse, Some(&broken)).contains("no role of this group"));
    }

    #[test]
    fn specs_that_no_controller_can_run_are_rejected() {
        let with = |member: &str, value: Value| {
            let mut role = role(1, json!({}));
            role[member] = value;
            role
        };
        let workload = json!({ "rbg.workloads.x-k8s.io/role-workload-type": "batch/v1/Job" });
        let reference = json!({ "templateRef": { "name": "t", "patch": {} } });
        for (role, text) in [
            (with("dependencies", json!(["r"])), "depend on each other in a circle: r"),
            (with("annotations", workload), "requests the workload `batch/v1/Job`"),
            (with("standalonePattern", reference), "spec.roleTemplates does not have"),
        ] {
            let refused = errors(&group_of(role), None);
            assert!(refused.contains(text), "{refused}");
        }
        let profile = with("engineRuntimes", json!([{ "profileName": "comes-later" }]));
        assert_eq!(validate_group(&group_of(profile), None, LIMITS), []);
    }

    #[test]
    fn topology_levels_and_queues_must_be_valid() {
        let mut invalid = group_of(role(1, json!({})));
        invalid.metadata.annotations = Some([(keys::TOPOLOGY_LADDER.to_owned(), "host".to_owned())].into());
        assert!(errors(&invalid, None).contains("`host` is not a level"));
        let mut queued = group_of(role(1, json!({})));
        queued.metadata.annotations = Some([(keys::QUEUE.to_owned(), "Team A".to_owned())].into());
        assert!(errors(&queued, None).contains("`Team A` is not the name of a queue"));
        assert_eq!(validate_group(&invalid, Some(&invalid), LIMITS), []);
        let object = json!({ "metadata": { "name": "s" }, "spec": { "groupTemplate": invalid } });
        assert_eq!(validate_group_set(&serde_json::from_value(object).unwrap(), None, LIMITS).len(), 1);
    }

    #[test]
    fn an_adapter_controls_its_roles_replicas() {
        let adapted = |replicas| {
            let mut role = role(replicas, json!({}));
            role["scalingAdapter"] = json!({ "enable": true });
            group_of(role)
        };
        let (old, new) = (adapted(1), adapted(3));
        assert_eq!(scaled_roles(&new, &new).count(), 0);
        let role = scaled_roles(&new, &old).next().unwrap();
        let adapter = |replicas: Value| -> RoleBasedGroupScalingAdapter {
            let spec = json!({ "replicas": replicas, "scaleTargetRef": { "name": "g", "role": "r" } });
            serde_json::from_value(json!({ "metadata": { "name": "g-r" }, "spec": spec })).unwrap()
        };
        assert_eq!(validate_scaled_replicas(role, &adapter(json!(3))), None);
        assert_eq!(validate_scaled_replicas(role, &adapter(Value::Null)), None);
        let refused = validate_scaled_replicas(role, &adapter(json!(2))).unwrap().to_string();
        assert!(refused.contains("`g-r`, which requests 2"), "{refused}");
    }

    #[test]
    fn objects_that_request_too_many_objects_are_rejected() {
        let large = group_of(role(i32::MAX, json!({})));
        let refused = errors(&large, None);
        assert!(refused.contains("role `r` with 2147483647 replicas"), "{refused}");
        assert!(refused.contains("at most 100 are allowed; lower the replicas"), "{refused}");
        assert_eq!(validate_group(&large, Some(&large), LIMITS), [], "finalizers can be removed");
        assert_eq!(validate_group(&group_of(role(100, json!({}))), None, LIMITS), []);
        let set = |replicas: i32| -> RoleBasedGroupSet {
            let spec = json!({ "replicas": replicas, "groupTemplate": { "spec": { "roles": [role(1, json!({}))] } } });
            serde_json::from_value(json!({ "metadata": { "name": "s" }, "spec": spec })).unwrap()
        };
        let error = SizeLimitError::GroupsPerSet { replicas: 6, limit: 5 };
        assert_eq!(validate_group_set(&set(6), None, LIMITS), [error.into()]);
        assert_eq!(validate_group_set(&set(6), Some(&set(6)), LIMITS), []);
        assert_eq!(validate_group_set(&set(5), None, LIMITS), []);
    }

    #[test]
    fn a_discovery_file_beyond_the_limit_is_rejected() {
        let limits = SizeLimits { pods_per_group: 20_000, ..LIMITS };
        let refused = |replicas| validate_group(&group_of(role(replicas, json!({}))), None, limits);
        assert_eq!(refused(10_000), []);
        let mut long = group_of(role(20_000, json!({})));
        long.metadata.name = Some("g".repeat(40));
        let errors = validate_group(&long, None, limits);
        assert!(matches!(errors[..], [ValidationError::Limit(SizeLimitError::DiscoveryFile { .. })]));
    }
}

//! Which groups and sets may be stored. Pure.
//!
//! What upstream's webhooks refuse is refused, and what no controller could ever carry out. An update is not refused for what
//! was wrong before: whoever takes a finalizer away, or scales a role, need not mend the rest first.

use moongate_render::{
    GangScheduler, GroupRenderer, PreservedFields, RenderError, RoleTarget, RuntimeProfiles, group_set,
};
use rbg_api::v1alpha2::{
    RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleBasedGroupSet, RoleSpec, RollingUpdate,
};
use rbg_api::{IntOrPercent, RoundingMode};

use crate::plan;

/// Longest DNS label.
const MAX_LABEL: usize = 63;

/// Why an object may not be stored. The texts are shown to whoever sent it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValidationError {
    /// The object is none of its kind.
    #[error("the object cannot be read: {0}")]
    Unreadable(String),
    /// A name that pods and services cannot be called after.
    #[error(
        "metadata.name `{0}` must be a DNS label, since pods and services are called after it: letters a-z, digits \
         and `-`, a letter or digit at both ends, at most 63 in all"
    )]
    Name(String),
    /// As [`Self::Name`].
    #[error(
        "metadata.name `{0}` is too long or no DNS label: the set's groups are called `{0}-0` and so on, which must have \
         at most 63 letters a-z, digits and `-`"
    )]
    SetName(String),
    /// As [`Self::Name`].
    #[error("spec.roles: the name `{0}` must be a DNS label: letters a-z, digits and `-`, at most 63 in all")]
    RoleName(String),
    /// Neither a count nor a share.
    #[error(
        "role `{role}`: rolloutStrategy.rollingUpdate.{member} must be a number that is not negative or a percentage, \
         not `{value}`"
    )]
    InvalidAmount {
        /// The role.
        role: String,
        /// Which member.
        member: &'static str,
        /// What it says.
        value: String,
    },
    /// Updates that could never begin.
    #[error(
        "role `{role}`: of {replicas} replicas, maxUnavailable (rounded down) and maxSurge (rounded up) both come to 0, \
         so that no update could begin; raise one of them"
    )]
    NoProgress {
        /// The role.
        role: String,
        /// Its replicas.
        replicas: i32,
    },
    /// A partition that holds back every instance.
    #[error(
        "role `{role}`: rolloutStrategy.rollingUpdate.partition comes to {partition}, which must be less than its \
         {replicas} replicas; to hold an update back as a whole, set `paused`"
    )]
    Partition {
        /// The role.
        role: String,
        /// The partition.
        partition: i32,
        /// The role's replicas.
        replicas: i32,
    },
    /// Somebody else sets the replicas.
    #[error(
        "role `{role}`: its replicas are set by the RoleBasedGroupScalingAdapter `{adapter}`, which says {replicas}; \
         scale that one instead of writing {wanted} here, or disable scalingAdapter"
    )]
    Scaled {
        /// The role.
        role: String,
        /// The adapter.
        adapter: String,
        /// What the adapter says.
        replicas: i32,
        /// What the group shall say.
        wanted: i32,
    },
    /// What [`Self::Scaled`] needs to know cannot be had.
    #[error(
        "the RoleBasedGroupScalingAdapter `{adapter}` cannot be read, so whether replicas may change is not known: {error}"
    )]
    Unknown {
        /// The adapter.
        adapter: String,
        /// Why not.
        error: String,
    },
    /// What the controller would say of the spec.
    #[error("{0}")]
    Spec(String),
}

/// What speaks against a group; `old` is what is stored.
#[must_use]
pub fn validate_group(new: &RoleBasedGroup, old: Option<&RoleBasedGroup>) -> Vec<ValidationError> {
    let mut objections = Vec::new();
    let name = new.metadata.name.clone().unwrap_or_default();
    if old.is_none() && !is_label(&name) {
        objections.push(ValidationError::Name(name));
    }
    objections.extend(validate_spec(new, old));
    objections
}

/// What speaks against a set of groups.
#[must_use]
pub fn validate_group_set(new: &RoleBasedGroupSet, old: Option<&RoleBasedGroupSet>) -> Vec<ValidationError> {
    let mut objections = Vec::new();
    let name = new.metadata.name.clone().unwrap_or_default();
    if old.is_none() && !is_label(&format!("{name}-0")) {
        objections.push(ValidationError::SetName(name));
    }
    objections.extend(validate_spec(&first_group(new), old.map(first_group).as_ref()));
    objections
}

/// A group of the set, as far as it matters here.
fn first_group(set: &RoleBasedGroupSet) -> RoleBasedGroup {
    let mut group = RoleBasedGroup::new("group", set.spec.group_template.spec.clone());
    group.metadata.annotations = Some(group_set::annotations(set));
    group
}

/// Roles with an adapter whose replicas somebody wants to change. Whether they may depends on what [`validate_scaled_replicas`] says.
pub fn scaled_roles<'a>(
    new: &'a RoleBasedGroup,
    old: &'a RoleBasedGroup,
) -> impl Iterator<Item = &'a RoleSpec> {
    new.spec.roles.iter().filter(|role| {
        let has_adapter = role.scaling_adapter.as_ref().is_some_and(|adapter| adapter.enable);
        has_adapter && old.spec.role(&role.name).is_some_and(|old| old.replicas != role.replicas)
    })
}

/// What the adapter has against a role's replicas. One that has none yet takes the role's.
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

fn validate_spec(new: &RoleBasedGroup, old: Option<&RoleBasedGroup>) -> Vec<ValidationError> {
    let mut objections = spec_errors(new);
    if let Some(before) = old.map(spec_errors) {
        objections.retain(|objection| !before.contains(objection));
    }
    for role in &new.spec.roles {
        let before = old.and_then(|old| old.spec.role(&role.name)).and_then(rolling_update);
        if let Some(rolling) = rolling_update(role)
            && before != Some(rolling)
        {
            objections.extend(rolling_update_errors(role, rolling));
        }
    }
    objections
}

/// What makes the group impossible to run, whatever the cluster has.
fn spec_errors(group: &RoleBasedGroup) -> Vec<ValidationError> {
    let spec = &group.spec;
    let names = spec.roles.iter().map(|role| &role.name);
    let mut faults: Vec<_> =
        names.filter(|name| !is_label(name)).map(|name| ValidationError::RoleName(name.clone())).collect();
    // Names of pods and the like are no matter here, and the ladder is judged once for all roles.
    let mut object = RoleBasedGroup::new("group", spec.clone());
    object.metadata.namespace = Some("namespace".to_owned());
    if let Err(wrong) = moongate_render::topology_keys(group) {
        faults.push(ValidationError::Spec(wrong.to_string()));
    }
    if let Err(refusal) = plan::check_dependencies(&object) {
        faults.push(ValidationError::Spec(refusal.to_string()));
    }
    // A profile may come later than the groups that want it.
    let wanted = spec.roles.iter().flat_map(|role| &role.engine_runtimes);
    let profiles: RuntimeProfiles =
        wanted.map(|runtime| (runtime.profile_name.clone(), Default::default())).collect();
    for role in &spec.roles {
        match render(&object, &profiles, role) {
            // Judged with the replicas that the role has.
            Ok(()) | Err(RenderError::NoProgress(_)) => {}
            Err(error) => faults.push(ValidationError::Spec(error.to_string())),
        }
    }
    faults
}

fn render(object: &RoleBasedGroup, profiles: &RuntimeProfiles, role: &RoleSpec) -> Result<(), RenderError> {
    let group = GroupRenderer::new(object, profiles, GangScheduler::default())?;
    group.role(role)?.workload(&RoleTarget::of(role), &PreservedFields::default()).map(|_| ())
}

fn rolling_update(role: &RoleSpec) -> Option<&RollingUpdate> {
    role.rollout_strategy.as_ref()?.rolling_update.as_ref()
}

fn rolling_update_errors(role: &RoleSpec, rolling: &RollingUpdate) -> Vec<ValidationError> {
    let RollingUpdate { partition, max_unavailable, max_surge, .. } = rolling;
    let amounts = [("partition", partition), ("maxUnavailable", max_unavailable), ("maxSurge", max_surge)];
    let wrong: Vec<_> = amounts
        .into_iter()
        .filter_map(|(member, amount)| Some((member, amount.as_ref()?)))
        .filter(|(_, amount)| amount.of(100, RoundingMode::Down).is_none_or(|count| count < 0))
        .map(|(member, amount)| {
            let value = match amount {
                IntOrPercent::Int(count) => count.to_string(),
                IntOrPercent::Text(text) => text.clone(),
            };
            ValidationError::InvalidAmount { role: role.name.clone(), member, value }
        })
        .collect();
    if role.replicas <= 0 || !wrong.is_empty() {
        return wrong;
    }
    let (name, replicas) = (role.name.clone(), role.replicas);
    let count = |amount: &Option<IntOrPercent>, round, default| {
        amount.as_ref().and_then(|amount| amount.of(replicas, round)).unwrap_or(default)
    };
    let mut faults = Vec::new();
    if count(max_unavailable, RoundingMode::Down, 1) == 0 && count(max_surge, RoundingMode::Up, 0) == 0 {
        faults.push(ValidationError::NoProgress { role: name.clone(), replicas });
    }
    let partition = count(partition, RoundingMode::Up, 0);
    if partition >= replicas {
        faults.push(ValidationError::Partition { role: name, partition, replicas });
    }
    faults
}

/// RFC 1123, as Kubernetes has it.
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

    fn named(name: &str, roles: Value) -> RoleBasedGroup {
        serde_json::from_value(json!({ "metadata": { "name": name }, "spec": { "roles": roles } })).unwrap()
    }

    fn role(replicas: i32, rolling: Value) -> Value {
        json!({ "name": "r", "replicas": replicas, "rolloutStrategy": { "rollingUpdate": rolling },
            "standalonePattern": { "template": { "spec": { "containers": [{ "name": "c" }] } } } })
    }

    fn one(role: Value) -> RoleBasedGroup {
        named("g", json!([role]))
    }

    fn objections(new: &RoleBasedGroup, old: Option<&RoleBasedGroup>) -> String {
        validate_group(new, old).iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn names_must_be_dns_labels_when_an_object_is_made() {
        let good = json!([role(1, json!({}))]);
        for name in ["g", "0-g", &"g".repeat(63)] {
            assert_eq!(validate_group(&named(name, good.clone()), None), []);
        }
        for name in ["", "a.b", "A", "-a", "a-", "ä", &"g".repeat(64)] {
            let new = named(name, good.clone());
            assert_eq!(validate_group(&new, None), [ValidationError::Name(name.to_owned())]);
            assert_eq!(validate_group(&new, Some(&new)), []);
        }
        let mut role = role(1, json!({}));
        role["name"] = "R".into();
        assert!(validate_group(&one(role), None).contains(&ValidationError::RoleName("R".to_owned())));
    }

    #[test]
    fn a_set_is_judged_by_its_template() {
        let set_of = |name: &str, roles: Value| -> RoleBasedGroupSet {
            let spec = json!({ "groupTemplate": { "spec": { "roles": roles } } });
            serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec })).unwrap()
        };
        let good = json!([role(1, json!({}))]);
        assert_eq!(validate_group_set(&set_of(&"s".repeat(61), good.clone()), None), []);
        let long = "s".repeat(62);
        assert_eq!(validate_group_set(&set_of(&long, good), None), [ValidationError::SetName(long)]);
        let refused = validate_group_set(&set_of("s", json!([role(2, json!({ "partition": 2 }))])), None);
        assert!(matches!(refused[..], [ValidationError::Partition { partition: 2, .. }]));
    }

    #[test]
    fn an_update_must_be_able_to_begin_and_to_reach_someone() {
        for (replicas, rolling, text) in [
            (3, json!({ "maxUnavailable": 0 }), "both come to 0"),
            (3, json!({ "maxUnavailable": "30%", "maxSurge": 0 }), "both come to 0"),
            (3, json!({ "partition": 3 }), "comes to 3, which must be less than its 3 replicas"),
            (3, json!({ "partition": "70%" }), "comes to 3"),
            (3, json!({ "maxSurge": "x" }), "rollingUpdate.maxSurge must be a number"),
            (3, json!({ "maxUnavailable": -1 }), "not `-1`"),
            (0, json!({ "partition": "-1%" }), "not `-1%`"),
        ] {
            let refused = objections(&one(role(replicas, rolling.clone())), None);
            assert!(refused.contains(text), "{rolling}: {refused}");
        }
        for (replicas, rolling) in [
            (3, json!({ "maxUnavailable": 0, "maxSurge": "1%" })),
            (3, json!({ "partition": "60%" })),
            (0, json!({ "partition": 7, "maxUnavailable": "10%" })),
        ] {
            assert_eq!(validate_group(&one(role(replicas, rolling)), None), []);
        }
    }

    #[test]
    fn what_was_wrong_before_does_not_stop_an_update() {
        let rolling = json!({ "partition": 2, "maxUnavailable": "30%" });
        let old = one(role(5, rolling.clone()));
        let scaled_down = one(role(2, rolling));
        assert_eq!(validate_group(&scaled_down, Some(&old)), []);
        let other_partition = one(role(2, json!({ "partition": 3 })));
        assert!(objections(&other_partition, Some(&old)).contains("comes to 3"));

        let broken = one(json!({ "name": "r" }));
        assert!(objections(&broken, None).contains("none of standalonePattern"));
        assert_eq!(validate_group(&broken, Some(&broken)), []);
        let mut worse = broken.clone();
        worse.spec.roles[0].dependencies = vec!["other".to_owned()];
        assert!(objections(&worse, Some(&broken)).contains("no role of this group"));
    }

    #[test]
    fn what_no_controller_could_run_is_refused() {
        let with = |member: &str, value: Value| {
            let mut role = role(1, json!({}));
            role[member] = value;
            role
        };
        let workload = json!({ "rbg.workloads.x-k8s.io/role-workload-type": "batch/v1/Job" });
        let reference = json!({ "templateRef": { "name": "t", "patch": {} } });
        for (role, text) in [
            (with("dependencies", json!(["r"])), "depend on each other in a circle: r"),
            (with("annotations", workload), "asks for the workload `batch/v1/Job`"),
            (with("standalonePattern", reference), "spec.roleTemplates does not have"),
        ] {
            let refused = objections(&one(role), None);
            assert!(refused.contains(text), "{refused}");
        }
        let profile = with("engineRuntimes", json!([{ "profileName": "comes-later" }]));
        assert_eq!(validate_group(&one(profile), None), []);
    }

    #[test]
    fn a_ladder_must_be_one_that_can_be_climbed() {
        let mut wrong = one(role(1, json!({})));
        wrong.metadata.annotations = Some([(keys::TOPOLOGY_LADDER.to_owned(), "host".to_owned())].into());
        assert!(objections(&wrong, None).contains("`host` is no level"));
        assert_eq!(validate_group(&wrong, Some(&wrong)), []);
        let object = json!({ "metadata": { "name": "s" }, "spec": { "groupTemplate": wrong } });
        assert_eq!(validate_group_set(&serde_json::from_value(object).unwrap(), None).len(), 1);
    }

    #[test]
    fn an_adapter_decides_on_its_roles_replicas() {
        let adapted = |replicas| {
            let mut role = role(replicas, json!({}));
            role["scalingAdapter"] = json!({ "enable": true });
            one(role)
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
        assert!(refused.contains("`g-r`, which says 2"), "{refused}");
    }
}

//! Pods that are scheduled together: the PodGroup of a group, and groups of pods in Kueue.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use moongate_render::{
    GangPolicy, GangPolicyError, GangScheduler, GroupContext, Manifest, kueue_group_name, pod_group,
};
use rbg_api::v1alpha2::{CoordinatedPolicySpec, InstanceComponent, RoleBasedGroup, RoleInstance};
use rbg_api::{Condition, keys};
use serde::Deserialize as _;

use super::group::{GroupInput, GroupPlanError, apply_if_changed};
use super::{InstanceInput, ReconcilePlan, WriteAction};
use crate::ResourceKind;
use crate::status::{self, INCOMPATIBLE_GANG, pod_label};

/// Condition of a group whose policy has a gang, as upstream sets it.
const CONDITION: &str = "GangConfigured";

/// The gang of the group's policy.
pub(super) fn of_policy(input: GroupInput<'_>) -> Result<Option<GangPolicy>, GangPolicyError> {
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let policy = (input.live)(ResourceKind::Policy, name);
    let Some(policy) = policy.and_then(|policy| CoordinatedPolicySpec::deserialize(&policy["spec"]).ok())
    else {
        return Ok(None);
    };
    let gang = GangPolicy::resolve(&policy)?;
    if let Some(gang) = &gang {
        gang.check_scheduler(input.gang)?;
        gang.check_roles(input.group)?;
    }
    Ok(gang)
}

/// Reports whether the gang of the group's policy can be scheduled. Removes the condition from a group without one.
pub(super) fn set_condition(
    input: GroupInput<'_>,
    error: Option<&GangPolicyError>,
    conditions: &mut Vec<Condition>,
) {
    let text = error.map(ToString::to_string);
    match (text, input.gang_policy) {
        (Some(text), _) => {
            status::set_condition(conditions, CONDITION, false, (INCOMPATIBLE_GANG, &text), input.now);
        }
        (None, Some(_)) => status::set_condition(conditions, CONDITION, true, (CONDITION, ""), input.now),
        (None, None) => conditions.retain(|condition| condition.kind != CONDITION),
    }
}

/// Roles that are in the gang or that wait for a role in it, directly or not. A role of the gang cannot wait for these, since its
/// members have no node before all of them are created.
pub(super) fn roles_behind_gang<'a>(group: GroupContext<'_>, spec: &'a RoleBasedGroup) -> BTreeSet<&'a str> {
    let roles = &spec.spec.roles;
    let mut found: BTreeSet<&str> =
        roles.iter().map(|role| role.name.as_str()).filter(|name| group.is_in_gang(name)).collect();
    loop {
        let before = found.len();
        for role in roles {
            if role.dependencies.iter().any(|name| found.contains(name.as_str())) {
                found.insert(&role.name);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

pub(super) fn plan(
    input: GroupInput<'_>,
    group: GroupContext<'_>,
    plan: &mut ReconcilePlan,
) -> Result<(), GroupPlanError> {
    let kind = match input.gang {
        GangScheduler::SchedulerPlugins => ResourceKind::PodGroup,
        GangScheduler::Volcano => ResourceKind::VolcanoPodGroup,
    };
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let annotations = input.group.metadata.annotations.as_ref();
    let says = |key| annotations.and_then(|all| all.get(key)).is_some_and(|value| value == "true");
    if says(keys::GANG_SCHEDULING) && says(keys::INSTANCE_GANG_SCHEDULING) {
        return Err(GroupPlanError::ConflictingGangs);
    }
    let live = (input.live)(kind, name);
    match (pod_group(group), live) {
        (Some(_), _) if (input.is_absent)(kind) => return Err(GroupPlanError::Absent(kind)),
        (Some(manifest), live) => apply_if_changed(&manifest, live, plan, "the group's PodGroup"),
        (None, Some(live)) => {
            let owners = live["metadata"]["ownerReferences"].as_array();
            let is_ours =
                |owner: &serde_json::Value| owner["uid"].as_str() == input.group.metadata.uid.as_deref();
            let uid = live["metadata"]["uid"].as_str().filter(|_| owners.into_iter().flatten().any(is_ours));
            if let Some(uid) = uid {
                let action = WriteAction::Delete { kind, name: name.to_owned(), uid: uid.to_owned() };
                plan.push(action, "gang scheduling is turned off for the group");
            }
        }
        (None, None) => {}
    }
    Ok(())
}

/// Whether the pods of one instance are created and recreated together.
pub(super) fn is_gang(instance: &RoleInstance) -> bool {
    let annotations = instance.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(keys::INSTANCE_GANG_SCHEDULING)).is_some_and(|value| value == "true")
}

/// Whether the component's pods are scheduled together with all others, so that none can wait until another is up.
pub(super) fn is_scheduled_together(instance: &RoleInstance, component: &InstanceComponent) -> bool {
    let template = &component.template;
    template.label(keys::POD_GROUP).is_some()
        || template.annotation(keys::VOLCANO_POD_GROUP).is_some()
        || is_kueue_gang(instance)
}

/// Whether Kueue admits the instance's pods together.
fn is_kueue_gang(instance: &RoleInstance) -> bool {
    let annotations = instance.metadata.annotations.as_ref();
    let has_queue =
        annotations.and_then(|all| all.get(keys::KUEUE_QUEUE)).is_some_and(|queue| !queue.is_empty());
    has_queue && is_gang(instance) && size(instance) > 1
}

fn size(instance: &RoleInstance) -> i32 {
    instance.spec.components.iter().map(InstanceComponent::size).fold(0, i32::saturating_add)
}

/// Makes new pods of an instance members of the group of pods that Kueue admits together: that of its other pods, or a new one. Pods
/// that are created again need a new one, since Kueue considers the previous one finished.
pub(super) fn join_kueue_group(input: InstanceInput<'_>, pods: &[&Pod], new: &mut [Manifest]) {
    let instance = input.instance;
    if !is_kueue_gang(instance) {
        return;
    }
    let present = pods.iter().find_map(|pod| pod_label(pod, keys::KUEUE_POD_GROUP));
    let name = instance.metadata.name.as_deref().unwrap_or_default();
    let created = || kueue_group_name(name, input.now.as_second());
    let group = present.map_or_else(created, str::to_owned);
    new.iter_mut().for_each(|pod| moongate_render::join_kueue_group(pod, &group, size(instance)));
}

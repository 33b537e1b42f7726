//! PodGroup of a group with gang scheduling.

use moongate_render::{GangScheduler, GroupContext, pod_group};
use rbg_api::keys;
use rbg_api::v1alpha2::{CoordinatedPolicySpec, InstanceComponent, RoleInstance};

use super::group::{GroupInput, GroupPlanError, apply_if_changed};
use super::{ReconcilePlan, WriteAction};
use crate::ResourceKind;

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
pub(super) fn is_scheduled_together(component: &InstanceComponent) -> bool {
    let template = &component.template;
    template.label(keys::POD_GROUP).is_some() || template.annotation(keys::VOLCANO_POD_GROUP).is_some()
}

/// A gang needs all its pods to be scheduled: a policy cannot scale its roles step by step.
pub(super) fn remove_scaling_rules(group: GroupContext<'_>, policy: &mut CoordinatedPolicySpec) {
    if pod_group(group).is_some() {
        for rule in &mut policy.policies {
            rule.strategy.scaling = None;
        }
    }
}

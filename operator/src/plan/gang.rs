//! The PodGroup of a group whose pods are scheduled at once or not at all.

use moongate_render::{GangScheduler, Group};
use rbg_api::v1alpha2::CoordinatedPolicySpec;

use super::group::{GroupInput, Refusal, apply_if_other};
use super::{Action, Plan};
use crate::Kind;

pub(super) fn plan(input: GroupInput<'_>, group: Group<'_>, plan: &mut Plan) -> Result<(), Refusal> {
    let kind = match input.gang {
        GangScheduler::SchedulerPlugins => Kind::PodGroup,
        GangScheduler::Volcano => Kind::VolcanoPodGroup,
    };
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let live = (input.live)(kind, name);
    match (group.pod_group(), live) {
        (Some(_), _) if (input.is_absent)(kind) => return Err(Refusal::Absent(kind)),
        (Some(manifest), live) => apply_if_other(&manifest, live, plan, "the group's PodGroup"),
        (None, Some(live)) => {
            let owners = live["metadata"]["ownerReferences"].as_array();
            let is_ours =
                |owner: &serde_json::Value| owner["uid"].as_str() == input.group.metadata.uid.as_deref();
            let uid = live["metadata"]["uid"].as_str().filter(|_| owners.into_iter().flatten().any(is_ours));
            if let Some(uid) = uid {
                let action = Action::Delete { kind, name: name.to_owned(), uid: uid.to_owned() };
                plan.push(action, "the group's pods are scheduled one by one now");
            }
        }
        (None, None) => {}
    }
    Ok(())
}

/// A gang is there as a whole or not at all: no policy can have its roles grow step by step.
pub(super) fn without_steps(group: Group<'_>, policy: &mut CoordinatedPolicySpec) {
    if group.pod_group().is_some() {
        for rule in &mut policy.policies {
            rule.strategy.scaling = None;
        }
    }
}

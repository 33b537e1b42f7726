//! Order in which unordered instances are removed when their set has too many.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::Pod;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleInstance;

use super::set::InstanceSetView;
use super::{ReconcilePlan, hooks, lifecycle};
use crate::status::is_ready;
use crate::upgrade_hook::{HookCall, HookResult};

/// The instances that are removed first: those whose removal has begun, those that are not ready, those of an older revision, which lose
/// their state in the update anyway, those with the lowest cost, and then the youngest.
///
/// `None` if the costs decide and pods have yet to respond: the calls are in the plan.
pub(super) fn first<'a>(
    view: &InstanceSetView<'_>,
    instances: &[&'a RoleInstance],
    count: usize,
    plan: &mut ReconcilePlan,
) -> Option<Vec<&'a RoleInstance>> {
    let class = |live: &RoleInstance| (!lifecycle::is_leaving(live), is_ready(live), view.is_updated(live));
    let mut sorted = instances.to_vec();
    sorted.sort_by_cached_key(|live| class(live));
    let (last, next) = (sorted.get(count.checked_sub(1)?)?, sorted.get(count));
    let decided = next.filter(|next| class(next) == class(last)).map(|next| class(next));
    // Costs matter only within the class of which some are removed and some stay.
    let tied = |live: &RoleInstance| decided.is_some_and(|decided| class(live) == decided);
    let mut calls = Vec::new();
    let costs: Vec<i64> =
        sorted.iter().map(|live| if tied(live) { cost(view, live, &mut calls) } else { 0 }).collect();
    if !calls.is_empty() {
        plan.call_hooks(calls, view.input.now);
        return None;
    }
    let mut by_cost: Vec<_> = sorted.into_iter().zip(costs).collect();
    by_cost.sort_by_cached_key(|(live, cost)| {
        (class(live), *cost, Reverse(live.metadata.creation_timestamp.as_ref().map(|time| time.0)))
    });
    Some(by_cost.into_iter().take(count).map(|(live, _)| live).collect())
}

/// Cost of removing an instance: its own annotation, or the sum of its pods'. Adds the calls of pods that have yet to respond.
fn cost(view: &InstanceSetView<'_>, instance: &RoleInstance, calls: &mut Vec<HookCall>) -> i64 {
    let annotations = instance.metadata.annotations.as_ref();
    let own = annotations.and_then(|all| parse(all.get(keys::INSTANCE_DELETION_COST)?));
    own.unwrap_or_else(|| {
        let pods = (view.input.pods)(instance.metadata.uid.as_deref().unwrap_or_default());
        pods.iter().map(|pod| pod_cost(view, pod, calls)).sum()
    })
}

/// A pod's annotation, or what its hook reports; 0 without either, or if the hook fails.
fn pod_cost(view: &InstanceSetView<'_>, pod: &Pod, calls: &mut Vec<HookCall>) -> i64 {
    let annotations = pod.metadata.annotations.as_ref();
    if let Some(cost) = annotations.and_then(|all| parse(all.get(keys::POD_DELETION_COST)?)) {
        return cost;
    }
    let Some(call) = hooks::removal_cost_call(pod, view.input.now) else { return 0 };
    match (view.input.hook_result)(&call) {
        Some(HookResult::Cost(cost)) => cost.into(),
        Some(_) => 0,
        None => {
            calls.push(call);
            0
        }
    }
}

/// A cost as Kubernetes accepts it: a 32-bit integer without a plus sign.
fn parse(text: &str) -> Option<i64> {
    text.parse::<i32>().ok().filter(|_| !text.starts_with('+')).map(i64::from)
}

//! Upgrade hooks of pods: HTTP calls before and after a pod is restarted in place, and before it is deleted.
//!
//! A pod's progress is stored in its annotations. Responses are cached in the resource cache.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::RoleInstance;
use rbg_api::{Condition, PodTemplate, keys};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::in_place::{self, STATE};
use super::instance::InstanceInput;
use super::{ReconcilePlan, WriteAction, revisions};
use crate::ResourceKind;
use crate::status::{FOR_HOOKS, pod_label, set_waiting};
use crate::time::add_duration;
use crate::upgrade_hook::{HookCall, HookResult, UpgradeHook};

/// Default of the annotation for the hook timeout.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Seconds for which a removal cost is used.
const COST_LIFETIME: i64 = 60;
/// Upper bound of the annotation for the hook timeout.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Hook progress stored with an update in place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct HookProgress {
    phase: HookPhase,
    /// Hooks that did not finish before their timeout.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unfinished: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum HookPhase {
    #[default]
    Draining,
    /// Draining because the pod will be deleted.
    Leaving,
    Settling,
    Settled,
}

#[derive(Debug, PartialEq, Eq)]
enum HookOutcome {
    Pending,
    Finished { unfinished: Option<String>, warning: Option<String> },
}

fn port(annotation: Option<&str>) -> Option<u16> {
    annotation?.parse().ok().filter(|port| *port != 0)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn timeout(pod: &Pod) -> Duration {
    let configured =
        annotation(pod, keys::UPGRADE_TIMEOUT).and_then(|text| humantime::parse_duration(text).ok());
    configured.unwrap_or(TIMEOUT).min(MAX_TIMEOUT)
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn progress(pod: &Pod) -> Option<HookProgress> {
    let hooks = in_place::annotation(pod, STATE)?.get("hooks")?.clone();
    let mut progress: HookProgress = serde_json::from_value(hooks).ok()?;
    let is_settling = match progress.phase {
        // Another operator, without support for hooks, has changed the images.
        HookPhase::Draining => !in_place::has_pending_images(pod),
        // The pod is in service again. Its `/settled` has to report that: a drain ends only after that call, or ten minutes.
        HookPhase::Leaving => in_place::gate_since(pod, true).is_some(),
        HookPhase::Settling | HookPhase::Settled => false,
    };
    if is_settling {
        progress.phase = HookPhase::Settling;
    }
    Some(progress)
}

/// Whether pods of this template serve hooks.
pub(super) fn has_hooks(template: &PodTemplate) -> bool {
    port(template.annotation(keys::UPGRADE_HOOKS)).is_some()
}

/// Whether any pod of the instance serves hooks. If so, no pod is restarted before all have drained.
pub(super) fn are_used(instance: &RoleInstance) -> bool {
    instance.spec.components.iter().any(|component| has_hooks(&component.template))
}

/// State to store when the gate of a pod is closed because it will be deleted; `None` if the pod has no hooks.
pub(super) fn leaving_state(pod: &Pod) -> Option<String> {
    port(annotation(pod, keys::UPGRADE_HOOKS))?;
    let hooks = HookProgress { phase: HookPhase::Leaving, unfinished: Vec::new() };
    Some(in_place::state_with(pod, json!(hooks)))
}

/// Whether the pod's update still waits for its hooks.
pub(super) fn is_pending(pod: &Pod) -> bool {
    progress(pod).is_some_and(|progress| progress.phase != HookPhase::Settled)
}

/// Hook progress at the start of an update in place.
pub(super) fn initial_progress() -> Value {
    json!(HookProgress::default())
}

fn verb(hook: UpgradeHook) -> &'static str {
    match hook {
        UpgradeHook::Drain | UpgradeHook::DrainForRemoval => "drain",
        UpgradeHook::Settled => "settle",
        UpgradeHook::RemovalCost => "report its cost",
    }
}

fn call(hook: UpgradeHook, pod: &Pod, since: Timestamp) -> Option<HookCall> {
    let ip = pod.status.as_ref()?.pod_ip.clone().filter(|ip| !ip.is_empty())?;
    let port = port(annotation(pod, keys::UPGRADE_HOOKS))?;
    Some(HookCall { pod: pod.metadata.uid.clone()?, ip, port, hook, since })
}

/// A pod without an IP address or a hook port is not waited for.
fn outcome(hook: UpgradeHook, input: InstanceInput<'_>, pod: &Pod, since: Timestamp) -> HookOutcome {
    let Some(call) = call(hook, pod, since) else {
        return HookOutcome::Finished { unfinished: None, warning: None };
    };
    match (input.hook_result)(&call) {
        Some(HookResult::Done(warning)) => HookOutcome::Finished { unfinished: None, warning },
        Some(HookResult::Cost(_)) => HookOutcome::Finished { unfinished: None, warning: None },
        response if add_duration(since, timeout(pod)) <= input.now => {
            let limit = humantime::format_duration(timeout(pod));
            let (name, does, waits_for) = (name(pod), verb(hook), pending_reason(response));
            let unfinished = format!("{name} did not {does} within {limit}{waits_for}");
            HookOutcome::Finished { unfinished: Some(unfinished), warning: None }
        }
        _ => HookOutcome::Pending,
    }
}

fn pending_reason(response: Option<HookResult>) -> String {
    match response {
        Some(HookResult::Pending(Some(what))) => format!(": {what}"),
        _ => String::new(),
    }
}

/// Call for the cost of removing a pod; `None` if it has no hooks. The time of the call is rounded, so that one response is used by all
/// plans of about a minute.
pub(super) fn removal_cost_call(pod: &Pod, now: Timestamp) -> Option<HookCall> {
    let second = now.as_second();
    let since = Timestamp::from_second(second - second.rem_euclid(COST_LIFETIME)).unwrap_or(now);
    call(UpgradeHook::RemovalCost, pod, since)
}

/// Since when a pod in an in-place update drains. A pod without running containers has nothing to drain.
fn draining_since(pod: &Pod) -> Option<Timestamp> {
    let is_draining = progress(pod)?.phase == HookPhase::Draining;
    (is_draining && !in_place::is_down(pod)).then(|| in_place::started_at(pod)).flatten()
}

/// Since when a pod that was updated in place is up again.
fn settling_since(pod: &Pod) -> Option<Timestamp> {
    let is_settling = progress(pod)?.phase == HookPhase::Settling;
    in_place::gate_since(pod, true).filter(|_| is_settling)
}

/// Whether pods of the instance still drain, so that none may be restarted. Adds their hook calls to the plan.
pub(super) fn poll_draining(
    input: InstanceInput<'_>,
    pods: &[&Pod],
    revision: &revisions::RevisionRef,
    plan: &mut ReconcilePlan,
) -> bool {
    if !are_used(input.instance) {
        return false;
    }
    let is_new = |pod: &Pod| pod_label(pod, keys::CONTROLLER_REVISION_HASH) == Some(revision.hash.as_str());
    let mut is_draining = pods.iter().any(|pod| !is_new(pod));
    let mut calls = Vec::new();
    for pod in pods {
        if let Some(since) = draining_since(pod) {
            is_draining |= outcome(UpgradeHook::Drain, input, pod, since) == HookOutcome::Pending;
            calls.extend(call(UpgradeHook::Drain, pod, since));
        }
    }
    if is_draining {
        // Pods that have drained are called again: they would otherwise resume work.
        plan.call_hooks(calls, input.now);
    }
    is_draining
}

/// Since when a pod that is to be deleted drains: since its gate was closed.
fn leaving_since(pod: &Pod) -> Option<Timestamp> {
    in_place::gate_since(pod, false).filter(|_| !in_place::is_down(pod))
}

/// Whether pods that are to be deleted, and whose gates are closed, still drain. Adds their hook calls to the plan.
pub(super) fn block_deletion(input: InstanceInput<'_>, pods: &[&Pod], plan: &mut ReconcilePlan) -> bool {
    let leaving: Vec<(&Pod, Timestamp)> =
        pods.iter().filter_map(|pod| Some((*pod, leaving_since(pod)?))).collect();
    let is_pending = |(pod, since): &(&Pod, Timestamp)| {
        outcome(UpgradeHook::DrainForRemoval, input, pod, *since) == HookOutcome::Pending
    };
    let is_draining = leaving.iter().any(is_pending);
    if is_draining {
        // Pods that have drained are called again: they would otherwise resume work.
        plan.call_hooks(
            leaving.iter().filter_map(|(pod, since)| call(UpgradeHook::DrainForRemoval, pod, *since)),
            input.now,
        );
    }
    is_draining
}

/// What is lost although the pods have drained, according to their responses.
pub(super) fn drain_warnings(input: InstanceInput<'_>, pods: &[&Pod]) -> Vec<String> {
    let warning = |pod: &&Pod| match outcome(UpgradeHook::DrainForRemoval, input, pod, leaving_since(pod)?) {
        HookOutcome::Finished { warning: Some(warning), .. } => Some(format!("{}: {warning}", name(pod))),
        _ => None,
    };
    pods.iter().filter_map(warning).collect()
}

/// The hook progress to store, and the reason, when the pod is about to be restarted.
pub(super) fn drained(input: InstanceInput<'_>, pod: &Pod) -> Option<(Value, String)> {
    let progress = progress(pod)?;
    let outcome = draining_since(pod).map(|since| outcome(UpgradeHook::Drain, input, pod, since));
    Some(advance_phase(progress, HookPhase::Settling, outcome, &format!("{} has drained", name(pod))))
}

fn advance_phase(
    progress: HookProgress,
    next: HookPhase,
    outcome: Option<HookOutcome>,
    success: &str,
) -> (Value, String) {
    let (mut progress, mut reason) = (HookProgress { phase: next, ..progress }, success.to_owned());
    if let Some(HookOutcome::Finished { unfinished, warning }) = outcome {
        if let Some(warning) = warning {
            reason = format!("{success}: {warning}");
        }
        if let Some(unfinished) = unfinished {
            reason.clone_from(&unfinished);
            progress.unfinished.push(unfinished);
        }
    }
    (json!(progress), reason)
}

/// Calls the settle hook of pods that are up again, and completes their updates.
pub(super) fn poll_settling(input: InstanceInput<'_>, pods: &[&Pod], plan: &mut ReconcilePlan) {
    for pod in pods {
        let (Some(since), Some(progress)) = (settling_since(pod), progress(pod)) else { continue };
        let outcome = outcome(UpgradeHook::Settled, input, pod, since);
        if outcome == HookOutcome::Pending {
            plan.call_hooks(call(UpgradeHook::Settled, pod, since), input.now);
            continue;
        }
        let success = format!("{} has settled", name(pod));
        let (hooks, reason) = advance_phase(progress, HookPhase::Settled, Some(outcome), &success);
        let annotations = json!({ STATE: in_place::state_with(pod, hooks) });
        let body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": annotations } });
        let action =
            WriteAction::Patch { kind: ResourceKind::Pod, name: name(pod).to_owned(), status: false, body };
        plan.push(action, reason);
    }
}

/// Sets the condition for hooks: pods that the update waits for, and those that timed out.
pub(super) fn set_hook_conditions(input: InstanceInput<'_>, pods: &[&Pod], conditions: &mut Vec<Condition>) {
    let (mut waiting, mut unfinished) = (Vec::new(), Vec::new());
    for pod in pods {
        let Some(progress) = progress(pod) else { continue };
        let pending = match progress.phase {
            HookPhase::Draining => Some((UpgradeHook::Drain, draining_since(pod))),
            HookPhase::Leaving => {
                let hook = UpgradeHook::DrainForRemoval;
                match leaving_since(pod).map(|since| outcome(hook, input, pod, since)) {
                    Some(HookOutcome::Pending) => Some((hook, leaving_since(pod))),
                    Some(HookOutcome::Finished { unfinished: late, .. }) => {
                        unfinished.extend(late);
                        None
                    }
                    None => None,
                }
            }
            HookPhase::Settling => Some((UpgradeHook::Settled, settling_since(pod))),
            HookPhase::Settled => None,
        };
        if let Some((hook, since)) = pending {
            let call = since.and_then(|since| call(hook, pod, since));
            let response = call.and_then(|call| (input.hook_result)(&call));
            waiting.push(format!("{} has yet to {}{}", name(pod), verb(hook), pending_reason(response)));
        }
        unfinished.extend(progress.unfinished);
    }
    set_waiting(conditions, FOR_HOOKS, &waiting, &unfinished, input.now);
}

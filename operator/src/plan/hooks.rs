//! Hooks of pods: what they answer before they are restarted in place, and after.
//!
//! How far a pod is stands with its update, in its annotations. What it answered is observed as anything else is.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::RoleInstance;
use rbg_api::{Condition, PodTemplate, keys};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::in_place::{self, STATE};
use super::instance::InstanceInput;
use super::{ReconcilePlan, WriteAction, add_duration, revisions};
use crate::ResourceKind;
use crate::status::{FOR_HOOKS, pod_label, set_waiting};

/// For how long a pod is waited for if it does not say.
const TIMEOUT: Duration = Duration::from_secs(120);
/// For how long at most.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// What a pod is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpgradeHook {
    /// To end its work and to keep what it has: it will be restarted.
    Drain,
    /// Whether it is back with all it had.
    Settled,
}

/// A question to a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HookCall {
    /// The pod's UID.
    pub pod: String,
    /// Its address.
    pub ip: String,
    /// Where it answers.
    pub port: u16,
    /// What is asked.
    pub hook: UpgradeHook,
    /// Since when the pod is waited for. An answer counts for one update only.
    pub since: Timestamp,
}

/// What a pod answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookResult {
    /// It is so, though perhaps at a cost.
    Done(Option<String>),
    /// Not yet. It may have said what it waits for.
    NotYet(Option<String>),
}

/// What an update in place keeps about hooks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct HookProgress {
    phase: HookPhase,
    /// What was not waited for any longer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unfinished: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
enum HookPhase {
    #[default]
    Draining,
    Settling,
    Settled,
}

/// How it is with one question.
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
    let asked = annotation(pod, keys::UPGRADE_TIMEOUT).and_then(|text| humantime::parse_duration(text).ok());
    asked.unwrap_or(TIMEOUT).min(MAX_TIMEOUT)
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn progress(pod: &Pod) -> Option<HookProgress> {
    let hooks = in_place::annotation(pod, STATE)?.get("hooks")?.clone();
    let mut progress: HookProgress = serde_json::from_value(hooks).ok()?;
    if progress.phase == HookPhase::Draining && !in_place::has_pending_images(pod) {
        // Another operator has changed them, that does not know of hooks.
        progress.phase = HookPhase::Settling;
    }
    Some(progress)
}

/// Whether pods of this template are asked.
pub(super) fn has_hooks(template: &PodTemplate) -> bool {
    port(template.annotation(keys::UPGRADE_HOOKS)).is_some()
}

/// Whether a pod of the instance is asked: then none is restarted before all may be.
pub(super) fn are_used(instance: &RoleInstance) -> bool {
    instance.spec.components.iter().any(|component| has_hooks(&component.template))
}

/// Whether the pod's update is not over before its hooks say so.
pub(crate) fn is_pending(pod: &Pod) -> bool {
    progress(pod).is_some_and(|progress| progress.phase != HookPhase::Settled)
}

/// What an update in place keeps when it begins.
pub(super) fn initial_progress() -> Value {
    json!(HookProgress::default())
}

impl UpgradeHook {
    fn verb(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Settled => "settle",
        }
    }

    fn call(self, pod: &Pod, since: Timestamp) -> Option<HookCall> {
        let ip = pod.status.as_ref()?.pod_ip.clone().filter(|ip| !ip.is_empty())?;
        let port = port(annotation(pod, keys::UPGRADE_HOOKS))?;
        Some(HookCall { pod: pod.metadata.uid.clone()?, ip, port, hook: self, since })
    }

    /// Nobody is waited for who cannot be asked.
    fn outcome(self, input: InstanceInput<'_>, pod: &Pod, since: Timestamp) -> HookOutcome {
        let Some(ask) = self.call(pod, since) else {
            return HookOutcome::Finished { unfinished: None, warning: None };
        };
        match (input.hook_result)(&ask) {
            Some(HookResult::Done(warning)) => HookOutcome::Finished { unfinished: None, warning },
            answer if add_duration(since, timeout(pod)) <= input.now => {
                let limit = humantime::format_duration(timeout(pod));
                let (name, does, waits_for) = (name(pod), self.verb(), pending_reason(answer));
                let unfinished = format!("{name} did not {does} within {limit}{waits_for}");
                HookOutcome::Finished { unfinished: Some(unfinished), warning: None }
            }
            _ => HookOutcome::Pending,
        }
    }
}

fn pending_reason(answer: Option<HookResult>) -> String {
    match answer {
        Some(HookResult::NotYet(Some(what))) => format!(": {what}"),
        _ => String::new(),
    }
}

/// Since when a pod that is updated in place drains. What does not run has nothing to drain.
fn draining_since(pod: &Pod) -> Option<Timestamp> {
    let is_draining = progress(pod)?.phase == HookPhase::Draining;
    (is_draining && !in_place::is_down(pod)).then(|| in_place::begun_at(pod)).flatten()
}

/// Since when a pod that was updated in place is up.
fn settling_since(pod: &Pod) -> Option<Timestamp> {
    let is_settling = progress(pod)?.phase == HookPhase::Settling;
    in_place::gate_since(pod, true).filter(|_| is_settling)
}

/// Whether pods of the instance are still at work, so that none may be restarted. Asks them.
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
    let mut hold = pods.iter().any(|pod| !is_new(pod));
    let mut asks = Vec::new();
    for pod in pods {
        if let Some(since) = draining_since(pod) {
            hold |= UpgradeHook::Drain.outcome(input, pod, since) == HookOutcome::Pending;
            asks.extend(UpgradeHook::Drain.call(pod, since));
        }
    }
    if hold {
        // Also those that have drained: they would not stay so.
        plan.call_hooks(asks, input.now);
    }
    hold
}

/// Whether a pod that is to be deleted for a new one is still at work. Its gate is closed by then. Asks it.
pub(super) fn blocks_deletion(input: InstanceInput<'_>, pod: &Pod, plan: &mut ReconcilePlan) -> bool {
    let Some(since) = in_place::gate_since(pod, false).filter(|_| !in_place::is_down(pod)) else {
        return false;
    };
    let waits = UpgradeHook::Drain.outcome(input, pod, since) == HookOutcome::Pending;
    if waits {
        plan.call_hooks(UpgradeHook::Drain.call(pod, since), input.now);
    }
    waits
}

/// What the update keeps from now on, and the reason, when the pod is going to be restarted.
pub(super) fn drained(input: InstanceInput<'_>, pod: &Pod) -> Option<(Value, String)> {
    let progress = progress(pod)?;
    let outcome = draining_since(pod).map(|since| UpgradeHook::Drain.outcome(input, pod, since));
    Some(advance_phase(progress, HookPhase::Settling, outcome, &format!("{} has drained", name(pod))))
}

fn advance_phase(
    progress: HookProgress,
    next: HookPhase,
    outcome: Option<HookOutcome>,
    well: &str,
) -> (Value, String) {
    let (mut progress, mut reason) = (HookProgress { phase: next, ..progress }, well.to_owned());
    if let Some(HookOutcome::Finished { unfinished, warning }) = outcome {
        if let Some(warning) = warning {
            reason = format!("{well}: {warning}");
        }
        if let Some(unfinished) = unfinished {
            reason.clone_from(&unfinished);
            progress.unfinished.push(unfinished);
        }
    }
    (json!(progress), reason)
}

/// Asks pods that are up again whether they are back with all they had, and ends their updates.
pub(super) fn poll_settling(input: InstanceInput<'_>, pods: &[&Pod], plan: &mut ReconcilePlan) {
    for pod in pods {
        let (Some(since), Some(progress)) = (settling_since(pod), progress(pod)) else { continue };
        let outcome = UpgradeHook::Settled.outcome(input, pod, since);
        if outcome == HookOutcome::Pending {
            plan.call_hooks(UpgradeHook::Settled.call(pod, since), input.now);
            continue;
        }
        let well = format!("{} has settled", name(pod));
        let (hooks, reason) = advance_phase(progress, HookPhase::Settled, Some(outcome), &well);
        let annotations = json!({ STATE: in_place::state_with(pod, hooks) });
        let body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": annotations } });
        let action =
            WriteAction::Patch { kind: ResourceKind::Pod, name: name(pod).to_owned(), status: false, body };
        plan.push(action, reason);
    }
}

/// Says in the status who is waited for, and who was not waited for any longer.
pub(super) fn set_hook_conditions(input: InstanceInput<'_>, pods: &[&Pod], conditions: &mut Vec<Condition>) {
    let (mut waiting, mut unfinished) = (Vec::new(), Vec::new());
    for pod in pods {
        let Some(progress) = progress(pod) else { continue };
        let asked = match progress.phase {
            HookPhase::Draining => Some((UpgradeHook::Drain, draining_since(pod))),
            HookPhase::Settling => Some((UpgradeHook::Settled, settling_since(pod))),
            HookPhase::Settled => None,
        };
        if let Some((hook, since)) = asked {
            let ask = since.and_then(|since| hook.call(pod, since));
            let answer = ask.and_then(|ask| (input.hook_result)(&ask));
            waiting.push(format!("{} is to {}{}", name(pod), hook.verb(), pending_reason(answer)));
        }
        unfinished.extend(progress.unfinished);
    }
    set_waiting(conditions, FOR_HOOKS, &waiting, &unfinished, input.now);
}

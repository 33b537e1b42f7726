//! Lifecycle hooks: instances that wait before they are updated in place or deleted.
//!
//! A set's hooks (`spec.lifecycle`) name labels or finalizers that an external controller puts on instances, as with
//! OpenKruise's CloneSets.
//! The label [`keys::LIFECYCLE_STATE`] announces the next action; it proceeds after the external controller has removed its
//! marks. An instance
//! whose pods have upgrade hooks waits in the same way until they have drained, before it is recreated or removed.

use std::cell::RefCell;
use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use rbg_api::v1alpha2::{LifecycleHook, RoleInstance, RoleInstanceSet};
use rbg_api::{Condition, keys};
use serde_json::{Value, json};

use super::set::InstanceSetView;
use super::{ReconcilePlan, WriteAction, hooks};
use crate::ResourceKind;
use crate::status::is_ready;

const NORMAL: &str = "Normal";
const UPDATING: &str = "Updating";
const UPDATED: &str = "Updated";
/// Condition of an instance whose pods have all drained.
pub(super) const DRAINED: &str = "Drained";

/// The next action on an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InstanceTransition {
    Updated,
    Deleted,
    /// Deleted and replaced by a new instance.
    Recreated,
}

impl InstanceTransition {
    fn state(self) -> &'static str {
        match self {
            Self::Updated => "PreparingUpdate",
            Self::Deleted | Self::Recreated => "PreparingDelete",
        }
    }

    fn hook(self, set: &RoleInstanceSet) -> Option<&LifecycleHook> {
        let lifecycle = set.spec.lifecycle.as_ref()?;
        match self {
            Self::Updated => lifecycle.in_place_update.as_ref(),
            Self::Deleted | Self::Recreated => lifecycle.pre_delete.as_ref(),
        }
    }
}

/// Instances that wait for their hooks, by name.
pub(super) type PendingInstances = RefCell<BTreeMap<String, InstanceTransition>>;

fn label<'a>(instance: &'a RoleInstance, key: &str) -> Option<&'a str> {
    instance.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

fn annotation<'a>(instance: &'a RoleInstance, key: &str) -> Option<&'a str> {
    instance.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn name(instance: &RoleInstance) -> &str {
    instance.metadata.name.as_deref().unwrap_or_default()
}

fn state(instance: &RoleInstance) -> &str {
    label(instance, keys::LIFECYCLE_STATE).unwrap_or_default()
}

/// Whether an update or a deletion has been announced. The instance may still serve, but does not count as available.
pub(super) fn is_preparing(instance: &RoleInstance) -> bool {
    state(instance).starts_with("Preparing")
}

/// Whether its deletion has been announced.
pub(super) fn is_leaving(instance: &RoleInstance) -> bool {
    state(instance) == InstanceTransition::Deleted.state()
}

/// Whether its pods are out of service while it waits.
pub(super) fn is_marked(instance: &RoleInstance) -> bool {
    is_preparing(instance) && annotation(instance, keys::LIFECYCLE_NOT_READY) == Some("true")
}

/// Whether its pods drain because it will be deleted.
pub(super) fn is_draining(instance: &RoleInstance) -> bool {
    is_preparing(instance) && annotation(instance, keys::LIFECYCLE_DRAIN) == Some("true")
}

fn handler_marks<'a>(hook: &'a LifecycleHook, instance: &'a RoleInstance) -> impl Iterator<Item = bool> + 'a {
    let labels = hook.labels_handler.iter().map(|(key, value)| label(instance, key) == Some(value));
    let finalizers = instance.metadata.finalizers.as_deref().unwrap_or_default();
    labels.chain(hook.finalizers_handler.iter().map(|finalizer| finalizers.contains(finalizer)))
}

/// Whether the action may happen now. If not, announces it on the instance, with the reason.
pub(super) fn may_proceed(
    view: &InstanceSetView<'_>,
    instance: &RoleInstance,
    transition: InstanceTransition,
    (why, plan): (&str, &mut ReconcilePlan),
) -> bool {
    let hook = transition.hook(view.input.set);
    let is_held = hook.is_some_and(|hook| handler_marks(hook, instance).any(|is_present| is_present));
    let drains = transition != InstanceTransition::Updated && hooks::are_used(instance);
    if !is_held && (!drains || drained(instance).is_some()) {
        return true;
    }
    view.waiting.borrow_mut().insert(name(instance).to_owned(), transition);
    let is_announced = state(instance) == transition.state() && (!drains || is_draining(instance));
    if !is_announced {
        let not_ready = hook.is_some_and(|hook| is_held && hook.mark_pod_not_ready).then_some("true");
        let annotations =
            json!({ keys::LIFECYCLE_NOT_READY: not_ready, keys::LIFECYCLE_DRAIN: drains.then_some("true") });
        let next = if drains { "drains" } else { "waits for its lifecycle hook" };
        let reason = format!("{} {next}: {why}", name(instance));
        set_lifecycle_state(view, instance, transition.state(), annotations, (reason, plan));
    }
    false
}

/// What was lost in spite of the drain, if all pods of the instance have drained; empty if nothing was.
fn drained(instance: &RoleInstance) -> Option<&str> {
    let conditions = &instance.status.as_ref().filter(|_| is_draining(instance))?.conditions;
    let condition = conditions.iter().find(|condition| is_of_this_drain(instance, condition))?;
    (condition.status == "True").then_some(condition.message.as_str())
}

/// Whether this is the condition of the present drain, and not of an earlier one that was cancelled.
pub(super) fn is_of_this_drain(instance: &RoleInstance, condition: &Condition) -> bool {
    let announced =
        annotation(instance, keys::LIFECYCLE_TIMESTAMP).and_then(|time| time.parse::<Timestamp>().ok());
    let since = condition.last_transition_time.as_ref().map(|time| time.0.as_second());
    // Transition times have no fraction.
    condition.kind == DRAINED && announced.is_none_or(|time| since >= Some(time.as_second()))
}

/// Sets the lifecycle state at the start of an in-place update, if the set has hooks for it.
pub(super) fn begin(set: &RoleInstanceSet, object: &mut Value) {
    if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
        annotations.remove(keys::LIFECYCLE_NOT_READY);
        annotations.remove(keys::LIFECYCLE_DRAIN);
    }
    if InstanceTransition::Updated.hook(set).is_some() {
        object["metadata"]["labels"][keys::LIFECYCLE_STATE] = UPDATING.into();
    }
}

/// Updates the lifecycle state of instances whose update is complete or was reverted.
pub(super) fn finish_transitions(
    view: &InstanceSetView<'_>,
    finalizers: &[&RoleInstance],
    plan: &mut ReconcilePlan,
) {
    let waiting = view.waiting.borrow();
    for instance in finalizers.iter().filter(|one| one.metadata.deletion_timestamp.is_none()) {
        let hook = InstanceTransition::Updated.hook(view.input.set);
        let has_all = hook.is_none_or(|hook| handler_marks(hook, instance).all(|is_present| is_present));
        let is_done = view.is_updated(instance) && is_ready(instance);
        let next = match state(instance) {
            UPDATING if is_done && !has_all => UPDATED,
            UPDATING if is_done => NORMAL,
            UPDATED if has_all => NORMAL,
            _ if is_preparing(instance) && !waiting.contains_key(name(instance)) => NORMAL,
            _ => continue,
        };
        // An instance that is replaced or deleted in this plan needs no patch.
        let is_written = |step: &super::PlanStep| match &step.action {
            WriteAction::Replace { name: other, .. } | WriteAction::Delete { name: other, .. } => {
                other == name(instance)
            }
            _ => false,
        };
        if plan.steps.iter().any(is_written) {
            continue;
        }
        let none = json!({ keys::LIFECYCLE_NOT_READY: null, keys::LIFECYCLE_DRAIN: null });
        let reason = match is_preparing(instance) {
            true => format!("{} stays as it is, and returns to service", name(instance)),
            false => format!("{}: its update is complete", name(instance)),
        };
        set_lifecycle_state(view, instance, next, none, (reason, plan));
    }
}

fn set_lifecycle_state(
    view: &InstanceSetView<'_>,
    instance: &RoleInstance,
    state: &str,
    mut annotations: Value,
    (reason, plan): (String, &mut ReconcilePlan),
) {
    annotations[keys::LIFECYCLE_TIMESTAMP] = view.input.now.to_string().into();
    let body = json!({ "metadata": { "uid": instance.metadata.uid,
        "labels": { keys::LIFECYCLE_STATE: state }, "annotations": annotations } });
    let name = name(instance).to_owned();
    plan.push(WriteAction::Patch { kind: ResourceKind::Instance, name, status: false, body }, reason);
}

/// Deletes an instance, if its hooks allow that.
pub(super) fn delete(
    view: &InstanceSetView<'_>,
    instance: &RoleInstance,
    transition: InstanceTransition,
    reason: &str,
    plan: &mut ReconcilePlan,
) {
    if may_proceed(view, instance, transition, (reason, plan)) {
        let lost = drained(instance).filter(|lost| !lost.is_empty());
        let reason = lost.map_or_else(|| reason.to_owned(), |lost| format!("{reason}; {lost}"));
        plan.push(super::set::delete(instance), reason);
    }
}

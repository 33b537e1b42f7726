//! Plans a RoleInstanceSet: its revision, and the right number of instances at that revision.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use moongate_render::revision::SpecRevision;
use moongate_render::{Manifest, OwnerRef, SizeLimits};
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet, RoleInstanceSpec, UpdateStrategy};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::{Value, json};

use super::lifecycle::{self, InstanceTransition, PendingInstances};
use super::{
    PlanError, ReconcilePlan, WriteAction, managed_metadata, node_affinity, ordered, revisions, unordered,
};
use crate::ResourceKind;
use crate::status::{self, ObservedInstanceSet};
use crate::upgrade_hook::{HookCall, HookResult};

#[derive(Clone, Copy)]
pub struct InstanceSetInput<'a> {
    pub set: &'a RoleInstanceSet,
    /// Stored revisions of the set.
    pub revisions: &'a [ControllerRevision],
    /// Instances that the set controls.
    pub instances: &'a [RoleInstance],
    /// Pods of the instance with that UID.
    pub pods: &'a dyn Fn(&str) -> Vec<Pod>,
    /// Last response of a pod's hook.
    pub hook_result: &'a dyn Fn(&HookCall) -> Option<HookResult>,
    pub limits: SizeLimits,
    pub now: Timestamp,
}

/// A set with its resolved settings, for both instance patterns.
pub(super) struct InstanceSetView<'a> {
    pub(super) input: InstanceSetInput<'a>,
    pub(super) replicas: i32,
    /// Number of instances that keep their revision.
    pub(super) partition: i32,
    pub(super) max_unavailable: i32,
    pub(super) max_surge: i32,
    pub(super) paused: bool,
    pub(super) ordered_ready: bool,
    pub(super) update: revisions::RevisionRef,
    /// The set at the previous revision of its instances, for those that are held back.
    pub(super) previous: Option<(RoleInstanceSet, revisions::RevisionRef)>,
    pub(super) waiting: PendingInstances,
}

/// Plans one RoleInstanceSet.
///
/// # Errors
/// [`PlanError`].
pub fn set(input: InstanceSetInput<'_>) -> Result<ReconcilePlan, PlanError> {
    let mut plan = ReconcilePlan::default();
    let set = input.set;
    if set.metadata.deletion_timestamp.is_some() {
        return Ok(plan);
    }
    let replicas = set.spec.replicas.unwrap_or(1);
    input.limits.check_instance_set(replicas, &set.spec.role_instance_template.components)?;
    node_affinity::record_set_nodes(input, &mut plan);
    let view = view(input, &mut plan)?;
    let annotations = set.metadata.annotations.as_ref();
    let pattern = annotations.and_then(|all| all.get(keys::ROLE_INSTANCE_PATTERN)).map(String::as_str);
    let is_ordered = pattern != Some("Stateless");
    let (own_instances, others): (Vec<&RoleInstance>, Vec<&RoleInstance>) =
        input.instances.iter().partition(|instance| unordered::is_unordered(instance) != is_ordered);
    for other in &others {
        let reason = "the set's instance pattern has changed";
        lifecycle::delete(&view, other, InstanceTransition::Deleted, reason, &mut plan);
    }
    if is_ordered {
        ordered::plan(&view, &own_instances, &mut plan)?;
    } else {
        unordered::plan(&view, &own_instances, &mut plan)?;
    }
    lifecycle::finish_transitions(&view, &own_instances, &mut plan);
    own_instances.iter().for_each(|instance| propagate_placement(set, instance, &mut plan));
    let facts = observe(&view, &own_instances);
    let in_use: BTreeSet<&str> = input.instances.iter().filter_map(revision_label).collect();
    let limit = set.spec.revision_history_limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(10);
    let is_used = |name: &str| {
        let hash = name.rsplit('-').next().unwrap_or_default();
        let current = set.status.as_ref().and_then(|status| status.current_revision.as_deref());
        name == view.update.name || current == Some(name) || in_use.contains(name) || in_use.contains(hash)
    };
    revisions::prune(input.revisions, is_used, limit, &mut plan);
    let mut after = status::set(set, &facts);
    let parts =
        own_instances.iter().filter_map(|instance| Some(instance.status.as_ref()?.conditions.as_slice()));
    status::aggregate_waiting(&mut after.conditions, parts.clone(), input.now);
    status::aggregate_stalled(&mut after.conditions, parts, input.now);
    status::set_scaling_in(&mut after.conditions, &view.names_of_leaving(), input.now);
    plan.status(ResourceKind::Set, name(set), set.status.as_ref(), &after);
    Ok(plan)
}

/// Annotations for the placement of pods are in no revision: instances inherit them from their set, and pods get them when they are created.
fn propagate_placement(set: &RoleInstanceSet, instance: &RoleInstance, plan: &mut ReconcilePlan) {
    let value = |metadata: &ObjectMeta, key: &str| metadata.annotations.as_ref()?.get(key).cloned();
    let differs = |key: &&str| value(&set.metadata, key) != value(&instance.metadata, key);
    let changed: serde_json::Map<String, Value> = keys::PLACEMENT
        .into_iter()
        .filter(differs)
        .map(|key| (key.to_owned(), value(&set.metadata, key).into()))
        .collect();
    let name = instance.metadata.name.clone().unwrap_or_default();
    // An instance that is replaced or deleted in this plan needs no patch.
    let is_written = |step: &super::PlanStep| match &step.action {
        WriteAction::Replace { name: other, .. } | WriteAction::Delete { name: other, .. } => *other == name,
        _ => false,
    };
    let is_deleting = instance.metadata.deletion_timestamp.is_some();
    if changed.is_empty() || is_deleting || plan.steps.iter().any(is_written) {
        return;
    }
    let body = json!({ "metadata": { "uid": instance.metadata.uid, "annotations": changed } });
    let reason = format!("{name}: placement of its future pods has changed");
    plan.push(WriteAction::Patch { kind: ResourceKind::Instance, name, status: false, body }, reason);
}

pub(super) fn name(set: &RoleInstanceSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

fn view<'a>(input: InstanceSetInput<'a>, plan: &mut ReconcilePlan) -> Result<InstanceSetView<'a>, PlanError> {
    let set = input.set;
    let namespace = set.metadata.namespace.as_deref().ok_or(PlanError::NoMetadata("namespace"))?;
    let template = serde_json::to_value(&set.spec.role_instance_template).unwrap_or_default();
    let labels = set.spec.selector.as_ref().and_then(|selector| selector.match_labels.clone());
    let reference = OwnerRef {
        api_version: ResourceKind::Set.api_version().to_owned(),
        kind: ResourceKind::Set.name().to_owned(),
        name: name(set).to_owned(),
        uid: set.metadata.uid.clone().unwrap_or_default(),
        controller: true,
    };
    let owner = revisions::RevisionOwner { namespace, labels: labels.unwrap_or_default(), reference };
    let render = |collisions| SpecRevision::for_set(name(set), &template, collisions);
    let update = revisions::find_or_make(render, input.revisions, owner, plan);
    let strategy = set.spec.update_strategy.clone().unwrap_or_default();
    let replicas = set.spec.replicas.unwrap_or(1).max(0);
    let resolve = |value: &Option<IntOrPercent>, round, default| {
        value.as_ref().and_then(|value| value.of(replicas, round)).unwrap_or(default).max(0)
    };
    let max_surge = resolve(&strategy.max_surge, RoundingMode::Up, 0);
    let max_unavailable = match max_surge {
        0 => resolve(&strategy.max_unavailable, RoundingMode::Up, 1).max(1),
        _ => resolve(&strategy.max_unavailable, RoundingMode::Down, 1),
    };
    Ok(InstanceSetView {
        previous: previous_revision(input, &update),
        waiting: PendingInstances::default(),
        input,
        replicas,
        partition: resolve(&strategy.partition, RoundingMode::Down, 0).min(replicas),
        max_unavailable,
        max_surge,
        paused: strategy.paused.unwrap_or(false),
        ordered_ready: set.spec.pod_management_policy.as_deref() == Some("OrderedReady"),
        update,
    })
}

/// The set with the template of its last revision, if that differs from the present one.
fn previous_revision(
    input: InstanceSetInput<'_>,
    update: &revisions::RevisionRef,
) -> Option<(RoleInstanceSet, revisions::RevisionRef)> {
    let current = input.set.status.as_ref()?.current_revision.as_deref()?;
    let stored = input.revisions.iter().find(|stored| stored.metadata.name.as_deref() == Some(current))?;
    let revision = revisions::RevisionRef { name: current.to_owned(), hash: revisions::hash(stored) };
    if revision.name == update.name {
        return None;
    }
    let mut template = revisions::data(stored)?["spec"]["roleInstanceTemplate"].take();
    template.as_object_mut()?.remove("$patch");
    let mut set = input.set.clone();
    set.spec.role_instance_template = serde_json::from_value::<RoleInstanceSpec>(template).ok()?;
    Some((set, revision))
}

pub(super) fn revision_label(instance: &RoleInstance) -> Option<&str> {
    instance.metadata.labels.as_ref()?.get(keys::CONTROLLER_REVISION_HASH).map(String::as_str)
}

impl InstanceSetView<'_> {
    /// Whether the instance has the spec's revision. Ordered instances are labelled with its whole name, others with its hash.
    pub(super) fn is_updated(&self, instance: &RoleInstance) -> bool {
        let label = revision_label(instance);
        label == Some(self.update.name.as_str()) || label == Some(self.update.hash.as_str())
    }

    /// Updates an instance to the spec's revision: in place if its pods stay the same, else by recreating it.
    pub(super) fn update(&self, instance: &RoleInstance, wanted: &Manifest, plan: &mut ReconcilePlan) {
        let name = instance.metadata.name.as_deref().unwrap_or_default();
        let strategy: Option<&UpdateStrategy> = self.input.set.spec.update_strategy.as_ref();
        let kind = strategy.and_then(|strategy| strategy.kind.as_deref());
        let sizes = |spec: &RoleInstanceSpec| -> Vec<(String, i32)> {
            spec.components.iter().map(|component| (component.name.clone(), component.size())).collect()
        };
        let same_pods = sizes(&instance.spec) == sizes(&self.input.set.spec.role_instance_template);
        if matches!(kind, Some("RecreatePod" | "Recreate")) || !same_pods {
            let reason = format!("{name} gets a new revision and has to be recreated");
            lifecycle::delete(self, instance, InstanceTransition::Recreated, &reason, plan);
            return;
        }
        let reason = "it gets a new revision";
        if !lifecycle::may_proceed(self, instance, InstanceTransition::Updated, (reason, plan)) {
            return;
        }
        let mut object = serde_json::to_value(instance).unwrap_or_default();
        let stale = stale_metadata(wanted, instance);
        for member in ["labels", "annotations"] {
            let Value::Object(metadata) = &mut object["metadata"] else { continue };
            let texts = rbg_api::template::member_object(metadata, member);
            texts.retain(|key, _| !stale.contains(key));
            if let Some(Value::Object(wanted)) = wanted.0.get("metadata").and_then(|meta| meta.get(member)) {
                texts.extend(wanted.clone());
            }
        }
        if let Value::Object(metadata) = &mut object["metadata"] {
            // The cache has a part of them, and a write replaces them.
            metadata.remove("managedFields");
        }
        object["spec"] = wanted.0.get("spec").cloned().unwrap_or_default();
        lifecycle::begin(self.input.set, &mut object);
        let action = WriteAction::Replace { kind: ResourceKind::Instance, name: name.to_owned(), object };
        plan.push(action, format!("{name} gets a new revision in place"));
    }

    /// Instances that are being removed and wait for their hooks.
    fn names_of_leaving(&self) -> Vec<String> {
        let waiting = self.waiting.borrow();
        let leaving = waiting.iter().filter(|(_, transition)| **transition == InstanceTransition::Deleted);
        leaving.map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn min_ready(&self) -> Duration {
        Duration::from_secs(self.input.set.spec.min_ready_seconds.unwrap_or(0).max(0).unsigned_abs().into())
    }
}

/// Inherited labels and annotations that the set no longer has. Others of our own are the instance's state.
fn stale_metadata(wanted: &Manifest, instance: &RoleInstance) -> BTreeSet<String> {
    let is_own = |key: &str| key.contains("moongate.io/") || key.contains(keys::PREFIX);
    let mut stale = managed_metadata::stale_keys(wanted, &instance.metadata, "labels");
    stale.retain(|key| !is_own(key));
    let annotations = wanted.0.get("metadata").and_then(|metadata| metadata.get("annotations"));
    let is_wanted = |key: &str| annotations.is_some_and(|annotations| annotations.get(key).is_some());
    let inherited = moongate_render::instance::INHERITED.into_iter().filter(|key| !is_wanted(key));
    stale.extend(inherited.map(str::to_owned));
    stale
}

pub(super) fn delete(instance: &RoleInstance) -> WriteAction {
    WriteAction::Delete {
        kind: ResourceKind::Instance,
        name: instance.metadata.name.clone().unwrap_or_default(),
        uid: instance.metadata.uid.clone().unwrap_or_default(),
    }
}

fn observe(view: &InstanceSetView<'_>, own_instances: &[&RoleInstance]) -> ObservedInstanceSet {
    let count = |which: &dyn Fn(&RoleInstance) -> bool| {
        i32::try_from(own_instances.iter().filter(|instance| which(instance)).count()).unwrap_or(i32::MAX)
    };
    let is_live = |instance: &RoleInstance| instance.metadata.deletion_timestamp.is_none();
    let updated_ready = count(&|instance| view.is_updated(instance) && status::is_ready(instance));
    let replicas = count(&is_live);
    ObservedInstanceSet {
        replicas,
        ready: count(&|instance| status::is_ready(instance)),
        available: count(&|instance| status::is_available(instance, view.min_ready(), view.input.now)),
        updated: count(&|instance| is_live(instance) && view.is_updated(instance)),
        updated_ready,
        expected_updated: view.replicas - view.partition,
        update_revision: view.update.name.clone(),
        complete: view.partition == 0 && replicas == view.replicas && updated_ready >= view.replicas,
    }
}

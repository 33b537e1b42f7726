//! Plans a RoleBasedGroupSet: creates its groups and updates them to its template, a few at a time.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use moongate_render::{Manifest, SizeLimitError, SizeLimits, group_set};
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupSet, RoleBasedGroupSpec};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::Value;

use super::managed_metadata::stale_keys;
use super::{PlanError, ReconcilePlan, WriteAction};
use crate::ResourceKind;
use crate::status::{self, ObservedGroupSet};

/// Annotation of a set: number or percentage of groups that an update may take out of service at a time. Default: 1.
pub const MAX_UNAVAILABLE: &str = "moongate.io/max-unavailable";

#[derive(Clone, Copy)]
pub struct GroupSetInput<'a> {
    pub set: &'a RoleBasedGroupSet,
    pub groups: &'a [RoleBasedGroup],
    /// Whether any group has that name, including groups of other owners.
    pub exists: &'a dyn Fn(&str) -> bool,
    pub limits: SizeLimits,
    pub now: Timestamp,
}

/// Plans one RoleBasedGroupSet.
///
/// # Errors
/// [`PlanError`].
pub fn group_set(input: GroupSetInput<'_>) -> Result<ReconcilePlan, PlanError> {
    let mut plan = ReconcilePlan::default();
    let set = input.set;
    if set.metadata.deletion_timestamp.is_some() {
        return Ok(plan);
    }
    let replicas = set.spec.replicas.max(0);
    if let Err(error) = input.limits.check_group_set(replicas) {
        report_limit(input, &error, &mut plan);
        return Ok(plan);
    }
    let by_index = by_index(input, replicas, &mut plan);
    let mut observed = ObservedGroupSet { desired: replicas, ..ObservedGroupSet::default() };
    let mut old = Vec::new();
    for index in 0..replicas {
        if plan.is_full() {
            plan.is_truncated = true;
            return Ok(plan);
        }
        let Some(live) = by_index.get(&index) else {
            create_group(input, index, &mut plan, &mut observed)?;
            continue;
        };
        if live.metadata.deletion_timestamp.is_some() {
            continue;
        }
        observed.replicas += 1;
        observed.ready += i32::from(status::is_group_ready(live));
        let wanted = group_set::group(set, index, name(live), Some(live))?;
        if !is_written(&wanted, live) {
            old.push((live, wanted));
        } else if !status::is_group_settled(live) {
            observed.updating.push(name(live).to_owned());
        }
    }
    observed.updating.extend(old.iter().map(|(live, _)| name(live).to_owned()));
    update(input, replicas, &by_index, old, &mut plan);
    let mut after = status::group_set(set, &observed, input.now);
    let parts = input.groups.iter().filter_map(|group| Some(group.status.as_ref()?.conditions.as_slice()));
    status::aggregate_stalled(&mut after.conditions, parts, input.now);
    let set_name = set.metadata.name.as_deref().unwrap_or_default();
    plan.status(ResourceKind::GroupSet, set_name, set.status.as_ref(), &after);
    Ok(plan)
}

/// Reports that the set requests too many groups. Existing groups stay as they are.
fn report_limit(input: GroupSetInput<'_>, error: &SizeLimitError, plan: &mut ReconcilePlan) {
    let set = input.set;
    let observed = ObservedGroupSet {
        desired: set.spec.replicas,
        replicas: i32::try_from(input.groups.len()).unwrap_or(i32::MAX),
        ready: i32::try_from(input.groups.iter().filter(|group| status::is_group_ready(group)).count())
            .unwrap_or(i32::MAX),
        spec_error: Some((status::LIMIT_EXCEEDED, error.to_string())),
        ..ObservedGroupSet::default()
    };
    let after = status::group_set(set, &observed, input.now);
    let name = set.metadata.name.as_deref().unwrap_or_default();
    plan.status(ResourceKind::GroupSet, name, set.status.as_ref(), &after);
}

fn name(group: &RoleBasedGroup) -> &str {
    group.metadata.name.as_deref().unwrap_or_default()
}

/// The groups that the set keeps. All others are deleted, highest index first.
fn by_index<'a>(
    input: GroupSetInput<'a>,
    replicas: i32,
    plan: &mut ReconcilePlan,
) -> BTreeMap<i32, &'a RoleBasedGroup> {
    let mut groups: Vec<_> = input.groups.iter().map(|group| (index(group), group)).collect();
    // Of two groups with the same index, the older one is kept.
    groups.sort_by_key(|(index, group)| {
        let created = group.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (*index, created, name(group))
    });
    let mut by_index = BTreeMap::new();
    let mut surplus = Vec::new();
    for (index, group) in groups {
        match index.filter(|index| *index < replicas && !by_index.contains_key(index)) {
            Some(index) => drop(by_index.insert(index, group)),
            None => surplus.push(group),
        }
    }
    for group in surplus.iter().rev().filter(|group| group.metadata.deletion_timestamp.is_none()) {
        let action = WriteAction::Delete {
            kind: ResourceKind::Group,
            name: name(group).to_owned(),
            uid: group.metadata.uid.clone().unwrap_or_default(),
        };
        plan.push(action, format!("{} is beyond the set's replicas or a duplicate", name(group)));
    }
    by_index
}

fn index(group: &RoleBasedGroup) -> Option<i32> {
    let labels = group.metadata.labels.as_ref()?;
    let text = labels.get(keys::GROUPSET_INDEX).or_else(|| labels.get(keys::legacy::GROUPSET_INDEX))?;
    text.parse().ok().filter(|index| *index >= 0)
}

fn create_group(
    input: GroupSetInput<'_>,
    index: i32,
    plan: &mut ReconcilePlan,
    observed: &mut ObservedGroupSet,
) -> Result<(), PlanError> {
    let set_name = input.set.metadata.name.as_deref().ok_or(PlanError::NoMetadata("name"))?;
    let name = group_set::name(set_name, index);
    // A surplus group of this set may still have the name; its deletion frees it.
    if (input.exists)(&name) {
        observed.conflicting_names.push(name);
        return Ok(());
    }
    let manifest = group_set::group(input.set, index, &name, None)?;
    plan.push(WriteAction::Create(manifest), format!("group {name} is missing"));
    Ok(())
}

/// Updates groups that are out of service at once, since they serve no requests; others from the highest index, within the
/// budget.
fn update(
    input: GroupSetInput<'_>,
    replicas: i32,
    by_index: &BTreeMap<i32, &RoleBasedGroup>,
    mut old: Vec<(&&RoleBasedGroup, Manifest)>,
    plan: &mut ReconcilePlan,
) {
    let in_service = |group: &RoleBasedGroup| {
        group.metadata.deletion_timestamp.is_none() && status::is_group_settled(group)
    };
    let serving = by_index.values().filter(|group| in_service(group)).count();
    let min_serving = replicas.saturating_sub(max_unavailable(input.set, replicas));
    let mut budget = serving.saturating_sub(usize::try_from(min_serving).unwrap_or(0));
    old.reverse();
    for (live, wanted) in old {
        if in_service(live) {
            if budget == 0 {
                continue;
            }
            budget -= 1;
        }
        let action = WriteAction::Replace {
            kind: ResourceKind::Group,
            name: name(live).to_owned(),
            object: rewritten(live, wanted),
        };
        plan.push(action, format!("{} differs from the set's template", name(live)));
    }
}

fn max_unavailable(set: &RoleBasedGroupSet, replicas: i32) -> i32 {
    let text = set.metadata.annotations.as_ref().and_then(|annotations| annotations.get(MAX_UNAVAILABLE));
    let number = text.and_then(|text| match text.parse() {
        Ok(count) => Some(count),
        Err(_) => IntOrPercent::Text(text.clone()).of(replicas, RoundingMode::Up),
    });
    number.unwrap_or(1).max(1)
}

/// Whether the group matches the template. Specs are compared after deserialization, so that defaults filled in by a server
/// do not count.
fn is_written(wanted: &Manifest, live: &RoleBasedGroup) -> bool {
    let spec = wanted.0.get("spec").cloned().unwrap_or_default();
    let same_spec = serde_json::from_value::<RoleBasedGroupSpec>(spec).is_ok_and(|spec| spec == live.spec);
    let metadata = Manifest([("metadata".to_owned(), wanted.0["metadata"].clone())].into_iter().collect());
    same_spec
        && serde_json::to_value(live).is_ok_and(|live| metadata.is_subset_of(&live))
        && ["labels", "annotations"]
            .iter()
            .all(|member| stale_keys(wanted, &live.metadata, member).is_empty())
}

/// The group as desired. Labels and annotations of other field managers stay.
fn rewritten(live: &RoleBasedGroup, wanted: Manifest) -> Value {
    let mut object = serde_json::to_value(live).unwrap_or_default();
    for member in ["labels", "annotations"] {
        let stale = stale_keys(&wanted, &live.metadata, member);
        let Value::Object(metadata) = &mut object["metadata"] else { continue };
        let texts = rbg_api::template::member_object(metadata, member);
        texts.retain(|key, _| !stale.contains(key));
        if let Some(Value::Object(wanted)) = wanted.0["metadata"].get(member) {
            texts.extend(wanted.clone());
        }
    }
    object["metadata"]["ownerReferences"] = wanted.0["metadata"]["ownerReferences"].clone();
    object["spec"] = wanted.0.get("spec").cloned().unwrap_or_default();
    object
}

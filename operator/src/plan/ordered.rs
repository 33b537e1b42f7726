//! Instances with ordinals: created from the lowest, deleted and updated from the highest.

use std::collections::BTreeMap;
use std::time::Duration;

use moongate_render::instance;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleInstance;

use super::lifecycle::{self, InstanceTransition};
use super::set::InstanceSetView;
use super::{PlanError, ReconcilePlan, WriteAction, node_affinity};
use crate::status::{self, is_ready};
use crate::time::add_duration;

/// An instance that has been unready for this long is updated outside the budget: it serves no requests.
pub(super) const UNREADY_GRACE: Duration = Duration::from_secs(10);

pub(super) fn plan(
    view: &InstanceSetView<'_>,
    own: &[&RoleInstance],
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let by_ordinal: BTreeMap<i32, &RoleInstance> =
        own.iter().filter_map(|instance| Some((ordinal(instance)?, *instance))).collect();
    let end = view.replicas + surge(view, &by_ordinal);
    let surplus =
        by_ordinal.range(end..).rev().filter(|(_, live)| live.metadata.deletion_timestamp.is_none());
    for (_, extra) in surplus {
        lifecycle::delete(
            view,
            extra,
            InstanceTransition::Deleted,
            "the instance is beyond the set's replicas",
            plan,
        );
        if view.ordered_ready {
            return Ok(());
        }
    }
    if view.ordered_ready && by_ordinal.range(end..).next().is_some() {
        return Ok(());
    }
    for ordinal in 0..end {
        if plan.is_full() {
            plan.is_truncated = true;
            return Ok(());
        }
        match by_ordinal.get(&ordinal) {
            Some(live) if view.ordered_ready && !is_ready(live) && view.is_updated(live) => return Ok(()),
            Some(_) => {}
            None => {
                create_instance(view, ordinal, plan)?;
                if view.ordered_ready {
                    return Ok(());
                }
            }
        }
    }
    update(view, &by_ordinal, end, plan)
}

/// The number at the end of the instance's name.
fn ordinal(instance: &RoleInstance) -> Option<i32> {
    let label = instance.metadata.labels.as_ref().and_then(|labels| labels.get(keys::POD_NAME));
    let name = instance.metadata.name.as_ref().or(label)?;
    name.rsplit_once('-')?.1.parse().ok().filter(|ordinal| *ordinal >= 0)
}

fn create_instance(
    view: &InstanceSetView<'_>,
    ordinal: i32,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let previous = view.previous.as_ref().filter(|_| ordinal < view.partition);
    let mut manifest = match previous {
        Some((set, revision)) => instance::ordered(set, ordinal, &revision.name)?,
        None => instance::ordered(view.input.set, ordinal, &view.update.name)?,
    };
    node_affinity::inherit_nodes(view.input, &mut manifest);
    plan.push(WriteAction::Create(manifest), format!("instance {ordinal} is missing"));
    Ok(())
}

/// Number of instances beyond the replicas: as many as needed to keep unavailability within the limit.
fn surge(view: &InstanceSetView<'_>, by_ordinal: &BTreeMap<i32, &RoleInstance>) -> i32 {
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    let is_surge = |live: &RoleInstance| view.is_updated(live) && !lifecycle::is_leaving(live);
    let existing = count(by_ordinal.range(view.replicas..).filter(|(_, live)| is_surge(live)).count());
    let old: Vec<&&RoleInstance> = by_ordinal
        .range(view.partition..view.replicas.max(view.partition))
        .map(|(_, live)| live)
        .filter(|live| !view.is_updated(live))
        .collect();
    if view.paused {
        return existing.min(view.max_surge);
    }
    let base = (0..view.replicas).map(|ordinal| by_ordinal.get(&ordinal));
    let is_done = old.is_empty() && base.into_iter().all(|live| live.is_some_and(|live| is_ready(live)));
    let needed = count(old.iter().filter(|live| is_ready(live)).count()) - view.max_unavailable;
    view.max_surge.min(if is_done { 0 } else { needed.max(existing).max(0) })
}

fn update(
    view: &InstanceSetView<'_>,
    by_ordinal: &BTreeMap<i32, &RoleInstance>,
    end: i32,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    if view.paused {
        return Ok(());
    }
    let now = view.input.now;
    let is_available = |live: &RoleInstance| {
        status::is_available(live, view.min_ready(), now) && !lifecycle::is_preparing(live)
    };
    let available = |ordinal: i32| by_ordinal.get(&ordinal).is_some_and(|live| is_available(live));
    let mut unavailable = (0..view.replicas).filter(|ordinal| !available(*ordinal)).count();
    let surplus = (view.replicas..end).filter(|ordinal| available(*ordinal)).count();
    let budget = usize::try_from(view.max_unavailable).unwrap_or(0) + surplus;
    for (ordinal, live) in by_ordinal.range(view.partition..end.max(view.partition)).rev() {
        if view.is_updated(live) {
            if let Some(time) = ready_at(view, live) {
                plan.schedule_requeue(time);
            }
            continue;
        }
        if live.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let budget_exempt_at = status_since(live).map(|since| add_duration(since, UNREADY_GRACE));
        // It has been selected before.
        let is_preparing = lifecycle::is_preparing(live);
        let is_free =
            is_preparing || *ordinal >= view.replicas || budget_exempt_at.is_some_and(|time| time <= now);
        if !is_free && unavailable >= budget {
            if let Some(time) = budget_exempt_at {
                plan.schedule_requeue(time);
            }
            break;
        }
        if !is_free && is_available(live) {
            unavailable += 1;
        }
        let wanted = instance::ordered(view.input.set, *ordinal, &view.update.name)?;
        view.update(live, &wanted, plan);
    }
    Ok(())
}

fn status_since(live: &RoleInstance) -> Option<k8s_openapi::jiff::Timestamp> {
    status::unready_since(live)
}

/// When a ready instance becomes available, if that time is in the future.
pub(super) fn ready_at(
    view: &InstanceSetView<'_>,
    live: &RoleInstance,
) -> Option<k8s_openapi::jiff::Timestamp> {
    let min_ready = view.min_ready();
    if min_ready.is_zero() || !is_ready(live) {
        return None;
    }
    let since = status::since(&live.status.as_ref()?.conditions, "RoleInstanceReady")?;
    Some(add_duration(since, min_ready)).filter(|time| *time > view.input.now)
}

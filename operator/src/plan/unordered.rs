//! Unordered instances, with random ids as names.

use moongate_render::instance::{self, ID_LENGTH};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};

use super::lifecycle::{self, InstanceTransition};
use super::set::{InstanceSetView, name};
use super::{PlanError, ReconcilePlan, WriteAction, deletion_order, node_affinity};
use crate::status::{self, is_ready, unready_since};
use crate::time::add_duration;

/// Letters of ids: without vowels and characters that are easily confused.
const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Offset basis of the FNV-1a hash.
const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

pub(super) fn is_unordered(instance: &RoleInstance) -> bool {
    label(instance, keys::ROLE_INSTANCE_ID).is_some()
}

fn label<'a>(instance: &'a RoleInstance, key: &str) -> Option<&'a str> {
    instance.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

pub(super) fn plan(
    view: &InstanceSetView<'_>,
    own: &[&RoleInstance],
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let set = view.input.set;
    let mut live_instances: Vec<&RoleInstance> =
        own.iter().copied().filter(|live| live.metadata.deletion_timestamp.is_none()).collect();
    let to_delete = set.spec.scale_strategy.iter().flat_map(|strategy| &strategy.role_instance_to_delete);
    for name in to_delete {
        if let Some(at) = live_instances.iter().position(|live| live.metadata.name.as_ref() == Some(name)) {
            lifecycle::delete(
                view,
                live_instances.remove(at),
                InstanceTransition::Deleted,
                "the scale strategy lists the instance",
                plan,
            );
        }
    }
    let replicas = usize::try_from(view.replicas).unwrap_or(0);
    let surge = count_to_update(view, &live_instances).min(usize::try_from(view.max_surge).unwrap_or(0));
    for (index, id) in (live_instances.len()..replicas + surge).zip(free_ids(set, own)) {
        if plan.is_full() {
            plan.is_truncated = true;
            return Ok(());
        }
        create_instance(view, own, (index, &id), plan)?;
    }
    if live_instances.len() > replicas + surge {
        let surplus = live_instances.len() - replicas - surge;
        // Nothing is updated either until it is decided which instances stay.
        let Some(extra) = deletion_order::first(view, &live_instances, surplus, plan) else { return Ok(()) };
        for extra in extra {
            live_instances.retain(|live| !std::ptr::eq(*live, extra));
            let reason = "the instance is beyond the set's replicas";
            lifecycle::delete(view, extra, InstanceTransition::Deleted, reason, plan);
        }
    }
    if live_instances.len() >= replicas {
        let to_update = count_to_update(view, &live_instances);
        update(view, &live_instances, to_update, plan)?;
    }
    Ok(())
}

/// Number of instances to update: those of an older revision that the partition does not hold back.
fn count_to_update(view: &InstanceSetView<'_>, live_instances: &[&RoleInstance]) -> usize {
    let old = live_instances.iter().filter(|live| !view.is_updated(live)).count();
    let partitioned = usize::try_from(view.partition).unwrap_or(0);
    if view.paused { 0 } else { old.saturating_sub(partitioned) }
}

fn create_instance(
    view: &InstanceSetView<'_>,
    own: &[&RoleInstance],
    (index, id): (usize, &str),
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let old = own.iter().filter(|live| !view.is_updated(live)).count();
    let partitioned =
        view.previous.as_ref().filter(|_| old + index < usize::try_from(view.partition).unwrap_or(0));
    let now = view.input.now.to_string();
    let mut manifest = match partitioned {
        Some((set, revision)) => instance::unordered(set, id, &revision.hash, &now)?,
        None => instance::unordered(view.input.set, id, &view.update.hash, &now)?,
    };
    node_affinity::inherit_nodes(view.input, &mut manifest);
    plan.push(WriteAction::Create(manifest), format!("{} has too few instances", name(view.input.set)));
    Ok(())
}

/// Ids without an instance, always in the same order: after a failover, an operator may not have observed the last created
/// instance, and must not create a second one in its place.
fn free_ids<'a>(set: &RoleInstanceSet, own: &'a [&RoleInstance]) -> impl Iterator<Item = String> + 'a {
    let uid = set.metadata.uid.as_deref().unwrap_or_default();
    let mut state =
        uid.bytes().fold(FNV_START, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
    let is_taken =
        |id: &String| own.iter().any(|live| label(live, keys::ROLE_INSTANCE_ID) == Some(id.as_str()));
    std::iter::repeat_with(move || random_id(&mut state)).filter(move |id| !is_taken(id))
}

/// SplitMix64, whose state is a single number.
fn random_id(state: &mut u64) -> String {
    let mut letter = || {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let at = usize::try_from((z ^ (z >> 31)) % LETTERS.len() as u64).unwrap_or(0);
        LETTERS.get(at).map_or('b', |letter| char::from(*letter))
    };
    (0..ID_LENGTH).map(|_| letter()).collect()
}

fn update(
    view: &InstanceSetView<'_>,
    live_instances: &[&RoleInstance],
    to_update: usize,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let now = view.input.now;
    let is_available = |live: &RoleInstance| {
        status::is_available(live, view.min_ready(), now) && !lifecycle::is_preparing(live)
    };
    let available = live_instances.iter().filter(|live| is_available(live)).count();
    let min_available = usize::try_from(view.replicas - view.max_unavailable).unwrap_or(0);
    let mut budget = available.saturating_sub(min_available);
    let mut old: Vec<&&RoleInstance> = live_instances.iter().filter(|live| !view.is_updated(live)).collect();
    // Continue with instances that are already preparing, then those that are not ready, which cost no availability.
    old.sort_by_key(|live| (!lifecycle::is_preparing(live), is_ready(live)));
    for live in old.into_iter().take(to_update) {
        if lifecycle::is_preparing(live) {
            // It already counts as unavailable.
        } else if is_available(live) {
            if budget == 0 {
                break;
            }
            budget -= 1;
        } else if let Some(at) =
            unready_since(live).map(|since| add_duration(since, super::ordered::UNREADY_GRACE))
            && at > now
        {
            // The instance may still be starting.
            plan.schedule_requeue(at);
            continue;
        }
        let id = label(live, keys::ROLE_INSTANCE_ID).unwrap_or_default();
        let wanted = instance::unordered(view.input.set, id, &view.update.hash, &now.to_string())?;
        view.update(live, &wanted, plan);
    }
    for at in live_instances.iter().filter_map(|live| super::ordered::ready_at(view, live)) {
        plan.schedule_requeue(at);
    }
    Ok(())
}

//! Instances without order, told apart by names that say nothing.

use moongate_render::instance::{self, ID_LENGTH};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};

use super::lifecycle::{self, InstanceTransition};
use super::set::{InstanceSetView, name};
use super::{PlanError, ReconcilePlan, WriteAction, add_duration, node_affinity};
use crate::status::{self, is_ready, unready_since};

/// Letters of names: none that make words, or look like others.
const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Of the hash FNV-1a.
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
    let mut living: Vec<&RoleInstance> =
        own.iter().copied().filter(|live| live.metadata.deletion_timestamp.is_none()).collect();
    let chosen = set.spec.scale_strategy.iter().flat_map(|strategy| &strategy.role_instance_to_delete);
    for name in chosen {
        if let Some(at) = living.iter().position(|live| live.metadata.name.as_ref() == Some(name)) {
            lifecycle::delete(
                view,
                living.remove(at),
                InstanceTransition::Deleted,
                "the scale strategy names it",
                plan,
            );
        }
    }
    let old = living.iter().filter(|live| !view.is_updated(live)).count();
    let held_back = usize::try_from(view.partition).unwrap_or(0);
    let to_update = if view.paused { 0 } else { old.saturating_sub(held_back) };
    let replicas = usize::try_from(view.replicas).unwrap_or(0);
    let surge = to_update.min(usize::try_from(view.max_surge).unwrap_or(0));
    for (index, id) in (living.len()..replicas + surge).zip(free_ids(set, own)) {
        make(view, own, (index, &id), plan)?;
    }
    if living.len() > replicas + surge {
        // First those that serve nobody, then those of an older revision, then the youngest.
        living.sort_by_key(|live| {
            let made = live.metadata.creation_timestamp.as_ref().map(|time| time.0);
            (is_ready(live), view.is_updated(live), std::cmp::Reverse(made))
        });
        let surplus = living.len() - replicas - surge;
        for extra in living.drain(..surplus) {
            lifecycle::delete(
                view,
                extra,
                InstanceTransition::Deleted,
                "there are more instances than the set shall have",
                plan,
            );
        }
    }
    if living.len() >= replicas {
        update(view, &living, to_update, plan)?;
    }
    Ok(())
}

fn make(
    view: &InstanceSetView<'_>,
    own: &[&RoleInstance],
    (index, id): (usize, &str),
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let old = own.iter().filter(|live| !view.is_updated(live)).count();
    let held_back =
        view.previous.as_ref().filter(|_| old + index < usize::try_from(view.partition).unwrap_or(0));
    let now = view.input.now.to_string();
    let mut manifest = match held_back {
        Some((set, revision)) => instance::unordered(set, id, &revision.hash, &now)?,
        None => instance::unordered(view.input.set, id, &view.update.hash, &now)?,
    };
    node_affinity::inherit_nodes(view.input, &mut manifest);
    plan.push(WriteAction::Create(manifest), format!("{} has too few instances", name(view.input.set)));
    Ok(())
}

/// Ids that no instance has, always in the same order: an operator that goes on for another may not know yet what that one
/// made last, and must not make a second one in its place.
fn free_ids<'a>(set: &RoleInstanceSet, own: &'a [&RoleInstance]) -> impl Iterator<Item = String> + 'a {
    let uid = set.metadata.uid.as_deref().unwrap_or_default();
    let mut state =
        uid.bytes().fold(FNV_START, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
    let is_taken =
        |id: &String| own.iter().any(|live| label(live, keys::ROLE_INSTANCE_ID) == Some(id.as_str()));
    std::iter::repeat_with(move || random_id(&mut state)).filter(move |id| !is_taken(id))
}

/// SplitMix64, which needs no more state than a number.
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
    living: &[&RoleInstance],
    to_update: usize,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let now = view.input.now;
    let is_available = |live: &RoleInstance| {
        status::is_available(live, view.min_ready(), now) && !lifecycle::is_preparing(live)
    };
    let available = living.iter().filter(|live| is_available(live)).count();
    let least = usize::try_from(view.replicas - view.max_unavailable).unwrap_or(0);
    let mut budget = available.saturating_sub(least);
    let mut old: Vec<&&RoleInstance> = living.iter().filter(|live| !view.is_updated(live)).collect();
    // Those whose turn has come before go on; those that serve nobody cost nothing.
    old.sort_by_key(|live| (!lifecycle::is_preparing(live), is_ready(live)));
    for live in old.into_iter().take(to_update) {
        if lifecycle::is_preparing(live) {
            // It counts as out of service by now.
        } else if is_available(live) {
            if budget == 0 {
                break;
            }
            budget -= 1;
        } else if let Some(at) =
            unready_since(live).map(|since| add_duration(since, super::ordered::UNREADY_GRACE))
            && at > now
        {
            // It may be on its way up.
            plan.schedule_requeue(at);
            continue;
        }
        let id = label(live, keys::ROLE_INSTANCE_ID).unwrap_or_default();
        let wanted = instance::unordered(view.input.set, id, &view.update.hash, &now.to_string())?;
        view.update(live, &wanted, plan);
    }
    for at in living.iter().filter_map(|live| super::ordered::ready_at(view, live)) {
        plan.schedule_requeue(at);
    }
    Ok(())
}

//! Steps of a StatefulSet's rolling update. Its own controller knows a partition only: pods below it keep their revision.

use k8s_openapi::api::core::v1::Pod;
use moongate_render::{Manifest, WorkloadKind};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::{Value, json};

use super::coordination::RoleUpdateState;
use super::desired_roles::{DesiredRole, RoleWithWorkload, update};
use super::group::GroupInput;
use crate::status::{pod_has, pod_label};

/// A pod, by its ordinal; one that is missing is neither.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PodSlot {
    ready: bool,
    updated: bool,
}

/// A StatefulSet in the middle of an update.
#[derive(Debug, Clone, Copy)]
struct StatefulSetRollout {
    /// Pods that it shall have in the end.
    replicas: usize,
    /// Pods beyond them while it is updated.
    surge: usize,
    /// Pods that may be unavailable.
    unavailable: usize,
    /// Pods that keep their revision.
    partitioned: usize,
    /// What it has been told.
    requested: usize,
    partition: usize,
}

/// Replicas and partition that the role's StatefulSet is told now.
pub(super) fn plan_rollout(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'_>,
    target: &DesiredRole,
    manifest: &mut Manifest,
) {
    let Some(live) = role.live.filter(|_| role.role.kind() == WorkloadKind::StatefulSet) else { return };
    // A policy has its own steps.
    if target.current.partition.is_some() {
        return;
    }
    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let own = role.role.rolling_update();
    let replicas = usize::try_from(target.current.replicas).unwrap_or(0);
    let share = |bound: Option<&IntOrPercent>, round| {
        let count = bound.and_then(|bound| bound.of(target.current.replicas, round));
        count.and_then(|count| usize::try_from(count).ok())
    };
    let surge = share(own.and_then(|own| own.max_surge.as_ref()), RoundingMode::Up).unwrap_or(0);
    let unavailable = target.current.max_unavailable.as_ref().or_else(|| own?.max_unavailable.as_ref());
    let unavailable = match surge {
        0 => share(unavailable, RoundingMode::Up).unwrap_or(1).max(1),
        _ => share(unavailable, RoundingMode::Down).unwrap_or(1),
    };
    let rolling = StatefulSetRollout {
        replicas,
        surge,
        unavailable,
        partitioned: usize::try_from(target.partitioned).unwrap_or(0),
        requested: number(&live["spec"]["replicas"]).unwrap_or(1),
        partition: number(&live["spec"]["updateStrategy"]["rollingUpdate"]["partition"]).unwrap_or(0),
    };
    let paused = own.is_some_and(|own| own.paused);
    let (asked, partition) = match update(role, live, i32::try_from(rolling.requested).unwrap_or(i32::MAX)) {
        RoleUpdateState::Done => (replicas, rolling.partitioned),
        RoleUpdateState::NotApplied if paused => (replicas, replicas.max(rolling.requested)),
        RoleUpdateState::NotApplied => (replicas + surge, replicas.min(rolling.requested)),
        RoleUpdateState::NotObserved => (rolling.requested, rolling.partition),
        RoleUpdateState::InProgress(_) if paused => (replicas, rolling.partition),
        RoleUpdateState::InProgress(_) => {
            let pods = live["metadata"]["uid"].as_str().map(input.foreign_pods).unwrap_or_default();
            next_step(rolling, &slots(&pods, live, rolling.requested))
        }
    };
    if let Some(spec) = manifest.0.get_mut("spec") {
        spec["replicas"] = asked.into();
        spec["updateStrategy"]["rollingUpdate"] = json!({ "partition": partition });
    }
}

fn slots(pods: &[Pod], live: &Value, count: usize) -> Vec<PodSlot> {
    let mut slots = vec![PodSlot::default(); count];
    let revision = live["status"]["updateRevision"].as_str();
    for pod in pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        let name = pod.metadata.name.as_deref().and_then(|name| name.rsplit_once('-'));
        let ordinal = name.and_then(|(_, ordinal)| ordinal.parse::<usize>().ok());
        if let Some(slot) = ordinal.and_then(|ordinal| slots.get_mut(ordinal)) {
            let updated = pod_label(pod, keys::CONTROLLER_REVISION_HASH);
            *slot =
                PodSlot { ready: pod_has(pod, "Ready"), updated: updated.is_some() && updated == revision };
        }
    }
    slots
}

/// The next step: pods at the end that are through make room for as many others, and pods that are down anyway are free.
fn next_step(rolling: StatefulSetRollout, slots: &[PodSlot]) -> (usize, usize) {
    let StatefulSetRollout {
        replicas,
        surge,
        unavailable,
        partitioned: held_back,
        requested: asked,
        partition,
    } = rolling;
    if !(replicas..=replicas + surge).contains(&asked) {
        return (replicas + surge, partition.min(replicas + surge).max(held_back));
    }
    let is_through = |slot: &&PodSlot| slot.ready && slot.updated;
    let through = slots.iter().rev().take_while(is_through).count();
    // Pods beyond the replicas that serve stand in for others.
    let bridging = slots.iter().skip(replicas).filter(is_through).count();
    let mut at = asked.saturating_sub(through + unavailable + bridging);
    at += slots.iter().take(at).filter(|slot| !slot.ready).count();
    while at > 0 && slots.get(at - 1).is_none_or(|slot| !slot.ready || slot.updated) {
        at -= 1;
    }
    let at = at.min(partition).max(held_back);
    // Those beyond the replicas go one by one when there are more of them than are left to be updated.
    let left = slots.iter().take(replicas).skip(held_back).filter(|slot| !is_through(slot)).count();
    (replicas + left.min(surge), at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: PodSlot = PodSlot { ready: true, updated: false };
    const NEW: PodSlot = PodSlot { ready: true, updated: true };
    const DOWN: PodSlot = PodSlot { ready: false, updated: true };

    fn rolling(partition: usize) -> StatefulSetRollout {
        StatefulSetRollout { replicas: 4, surge: 0, unavailable: 1, partitioned: 0, requested: 4, partition }
    }

    #[test]
    fn the_partition_follows_the_pods_that_are_through() {
        assert_eq!(next_step(rolling(4), &[OLD; 4]), (4, 3));
        assert_eq!(next_step(rolling(3), &[OLD, OLD, OLD, DOWN]), (4, 3));
        assert_eq!(next_step(rolling(3), &[OLD, OLD, OLD, NEW]), (4, 2));
        assert_eq!(
            next_step(StatefulSetRollout { unavailable: 2, ..rolling(3) }, &[OLD, OLD, OLD, NEW]),
            (4, 1)
        );
        assert_eq!(
            next_step(StatefulSetRollout { partitioned: 3, ..rolling(3) }, &[OLD, OLD, OLD, NEW]),
            (4, 3)
        );
        let down = PodSlot { ready: false, updated: false };
        assert_eq!(next_step(rolling(4), &[OLD, down, OLD, OLD]), (4, 4), "one is down already");
        assert_eq!(next_step(rolling(4), &[OLD, OLD, OLD, down]), (4, 3), "and costs nothing");
    }

    /// What a StatefulSet's controller and kubelets may do next; of what a partition allows, all at once if they like.
    fn act(slots: &mut Vec<PodSlot>, (asked, partition): (usize, usize), draw: &[u8]) {
        while slots.len() < asked {
            slots.push(PodSlot { ready: false, updated: slots.len() >= partition });
        }
        slots.truncate(asked);
        for (ordinal, slot) in slots.iter_mut().enumerate() {
            match draw.get(ordinal % draw.len().max(1)) {
                Some(0) if !slot.ready => slot.ready = true,
                Some(1) if !slot.updated && ordinal >= partition => *slot = DOWN,
                _ => {}
            }
        }
    }

    proptest! {
        #[test]
        fn no_more_are_down_than_may_be_and_all_are_updated_in_the_end(
            replicas in 1_usize..7,
            surge in 0_usize..3,
            unavailable in 0_usize..3,
            held_back in 0_usize..3,
            draws in prop::collection::vec(prop::collection::vec(0_u8..3, 1..8), 0..60),
        ) {
            prop_assume!(surge + unavailable > 0);
            let held_back = held_back.min(replicas - 1);
            let mut told = (replicas + surge, replicas);
            let mut slots = vec![OLD; replicas];
            let patient = std::iter::repeat_n(vec![0], 1).chain(std::iter::repeat_n(vec![1], 1)).cycle().take(100);
            for draw in draws.into_iter().chain(patient) {
                act(&mut slots, told, &draw);
                let ready = slots.iter().filter(|slot| slot.ready).count();
                prop_assert!(ready + unavailable >= replicas, "{slots:?} {told:?}");
                prop_assert!(slots.iter().take(held_back).all(|slot| !slot.updated));
                let (requested, partition) = told;
                let rolling = StatefulSetRollout { replicas, surge, unavailable, partitioned: held_back, requested, partition };
                slots.resize(requested, PodSlot::default());
                told = next_step(rolling, &slots);
                prop_assert!(told.1 <= partition.max(held_back), "never raised");
                slots.truncate(requested);
            }
            prop_assert_eq!(told, (replicas, held_back));
            prop_assert!(slots.iter().skip(held_back).all(|slot| *slot == NEW), "{:?}", slots);
        }
    }
}

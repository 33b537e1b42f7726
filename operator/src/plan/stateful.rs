//! Steps of a StatefulSet's rolling update. The StatefulSet controller supports only a partition: pods below it keep their
//! revision.

use k8s_openapi::api::core::v1::Pod;
use moongate_render::{Manifest, WorkloadKind};
use rbg_api::{IntOrPercent, RoundingMode, keys};
use serde_json::{Value, json};

use super::coordination::RoleUpdateState;
use super::desired_roles::{DesiredRole, RoleWithWorkload, update};
use super::group::GroupInput;
use crate::status::{pod_has, pod_label};

/// A pod by its ordinal. For a missing pod both are false.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PodSlot {
    ready: bool,
    updated: bool,
}

/// A StatefulSet during an update.
#[derive(Debug, Clone, Copy)]
struct StatefulSetRollout {
    /// Number of pods to reach in the end.
    replicas: usize,
    /// Maximum number of surge pods during the update.
    surge: usize,
    /// Number of pods that may be unavailable.
    unavailable: usize,
    /// Number of pods that keep their revision.
    partitioned: usize,
    requested: usize,
    partition: usize,
}

/// Sets replicas and partition of the role's StatefulSet for the next step.
pub(super) fn plan_rollout(
    input: GroupInput<'_>,
    role: &RoleWithWorkload<'_>,
    target: &DesiredRole,
    manifest: &mut Manifest,
) {
    let Some(live) = role.live.filter(|_| role.role.kind() == WorkloadKind::StatefulSet) else { return };
    // With a policy, coordination sets the partition.
    if target.current.partition.is_some() {
        return;
    }
    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let rolling_update = role.role.rolling_update();
    let replicas = usize::try_from(target.current.replicas).unwrap_or(0);
    let resolve = |bound: Option<&IntOrPercent>, round| {
        let count = bound.and_then(|bound| bound.of(target.current.replicas, round));
        count.and_then(|count| usize::try_from(count).ok())
    };
    let surge = resolve(
        rolling_update.and_then(|rolling_update| rolling_update.max_surge.as_ref()),
        RoundingMode::Up,
    )
    .unwrap_or(0);
    let unavailable =
        target.current.max_unavailable.as_ref().or_else(|| rolling_update?.max_unavailable.as_ref());
    let unavailable = match surge {
        0 => resolve(unavailable, RoundingMode::Up).unwrap_or(1).max(1),
        _ => resolve(unavailable, RoundingMode::Down).unwrap_or(1),
    };
    let rolling = StatefulSetRollout {
        replicas,
        surge,
        unavailable,
        partitioned: usize::try_from(target.partitioned).unwrap_or(0),
        requested: number(&live["spec"]["replicas"]).unwrap_or(1),
        partition: number(&live["spec"]["updateStrategy"]["rollingUpdate"]["partition"]).unwrap_or(0),
    };
    let paused = rolling_update.is_some_and(|rolling_update| rolling_update.paused);
    let (requested, partition) =
        match update(role, live, i32::try_from(rolling.requested).unwrap_or(i32::MAX)) {
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
        spec["replicas"] = requested.into();
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

/// The next step as (replicas, partition): each updated and ready pod at the end allows one more, and pods that are down do
/// not count against the limit.
fn next_step(rolling: StatefulSetRollout, slots: &[PodSlot]) -> (usize, usize) {
    let StatefulSetRollout { replicas, surge, unavailable, partitioned, requested, partition } = rolling;
    if !(replicas..=replicas + surge).contains(&requested) {
        return (replicas + surge, partition.min(replicas + surge).max(partitioned));
    }
    let is_updated_and_ready = |slot: &&PodSlot| slot.ready && slot.updated;
    let updated_and_ready = slots.iter().rev().take_while(is_updated_and_ready).count();
    // Ready surge pods serve in place of others.
    let bridging = slots.iter().skip(replicas).filter(is_updated_and_ready).count();
    let mut next_partition = requested.saturating_sub(updated_and_ready + unavailable + bridging);
    next_partition += slots.iter().take(next_partition).filter(|slot| !slot.ready).count();
    while next_partition > 0 && slots.get(next_partition - 1).is_none_or(|slot| !slot.ready || slot.updated) {
        next_partition -= 1;
    }
    let next_partition = next_partition.min(partition).max(partitioned);
    // When fewer pods remain to be updated than there are surge pods, the surge pods are removed one by one.
    let remaining =
        slots.iter().take(replicas).skip(partitioned).filter(|slot| !is_updated_and_ready(slot)).count();
    (replicas + remaining.min(surge), next_partition)
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
    fn the_partition_follows_the_updated_and_ready_pods() {
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
        assert_eq!(next_step(rolling(4), &[OLD, down, OLD, OLD]), (4, 4), "one pod is down already");
        assert_eq!(
            next_step(rolling(4), &[OLD, OLD, OLD, down]),
            (4, 3),
            "a pod that is down is updated first"
        );
    }

    /// A random next action of the StatefulSet controller and kubelets. They may update all pods that the partition allows at
    /// once.
    fn act(slots: &mut Vec<PodSlot>, (requested, partition): (usize, usize), draw: &[u8]) {
        while slots.len() < requested {
            slots.push(PodSlot { ready: false, updated: slots.len() >= partition });
        }
        slots.truncate(requested);
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
        fn unavailability_stays_within_its_limit_and_the_update_ends(
            replicas in 1_usize..7,
            surge in 0_usize..3,
            unavailable in 0_usize..3,
            partitioned in 0_usize..3,
            draws in prop::collection::vec(prop::collection::vec(0_u8..3, 1..8), 0..60),
        ) {
            prop_assume!(surge + unavailable > 0);
            let partitioned = partitioned.min(replicas - 1);
            let mut target = (replicas + surge, replicas);
            let mut slots = vec![OLD; replicas];
            let eventual = std::iter::repeat_n(vec![0], 1).chain(std::iter::repeat_n(vec![1], 1)).cycle().take(100);
            for draw in draws.into_iter().chain(eventual) {
                act(&mut slots, target, &draw);
                let ready = slots.iter().filter(|slot| slot.ready).count();
                prop_assert!(ready + unavailable >= replicas, "{slots:?} {target:?}");
                prop_assert!(slots.iter().take(partitioned).all(|slot| !slot.updated));
                let (requested, partition) = target;
                let rolling = StatefulSetRollout { replicas, surge, unavailable, partitioned, requested, partition };
                slots.resize(requested, PodSlot::default());
                target = next_step(rolling, &slots);
                prop_assert!(target.1 <= partition.max(partitioned), "the partition never grows");
                slots.truncate(requested);
            }
            prop_assert_eq!(target, (replicas, partitioned));
            prop_assert!(slots.iter().skip(partitioned).all(|slot| *slot == NEW), "{:?}", slots);
        }
    }
}

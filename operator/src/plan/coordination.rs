//! Limits how far the roles of a CoordinatedPolicy may scale or update now.
//!
//! A role's progress is the share of its instances that are done. A role may be ahead of the slowest other role by
//! `maxSkew` of its own
//! instances, as a number or a percentage. Whole instances cannot always meet that bound, so the slowest role may always do
//! one more; among equally
//! slow roles that is the one with the most instances, whose step is the smallest.
//!
//! Roles that grow are limited by each other, and so are roles that shrink. The two directions do not wait for each other: the
//! instances to create may need the machines of those to remove.

mod scale_in;

pub(super) use scale_in::ScaleIn;

use std::cmp::Ordering;
use std::collections::BTreeMap;

use rbg_api::v1alpha2::{CoordinatedPolicySpec, CoordinatedRollingUpdate, CoordinatedScaling, PolicyRule};
use rbg_api::{IntOrPercent, RoundingMode};

/// Observed state of a role.
#[derive(Debug, Clone)]
pub(super) struct ObservedRole<'a> {
    pub(super) name: &'a str,
    /// Number of instances to reach in the end.
    pub(super) desired: i32,
    /// Number of instances that the role's own strategy keeps at their revision.
    pub(super) partitioned: i32,
    /// The role's workload, if it exists.
    pub(super) live: Option<ObservedWorkload>,
}

/// Observed state of a role's workload.
#[derive(Debug, Clone)]
pub(super) struct ObservedWorkload {
    pub(super) requested: i32,
    /// Number of instances whose pods all have a node.
    pub(super) scheduled: i32,
    pub(super) ready: i32,
    /// Number of instances beyond `requested` that have yet to be removed.
    pub(super) leaving: i32,
    /// The removal in steps that the workload is part of.
    pub(super) scale_in: Option<ScaleIn>,
    /// Partition in the workload's spec.
    pub(super) partition: i32,
    pub(super) update: RoleUpdateState,
}

/// Progress of a role's update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoleUpdateState {
    /// No update is in progress.
    Done,
    /// The workload's spec does not contain the update yet.
    NotApplied,
    /// The workload's controller has not observed the new spec yet.
    NotObserved,
    /// Number of instances that are updated and ready.
    InProgress(i32),
}

/// Limits of a role at this moment.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RolloutBounds {
    pub(super) replicas: i32,
    /// Number of instances that keep their revision now; `None` leaves it to the role's own strategy.
    pub(super) partition: Option<i32>,
    /// Number of instances that keep their revision in the end.
    pub(super) partitioned: i32,
    pub(super) max_unavailable: Option<IntOrPercent>,
    /// The removal in steps to record in the workload.
    pub(super) scale_in: Option<ScaleIn>,
}

/// Progress of a role: `done` of `goal` instances.
#[derive(Debug, Clone, Copy)]
struct RoleProgress {
    done: i64,
    goal: i64,
}

impl RoleProgress {
    fn new(done: i32, goal: i32) -> Self {
        Self { done: i64::from(done.clamp(0, goal.max(0))), goal: i64::from(goal.max(0)) }
    }

    /// Progress as a fraction whose denominator is not 0.
    fn share(self) -> (i64, i64) {
        if self.goal == 0 { (1, 1) } else { (self.done, self.goal) }
    }

    fn compare(self, other: Self) -> Ordering {
        let ((a, of_a), (b, of_b)) = (self.share(), other.share());
        (a * of_b).cmp(&(b * of_a))
    }
}

pub(super) fn bounds<'a>(
    policy: Option<&CoordinatedPolicySpec>,
    roles: &[ObservedRole<'a>],
) -> BTreeMap<&'a str, RolloutBounds> {
    let free = |role: &ObservedRole<'a>| {
        let (replicas, partitioned) = (role.desired, role.partitioned);
        let bounds =
            RolloutBounds { replicas, partition: None, partitioned, max_unavailable: None, scale_in: None };
        (role.name, bounds)
    };
    let mut all: BTreeMap<&str, RolloutBounds> = roles.iter().map(free).collect();
    let rules = || policy.into_iter().flat_map(|policy| &policy.policies);
    for rule in rules() {
        if let Some(scaling) = &rule.strategy.scaling {
            let members = members(rule, roles);
            let removal = scale_in::steps(scaling, &members);
            for ((role, replicas), step) in members.iter().zip(scale(scaling, &members)).zip(removal) {
                let Some(bounds) = all.get_mut(role.name) else { continue };
                match step {
                    Some(step) => {
                        bounds.replicas = bounds.replicas.max(step.replicas);
                        bounds.scale_in = bounds.scale_in.or(step.record);
                    }
                    None => bounds.replicas = bounds.replicas.min(replicas),
                }
            }
        }
    }
    let updates = || rules().filter_map(|rule| Some((rule, rule.strategy.rolling_update.as_ref()?)));
    for (rule, update) in updates() {
        for role in members(rule, roles) {
            if let Some(bounds) = all.get_mut(role.name) {
                apply_rule(update, bounds);
            }
        }
    }
    for (rule, update) in updates() {
        let Some(skew) = &update.max_skew else { continue };
        let members = members(rule, roles);
        for (role, partition) in members.iter().zip(rolling_partitions(skew, &members, &all)) {
            if let Some(bounds) = all.get_mut(role.name) {
                bounds.partition = Some(bounds.partition.map_or(partition, |other| other.max(partition)));
            }
        }
    }
    all
}

fn members<'r, 'a>(rule: &PolicyRule, roles: &'r [ObservedRole<'a>]) -> Vec<&'r ObservedRole<'a>> {
    roles.iter().filter(|role| rule.roles.iter().any(|name| name == role.name)).collect()
}

/// Replaces the role's own strategy by the rule's. Of several rules the strictest applies.
fn apply_rule(update: &CoordinatedRollingUpdate, bounds: &mut RolloutBounds) {
    let replicas = bounds.replicas;
    if let Some(partition) = &update.partition {
        let count = partition.of(replicas, RoundingMode::Up).unwrap_or(0).clamp(0, replicas);
        // A percentage below 100 leaves at least one instance to update, however few there are.
        let is_part = partition.percent().is_some_and(|percent| percent < 100);
        let count = if is_part { count.min((replicas - 1).max(0)) } else { count };
        let other = bounds.partition.unwrap_or(0);
        bounds.partitioned = count.max(other);
        bounds.partition = Some(bounds.partitioned);
    }
    if let Some(unavailable) = &update.max_unavailable {
        let count = |bound: &IntOrPercent| bound.of(replicas, RoundingMode::Up);
        let is_less = bounds.max_unavailable.as_ref().is_none_or(|other| count(unavailable) < count(other));
        if is_less {
            bounds.max_unavailable = Some(unavailable.clone());
        }
    }
}

/// Number of instances that each role may have now.
fn scale(scaling: &CoordinatedScaling, roles: &[&ObservedRole<'_>]) -> Vec<i32> {
    let requested = |role: &ObservedRole<'_>| role.live.as_ref().map_or(0, |live| live.requested);
    let progress: Vec<RoleProgress> = roles
        .iter()
        .map(|role| {
            let live = role.live.as_ref();
            let done = match scaling.progression.as_deref() {
                Some("OrderReady") => live.map_or(0, |live| live.ready),
                Some("OrderScheduled") => live.map_or(0, |live| live.scheduled),
                _ => requested(role),
            };
            RoleProgress::new(done.min(requested(role)), role.desired)
        })
        .collect();
    let Some(skew) = &scaling.max_skew else { return roles.iter().map(|role| role.desired).collect() };
    let allowed = allowed_progress(skew, &progress);
    // Existing instances stay.
    roles.iter().zip(allowed).map(|(role, allowed)| allowed.max(requested(role)).min(role.desired)).collect()
}

/// Number of instances of each role that keep their revision now.
fn rolling_partitions(
    skew: &IntOrPercent,
    roles: &[&ObservedRole<'_>],
    all: &BTreeMap<&str, RolloutBounds>,
) -> Vec<i32> {
    let bound = |role: &ObservedRole<'_>| {
        let bounds = all.get(role.name);
        bounds.map_or((role.desired, role.partitioned), |bounds| (bounds.replicas, bounds.partitioned))
    };
    let update =
        |role: &ObservedRole<'_>| role.live.as_ref().map_or(RoleUpdateState::Done, |live| live.update);
    let in_doubt = roles.iter().any(|role| update(role) == RoleUpdateState::NotObserved);
    let progress: Vec<RoleProgress> = roles
        .iter()
        .map(|role| {
            let (replicas, partitioned) = bound(role);
            let goal = replicas - partitioned;
            match update(role) {
                RoleUpdateState::Done => RoleProgress::new(goal, goal),
                RoleUpdateState::NotApplied | RoleUpdateState::NotObserved => RoleProgress::new(0, goal),
                RoleUpdateState::InProgress(updated) => RoleProgress::new(updated, goal),
            }
        })
        .collect();
    let allowed = allowed_progress(skew, &progress);
    let partitions = roles.iter().zip(allowed).map(|(role, allowed)| {
        let (replicas, partitioned) = bound(role);
        let live_partition = role.live.as_ref().map_or(partitioned, |live| live.partition);
        let partition = match update(role) {
            RoleUpdateState::Done => partitioned,
            RoleUpdateState::NotApplied if in_doubt => replicas,
            RoleUpdateState::NotApplied => replicas - allowed,
            RoleUpdateState::NotObserved => live_partition,
            // An update in progress is not held back again when a pod of another role fails.
            RoleUpdateState::InProgress(_) if in_doubt => live_partition,
            RoleUpdateState::InProgress(_) => live_partition.min(replicas - allowed),
        };
        partition.max(partitioned)
    });
    partitions.collect()
}

/// Number of instances of each role that may be done.
fn allowed_progress(skew: &IntOrPercent, progress: &[RoleProgress]) -> Vec<i32> {
    let slowest = (0..progress.len()).min_by(|a, b| {
        let (a, b) = (progress[*a], progress[*b]);
        a.compare(b).then(b.goal.cmp(&a.goal))
    });
    let of_one = |(index, own): (usize, &RoleProgress)| {
        let others =
            progress.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, other)| *other);
        let (done, goal) = others.min_by(|a, b| a.compare(*b)).map_or((1, 1), RoleProgress::share);
        let ahead = match skew.percent() {
            Some(percent) => {
                (done * 100 + i64::from(percent.max(0)) * goal).saturating_mul(own.goal) / (goal * 100)
            }
            None => done * own.goal / goal + i64::from(skew.of(0, RoundingMode::Down).unwrap_or(0).max(0)),
        };
        let minimum = own.done + i64::from(slowest == Some(index));
        i32::try_from(ahead.max(minimum).min(own.goal)).unwrap_or(i32::MAX)
    };
    progress.iter().enumerate().map(of_one).collect()
}

#[cfg(test)]
mod tests;

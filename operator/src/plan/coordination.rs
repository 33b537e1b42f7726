//! How far roles that a CoordinatedPolicy keeps together may go now.
//!
//! The measure is a role's share of its way: instances that are done, of those that it shall do. A role may be ahead of the
//! slowest other one by `maxSkew` of its own instances, as a number or a percentage. Whole instances cannot always keep
//! that, so the slowest role may always do one more; of equally slow ones that with the most instances, whose step is the
//! smallest.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use rbg_api::v1alpha2::{CoordinatedPolicySpec, CoordinatedRollingUpdate, CoordinatedScaling, PolicyRule};
use rbg_api::{IntOrPercent, RoundingMode};

/// What is known of a role.
#[derive(Debug, Clone)]
pub(super) struct ObservedRole<'a> {
    pub(super) name: &'a str,
    /// Instances that it shall have in the end.
    pub(super) desired: i32,
    /// Instances that its own strategy keeps at their revision.
    pub(super) partitioned: i32,
    /// Its workload, if it has one.
    pub(super) live: Option<ObservedWorkload>,
}

/// What is known of a role's workload.
#[derive(Debug, Clone)]
pub(super) struct ObservedWorkload {
    /// Instances that it was told to have.
    pub(super) requested: i32,
    /// Instances of which all pods have a node.
    pub(super) scheduled: i32,
    pub(super) ready: i32,
    /// Instances that it was told to keep at their revision.
    pub(super) partition: i32,
    pub(super) update: RoleUpdateState,
}

/// How far a role's update is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoleUpdateState {
    /// There is none.
    Done,
    /// The workload has not been told of it.
    NotApplied,
    /// The workload has been told, and has not answered.
    NotObserved,
    /// Instances that are updated and ready.
    InProgress(i32),
}

/// How far a role may go now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RolloutBounds {
    pub(super) replicas: i32,
    /// Instances that keep their revision now; `None`: as the role's own strategy says.
    pub(super) partition: Option<i32>,
    /// Instances that keep their revision in the end.
    pub(super) partitioned: i32,
    pub(super) max_unavailable: Option<IntOrPercent>,
}

/// A role's share of its way.
#[derive(Debug, Clone, Copy)]
struct RoleProgress {
    done: i64,
    goal: i64,
}

impl RoleProgress {
    fn new(done: i32, goal: i32) -> Self {
        Self { done: i64::from(done.clamp(0, goal.max(0))), goal: i64::from(goal.max(0)) }
    }

    /// The share, as a fraction whose denominator is not 0.
    fn share(self) -> (i64, i64) {
        if self.goal == 0 { (1, 1) } else { (self.done, self.goal) }
    }

    fn compare(self, other: Self) -> Ordering {
        let ((a, of_a), (b, of_b)) = (self.share(), other.share());
        (a * of_b).cmp(&(b * of_a))
    }
}

/// Bounds of every role, by its name.
pub(super) fn bounds<'a>(
    policy: Option<&CoordinatedPolicySpec>,
    roles: &[ObservedRole<'a>],
) -> BTreeMap<&'a str, RolloutBounds> {
    let free = |role: &ObservedRole<'a>| {
        let (replicas, held_back) = (role.desired, role.partitioned);
        (
            role.name,
            RolloutBounds { replicas, partition: None, partitioned: held_back, max_unavailable: None },
        )
    };
    let mut all: BTreeMap<&str, RolloutBounds> = roles.iter().map(free).collect();
    let rules = || policy.into_iter().flat_map(|policy| &policy.policies);
    for rule in rules() {
        if let Some(scaling) = &rule.strategy.scaling {
            let members = members(rule, roles);
            for (role, replicas) in members.iter().zip(scale(scaling, &members)) {
                if let Some(bounds) = all.get_mut(role.name) {
                    bounds.replicas = bounds.replicas.min(replicas);
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

/// Takes over what a rule says in place of the role's own strategy. Of several rules the most careful one holds.
fn apply_rule(update: &CoordinatedRollingUpdate, bounds: &mut RolloutBounds) {
    let replicas = bounds.replicas;
    if let Some(partition) = &update.partition {
        let count = partition.of(replicas, RoundingMode::Up).unwrap_or(0).clamp(0, replicas);
        // Less than all leaves one to update, however few there are.
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

/// Instances that each role may have now.
fn scale(scaling: &CoordinatedScaling, roles: &[&ObservedRole<'_>]) -> Vec<i32> {
    let asked = |role: &ObservedRole<'_>| role.live.as_ref().map_or(0, |live| live.requested);
    let progress: Vec<RoleProgress> = roles
        .iter()
        .map(|role| {
            let live = role.live.as_ref();
            let done = match scaling.progression.as_deref() {
                Some("OrderReady") => live.map_or(0, |live| live.ready),
                Some("OrderScheduled") => live.map_or(0, |live| live.scheduled),
                _ => asked(role),
            };
            RoleProgress::new(done.min(asked(role)), role.desired)
        })
        .collect();
    let Some(skew) = &scaling.max_skew else { return roles.iter().map(|role| role.desired).collect() };
    let allowed = allowed_progress(skew, &progress);
    // What is there stays; what is too much goes at once.
    roles.iter().zip(allowed).map(|(role, allowed)| allowed.max(asked(role)).min(role.desired)).collect()
}

/// Instances that each role keeps at their revision now.
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
            let (replicas, held_back) = bound(role);
            let goal = replicas - held_back;
            match update(role) {
                RoleUpdateState::Done => RoleProgress::new(goal, goal),
                RoleUpdateState::NotApplied | RoleUpdateState::NotObserved => RoleProgress::new(0, goal),
                RoleUpdateState::InProgress(updated) => RoleProgress::new(updated, goal),
            }
        })
        .collect();
    let allowed = allowed_progress(skew, &progress);
    let partitions = roles.iter().zip(allowed).map(|(role, allowed)| {
        let (replicas, held_back) = bound(role);
        let told = role.live.as_ref().map_or(held_back, |live| live.partition);
        let partition = match update(role) {
            RoleUpdateState::Done => held_back,
            RoleUpdateState::NotApplied if in_doubt => replicas,
            RoleUpdateState::NotApplied => replicas - allowed,
            RoleUpdateState::NotObserved => told,
            // An update that has begun is not held back again when a pod of another role fails.
            RoleUpdateState::InProgress(_) if in_doubt => told,
            RoleUpdateState::InProgress(_) => told.min(replicas - allowed),
        };
        partition.max(held_back)
    });
    partitions.collect()
}

/// Instances that may be done of each role.
fn allowed_progress(skew: &IntOrPercent, progress: &[RoleProgress]) -> Vec<i32> {
    let slowest = (0..progress.len()).min_by(|a, b| {
        let (a, b) = (progress[*a], progress[*b]);
        a.compare(b).then(b.goal.cmp(&a.goal))
    });
    let of_one = |(at, own): (usize, &RoleProgress)| {
        let others = progress.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| *other);
        let (done, goal) = others.min_by(|a, b| a.compare(*b)).map_or((1, 1), RoleProgress::share);
        let ahead = match skew.percent() {
            Some(percent) => {
                (done * 100 + i64::from(percent.max(0)) * goal).saturating_mul(own.goal) / (goal * 100)
            }
            None => done * own.goal / goal + i64::from(skew.of(0, RoundingMode::Down).unwrap_or(0).max(0)),
        };
        let least = own.done + i64::from(slowest == Some(at));
        i32::try_from(ahead.max(least).min(own.goal)).unwrap_or(i32::MAX)
    };
    progress.iter().enumerate().map(of_one).collect()
}

#[cfg(test)]
mod tests;

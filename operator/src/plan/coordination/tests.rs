use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn policy(strategy: &Value) -> CoordinatedPolicySpec {
    let rule = json!({ "name": "rule", "roles": ["a", "b", "c"], "strategy": strategy });
    serde_json::from_value(json!({ "policies": [rule] })).unwrap()
}

fn role(name: &'static str, desired: i32, live: Option<ObservedWorkload>) -> ObservedRole<'static> {
    ObservedRole { name, desired, partitioned: 0, live }
}

fn live(requested: i32, update: RoleUpdateState) -> Option<ObservedWorkload> {
    let (scheduled, ready) = (requested, requested);
    Some(ObservedWorkload { requested, scheduled, ready, leaving: 0, scale_in: None, partition: 0, update })
}

fn skew() -> impl Strategy<Value = Value> {
    prop_oneof![(0..4).prop_map(Value::from), (0..=100).prop_map(|percent| json!(format!("{percent}%")))]
}

/// Upper bound for a role, given the progress of another role. One more than it has done is always allowed.
fn limit(skew: &Value, own: (i32, i32), other: (i32, i32)) -> f64 {
    let (done, goal) = (f64::from(own.0), f64::from(own.1));
    let share = if other.1 == 0 { 1.0 } else { f64::from(other.0) / f64::from(other.1) };
    let ahead = match skew.as_str() {
        Some(text) => text.trim_end_matches('%').parse::<f64>().unwrap() / 100.0 * goal,
        None => skew.as_f64().unwrap(),
    };
    (share * goal + ahead + 1e-6).max(done + 1.0)
}

const NAMES: [&str; 3] = ["a", "b", "c"];

proptest! {
    #[test]
    fn scaling_keeps_the_skew_and_ends(
        goals in prop::collection::vec(0..15_i32, 1..4),
        skew in skew(),
        progression in prop::sample::select(vec!["OrderReady", "OrderScheduled", ""]),
        order in prop::collection::vec(0..3_usize, 200),
    ) {
        let policy = policy(&json!({ "scaling": { "maxSkew": skew, "progression": progression } }));
        let mut requested = vec![0; goals.len()];
        let mut done = vec![0; goals.len()];
        for index in order.into_iter().chain((0..200).map(|round| round % 3)) {
            let roles: Vec<_> = (0..goals.len()).map(|index| {
                let facts = ObservedWorkload { scheduled: done[index], ready: done[index], ..live(requested[index], RoleUpdateState::Done).unwrap() };
                role(NAMES[index], goals[index], Some(facts))
            }).collect();
            let bounds = bounds(Some(&policy), &roles);
            for (index, name) in NAMES.iter().enumerate().take(goals.len()) {
                let replicas = bounds[name].replicas;
                prop_assert!(replicas >= requested[index] && replicas <= goals[index]);
                requested[index] = replicas;
                let own = if progression.is_empty() { replicas - 1 } else { done[index] };
                for other in (0..goals.len()).filter(|other| *other != index && !progression.is_empty()) {
                    let limit = limit(&skew, (own, goals[index]), (done[other], goals[other]));
                    prop_assert!(f64::from(replicas) <= limit, "{replicas} of {name}, not over {limit}");
                }
            }
            if let Some(done) = done.get_mut(index) {
                *done = (*done + 1).min(requested[index]);
            }
        }
        prop_assert_eq!(requested, goals);
    }

    #[test]
    fn shrinking_keeps_the_skew_and_ends(
        sizes in prop::collection::vec((0..15_i32, 0..15_i32), 1..4),
        skew in skew(),
        progression in prop::sample::select(vec!["OrderReady", "OrderScheduled", ""]),
        order in prop::collection::vec(0..3_usize, 200),
    ) {
        let mut scaling = json!({ "maxSkew": skew });
        if !progression.is_empty() {
            scaling["progression"] = progression.into();
        }
        let policy = policy(&json!({ "scaling": scaling }));
        let (goals, removals): (Vec<i32>, Vec<i32>) = sizes.into_iter().unzip();
        let mut roles: Vec<ShrinkingRole> = goals.iter().zip(&removals).map(|(goal, removal)| ShrinkingRole::new(*goal, *removal)).collect();
        for index in order.into_iter().chain((0..200).map(|round| round % 3)) {
            let facts: Vec<_> = roles.iter().enumerate().map(|(index, one)| one.facts(NAMES[index])).collect();
            let bounds = bounds(Some(&policy), &facts);
            for (index, name) in NAMES.iter().enumerate().take(roles.len()) {
                let replicas = bounds[name].replicas;
                let own = &mut roles[index];
                prop_assert!(replicas <= own.requested && replicas >= own.goal, "{replicas} of {name}");
                own.requested = replicas;
                own.record = bounds[name].scale_in.or(own.record);
                let own = &roles[index];
                for other in (0..roles.len()).filter(|other| *other != index && !progression.is_empty()) {
                    let limit = limit(&skew, own.progress(), roles[other].progress());
                    let removed = f64::from(own.from - replicas);
                    prop_assert!(removed <= limit, "{removed} of {name}, not over {limit}");
                }
            }
            if let Some(one) = roles.get_mut(index) {
                one.present = (one.present - 1).max(one.requested);
            }
        }
        prop_assert_eq!(roles.iter().map(|one| one.present).collect::<Vec<_>>(), goals);
    }

    #[test]
    fn updates_keep_the_skew_and_end(
        goals in prop::collection::vec(0..15_i32, 1..4),
        skew in skew(),
        order in prop::collection::vec(0..3_usize, 200),
    ) {
        let policy = policy(&json!({ "rollingUpdate": { "maxSkew": skew } }));
        let mut partitions: Vec<Option<i32>> = vec![None; goals.len()];
        let mut done = vec![0; goals.len()];
        for index in order.into_iter().chain((0..200).map(|round| round % 3)) {
            let roles: Vec<_> = (0..goals.len()).map(|index| {
                let update = if partitions[index].is_some() { RoleUpdateState::InProgress(done[index]) } else { RoleUpdateState::NotApplied };
                let partition = partitions[index].unwrap_or(0);
                let facts = ObservedWorkload { partition, ..live(goals[index], update).unwrap() };
                role(NAMES[index], goals[index], Some(facts))
            }).collect();
            let bounds = bounds(Some(&policy), &roles);
            for (index, name) in NAMES.iter().enumerate().take(goals.len()) {
                let partition = bounds[name].partition.unwrap();
                prop_assert!(partitions[index].is_none_or(|before| partition <= before), "the partition never grows");
                for other in (0..goals.len()).filter(|other| *other != index) {
                    let limit = limit(&skew, (done[index], goals[index]), (done[other], goals[other]));
                    prop_assert!(f64::from(goals[index] - partition) <= limit);
                }
                partitions[index] = Some(partition);
            }
            if let Some(done) = done.get_mut(index) {
                *done = (*done + 1).min(goals[index] - partitions[index].unwrap());
            }
        }
        prop_assert_eq!(done, goals);
    }
}

#[test]
fn the_slowest_role_advances_first_and_of_equals_the_largest() {
    let policy = policy(&json!({ "rollingUpdate": { "maxSkew": "1%" } }));
    let allowed = |a: RoleUpdateState, b: RoleUpdateState| {
        let partition =
            |update, partition_of| if update == RoleUpdateState::NotApplied { 0 } else { partition_of };
        let facts = |desired, update, partition_of| {
            Some(ObservedWorkload {
                partition: partition(update, partition_of),
                ..live(desired, update).unwrap()
            })
        };
        let bounds = bounds(Some(&policy), &[role("a", 7, facts(7, a, 7)), role("b", 3, facts(3, b, 3))]);
        (7 - bounds["a"].partition.unwrap(), 3 - bounds["b"].partition.unwrap())
    };
    assert_eq!(allowed(RoleUpdateState::NotApplied, RoleUpdateState::NotApplied), (1, 0));
    assert_eq!(allowed(RoleUpdateState::InProgress(1), RoleUpdateState::InProgress(0)), (1, 1));
    assert_eq!(allowed(RoleUpdateState::InProgress(1), RoleUpdateState::InProgress(1)), (2, 1));
    assert_eq!(allowed(RoleUpdateState::InProgress(3), RoleUpdateState::InProgress(1)), (3, 2));
    assert_eq!(allowed(RoleUpdateState::InProgress(7), RoleUpdateState::Done), (7, 3), "both roles are done");
    assert_eq!(
        allowed(RoleUpdateState::InProgress(2), RoleUpdateState::Done),
        (7, 3),
        "no other role is in progress"
    );
}

#[test]
fn rollout_waits_until_workloads_observe_their_spec() {
    let policy = policy(&json!({ "rollingUpdate": { "maxSkew": 2 } }));
    let partition_of = ObservedWorkload { partition: 3, ..live(4, RoleUpdateState::NotObserved).unwrap() };
    let roles = [role("a", 4, Some(partition_of)), role("b", 4, live(4, RoleUpdateState::NotApplied))];
    let bounds = bounds(Some(&policy), &roles);
    assert_eq!((bounds["a"].partition, bounds["b"].partition), (Some(3), Some(4)));
}

#[test]
fn the_strictest_of_several_rules_applies() {
    let rule = |name: &str, unavailable: Value, partition: &str| {
        let update = json!({ "maxUnavailable": unavailable, "partition": partition });
        json!({ "name": name, "roles": ["a", "unknown"], "strategy": { "rollingUpdate": update } })
    };
    let rules = [rule("x", json!("50%"), "10%"), rule("y", json!(2), "99%")];
    let policy = serde_json::from_value(json!({ "policies": rules })).unwrap();
    let bounds = bounds(Some(&policy), &[role("a", 10, None), role("b", 2, None)]);
    let (a, b) = (&bounds["a"], &bounds["b"]);
    assert_eq!((a.partition, a.partitioned), (Some(9), 9), "one instance is left to update");
    assert_eq!(a.max_unavailable, Some(IntOrPercent::Int(2)));
    let free =
        RolloutBounds { replicas: 2, partition: None, partitioned: 0, max_unavailable: None, scale_in: None };
    assert_eq!(b, &free);
}

/// A role from which instances are removed.
struct ShrinkingRole {
    from: i32,
    goal: i32,
    requested: i32,
    /// Number of instances, with those that drain.
    present: i32,
    record: Option<ScaleIn>,
}

impl ShrinkingRole {
    fn new(goal: i32, removal: i32) -> Self {
        let from = goal + removal;
        Self { from, goal, requested: from, present: from, record: None }
    }

    fn facts(&self, name: &'static str) -> ObservedRole<'static> {
        let leaving = self.present - self.requested;
        let facts = live(self.requested, RoleUpdateState::Done).unwrap();
        role(name, self.goal, Some(ObservedWorkload { leaving, scale_in: self.record, ..facts }))
    }

    fn progress(&self) -> (i32, i32) {
        (self.from - self.present, self.from - self.goal)
    }
}

#[test]
fn roles_shrink_in_proportion() {
    let policy = policy(&json!({ "scaling": { "maxSkew": "10%", "progression": "OrderReady" } }));
    let mut a = ShrinkingRole::new(6, 2);
    let mut b = ShrinkingRole::new(3, 1);
    let mut steps = Vec::new();
    for _ in 0..8 {
        let bounds = bounds(Some(&policy), &[a.facts("a"), b.facts("b")]);
        for (one, name) in [(&mut a, "a"), (&mut b, "b")] {
            one.requested = bounds[name].replicas;
            one.record = bounds[name].scale_in.or(one.record);
        }
        steps.push((a.requested, b.requested));
        // Without this, no further step follows.
        if steps.len() % 2 == 0 {
            (a.present, b.present) = (a.requested, b.requested);
        }
    }
    assert_eq!(steps, [(7, 4), (7, 4), (7, 3), (7, 3), (6, 3), (6, 3), (6, 3), (6, 3)]);
    assert_eq!(a.record.map(|record| record.to_string()).as_deref(), Some("8 to 6"));
}

#[test]
fn growth_and_removal_do_not_wait_for_each_other() {
    let policy = policy(&json!({ "scaling": { "maxSkew": 1, "progression": "OrderReady" } }));
    let (grows, shrinks) = (live(2, RoleUpdateState::Done), ShrinkingRole::new(2, 6));
    let bounds = bounds(Some(&policy), &[role("a", 4, grows), shrinks.facts("b")]);
    assert_eq!((bounds["a"].replicas, bounds["b"].replicas), (4, 2));
    assert_eq!(bounds["b"].scale_in, None, "a removal at once has no steps to record");
}

#[test]
fn without_a_skew_and_with_other_goals_removal_starts_again() {
    let free = policy(&json!({ "scaling": { "progression": "OrderReady" } }));
    let roles = || [ShrinkingRole::new(2, 6), ShrinkingRole::new(0, 8)];
    let facts = |roles: &[ShrinkingRole; 2]| [roles[0].facts("a"), roles[1].facts("b")];
    let at_once = bounds(Some(&free), &facts(&roles()));
    assert_eq!((at_once["a"].replicas, at_once["b"].replicas), (2, 0));

    let strict = policy(&json!({ "scaling": { "maxSkew": "50%" } }));
    let mut changed = roles();
    changed[0].requested = 5;
    changed[0].record = ScaleIn::parse("8 to 1");
    let bounds = bounds(Some(&strict), &facts(&changed));
    assert_eq!(bounds["a"].scale_in.unwrap().to_string(), "5 to 2");
    for invalid in ["", "8", "2 to 8", "3 to 3", "8 to -1", "x to 1"] {
        assert_eq!(ScaleIn::parse(invalid), None, "{invalid}");
    }
}

//! What a round plans for the engines.

use super::super::round_plan::{MAX_COMPARED, RoundPlan};
use super::*;
use crate::fleet::InstanceLoad;
use crate::policy::ScheduleRound;

/// A round of a fleet of one busy engine whose load was computed `age` ago; `refreshed` since the last round.
fn start_round(plan: &mut RoundPlan, now: f64, age: f64, refreshed: Option<&[InstanceIndex]>) {
    let cluster = fleet(1, PrefetchBehavior::WaitComplete);
    let engine = InstanceLoad { available: true, prefill_wait: 5.0 - now + age, ..InstanceLoad::default() };
    let round = ScheduleRound {
        cluster: &cluster,
        loads: &vec![engine; cluster.instances().len()],
        refreshed,
        refreshed_at: &vec![now - age; cluster.instances().len()],
        queued_requests: 1,
        max_store_fetch_tokens: 0.0,
        max_adapter_load: 0.0,
        now,
    };
    plan.start_round(&round, &settings());
}

#[test]
fn time_alone_makes_no_engine_free_sooner() {
    let mut plan = RoundPlan::default();
    start_round(&mut plan, 0.0, 0.0, None);
    start_round(&mut plan, 0.002, 0.002, Some(&[]));
    assert!((plan.backlog(InstanceIndex(0)) - 4.998).abs() < 1e-9);
    assert!((plan.first_due().unwrap() - 4.998 + settings().slack).abs() < 1e-9);
    start_round(&mut plan, 0.004, 0.002, Some(&[InstanceIndex(0)]));
    assert!((plan.backlog(InstanceIndex(0)) - 4.996).abs() < 1e-9);
    start_round(&mut plan, 0.004, 0.0, None);
    assert_eq!(plan.sooner_free_len(), 0);
}

#[test]
fn an_engine_is_compared_until_it_is_filled() {
    let mut plan = RoundPlan::default();
    let engine = InstanceIndex(0);
    plan.withdraw(engine, 2.0);
    plan.fill(engine, 1.5);
    assert_eq!(plan.sooner_free(0), Some(engine));
    plan.fill(engine, 0.5);
    assert_eq!(plan.sooner_free_len(), 0);
}

#[test]
fn an_engine_is_compared_with_a_bounded_number_of_requests() {
    let mut plan = RoundPlan::default();
    plan.withdraw(InstanceIndex(0), 2.0);
    for _ in 0..MAX_COMPARED {
        assert_eq!(plan.sooner_free(0), Some(InstanceIndex(0)));
        plan.count_comparison(0);
    }
    assert_eq!(plan.sooner_free(0), None);
}

proptest! {
    /// The shortcuts for prompts that no engine has change no decision.
    #[test]
    fn empty_prediction_is_one_without_hits(
        prefills in 1..150_usize,
        lengths in prop::collection::vec(100..5_000_u32, 1..40),
    ) {
        let (mut empty, mut without_hits) = (test_scheduler(prefills), test_scheduler(prefills));
        for (number, tokens) in (0_u32..).zip(lengths) {
            let now = 0.02 * f64::from(number);
            empty.submit_predicted(now, request(tokens), CacheHitPrediction::default());
            without_hits.submit(now, tokens, &[]);
            prop_assert_eq!(empty.sent(now), without_hits.sent(now));
        }
    }

    #[test]
    fn idlest_engine_is_the_first_of_the_least_backlog(
        backlogs in prop::collection::vec(prop_oneof![Just(0.0), Just(f64::INFINITY), 0.0..3.0_f64], 1..30),
    ) {
        let engines: Vec<InstanceIndex> = InstanceIndex::all().take(backlogs.len()).collect();
        let least = engines.iter().copied().min_by(|a, b| backlogs[a.as_usize()].total_cmp(&backlogs[b.as_usize()]));
        prop_assert_eq!(RoundPlan::with_backlogs(backlogs).idlest(&engines), least);
    }
}

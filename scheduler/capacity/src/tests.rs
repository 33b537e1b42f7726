//! Decisions in single situations.

use crate::decision::DecisionReason;
use crate::input::{DecodeSignals, PlannerInput, PrefillSignals, RoleReplicas, StartingReplica};
use crate::planner::Planner;
use crate::settings::{
    DailyWindow, EngineStart, FlipSettings, InvalidSettings, PlannerSettings, RoleSettings,
};

fn settings() -> PlannerSettings {
    let role = RoleSettings {
        start: EngineStart { start_s: 60.0, warmup_s: 0.0, drain_s: 30.0 },
        ..RoleSettings::default()
    };
    PlannerSettings { prefill: role, decode: role, ..PlannerSettings::default() }
}

/// Engines that compute 8,000 prompt tokens per second, and generate 2,000 tokens per second at 50 ms per token.
fn input(
    time_s: f64,
    (prefill, prefill_tokens): (u32, f64),
    (decode, decode_tokens): (u32, f64),
) -> PlannerInput {
    let busy = prefill_tokens / 8_000.0;
    // A step of 25 ms, and 0.25 ms per sequence.
    let per_engine = decode_tokens / f64::from(decode.max(1));
    let batch = 0.025 * per_engine / (1.0 - 0.000_25 * per_engine);
    let running = batch * f64::from(decode);
    PlannerInput {
        time_s,
        requests_per_s: Some(prefill_tokens / 2_000.0),
        prefill_replicas: RoleReplicas::ready(prefill),
        decode_replicas: RoleReplicas::ready(decode),
        prefill: PrefillSignals {
            arriving_tokens_per_s: Some(prefill_tokens),
            computed_tokens_per_s: Some(prefill_tokens),
            busy_share: Some(busy / f64::from(prefill.max(1))),
            queued_work_s: Some(0.0),
            cache_hit_share: None,
            ttft_s: Some(0.5),
            within_target_share: Some(0.99),
        },
        decode: DecodeSignals {
            generated_tokens_per_s: Some(decode_tokens),
            running: Some(running),
            waiting: Some(0.0),
            kv_occupancy: Some(0.3),
            tpot_s: Some(0.025 + 0.000_25 * batch),
            within_target_share: Some(0.99),
        },
    }
}

/// Steps until `until_s` with the same load and fleet, and returns the last decision.
fn repeat(
    planner: &mut Planner,
    from_s: u32,
    until_s: u32,
    prefill: (u32, f64),
    decode: (u32, f64),
) -> crate::PlannerDecision {
    let times = (from_s..=until_s).step_by(5);
    let decisions = times.map(|time_s| planner.step(&input(f64::from(time_s), prefill, decode)));
    decisions.last().expect("at least one step")
}

#[test]
fn replicas_follow_the_demand_of_their_own_role() {
    let mut planner = Planner::new(settings()).expect("valid");
    let steady = repeat(&mut planner, 0, 3_000, (3, 12_000.0), (2, 3_000.0));
    assert_eq!((steady.prefill.wanted, steady.decode.wanted), (3, 2), "{steady:#?}");
    let more_prefill = repeat(&mut planner, 3_005, 3_300, (3, 23_000.0), (2, 3_000.0));
    assert!(more_prefill.prefill.wanted >= 4, "{more_prefill:#?}");
    assert_eq!(more_prefill.prefill.explanation.reason, DecisionReason::Demand);
    assert_eq!(more_prefill.decode.wanted, 2);
}

#[test]
fn surplus_is_removed_after_the_break_even_time() {
    let mut planner = Planner::new(settings()).expect("valid");
    let steady = repeat(&mut planner, 0, 3_000, (5, 30_000.0), (2, 3_000.0));
    assert_eq!(steady.prefill.wanted, 5, "{steady:#?}");
    let soon = repeat(&mut planner, 3_005, 3_040, (5, 8_000.0), (2, 3_000.0));
    assert_eq!((soon.prefill.wanted, soon.prefill.explanation.reason), (5, DecisionReason::BreakEven));
    let later = repeat(&mut planner, 3_045, 3_600, (5, 8_000.0), (2, 3_000.0));
    assert!(later.prefill.wanted <= 3, "{later:#?}");
    assert_eq!(later.prefill.explanation.reason, DecisionReason::Surplus);
}

#[test]
fn a_longer_start_delays_the_removal() {
    let slow = EngineStart { start_s: 600.0, warmup_s: 0.0, drain_s: 30.0 };
    let wait = |start: EngineStart| {
        let role = RoleSettings { start, ..settings().prefill };
        let mut planner = Planner::new(PlannerSettings { prefill: role, ..settings() }).expect("valid");
        let fleet = repeat(&mut planner, 0, 3_000, (6, 30_000.0), (2, 3_000.0)).prefill.wanted;
        let times = (3_005..6_000).step_by(5);
        let removed = times.into_iter().find(|&time_s| {
            let observed = input(f64::from(time_s), (fleet, 8_000.0), (2, 3_000.0));
            planner.step(&observed).prefill.wanted < fleet
        });
        removed.expect("removed at last") - 3_000
    };
    assert!(wait(slow) > 2 * wait(settings().prefill.start));
}

#[test]
fn an_idle_deployment_scales_to_the_floor_of_the_night() {
    let role = RoleSettings { min: 2, night_min: Some(0), ..settings().prefill };
    let night = Some(DailyWindow { from_s: 0.0, until_s: 20_000.0 });
    let settings = PlannerSettings { prefill: role, decode: role, night, ..settings() };
    let mut planner = Planner::new(settings).expect("valid");
    repeat(&mut planner, 0, 3_000, (2, 8_000.0), (2, 2_000.0));
    let idle = repeat(&mut planner, 3_005, 6_000, (2, 0.0), (2, 0.0));
    assert_eq!((idle.prefill.wanted, idle.decode.wanted), (0, 0), "{idle:#?}");
    let day = repeat(&mut planner, 20_000, 20_300, (0, 0.0), (0, 0.0));
    assert_eq!((day.prefill.wanted, day.prefill.explanation.reason), (2, DecisionReason::Minimum));
}

#[test]
fn engines_flip_from_a_surplus_to_a_shortage() {
    let settings = PlannerSettings { flip: Some(FlipSettings { flip_s: 10.0 }), ..settings() };
    let mut planner = Planner::new(settings).expect("valid");
    repeat(&mut planner, 0, 3_000, (6, 30_000.0), (2, 3_000.0));
    let flipped = (3_005..3_600)
        .step_by(5)
        .map(|time_s| planner.step(&input(f64::from(time_s), (6, 4_000.0), (2, 3_900.0))))
        .find(|decision| decision.flips.prefill_to_decode > 0)
        .expect("flips");
    assert_eq!(flipped.prefill.wanted, 6 - flipped.flips.prefill_to_decode);
    assert!(flipped.decode.wanted >= 2 + flipped.flips.prefill_to_decode);
}

#[test]
fn the_time_to_start_is_learned() {
    let mut planner = Planner::new(settings()).expect("valid");
    for (start, number) in (0..8).map(|number| (400.0 * f64::from(number), number)) {
        for step in 0..60_u32 {
            let time_s = start + 5.0 * f64::from(step);
            let mut observed = input(time_s, (2, 8_000.0), (2, 2_000.0));
            if step < 48 {
                observed.prefill_replicas.starting = vec![StartingReplica { since_s: start }];
            } else {
                observed.prefill_replicas.ready = 3;
            }
            let decision = planner.step(&observed);
            if number == 7 && step == 59 {
                let horizon_s = decision.prefill.explanation.horizon_s;
                assert!((230.0..260.0).contains(&horizon_s), "{horizon_s}");
            }
        }
    }
}

#[test]
fn without_capacity_a_missed_target_adds_one_replica() {
    let mut planner = Planner::new(settings()).expect("valid");
    let mut observed = input(0.0, (2, 8_000.0), (2, 2_000.0));
    observed.prefill.busy_share = None;
    observed.prefill.within_target_share = Some(0.5);
    let decision = planner.step(&observed);
    assert_eq!(
        (decision.prefill.wanted, decision.prefill.explanation.reason),
        (3, DecisionReason::LatencyTarget)
    );
}

#[test]
fn contradicting_settings_are_rejected() {
    let rejected = |change: fn(&mut PlannerSettings)| {
        let mut settings = settings();
        change(&mut settings);
        Planner::new(settings).expect_err("contradicting")
    };
    assert_eq!(rejected(|settings| settings.targets.share = 1.0), InvalidSettings::Share(1.0));
    assert_eq!(
        rejected(|settings| settings.gpu_budget = Some(1)),
        InvalidSettings::Budget { budget: 1, needed: 2 }
    );
    assert!(matches!(rejected(|settings| settings.decode.max = 0), InvalidSettings::Bounds { .. }));
}

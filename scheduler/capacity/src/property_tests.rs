//! Properties of all decisions.

use proptest::prelude::*;

use crate::decision::PlannerDecision;
use crate::input::{DecodeSignals, PlannerInput, PrefillSignals, RoleReplicas, StartingReplica};
use crate::planner::Planner;
use crate::settings::{DailyWindow, FlipSettings, PlannerSettings, RoleSettings};

/// Steps before the one that is checked.
const STEPS: u32 = 200;

fn settings() -> impl Strategy<Value = PlannerSettings> {
    let role = |gpus: u32| {
        (0_u32..4, 4_u32..40, 0_u32..3).prop_map(move |(min, max, night_min)| RoleSettings {
            min,
            max,
            night_min: Some(night_min),
            gpus_per_replica: gpus,
            ..RoleSettings::default()
        })
    };
    (1_u32..5).prop_flat_map(move |gpus| (role(gpus), role(gpus), 30_u32..120, any::<bool>())).prop_map(
        |(prefill, decode, budget, flips)| PlannerSettings {
            prefill,
            decode,
            night: Some(DailyWindow { from_s: 79_200.0, until_s: 21_600.0 }),
            gpu_budget: Some(budget),
            flip: flips.then(FlipSettings::default),
            ..PlannerSettings::default()
        },
    )
}

/// A fleet with a load relative to its size.
#[derive(Debug, Clone, Copy)]
struct Load {
    prefill: f64,
    decode: f64,
    prefill_ready: u32,
    decode_ready: u32,
    starting: u32,
}

fn load() -> impl Strategy<Value = Load> {
    (0.0..3.0_f64, 0.0..3.0_f64, 0_u32..30, 0_u32..30, 0_u32..4).prop_map(
        |(prefill, decode, prefill_ready, decode_ready, starting)| Load {
            prefill,
            decode,
            prefill_ready,
            decode_ready,
            starting,
        },
    )
}

/// An engine computes 8,000 prompt tokens per second; with 100 sequences it generates 2,000 tokens per second.
fn input(time_s: f64, load: Load) -> PlannerInput {
    let Load { prefill, decode, prefill_ready, decode_ready, starting } = load;
    let (prefill_engines, decode_engines) = (f64::from(prefill_ready), f64::from(decode_ready));
    let demand = 8_000.0 * prefill * prefill_engines;
    let running = 100.0 * decode * decode_engines;
    let step = 0.025 + 0.000_25 * 100.0 * decode;
    PlannerInput {
        time_s,
        requests_per_s: Some(demand / 2_000.0),
        prefill_replicas: RoleReplicas {
            ready: prefill_ready,
            starting: vec![StartingReplica { since_s: 0.0 }; starting as usize],
            ..RoleReplicas::default()
        },
        decode_replicas: RoleReplicas::ready(decode_ready),
        prefill: PrefillSignals {
            arriving_tokens_per_s: Some(demand),
            computed_tokens_per_s: Some(demand.min(8_000.0 * prefill_engines)),
            busy_share: Some(prefill.min(1.0)),
            queued_work_s: Some(10.0 * (prefill - 1.0).max(0.0) * prefill_engines),
            cache_hit_share: Some(0.4),
            ttft_s: Some(prefill),
            within_target_share: Some(if prefill > 1.0 { 0.5 } else { 0.99 }),
        },
        decode: DecodeSignals {
            generated_tokens_per_s: Some(running / step),
            running: Some(running),
            waiting: Some(0.0),
            kv_occupancy: Some((0.4 * decode).min(1.0)),
            tpot_s: Some(1.05 * step),
            within_target_share: Some(if step > 0.05 { 0.2 } else { 0.99 }),
        },
    }
}

fn after_steps(settings: PlannerSettings, load: Load) -> Planner {
    let mut planner = Planner::new(settings).expect("valid");
    for step in 0..STEPS {
        planner.step(&input(5.0 * f64::from(step), load));
    }
    planner
}

fn next(planner: &Planner, input: &PlannerInput) -> PlannerDecision {
    planner.clone().step(input)
}

const NOW_S: f64 = 5.0 * STEPS as f64;

/// Inputs that lack one metric of prefill, and of decode.
fn without_one_metric(complete: &PlannerInput) -> (Vec<PlannerInput>, Vec<PlannerInput>) {
    let change = |change: fn(&mut PlannerInput)| {
        let mut input = complete.clone();
        change(&mut input);
        input
    };
    let prefill = vec![
        change(|input| input.prefill.arriving_tokens_per_s = None),
        change(|input| input.prefill.arriving_tokens_per_s = Some(f64::NAN)),
        change(|input| input.prefill.computed_tokens_per_s = None),
        change(|input| input.prefill.busy_share = None),
        change(|input| input.prefill.queued_work_s = None),
        change(|input| (input.prefill.ttft_s, input.prefill.within_target_share) = (None, None)),
        change(|input| input.prefill = PrefillSignals::default()),
    ];
    let decode = vec![
        change(|input| input.decode.generated_tokens_per_s = None),
        change(|input| input.decode.running = None),
        change(|input| input.decode.waiting = None),
        change(|input| input.decode.kv_occupancy = None),
        change(|input| (input.decode.tpot_s, input.decode.within_target_share) = (None, None)),
        change(|input| input.decode = DecodeSignals::default()),
    ];
    (prefill, decode)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn decisions_stay_within_bounds_and_budget(
        settings in settings(), first in load(), then in load(), hour in 0_u32..24,
    ) {
        prop_assume!(settings.validate().is_ok());
        let mut planner = after_steps(settings.clone(), first);
        let time_s = 3_600.0 * f64::from(hour) + 86_400.0;
        let decision = planner.step(&input(time_s, then));
        let is_night = !(6..22).contains(&hour);
        let mut gpus = 0;
        for (role, decided) in [(&settings.prefill, &decision.prefill), (&settings.decode, &decision.decode)] {
            let floor = if is_night { role.night_min.unwrap_or(role.min) } else { role.min };
            prop_assert!((floor..=role.max).contains(&decided.wanted), "{decided:?}");
            gpus += decided.wanted * role.gpus_per_replica;
        }
        prop_assert!(gpus <= settings.gpu_budget.unwrap_or(u32::MAX), "{decision:?}");
        let flips = decision.flips;
        prop_assert!(flips.prefill_to_decode == 0 || flips.decode_to_prefill == 0);
        prop_assert!(flips.prefill_to_decode <= then.prefill_ready && flips.decode_to_prefill <= then.decode_ready);
    }

    #[test]
    fn a_missing_metric_never_scales_down(load in load()) {
        let role = RoleSettings { max: 1_000, ..RoleSettings::default() };
        let planner = after_steps(PlannerSettings { prefill: role, decode: role, ..PlannerSettings::default() }, load);
        let complete = input(NOW_S, load);
        let (prefill, decode) = without_one_metric(&complete);
        for input in prefill {
            let decision = next(&planner, &input).prefill;
            prop_assert!(decision.wanted >= complete.prefill_replicas.current(), "{decision:?} {input:?}");
        }
        for input in decode {
            let decision = next(&planner, &input).decode;
            prop_assert!(decision.wanted >= complete.decode_replicas.current(), "{decision:?} {input:?}");
        }
    }

    #[test]
    fn an_overload_of_one_role_never_raises_the_other(
        load in load(), factor in 1.0..5.0_f64, waiting in 0.0..500.0_f64,
    ) {
        let role = RoleSettings { max: 1_000, ..RoleSettings::default() };
        let planner = after_steps(PlannerSettings { prefill: role, decode: role, ..PlannerSettings::default() }, load);
        let usual = input(NOW_S, load);
        // Full decode engines also delay first tokens.
        let mut overload = input(NOW_S, Load { decode: factor * load.decode, ..load });
        overload.decode.waiting = Some(waiting);
        (overload.prefill.ttft_s, overload.prefill.within_target_share) = (Some(30.0), Some(0.0));
        if waiting > 1.0 {
            prop_assert!(next(&planner, &overload).prefill.wanted <= next(&planner, &usual).prefill.wanted);
        }
        let mut overload = input(NOW_S, Load { prefill: factor * load.prefill, ..load });
        overload.requests_per_s = usual.requests_per_s;
        prop_assert!(next(&planner, &overload).decode.wanted <= next(&planner, &usual).decode.wanted);
    }

    #[test]
    fn more_demand_never_means_fewer_replicas(load in load(), factor in 1.0..3.0_f64) {
        let role = RoleSettings { max: 1_000, ..RoleSettings::default() };
        let planner = after_steps(PlannerSettings { prefill: role, decode: role, ..PlannerSettings::default() }, load);
        let usual = input(NOW_S, load);
        let mut more = usual.clone();
        more.prefill.arriving_tokens_per_s = usual.prefill.arriving_tokens_per_s.map(|tokens| factor * tokens);
        more.decode.generated_tokens_per_s = usual.decode.generated_tokens_per_s.map(|tokens| factor * tokens);
        more.decode.running = usual.decode.running.map(|running| factor * running);
        let (more, usual) = (next(&planner, &more), next(&planner, &usual));
        for (more, usual) in [(more.prefill, usual.prefill), (more.decode, usual.decode)] {
            // More demand also shows more of the capacity: that engines can do more than was known.
            let [known, shown] = [&usual, &more].map(|role| role.explanation.capacity_tokens_per_s);
            if known.zip(shown).is_some_and(|(known, shown)| shown <= known) {
                prop_assert!(more.wanted >= usual.wanted, "{more:?} {usual:?}");
            }
        }
    }

    #[test]
    fn a_restored_planner_continues(load in load()) {
        let planner = after_steps(PlannerSettings::default(), load);
        let text = serde_json::to_string(planner.state()).expect("serializable");
        let state = serde_json::from_str(&text).expect("the same format");
        let restored = Planner::restore(PlannerSettings::default(), state).expect("valid");
        let then = input(NOW_S, load);
        let (one, other) = (next(&planner, &then), next(&restored, &then));
        prop_assert_eq!(one.prefill.wanted, other.prefill.wanted);
        prop_assert_eq!(one.decode.wanted, other.decode.wanted);
    }
}

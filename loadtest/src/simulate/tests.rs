//! Tests of the whole simulator.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use moongate_scheduler::{PolicyName, SchedulerOptions};
use proptest::prelude::*;

use super::calibrate::PUBLISHED_MEASUREMENTS;
use super::ideal::{IdealOrder, SingleEngineRouter};
use super::multiturn::MultiTurnOptions;
use super::outcome::{SimulatedOutcome, SimulationResult};
use super::run::run_simulation;
use super::settings::{EngineOutage, EngineQueueOrder, SimPrefetchPolicy, SimulationOptions};
use super::sweep::{ExperimentLoad, PolicyExperiment, PolicyResult, PolicyVariant, run_experiment};
use super::tide::ArrivalTide;
use super::workload::{ArrivalMode, NewRequest, ReplayOptions, SimulatedWorkload, WorkloadBuilder};
use crate::generate::trace::read_trace;

fn trace() -> SimulatedWorkload {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/conversation_1000.jsonl");
    SimulatedWorkload::of_rows(&read_trace(&path, None).expect("the trace"), true)
}

fn replay(speed: f64) -> ReplayOptions {
    ReplayOptions { speed, jitter_s: 3.0, output_scale: 1.0, tide: ArrivalTide::CONSTANT, seed: 1 }
}

/// Requests given as (due, input tokens, block names).
fn workload(requests: &[(f64, usize, &[u64])]) -> SimulatedWorkload {
    let mut prompts = WorkloadBuilder::new(512);
    for (number, &(due_s, tokens, ids)) in (0_u64..).zip(requests) {
        prompts.push(NewRequest {
            recorded_s: due_s,
            input_tokens: tokens,
            output_tokens: 10,
            block_ids: ids,
            predecessor: None,
            session: number,
        });
    }
    prompts.finish(ArrivalMode::Open)
}

fn one_engine() -> SimulationOptions {
    SimulationOptions {
        l2_tokens: 1_662_000,
        l3_tokens: 2_000_000,
        prefetch: SimPrefetchPolicy::WaitComplete,
        ..SimulationOptions::one_engine()
    }
}

/// Simulates requests on one engine.
fn one(settings: &SimulationOptions, requests: &SimulatedWorkload) -> SimulationResult {
    run_simulation(settings, requests, 1, &mut SingleEngineRouter, &AtomicBool::new(false))
}

fn run(case: &PolicyExperiment) -> Vec<PolicyResult> {
    run_experiment(case, &AtomicBool::new(false))
}

fn ttft(outcome: &SimulationResult, request: usize) -> f64 {
    outcome.records[request].first_token_s - outcome.records[request].arrived_s
}

fn near(left: f64, right: f64) -> bool {
    (left - right).abs() < 1e-9
}

#[test]
fn single_prompt_costs_the_formula_and_its_repeat_one_token() {
    let ids: Vec<u64> = (0..8).collect();
    let settings = one_engine();
    let outcome = one(&settings, &workload(&[(0.0, 4_000, &ids), (60.0, 4_000, &ids)]));
    let service = &settings.service;
    assert!(near(ttft(&outcome, 0), service.prefill_base_s + service.prefill_compute_s(4_000, 0)));
    assert!(near(ttft(&outcome, 1), service.prefill_base_s + service.prefill_compute_s(1, 3_999)));
    assert_eq!(outcome.records[1].l1_tokens, 3_999);
}

#[test]
fn evicted_cache_is_fetched_if_prefetch_is_awaited() {
    let ids: Vec<u64> = (0..8).collect();
    // The engine fails between the two: only the store still has the prompt.
    let failures = vec![EngineOutage { engine: 0, at_s: 20.0, for_s: 1.0 }];
    let requests = workload(&[(0.0, 4_096, &ids), (60.0, 8_192, &ids)]);
    let fetched = |prefetch| {
        let settings = SimulationOptions { failures: failures.clone(), prefetch, ..one_engine() };
        let outcome = one(&settings, &requests);
        (outcome.records[1].l3_tokens, ttft(&outcome, 1), settings.service)
    };
    let (tokens, waited, service) = fetched(SimPrefetchPolicy::WaitComplete);
    let compute = |new, cached| service.prefill_base_s + service.prefill_compute_s(new, cached);
    assert_eq!(tokens, 4_096);
    assert!(near(waited, service.storage_fetch_s(4_096) + compute(4_096, 4_096)), "{waited}");
    // An idle engine does not wait under best effort, so nothing arrives in time.
    let (tokens, waited, _) = fetched(SimPrefetchPolicy::BestEffort);
    assert_eq!(tokens, 0);
    assert!(near(waited, compute(8_192, 0)), "{waited}");
    // One second suffices for this prompt.
    assert_eq!(fetched(SimPrefetchPolicy::Timeout).0, 4_096);
}

#[test]
fn prompt_waiting_for_the_store_is_overtaken() {
    let ids: Vec<u64> = (0..200).collect();
    let failures = vec![EngineOutage { engine: 0, at_s: 100.0, for_s: 1.0 }];
    let requests = workload(&[(0.0, 102_400, &ids), (200.0, 102_800, &ids), (200.1, 600, &[])]);
    let settings = SimulationOptions { failures, ..one_engine() };
    let outcome = one(&settings, &requests);
    assert!(outcome.records[2].first_token_s < outcome.records[1].first_token_s);
    assert_eq!(outcome.records[1].l3_tokens, 102_400);
}

#[test]
fn two_short_prompts_share_a_pass_where_passes_are_packed() {
    let requests = workload(&[(0.0, 20_000, &[]), (0.1, 1_000, &[]), (0.1, 1_000, &[])]);
    let end = |packed| {
        let outcome = one(&SimulationOptions { packed, ..one_engine() }, &requests);
        outcome.records.iter().map(|record| record.first_token_s).collect::<Vec<_>>()
    };
    let (alone, packed) = (end(false), end(true));
    assert!(alone[1] < alone[2]);
    // The two end with the pass that they share with the end of the long one, and one base cost is saved.
    assert!(near(packed[1], packed[2]) && packed[2] < alone[2], "{alone:?} {packed:?}");
}

#[test]
fn turn_arrives_after_the_previous_response() {
    let mut prompts = WorkloadBuilder::new(512);
    let turn = NewRequest {
        recorded_s: 0.0,
        input_tokens: 50_000,
        output_tokens: 100,
        block_ids: &[],
        predecessor: None,
        session: 0,
    };
    let first = prompts.push(turn);
    prompts.push(NewRequest {
        recorded_s: 1.0,
        input_tokens: 600,
        output_tokens: 1,
        predecessor: Some(first),
        ..turn
    });
    let requests = prompts.finish(ArrivalMode::Open);
    let outcome = one(&one_engine(), &requests);
    let first_end = outcome.records[0].first_token_s + 99.0 * one_engine().service.decode_step_s(1, 50_100);
    assert!((outcome.records[1].arrived_s - first_end).abs() < 1e-6);
}

fn case(settings: SimulationOptions, contenders: Vec<PolicyVariant>, speed: f64) -> PolicyExperiment {
    let scheduling = SchedulerOptions::default();
    PolicyExperiment {
        settings,
        scheduling,
        load: ExperimentLoad::Open(trace(), replay(speed)),
        variants: contenders,
        seeds: 1..=1,
    }
}

fn all_policies() -> Vec<PolicyVariant> {
    PolicyName::ALL.into_iter().map(PolicyVariant::from).collect()
}

#[test]
fn equal_seeds_give_equal_outcomes() {
    let settings =
        SimulationOptions { noise_sigma: 0.3, gateways: 2, ..SimulationOptions::eight_plus_four() };
    let case = case(settings, all_policies(), 1.5);
    let figures = || run(&case).iter().map(|standing| standing.summary).collect::<Vec<_>>();
    assert_eq!(figures(), figures());
}

#[test]
fn every_request_ends_once_and_every_token_is_accounted_for() {
    let settings = SimulationOptions {
        failures: vec![
            EngineOutage { engine: 1, at_s: 60.0, for_s: 30.0 },
            EngineOutage { engine: 9, at_s: 90.0, for_s: 30.0 },
        ],
        noise_sigma: 0.2,
        index_lag_s: 1.0,
        ..SimulationOptions::eight_plus_four()
    };
    let workload = trace();
    let ideal = PolicyVariant::from(IdealOrder::Shortest);
    for standing in run(&case(settings, all_policies().into_iter().chain([ideal]).collect(), 1.0)) {
        let name = &standing.variant.name;
        let outcome = &standing.first_run;
        assert_eq!(outcome.open, 0, "{name}");
        let served = outcome.records.iter().filter(|record| record.state == SimulatedOutcome::Served).count();
        assert!(served >= 950, "{name} served {served}");
        for (index, record) in outcome.records.iter().enumerate() {
            assert!(record.state != SimulatedOutcome::Open, "{name}");
            if record.state == SimulatedOutcome::Served {
                let cached = record.l1_tokens + record.l2_tokens + record.l3_tokens;
                assert!(cached < outcome.input_tokens(index), "{name}");
                assert!(record.first_token_s > record.sent_s && record.sent_s >= record.arrived_s, "{name}");
            }
        }
        assert!(standing.summary.hit() <= workload.ideal_hit() + 0.05, "{name}");
    }
}

#[test]
fn the_order_of_policies_is_the_expected_one() {
    let mut contenders =
        vec![PolicyVariant::from(IdealOrder::Shortest), PolicyVariant::from(IdealOrder::Fcfs)];
    contenders
        .extend([PolicyName::LeastLoad, PolicyName::PowerOfTwo, PolicyName::Random].map(PolicyVariant::from));
    let standings = run(&case(SimulationOptions::eight_plus_four(), contenders, 0.8));
    let means: Vec<f64> = standings.iter().map(|standing| standing.summary.ttft_mean_s).collect();
    assert!(means.windows(2).all(|pair| pair[0] < pair[1]), "{means:?}");
}

#[test]
fn a_store_in_another_zone_costs_time_and_less_if_that_is_known() {
    let mean = |zones, zones_known| {
        let mut settings = SimulationOptions { zones, zones_known, ..SimulationOptions::eight_plus_four() };
        settings.service.storage_bytes_per_s = 1.5e9;
        let case = case(settings, vec![PolicyName::Predictive.into()], 1.0);
        run(&case)[0].summary.ttft_mean_s
    };
    let (near, known, unknown) = (mean(1, true), mean(2, true), mean(2, false));
    assert!(near < known && known < unknown, "{near} {known} {unknown}");
}

#[test]
fn decodes_that_compute_prompts_take_load_off_prefills() {
    let run_with = |local_prefill| {
        let settings = SimulationOptions {
            tpot_target_known: true,
            local_prefill,
            ..SimulationOptions::eight_plus_four()
        };
        run(&case(settings, vec![PolicyName::Predictive.into()], 1.2))[0].summary
    };
    let (without, with) = (run_with(false), run_with(true));
    assert!(with.ttft_mean_s < 0.95 * without.ttft_mean_s, "{without:?} {with:?}");
    assert!(with.goodput >= without.goodput, "{without:?} {with:?}");
    // Decodes are slower with it, but in pace.
    assert!(with.tpot_mean_s > without.tpot_mean_s && with.tpot_mean_s < 0.035, "{without:?} {with:?}");
}

#[test]
fn targets_keep_decodes_in_pace() {
    let run_with = |known| {
        let mut settings = SimulationOptions {
            decode: 2,
            decode_tokens: 2_000_000,
            tpot_target_s: 0.04,
            tpot_target_known: known,
            ttft_targets: known,
            ..SimulationOptions::eight_plus_four()
        };
        settings.service.decode_per_sequence_s = 0.000_7;
        run(&case(settings, vec![PolicyName::Predictive.into()], 1.0))[0].summary
    };
    let (without, with) = (run_with(false), run_with(true));
    assert!(with.tpot_p99_s < 0.9 * without.tpot_p99_s, "{without:?} {with:?}");
    assert!(with.goodput > without.goodput + 0.1, "{without:?} {with:?}");
    assert!(with.rejected > 0.0 && with.goodput <= with.slo_attainment, "{with:?}");
}

#[test]
fn waiting_tenants_share_equally_and_urgent_requests_lead() {
    let settings = SimulationOptions {
        prefill: 4,
        tenants: vec![60.0, 40.0],
        urgent: 0.1,
        ..SimulationOptions::eight_plus_four()
    };
    let contenders = vec![PolicyName::Predictive.into(), IdealOrder::Fcfs.into()];
    let results = run(&case(settings, contenders, 1.5));
    let [large, small, urgent, normal] = &results[0].classes[..] else { panic!("{:?}", results[0].classes) };
    assert!((large.computation + small.computation - 1.0).abs() < 1e-9);
    // The overload lasts only five minutes.
    for tenant in [large, small] {
        let share = tenant.equal_share.expect("saturated");
        assert!((0.85..1.15).contains(&share), "{tenant:?}");
    }
    assert!(small.ttft_mean_s < 0.5 * large.ttft_mean_s, "{small:?} {large:?}");
    assert!(urgent.ttft_mean_s < 0.8 * normal.ttft_mean_s, "{urgent:?} {normal:?}");
    // First come, first served gives each tenant what it offers.
    assert!(results[1].classes[0].equal_share.expect("saturated") > 1.15, "{:?}", results[1].classes);
}

#[test]
fn a_single_tenant_changes_nothing() {
    let summary = |tenants| {
        let settings = SimulationOptions { tenants, ..SimulationOptions::eight_plus_four() };
        run(&case(settings, vec![PolicyName::Predictive.into()], 1.5)).remove(0).summary
    };
    let (without, with) = (summary(Vec::new()).ttft_mean_s, summary(vec![1.0]).ttft_mean_s);
    assert!((without - with).abs() < 0.01 * without, "{without} {with}");
}

#[test]
fn queued_requests_do_not_block_fetches() {
    let mut settings = PUBLISHED_MEASUREMENTS[2].settings();
    settings.prefetch = SimPrefetchPolicy::WaitComplete;
    let case = PolicyExperiment {
        load: ExperimentLoad::MultiTurn(MultiTurnOptions::default()),
        seeds: 1..=3,
        ..case(settings, vec![PolicyName::RoundRobin.into(), PolicyName::Predictive.into()], 1.0)
    };
    let speeds: Vec<f64> = run(&case).iter().map(|standing| standing.summary.input_tokens_per_s).collect();
    assert!(speeds[1] > speeds[0], "{speeds:?}");
}

#[test]
fn a_slow_engine_and_a_missing_store_cost_time() {
    let mean = |settings| {
        let case = case(settings, vec![PolicyName::LeastLoad.into()], 1.0);
        run(&case)[0].summary.ttft_mean_s
    };
    let base = mean(SimulationOptions::eight_plus_four());
    assert!(
        mean(SimulationOptions { slow_engine: 3.0, ..SimulationOptions::eight_plus_four() }) > 1.05 * base
    );
    assert!(mean(SimulationOptions { l3_tokens: 0, ..SimulationOptions::eight_plus_four() }) > 1.05 * base);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// In any fleet, requests are lost only with an engine, and the run ends.
    #[test]
    fn any_fleet_serves_everything(
        prefill in 1_usize..5,
        decode in 0_usize..4,
        gateways in 1_usize..4,
        prefetch in prop::sample::select(vec![SimPrefetchPolicy::BestEffort, SimPrefetchPolicy::WaitComplete, SimPrefetchPolicy::Timeout]),
        order in prop::sample::select(vec![EngineQueueOrder::Fcfs, EngineQueueOrder::Priority]),
        packed in any::<bool>(),
        (l1, l2, l3) in (1_000_u64..200_000, 0_u64..500_000, 0_u64..500_000),
        (lag, poll) in (0.0..5.0, 0.0..1.0_f64),
        policy in prop::sample::select(PolicyName::ALL.to_vec()),
    ) {
        let settings = SimulationOptions {
            prefill, decode, gateways, prefetch, order, packed,
            l1_tokens: l1, l2_tokens: l2, l3_tokens: l3, index_lag_s: lag, poll_s: poll,
            ..SimulationOptions::eight_plus_four()
        };
        let mut case = case(settings, vec![policy.into()], 0.5);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/conversation_1000.jsonl");
        let rows = read_trace(&path, Some(80)).expect("the trace");
        case.load = ExperimentLoad::Open(SimulatedWorkload::of_rows(&rows, true), replay(0.5));
        let standings = run(&case);
        let outcome = &standings[0].first_run;
        prop_assert_eq!(outcome.open, 0);
        prop_assert!(outcome.records.iter().all(|record| record.state == SimulatedOutcome::Served));
    }
}

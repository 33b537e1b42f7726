//! What background requests cost the others, in virtual time: the same arrivals with and without them.

use std::sync::atomic::AtomicBool;

use moongate_scheduler::{PolicyName, SchedulerOptions};

use super::gateway::SimulatedGateways;
use super::outcome::{SimulatedOutcome, SimulationResult};
use super::run::run_simulation;
use super::settings::SimulationOptions;
use super::workload::{ArrivalMode, NewRequest, SimulatedWorkload, WorkloadBuilder};

/// Interactive requests of a run, and more background requests than can run beside them.
const COUNT: usize = 4_000;
const ENDLESS: usize = 5 * COUNT;
/// Seeds of the table.
const SEEDS: u64 = 5;

/// A fleet of plain workers, or of pairs.
#[derive(Debug, Clone, Copy)]
struct Fleet {
    prefill: usize,
    decode: usize,
}

const PLAIN: Fleet = Fleet { prefill: 4, decode: 0 };
const PAIRS: Fleet = Fleet { prefill: 4, decode: 2 };

/// Interactive requests and background ones, which have about the same prompts. None share blocks.
fn workload(count: usize, rate: f64, background: usize, seed: u64) -> SimulatedWorkload {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut builder = WorkloadBuilder::new(512);
    let mut at_s = 0.0;
    for number in 0..count + background {
        let input_tokens = random.usize(1_000..4_000);
        let output_tokens = random.u32(50..250);
        if number < count {
            at_s -= (1.0 - random.f64()).ln() / rate;
        }
        builder.push(NewRequest {
            recorded_s: at_s,
            input_tokens,
            output_tokens,
            block_ids: &[],
            predecessor: None,
            session: number as u64,
        });
    }
    let mut workload = builder.finish(ArrivalMode::Open);
    for request in &mut workload.requests[count..] {
        request.class.background = true;
    }
    workload
}

fn run(fleet: Fleet, load: f64, count: usize, background: usize, seed: u64) -> SimulationResult {
    let base = SimulationOptions::one_engine();
    let settings =
        SimulationOptions { prefill: fleet.prefill, decode: fleet.decode, noise_sigma: 0.2, ..base };
    let service = settings.service.prefill_base_s + settings.service.prefill_compute_s(2_500, 0);
    let workload = workload(count, load * fleet.prefill as f64 / service, background, seed);
    let scheduling = SchedulerOptions::default();
    let mut gateways = SimulatedGateways::new(PolicyName::Predictive, &scheduling, &settings, seed);
    run_simulation(&settings, &workload, seed, &mut gateways, &AtomicBool::new(false))
}

/// What background requests cost with one seed.
#[derive(Debug)]
struct BackgroundCost {
    /// Ratio of the TTFT's 50th percentiles with and without them, and of the 99th.
    p50: f64,
    p99: f64,
    /// How many were sent during the warm-up, and later.
    early: usize,
    later: usize,
}

impl BackgroundCost {
    /// Of at most so many background requests.
    fn of(fleet: Fleet, load: f64, background: usize, seed: u64) -> Self {
        let [alone, both] = [0, background].map(|background| run(fleet, load, COUNT, background, seed));
        let (alone, summary) = (alone.summary(), both.summary());
        assert_eq!(summary.failed + summary.rejected, 0.0);
        let warm_s = both.counted().map(|(_, record)| record.arrived_s).fold(f64::INFINITY, f64::min);
        let sent: Vec<f64> = both.records[COUNT..]
            .iter()
            .map(|record| record.arrived_s)
            .filter(|at_s| !at_s.is_nan())
            .collect();
        let early = sent.iter().filter(|at_s| **at_s < warm_s).count();
        Self {
            p50: summary.ttft_p50_s / alone.ttft_p50_s,
            p99: summary.ttft_p99_s / alone.ttft_p99_s,
            early,
            later: sent.len() - early,
        }
    }
}

/// The costs with each seed.
fn costs(fleet: Fleet, load: f64, background: usize, seeds: u64) -> Vec<BackgroundCost> {
    (0..seeds).map(|seed| BackgroundCost::of(fleet, load, background, seed)).collect()
}

fn median(costs: &[BackgroundCost], of: impl Fn(&BackgroundCost) -> f64) -> f64 {
    let mut values: Vec<f64> = costs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn mean(costs: &[BackgroundCost], of: impl Fn(&BackgroundCost) -> usize) -> f64 {
    costs.iter().map(of).sum::<usize>() as f64 / costs.len() as f64
}

fn p99_range(costs: &[BackgroundCost]) -> String {
    let range = costs
        .iter()
        .map(|cost| cost.p99)
        .fold((f64::MAX, 0.0_f64), |(least, most), ratio| (least.min(ratio), most.max(ratio)));
    format!("{:.3} to {:.3}", range.0, range.1)
}

fn assert_cheap(fleet: Fleet) {
    for load in [0.4, 0.6] {
        let costs = costs(fleet, load, ENDLESS, 3);
        let (p50, p99) = (median(&costs, |cost| cost.p50), median(&costs, |cost| cost.p99));
        assert!(p50 <= 1.03 && p99 <= 1.03, "{fleet:?} at {load}: {p50} {p99} {costs:?}");
        assert!(costs.iter().all(|cost| cost.later > 0), "{fleet:?} at {load}: {costs:?}");
    }
    // The 99th percentile then depends on the order of a few events: the few that are sent before the load is known change it by
    // several percent in either direction.
    let costs = costs(fleet, 0.8, ENDLESS, 3);
    let p50 = median(&costs, |cost| cost.p50);
    let few = costs.iter().all(|cost| cost.early <= 10 && cost.later <= COUNT / 1_000);
    assert!(p50 <= 1.03 && few, "{fleet:?}: {costs:?}");
}

#[test]
fn background_requests_hardly_delay_others() {
    assert_cheap(PLAIN);
}

#[test]
fn background_requests_hardly_delay_others_of_pairs() {
    assert_cheap(PAIRS);
}

#[test]
fn without_others_background_requests_run_freely() {
    // One interactive request after ten minutes.
    let result = run(PLAIN, 0.000_1, 1, 10_000, 3);
    let seconds = result.records[0].arrived_s;
    let ended =
        result.records.iter().skip(1).filter(|record| record.state == SimulatedOutcome::Served).count();
    assert!(ended as f64 > 0.3 * 13.0 * seconds.min(700.0), "{ended} in {seconds} s");
}

/// The table in `docs/batch.md`.
#[test]
#[ignore = "takes minutes"]
fn table_of_costs() {
    println!(
        "| fleet | load | median p50 | median p99 | p99 of the seeds | with a single line | lines in the warm-up | later |\n|---|---|---|---|---|---|---|---|"
    );
    for fleet in [PLAIN, PAIRS, Fleet { prefill: 8, decode: 4 }, Fleet { prefill: 1, decode: 0 }] {
        for load in [0.2, 0.4, 0.6, 0.8] {
            let [costs, single] = [ENDLESS, 1].map(|background| costs(fleet, load, background, SEEDS));
            println!(
                "| {} + {} | {load} | {:.3} | {:.3} | {} | {:.3}, {} | {:.1} | {:.1} |",
                fleet.prefill,
                fleet.decode,
                median(&costs, |cost| cost.p50),
                median(&costs, |cost| cost.p99),
                p99_range(&costs),
                median(&single, |cost| cost.p99),
                p99_range(&single),
                mean(&costs, |cost| cost.early),
                mean(&costs, |cost| cost.later),
            );
        }
    }
}

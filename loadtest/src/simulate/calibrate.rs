//! Validation of the engine model: one engine without routing must match a published benchmark.
//!
//! The benchmark is SGLang's `bench_multiturn.py` on Qwen3-235B-A22B on four H20 cards with HiCache and a Mooncake
//! store: 150 clients, 10 rounds of 2,048 tokens, 4 in flight, 16 requests per second, rounds in lockstep.

use std::sync::atomic::AtomicBool;

use super::ideal::SingleEngineRouter;
use super::multiturn::{MultiTurnOptions, MultiTurnSender};
use super::outcome::SimulationSummary;
use super::run::run_simulation;
use super::settings::SimulationOptions;

/// Host cache of the benchmark: 80 GB on each of four ranks, at 192,512 bytes per token.
const HOST_TOKENS: u64 = 1_662_000;
/// Effective capacity in tokens of the benchmark's store of 500 GiB.
const STORE_TOKENS: u64 = 2_170_000;

/// One row of the published table.
#[derive(Debug, Clone, Copy)]
pub struct PublishedMeasurement {
    pub caches: &'static str,
    /// Mean time to first token.
    pub ttft_mean_s: f64,
    /// 90th percentile of the time to first token.
    pub ttft_p90_s: f64,
    pub input_tokens_per_s: f64,
    /// Share of the prompt tokens that were reused.
    pub hit: f64,
    l2_tokens: u64,
    l3_tokens: u64,
}

pub const PUBLISHED_MEASUREMENTS: [PublishedMeasurement; 3] = [
    PublishedMeasurement {
        caches: "L1",
        ttft_mean_s: 5.91,
        ttft_p90_s: 12.16,
        input_tokens_per_s: 6_577.0,
        hit: 0.0222,
        l2_tokens: 0,
        l3_tokens: 0,
    },
    PublishedMeasurement {
        caches: "L1+L2",
        ttft_mean_s: 3.77,
        ttft_p90_s: 10.88,
        input_tokens_per_s: 10_054.0,
        hit: 0.4062,
        l2_tokens: HOST_TOKENS,
        l3_tokens: 0,
    },
    PublishedMeasurement {
        caches: "L1+L2+L3",
        ttft_mean_s: 2.58,
        ttft_p90_s: 6.97,
        input_tokens_per_s: 15_023.0,
        hit: 0.6467,
        l2_tokens: HOST_TOKENS,
        l3_tokens: STORE_TOKENS,
    },
];

impl PublishedMeasurement {
    /// Settings of the measured engine.
    pub(crate) fn settings(&self) -> SimulationOptions {
        SimulationOptions {
            l2_tokens: self.l2_tokens,
            l3_tokens: self.l3_tokens,
            ..SimulationOptions::one_engine()
        }
    }
}

/// Simulates this row; returns the mean over this many seeds.
#[must_use]
pub fn calibrate(row: &PublishedMeasurement, seeds: u64) -> SimulationSummary {
    let settings = row.settings();
    let runs: Vec<SimulationSummary> = (1..=seeds)
        .map(|seed| {
            let workload = MultiTurnSender::workload(MultiTurnOptions::default(), seed);
            run_simulation(&settings, &workload, seed, &mut SingleEngineRouter, &AtomicBool::new(false))
                .summary()
        })
        .collect();
    SimulationSummary::mean(&runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_engine_matches_the_measurements() {
        for row in &PUBLISHED_MEASUREMENTS {
            // Fewer seeds suffice for an unoptimized build, which is slow.
            let shown = calibrate(row, if cfg!(debug_assertions) { 3 } else { 8 });
            let line = format!(
                "{}: mean {:.2} for {:.2}, p90 {:.2} for {:.2}, {:.0} for {:.0} tokens/s, hit {:.4} for {:.4}",
                row.caches,
                shown.ttft_mean_s,
                row.ttft_mean_s,
                shown.ttft_p90_s,
                row.ttft_p90_s,
                shown.input_tokens_per_s,
                row.input_tokens_per_s,
                shown.hit(),
                row.hit,
            );
            let near = |shown: f64, measured: f64| (shown / measured - 1.0).abs() <= 0.05;
            assert!(near(shown.ttft_mean_s, row.ttft_mean_s), "{line}");
            assert!(near(shown.ttft_p90_s, row.ttft_p90_s), "{line}");
            assert!(near(shown.input_tokens_per_s, row.input_tokens_per_s), "{line}");
            assert!((shown.hit() - row.hit).abs() <= 0.03, "{line}");
        }
    }
}

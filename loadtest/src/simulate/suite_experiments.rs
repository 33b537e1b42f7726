//! The experiments of the suite.

use super::settings::{EngineOutage, EngineQueueOrder, SimPrefetchPolicy, SimulationOptions};

/// Arrivals of an experiment.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SuiteWorkload {
    Conversation,
    /// The conversation trace with responses longer by this factor.
    LongResponses(f64),
    Synthetic,
    Agents,
    /// The same with arrival rates that differ by a factor of ten.
    AgentsTide,
    /// Coding agents with long prompts; this many start per second.
    CodingAgents(f64),
    /// bench_multiturn on four plain engines, with this many requests in flight.
    MultiTurn(u32),
    /// bench_multiturn as published, on one plain engine.
    OneEngine,
}

/// A figure of an experiment's summary.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SuiteMetric {
    Mean,
    P99,
    Longest,
    SloAttainment,
    Goodput,
    TpotP99,
    RejectedShare,
    KiloTokensPerSecond,
    RetryAfterAccuracy,
    RetryAfter,
    /// By tenant and priority.
    ClassMeans,
    ClassLongest,
    /// Computation by tenant and priority while the fleet was saturated.
    ClassComputation,
    /// The same for requests that waited, relative to an equal division.
    ClassEqualShares,
}

/// One row of the suite's table.
#[derive(Debug)]
pub(crate) struct SuiteExperiment {
    pub(crate) name: &'static str,
    pub(crate) source: SuiteWorkload,
    pub(crate) speed: f64,
    pub(crate) change: fn(&mut SimulationOptions),
    pub(crate) figures: &'static [SuiteMetric],
}

fn gbps(settings: &mut SimulationOptions, gbps: f64) {
    settings.service.storage_bytes_per_s = gbps * 1e9;
}

/// An engine other than the calibrated one, which was not used to choose any setting.
fn other_engine(settings: &mut SimulationOptions) {
    settings.prefill = 6;
    settings.service.prefill_base_s /= 3.0;
    settings.service.prefill_linear_s /= 3.0;
    settings.service.prefill_quadratic_s /= 3.0;
    settings.service.kv_bytes_per_token = 70_000;
}

/// Decode engines that are never full with prompts of coding agents.
fn enough_decodes(settings: &mut SimulationOptions) {
    settings.decode = 24;
}

/// Two decode engines with so much memory that steps are slow before it is full.
fn large_decodes(settings: &mut SimulationOptions) {
    settings.decode = 2;
    settings.decode_tokens = 2_000_000;
}

/// Requests with a target of the time to first token, and gateways with one of the time per output token.
fn both_targets(settings: &mut SimulationOptions) {
    settings.ttft_targets = true;
    settings.tpot_target_known = true;
}

/// The same with decodes that also compute prompts.
fn local_prefill(settings: &mut SimulationOptions) {
    both_targets(settings);
    settings.local_prefill = true;
}

/// A fleet of this many prefill engines with a shared store in proportion.
fn fleet_of(settings: &mut SimulationOptions, prefill: usize) {
    settings.l3_tokens = settings.l3_tokens / settings.prefill as u64 * prefill as u64;
    (settings.prefill, settings.decode) = (prefill, prefill / 2);
}

/// Times to first token.
const TIMES: &[SuiteMetric] = &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::Longest];

/// Times to first token, and of the tokens after it.
const DECODING: &[SuiteMetric] = &[
    SuiteMetric::Mean,
    SuiteMetric::P99,
    SuiteMetric::TpotP99,
    SuiteMetric::Goodput,
    SuiteMetric::RejectedShare,
];

/// Times to first token and computation by tenant.
const TENANTS: &[SuiteMetric] = &[
    SuiteMetric::Mean,
    SuiteMetric::ClassMeans,
    SuiteMetric::ClassLongest,
    SuiteMetric::ClassComputation,
    SuiteMetric::ClassEqualShares,
];

pub(crate) const EXPERIMENTS: &[SuiteExperiment] = &[
    SuiteExperiment {
        name: "conversation 1.0",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::Longest, SuiteMetric::SloAttainment],
    },
    SuiteExperiment {
        name: "conversation 1.2",
        source: SuiteWorkload::Conversation,
        speed: 1.2,
        change: |_| {},
        figures: TIMES,
    },
    SuiteExperiment {
        name: "synthetic 1.0",
        source: SuiteWorkload::Synthetic,
        speed: 1.0,
        change: |_| {},
        figures: TIMES,
    },
    SuiteExperiment {
        name: "synthetic 1.2",
        source: SuiteWorkload::Synthetic,
        speed: 1.2,
        change: |_| {},
        figures: TIMES,
    },
    SuiteExperiment {
        name: "prefetch best_effort",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.prefetch = SimPrefetchPolicy::BestEffort,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "prefetch best_effort, L3 at 3 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.prefetch = SimPrefetchPolicy::BestEffort;
            gbps(settings, 3.0);
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "no L3",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 0,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 3.0),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "L3 at 1.5 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 1.5),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s, 2 zones",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            settings.zones = 2;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s, 2 zones, unknown",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            (settings.zones, settings.zones_known) = (2, false);
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "L3 of 40 M tokens",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 40_000_000,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "service noise 30 %",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.noise_sigma = 0.3,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "one engine 2× slower, conversation 0.9",
        source: SuiteWorkload::Conversation,
        speed: 0.9,
        change: |settings| settings.slow_engine = 2.0,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "4 of 8 engines 2× slower, conversation 0.7",
        source: SuiteWorkload::Conversation,
        speed: 0.7,
        change: |settings| (settings.slow_engines, settings.slow_engine) = (4, 2.0),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "two engines out for ten minutes each, conversation 0.8",
        source: SuiteWorkload::Conversation,
        speed: 0.8,
        change: |settings| {
            let outage = |engine, at_s| EngineOutage { engine, at_s, for_s: 600.0 };
            settings.failures = vec![outage(1, 1_000.0), outage(5, 2_400.0)];
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "index 10 s late",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.index_lag_s = 10.0,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "2 gateways",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 2,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "4 gateways",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 4,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "16 gateways",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 16,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "4 gateways, one queue",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| (settings.gateways, settings.shared_queue) = (4, true),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "16 gateways, one queue",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| (settings.gateways, settings.shared_queue) = (16, true),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "4 gateways, engines order by priority",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.gateways = 4;
            settings.order = EngineQueueOrder::Priority;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "32 engines, conversation 3.2",
        source: SuiteWorkload::Conversation,
        speed: 3.2,
        change: |settings| fleet_of(settings, 32),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "64 engines, conversation 8.0",
        source: SuiteWorkload::Conversation,
        speed: 8.0,
        change: |settings| fleet_of(settings, 64),
        figures: TIMES,
    },
    SuiteExperiment {
        name: "conversation 1.2 with targets",
        source: SuiteWorkload::Conversation,
        speed: 1.2,
        change: both_targets,
        figures: DECODING,
    },
    SuiteExperiment {
        name: "conversation 1.2 with targets and local prefill",
        source: SuiteWorkload::Conversation,
        speed: 1.2,
        change: local_prefill,
        figures: DECODING,
    },
    SuiteExperiment {
        name: "responses 2.4 times as long",
        source: SuiteWorkload::LongResponses(2.4),
        speed: 1.0,
        change: |_| {},
        figures: DECODING,
    },
    SuiteExperiment {
        name: "responses 2.2 times as long, 2 large decodes",
        source: SuiteWorkload::LongResponses(2.2),
        speed: 1.0,
        change: large_decodes,
        figures: DECODING,
    },
    SuiteExperiment {
        name: "responses 2.2 times as long, 2 large decodes, with targets",
        source: SuiteWorkload::LongResponses(2.2),
        speed: 1.0,
        change: |settings| {
            large_decodes(settings);
            both_targets(settings);
        },
        figures: DECODING,
    },
    SuiteExperiment {
        name: "responses 2.5 times as long, 2 large decodes, with targets",
        source: SuiteWorkload::LongResponses(2.5),
        speed: 1.0,
        change: |settings| {
            large_decodes(settings);
            both_targets(settings);
        },
        figures: DECODING,
    },
    SuiteExperiment {
        name: "overload, conversation 2.0, with targets",
        source: SuiteWorkload::Conversation,
        speed: 2.0,
        change: |settings| settings.ttft_targets = true,
        figures: &[SuiteMetric::SloAttainment, SuiteMetric::P99, SuiteMetric::RejectedShare],
    },
    SuiteExperiment {
        name: "overload, conversation 2.0, rejected clients retry once",
        source: SuiteWorkload::Conversation,
        speed: 2.0,
        change: |settings| {
            settings.ttft_targets = true;
            settings.retry = true;
        },
        figures: &[
            SuiteMetric::RetryAfterAccuracy,
            SuiteMetric::RetryAfter,
            SuiteMetric::SloAttainment,
            SuiteMetric::RejectedShare,
        ],
    },
    SuiteExperiment {
        name: "overload, conversation 1.5, rejected clients retry once",
        source: SuiteWorkload::Conversation,
        speed: 1.5,
        change: |settings| {
            settings.ttft_targets = true;
            settings.retry = true;
        },
        figures: &[
            SuiteMetric::RetryAfterAccuracy,
            SuiteMetric::RetryAfter,
            SuiteMetric::SloAttainment,
            SuiteMetric::RejectedShare,
        ],
    },
    SuiteExperiment {
        name: "tenants 70:10:10:10, conversation 1.5",
        source: SuiteWorkload::Conversation,
        speed: 1.5,
        change: |settings| settings.tenants = vec![70.0, 10.0, 10.0, 10.0],
        figures: TENANTS,
    },
    SuiteExperiment {
        name: "tenants 25:25:25:25, conversation 1.5",
        source: SuiteWorkload::Conversation,
        speed: 1.5,
        change: |settings| settings.tenants = vec![25.0; 4],
        figures: TENANTS,
    },
    SuiteExperiment {
        name: "tenants 60:40, conversation 2.0",
        source: SuiteWorkload::Conversation,
        speed: 2.0,
        change: |settings| settings.tenants = vec![60.0, 40.0],
        figures: TENANTS,
    },
    SuiteExperiment {
        name: "10 % urgent, conversation 1.2",
        source: SuiteWorkload::Conversation,
        speed: 1.2,
        change: |settings| settings.urgent = 0.1,
        figures: &[SuiteMetric::Mean, SuiteMetric::ClassMeans, SuiteMetric::ClassLongest],
    },
    SuiteExperiment {
        name: "6 engines 3× faster, 70 kB per token, conversation 2.2",
        source: SuiteWorkload::Conversation,
        speed: 2.2,
        change: other_engine,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "6 engines 3× faster, conversation 2.2, best_effort",
        source: SuiteWorkload::Conversation,
        speed: 2.2,
        change: |settings| {
            other_engine(settings);
            settings.prefetch = SimPrefetchPolicy::BestEffort;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "agents 1.9",
        source: SuiteWorkload::Agents,
        speed: 1.9,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::Longest, SuiteMetric::SloAttainment],
    },
    SuiteExperiment {
        name: "agents, tide of 10 around 1.0",
        source: SuiteWorkload::AgentsTide,
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::Longest, SuiteMetric::SloAttainment],
    },
    SuiteExperiment {
        name: "agents, tide of 10 around 1.2",
        source: SuiteWorkload::AgentsTide,
        speed: 1.2,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::Longest, SuiteMetric::SloAttainment],
    },
    SuiteExperiment {
        name: "coding agents, 0.065 per second",
        source: SuiteWorkload::CodingAgents(0.065),
        speed: 1.0,
        change: enough_decodes,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, 0.075 per second",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: enough_decodes,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, 0.082 per second",
        source: SuiteWorkload::CodingAgents(0.082),
        speed: 1.0,
        change: enough_decodes,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, best_effort",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| {
            enough_decodes(settings);
            settings.prefetch = SimPrefetchPolicy::BestEffort;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, L3 at 0.5 GB/s",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| {
            enough_decodes(settings);
            gbps(settings, 0.5);
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, half the L3",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| {
            enough_decodes(settings);
            settings.l3_tokens /= 2;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, 8 decodes",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| settings.decode = 8,
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, 4 gateways",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| {
            enough_decodes(settings);
            settings.gateways = 4;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "coding agents, 16 gateways",
        source: SuiteWorkload::CodingAgents(0.075),
        speed: 1.0,
        change: |settings| {
            enough_decodes(settings);
            settings.gateways = 16;
        },
        figures: TIMES,
    },
    SuiteExperiment {
        name: "bench_multiturn, L1+L2, 16 in flight",
        source: SuiteWorkload::MultiTurn(16),
        speed: 1.0,
        change: |settings| settings.l3_tokens = 0,
        figures: &[SuiteMetric::KiloTokensPerSecond],
    },
    SuiteExperiment {
        name: "bench_multiturn, L1+L2+L3, 64 in flight",
        source: SuiteWorkload::MultiTurn(64),
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::KiloTokensPerSecond],
    },
    SuiteExperiment {
        name: "bench_multiturn, one engine",
        source: SuiteWorkload::OneEngine,
        speed: 1.0,
        change: |settings| settings.prefetch = SimPrefetchPolicy::WaitComplete,
        figures: &[SuiteMetric::KiloTokensPerSecond, SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "bench_multiturn, one engine, best_effort",
        source: SuiteWorkload::OneEngine,
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::KiloTokensPerSecond, SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "bench_multiturn, one engine, L3 at 1.5 GB/s",
        source: SuiteWorkload::OneEngine,
        speed: 1.0,
        change: |settings| {
            settings.prefetch = SimPrefetchPolicy::WaitComplete;
            gbps(settings, 1.5);
        },
        figures: &[SuiteMetric::KiloTokensPerSecond, SuiteMetric::Mean],
    },
];

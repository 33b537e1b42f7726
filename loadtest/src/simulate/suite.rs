//! The standard experiments for schedulers.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_scheduler::SchedulerOptions;

use super::agents::AgentTrafficOptions;
use super::calibrate::PUBLISHED_MEASUREMENTS;
use super::multiturn::MultiTurnOptions;
use super::outcome::SimulationSummary;
use super::settings::{EngineQueueOrder, SimPrefetchPolicy, SimulationOptions};
use super::store_cache::StoreRetention;
use super::sweep::{ExperimentLoad, PolicyExperiment, PolicyResult, PolicyVariant, run_experiment};
use super::workload::{ReplayOptions, SimulatedWorkload};
use crate::engine::EngineTimeModel;
use crate::generate::trace::read_trace;

/// Maximum jitter of the recorded traces' arrivals: the conversation trace has a resolution of 3 s.
const JITTER_S: f64 = 3.0;

/// With more contenders than this, each has a row instead of a column.
const MAX_COLUMNS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum SuiteWorkload {
    Conversation,
    Synthetic,
    Agents,
    /// bench_multiturn on four plain engines, with this many requests in flight.
    MultiTurn(u32),
    /// bench_multiturn as published, on one plain engine.
    OneEngine,
}

#[derive(Debug, Clone, Copy)]
enum SuiteMetric {
    Mean,
    P99,
    SloAttainment,
    RejectedShare,
    KiloTokensPerSecond,
    RetryAfterAccuracy,
    RetryAfter,
}

impl SuiteMetric {
    fn name(self) -> &'static str {
        match self {
            SuiteMetric::Mean => "mean TTFT, s",
            SuiteMetric::P99 => "p99 TTFT, s",
            SuiteMetric::SloAttainment => "SLO attainment, %",
            SuiteMetric::RejectedShare => "rejected, %",
            SuiteMetric::KiloTokensPerSecond => "input, k tokens/s",
            SuiteMetric::RetryAfter => "Retry-After, s",
            SuiteMetric::RetryAfterAccuracy => "Retry-After accuracy, %",
        }
    }

    fn text(self, summary: &SimulationSummary) -> String {
        match self {
            SuiteMetric::Mean => format!("{:.2} ± {:.2}", summary.ttft_mean_s, summary.ttft_mean_sd_s),
            SuiteMetric::P99 => format!("{:.1}", summary.ttft_p99_s),
            SuiteMetric::SloAttainment => format!("{:.1}", 100.0 * summary.slo_attainment),
            SuiteMetric::RejectedShare => format!("{:.1}", 100.0 * summary.rejected),
            SuiteMetric::KiloTokensPerSecond => format!("{:.1}", summary.input_tokens_per_s / 1_000.0),
            SuiteMetric::RetryAfter => or_dash(summary.retry_after_s, 1.0),
            SuiteMetric::RetryAfterAccuracy => or_dash(summary.retry_after_accuracy, 100.0),
        }
    }
}

fn or_dash(value: Option<f64>, factor: f64) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{:.0}", factor * value))
}

struct SuiteExperiment {
    name: &'static str,
    source: SuiteWorkload,
    speed: f64,
    change: fn(&mut SimulationOptions),
    figures: &'static [SuiteMetric],
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

const EXPERIMENTS: &[SuiteExperiment] = &[
    SuiteExperiment {
        name: "conversation 1.0",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::SloAttainment],
    },
    SuiteExperiment {
        name: "conversation 1.2",
        source: SuiteWorkload::Conversation,
        speed: 1.2,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99],
    },
    SuiteExperiment {
        name: "synthetic 1.0",
        source: SuiteWorkload::Synthetic,
        speed: 1.0,
        change: |_| {},
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "synthetic 1.2",
        source: SuiteWorkload::Synthetic,
        speed: 1.2,
        change: |_| {},
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "prefetch best_effort",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.prefetch = SimPrefetchPolicy::BestEffort,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "prefetch best_effort, L3 at 3 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.prefetch = SimPrefetchPolicy::BestEffort;
            gbps(settings, 3.0);
        },
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "no L3",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 0,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 3.0),
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "L3 at 1.5 GB/s",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 1.5),
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s, 2 zones",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            settings.zones = 2;
        },
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "L3 at 3 GB/s, 2 zones, unknown",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            (settings.zones, settings.zones_known) = (2, false);
        },
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "L3 of 40 M tokens",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 40_000_000,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "service noise 30 %",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.noise_sigma = 0.3,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "one engine 2× slower, conversation 0.9",
        source: SuiteWorkload::Conversation,
        speed: 0.9,
        change: |settings| settings.slow_engine = 2.0,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "index 10 s late",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.index_lag_s = 10.0,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "2 gateways",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 2,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "4 gateways",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 4,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "4 gateways, engines order by priority",
        source: SuiteWorkload::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.gateways = 4;
            settings.order = EngineQueueOrder::Priority;
        },
        figures: &[SuiteMetric::Mean],
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
        name: "6 engines 3× faster, 70 kB per token, conversation 2.2",
        source: SuiteWorkload::Conversation,
        speed: 2.2,
        change: other_engine,
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "6 engines 3× faster, conversation 2.2, best_effort",
        source: SuiteWorkload::Conversation,
        speed: 2.2,
        change: |settings| {
            other_engine(settings);
            settings.prefetch = SimPrefetchPolicy::BestEffort;
        },
        figures: &[SuiteMetric::Mean],
    },
    SuiteExperiment {
        name: "agents 1.9",
        source: SuiteWorkload::Agents,
        speed: 1.9,
        change: |_| {},
        figures: &[SuiteMetric::Mean, SuiteMetric::P99, SuiteMetric::SloAttainment],
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

/// Options of the shared store in all experiments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SuiteStoreOptions {
    pub(crate) retention: StoreRetention,
    pub(crate) return_hints: f64,
}

/// What the suite compares.
#[derive(Debug, Clone)]
pub(crate) struct SuiteOptions<'a> {
    pub(crate) contenders: &'a [PolicyVariant],
    pub(crate) scheduling: &'a SchedulerOptions,
    pub(crate) seeds: RangeInclusive<u64>,
    /// Only experiments whose name contains one of these texts; empty for all.
    pub(crate) only: &'a [String],
    pub(crate) store: SuiteStoreOptions,
}

/// Runs the experiments and returns the table.
///
/// # Errors
/// A trace cannot be read.
pub(crate) fn run(folder: &Path, options: SuiteOptions<'_>, stop: &AtomicBool) -> anyhow::Result<String> {
    let SuiteOptions { contenders, scheduling, seeds, only, store } = options;
    let read = |name: &str| -> anyhow::Result<SimulatedWorkload> {
        Ok(SimulatedWorkload::of_rows(&read_trace(&folder.join(name), None)?, true))
    };
    let (conversation, synthetic) = (read("conversation_trace.jsonl")?, read("synthetic_trace.jsonl")?);
    let mut lines = Vec::new();
    for row in EXPERIMENTS
        .iter()
        .filter(|row| only.is_empty() || only.iter().any(|text| row.name.contains(text.as_str())))
    {
        anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
        let replay = ReplayOptions { speed: row.speed, jitter_s: JITTER_S, seed: 0 };
        let unmoved = ReplayOptions { jitter_s: 0.0, ..replay };
        let load = match row.source {
            SuiteWorkload::Conversation => ExperimentLoad::Open(conversation.clone(), replay),
            SuiteWorkload::Synthetic => ExperimentLoad::Open(synthetic.clone(), replay),
            SuiteWorkload::Agents => ExperimentLoad::Agents(AgentTrafficOptions::default(), unmoved),
            SuiteWorkload::MultiTurn(in_flight) => ExperimentLoad::MultiTurn(MultiTurnOptions {
                clients: 600,
                in_flight,
                ..MultiTurnOptions::default()
            }),
            SuiteWorkload::OneEngine => ExperimentLoad::MultiTurn(MultiTurnOptions::default()),
        };
        let mut settings = settings(row.source);
        SuiteStoreOptions { retention: settings.retention, return_hints: settings.return_hints } = store;
        (row.change)(&mut settings);
        let case = PolicyExperiment {
            settings,
            scheduling: scheduling.clone(),
            load,
            variants: contenders.to_vec(),
            seeds: seeds.clone(),
        };
        lines.extend(table_rows(row, &run_experiment(&case, stop)));
    }
    anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
    Ok(if contenders.len() > MAX_COLUMNS {
        by_contender(contenders, &lines)
    } else {
        by_setting(contenders, &lines)
    })
}

fn settings(source: SuiteWorkload) -> SimulationOptions {
    let base = SimulationOptions::eight_plus_four();
    match source {
        SuiteWorkload::Conversation | SuiteWorkload::Synthetic | SuiteWorkload::Agents => base,
        SuiteWorkload::MultiTurn(_) => SimulationOptions {
            prefill: 4,
            decode: 0,
            service: EngineTimeModel::default(),
            prefetch: SimPrefetchPolicy::BestEffort,
            warmup_share: 0.0,
            ..base
        },
        SuiteWorkload::OneEngine => PUBLISHED_MEASUREMENTS[2].settings(),
    }
}

/// One metric of every contender.
struct SuiteTableRow {
    setting: &'static str,
    figure: SuiteMetric,
    cells: Vec<String>,
}

fn table_rows(row: &SuiteExperiment, standings: &[PolicyResult]) -> Vec<SuiteTableRow> {
    let cells =
        |figure: SuiteMetric| standings.iter().map(|standing| figure.text(&standing.summary)).collect();
    row.figures
        .iter()
        .map(|&figure| SuiteTableRow { setting: row.name, figure, cells: cells(figure) })
        .collect()
}

fn by_setting(contenders: &[PolicyVariant], lines: &[SuiteTableRow]) -> String {
    let names: Vec<&str> = contenders.iter().map(|contender| contender.name.as_str()).collect();
    let mut table =
        format!("| setting | figure | {} |\n|---|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for line in lines {
        let _ = writeln!(table, "| {} | {} | {} |", line.setting, line.figure.name(), line.cells.join(" | "));
    }
    table
}

fn by_contender(contenders: &[PolicyVariant], lines: &[SuiteTableRow]) -> String {
    let heads: Vec<String> =
        lines.iter().map(|line| format!("{}: {}", line.setting, line.figure.name())).collect();
    let mut table = format!("| policy | {} |\n|---|{}\n", heads.join(" | "), "---:|".repeat(heads.len()));
    for (index, contender) in contenders.iter().enumerate() {
        let cells: Vec<&str> = lines.iter().map(|line| line.cells[index].as_str()).collect();
        let _ = writeln!(table, "| {} | {} |", contender.name, cells.join(" | "));
    }
    table
}

//! The standard experiments for schedulers.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_scheduler::SchedulerOptions;

use super::agents::AgentTrafficOptions;
use super::bound_gap::{self, BoundGap};
use super::calibrate::PUBLISHED_MEASUREMENTS;
use super::fairness::ClassSummary;
use super::multiturn::MultiTurnOptions;
use super::settings::{SimPrefetchPolicy, SimulationOptions};
use super::store_cache::StoreRetention;
use super::suite_experiments::{EXPERIMENTS, SuiteExperiment, SuiteMetric, SuiteWorkload};
use super::sweep::{ExperimentLoad, PolicyExperiment, PolicyResult, PolicyVariant, run_experiment};
use super::tide::ArrivalTide;
use super::workload::{ReplayOptions, SimulatedWorkload};
use crate::engine::EngineTimeModel;
use crate::generate::trace::read_trace;

/// Maximum jitter of the recorded traces' arrivals: the conversation trace has a resolution of 3 s.
const JITTER_S: f64 = 3.0;

/// Seconds of a tide: one hour instead of a day, to keep the suite short.
const TIDE_PERIOD_S: f64 = 3_600.0;
/// Requests of agents with a tide, for about one period.
const TIDE_REQUESTS: usize = 24_000;

/// With more contenders than this, each has a row instead of a column.
const MAX_COLUMNS: usize = 6;

impl SuiteMetric {
    fn name(self) -> &'static str {
        match self {
            SuiteMetric::Mean => "mean TTFT, s",
            SuiteMetric::P99 => "p99 TTFT, s",
            SuiteMetric::Longest => "longest TTFT, s",
            SuiteMetric::SloAttainment => "SLO attainment, %",
            SuiteMetric::Goodput => "within both targets, %",
            SuiteMetric::TpotP99 => "p99 TPOT, ms",
            SuiteMetric::RejectedShare => "rejected, %",
            SuiteMetric::KiloTokensPerSecond => "input, k tokens/s",
            SuiteMetric::RetryAfter => "Retry-After, s",
            SuiteMetric::RetryAfterAccuracy => "Retry-After accuracy, %",
            SuiteMetric::ClassMeans => "mean TTFT by class, s",
            SuiteMetric::ClassLongest => "longest TTFT by class, s",
            SuiteMetric::ClassComputation => "computation by class, %",
            SuiteMetric::ClassEqualShares => "computation of equal part by class, %",
        }
    }

    fn text(self, result: &PolicyResult) -> String {
        let summary = &result.summary;
        let by_class = |text: &dyn Fn(&ClassSummary) -> String| {
            result.classes.iter().map(text).collect::<Vec<_>>().join(" / ")
        };
        match self {
            SuiteMetric::Mean => format!("{:.2} ± {:.2}", summary.ttft_mean_s, summary.ttft_mean_sd_s),
            SuiteMetric::P99 => format!("{:.1}", summary.ttft_p99_s),
            SuiteMetric::Longest => format!("{:.0}", summary.ttft_max_s),
            SuiteMetric::SloAttainment => format!("{:.1}", 100.0 * summary.slo_attainment),
            SuiteMetric::Goodput => format!("{:.1}", 100.0 * summary.goodput),
            SuiteMetric::TpotP99 => format!("{:.0}", 1_000.0 * summary.tpot_p99_s),
            SuiteMetric::RejectedShare => format!("{:.1}", 100.0 * summary.rejected),
            SuiteMetric::KiloTokensPerSecond => format!("{:.1}", summary.input_tokens_per_s / 1_000.0),
            SuiteMetric::RetryAfter => or_dash(summary.retry_after_s, 1.0),
            SuiteMetric::RetryAfterAccuracy => or_dash(summary.retry_after_accuracy, 100.0),
            SuiteMetric::ClassMeans => by_class(&|class| format!("{:.2}", class.ttft_mean_s)),
            SuiteMetric::ClassLongest => by_class(&|class| format!("{:.0}", class.ttft_max_s)),
            SuiteMetric::ClassComputation => by_class(&|class| format!("{:.1}", 100.0 * class.computation)),
            SuiteMetric::ClassEqualShares => by_class(&|class| or_dash(class.equal_share, 100.0)),
        }
    }
}

fn or_dash(value: Option<f64>, factor: f64) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{:.0}", factor * value))
}

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
    /// Whether to divide the distance from the first contender to a lower bound instead.
    pub(crate) bound_gap: bool,
}

/// Runs the experiments and returns the table.
///
/// # Errors
/// A trace cannot be read.
pub(crate) fn run(folder: &Path, options: SuiteOptions<'_>, stop: &AtomicBool) -> anyhow::Result<String> {
    let SuiteOptions { contenders, scheduling, seeds, only, store, bound_gap } = options;
    let read = |name: &str| -> anyhow::Result<SimulatedWorkload> {
        Ok(SimulatedWorkload::of_rows(&read_trace(&folder.join(name), None)?, true))
    };
    let (conversation, synthetic) = (read("conversation_trace.jsonl")?, read("synthetic_trace.jsonl")?);
    let (mut lines, mut gaps) = (Vec::new(), Vec::new());
    for row in EXPERIMENTS
        .iter()
        .filter(|row| only.is_empty() || only.iter().any(|text| row.name.contains(text.as_str())))
    {
        anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
        let replay = ReplayOptions {
            speed: row.speed,
            jitter_s: JITTER_S,
            output_scale: 1.0,
            tide: ArrivalTide::CONSTANT,
            seed: 0,
        };
        let unmoved = ReplayOptions { jitter_s: 0.0, ..replay };
        let load = match row.source {
            SuiteWorkload::Conversation => ExperimentLoad::Open(conversation.clone(), replay),
            SuiteWorkload::LongResponses(output_scale) => {
                ExperimentLoad::Open(conversation.clone(), ReplayOptions { output_scale, ..replay })
            }
            SuiteWorkload::Synthetic => ExperimentLoad::Open(synthetic.clone(), replay),
            SuiteWorkload::Agents => ExperimentLoad::Agents(AgentTrafficOptions::default(), unmoved),
            SuiteWorkload::AgentsTide => {
                let requests = TIDE_REQUESTS;
                let tide = ArrivalTide { ratio: 10.0, period_s: TIDE_PERIOD_S };
                ExperimentLoad::Agents(
                    AgentTrafficOptions { requests, ..AgentTrafficOptions::default() },
                    ReplayOptions { tide, ..unmoved },
                )
            }
            SuiteWorkload::CodingAgents(per_second) => {
                ExperimentLoad::Agents(AgentTrafficOptions::coding(per_second), unmoved)
            }
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
        if bound_gap {
            gaps.push(BoundGap::measure(row.name, &case, stop));
            continue;
        }
        lines.extend(table_rows(row, &run_experiment(&case, stop)));
    }
    anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
    if bound_gap {
        let policy = contenders.first().map_or("", |contender| contender.name.as_str());
        return Ok(bound_gap::table(policy, &gaps));
    }
    Ok(if contenders.len() > MAX_COLUMNS {
        by_contender(contenders, &lines)
    } else {
        by_setting(contenders, &lines)
    })
}

fn settings(source: SuiteWorkload) -> SimulationOptions {
    let base = SimulationOptions::eight_plus_four();
    match source {
        SuiteWorkload::Conversation
        | SuiteWorkload::LongResponses(_)
        | SuiteWorkload::Synthetic
        | SuiteWorkload::Agents
        | SuiteWorkload::AgentsTide
        | SuiteWorkload::CodingAgents(_) => base,
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
    let cells = |figure: SuiteMetric| standings.iter().map(|standing| figure.text(standing)).collect();
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

//! The standard experiments: what a scheduler is judged by.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moongate_scheduler::Settings as SchedulerSettings;

use super::agents::AgentSettings;
use super::calibrate::MEASURED;
use super::multiturn::MultiTurnSettings;
use super::outcome::Summary;
use super::settings::{EngineOrder, Prefetch, Settings};
use super::sweep::{Case, Contender, Load, Standing, run_case};
use super::workload::{Replay, Workload};
use crate::engine::ServiceModel;
use crate::generate::trace::read_trace;

/// Arrivals of the recorded traces move by up to this: the conversation trace counts in steps of 3 s.
const JITTER_S: f64 = 3.0;

/// With more contenders than this, each has a row instead of a column.
const MOST_COLUMNS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum Source {
    Conversation,
    Synthetic,
    /// Generated tool and agent traffic.
    Agents,
    /// bench_multiturn on four plain engines, with this many requests in flight.
    MultiTurn(u32),
    /// bench_multiturn as published, on one plain engine.
    OneEngine,
}

#[derive(Debug, Clone, Copy)]
enum Figure {
    Mean,
    P99,
    InTime,
    Refused,
    KiloTokensPerSecond,
    RetryAfterRight,
    RetryAfter,
}

impl Figure {
    fn name(self) -> &'static str {
        match self {
            Figure::Mean => "mean TTFT, s",
            Figure::P99 => "p99 TTFT, s",
            Figure::InTime => "in time, %",
            Figure::Refused => "refused, %",
            Figure::KiloTokensPerSecond => "input, k tokens/s",
            Figure::RetryAfter => "Retry-After, s",
            Figure::RetryAfterRight => "Retry-After right, %",
        }
    }

    fn text(self, summary: &Summary) -> String {
        match self {
            Figure::Mean => format!("{:.2} ± {:.2}", summary.ttft_mean_s, summary.ttft_mean_sd_s),
            Figure::P99 => format!("{:.1}", summary.ttft_p99_s),
            Figure::InTime => format!("{:.1}", 100.0 * summary.slo_met),
            Figure::Refused => format!("{:.1}", 100.0 * summary.rejected),
            Figure::KiloTokensPerSecond => format!("{:.1}", summary.input_tokens_per_s / 1_000.0),
            Figure::RetryAfter => or_dash(summary.retry_after_s, 1.0),
            Figure::RetryAfterRight => or_dash(summary.retry_after_right, 100.0),
        }
    }
}

fn or_dash(value: Option<f64>, factor: f64) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{:.0}", factor * value))
}

struct Row {
    name: &'static str,
    source: Source,
    speed: f64,
    change: fn(&mut Settings),
    figures: &'static [Figure],
}

fn gbps(settings: &mut Settings, gbps: f64) {
    settings.service.storage_bytes_per_s = gbps * 1e9;
}

/// Another engine than the calibrated one: no setting was chosen on it.
fn other_engine(settings: &mut Settings) {
    settings.prefill = 6;
    settings.service.prefill_base_s /= 3.0;
    settings.service.prefill_linear_s /= 3.0;
    settings.service.prefill_quadratic_s /= 3.0;
    settings.service.kv_bytes_per_token = 70_000;
}

const ROWS: &[Row] = &[
    Row {
        name: "conversation 1.0",
        source: Source::Conversation,
        speed: 1.0,
        change: |_| {},
        figures: &[Figure::Mean, Figure::P99, Figure::InTime],
    },
    Row {
        name: "conversation 1.2",
        source: Source::Conversation,
        speed: 1.2,
        change: |_| {},
        figures: &[Figure::Mean, Figure::P99],
    },
    Row {
        name: "synthetic 1.0",
        source: Source::Synthetic,
        speed: 1.0,
        change: |_| {},
        figures: &[Figure::Mean],
    },
    Row {
        name: "synthetic 1.2",
        source: Source::Synthetic,
        speed: 1.2,
        change: |_| {},
        figures: &[Figure::Mean],
    },
    Row {
        name: "prefetch best_effort",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.prefetch = Prefetch::BestEffort,
        figures: &[Figure::Mean],
    },
    Row {
        name: "prefetch best_effort, L3 at 3 GB/s",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.prefetch = Prefetch::BestEffort;
            gbps(settings, 3.0);
        },
        figures: &[Figure::Mean],
    },
    Row {
        name: "no L3",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 0,
        figures: &[Figure::Mean],
    },
    Row {
        name: "L3 at 3 GB/s",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 3.0),
        figures: &[Figure::Mean],
    },
    Row {
        name: "L3 at 1.5 GB/s",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| gbps(settings, 1.5),
        figures: &[Figure::Mean],
    },
    Row {
        name: "L3 at 3 GB/s, 2 zones",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            settings.zones = 2;
        },
        figures: &[Figure::Mean],
    },
    Row {
        name: "L3 at 3 GB/s, 2 zones, unknown",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| {
            gbps(settings, 3.0);
            (settings.zones, settings.zones_known) = (2, false);
        },
        figures: &[Figure::Mean],
    },
    Row {
        name: "L3 of 40 M tokens",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.l3_tokens = 40_000_000,
        figures: &[Figure::Mean],
    },
    Row {
        name: "service noise 30 %",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.noise_sigma = 0.3,
        figures: &[Figure::Mean],
    },
    Row {
        name: "one engine 2× slower, conversation 0.9",
        source: Source::Conversation,
        speed: 0.9,
        change: |settings| settings.slow_engine = 2.0,
        figures: &[Figure::Mean],
    },
    Row {
        name: "index 10 s late",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.index_lag_s = 10.0,
        figures: &[Figure::Mean],
    },
    Row {
        name: "2 gateways",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 2,
        figures: &[Figure::Mean],
    },
    Row {
        name: "4 gateways",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| settings.gateways = 4,
        figures: &[Figure::Mean],
    },
    Row {
        name: "4 gateways, engines order by priority",
        source: Source::Conversation,
        speed: 1.0,
        change: |settings| {
            settings.gateways = 4;
            settings.order = EngineOrder::Priority;
        },
        figures: &[Figure::Mean],
    },
    Row {
        name: "overload, conversation 2.0, with targets",
        source: Source::Conversation,
        speed: 2.0,
        change: |settings| settings.deadlines = true,
        figures: &[Figure::InTime, Figure::P99, Figure::Refused],
    },
    Row {
        name: "overload, conversation 2.0, refused clients come back once",
        source: Source::Conversation,
        speed: 2.0,
        change: |settings| {
            settings.deadlines = true;
            settings.retry = true;
        },
        figures: &[Figure::RetryAfterRight, Figure::RetryAfter, Figure::InTime, Figure::Refused],
    },
    Row {
        name: "overload, conversation 1.5, refused clients come back once",
        source: Source::Conversation,
        speed: 1.5,
        change: |settings| {
            settings.deadlines = true;
            settings.retry = true;
        },
        figures: &[Figure::RetryAfterRight, Figure::RetryAfter, Figure::InTime, Figure::Refused],
    },
    Row {
        name: "6 engines 3× faster, 70 kB per token, conversation 2.2",
        source: Source::Conversation,
        speed: 2.2,
        change: other_engine,
        figures: &[Figure::Mean],
    },
    Row {
        name: "6 engines 3× faster, conversation 2.2, best_effort",
        source: Source::Conversation,
        speed: 2.2,
        change: |settings| {
            other_engine(settings);
            settings.prefetch = Prefetch::BestEffort;
        },
        figures: &[Figure::Mean],
    },
    Row {
        name: "agents 1.9",
        source: Source::Agents,
        speed: 1.9,
        change: |_| {},
        figures: &[Figure::Mean, Figure::P99, Figure::InTime],
    },
    Row {
        name: "bench_multiturn, L1+L2, 16 in flight",
        source: Source::MultiTurn(16),
        speed: 1.0,
        change: |settings| settings.l3_tokens = 0,
        figures: &[Figure::KiloTokensPerSecond],
    },
    Row {
        name: "bench_multiturn, L1+L2+L3, 64 in flight",
        source: Source::MultiTurn(64),
        speed: 1.0,
        change: |_| {},
        figures: &[Figure::KiloTokensPerSecond],
    },
    Row {
        name: "bench_multiturn, one engine",
        source: Source::OneEngine,
        speed: 1.0,
        change: |settings| settings.prefetch = Prefetch::WaitComplete,
        figures: &[Figure::KiloTokensPerSecond, Figure::Mean],
    },
    Row {
        name: "bench_multiturn, one engine, best_effort",
        source: Source::OneEngine,
        speed: 1.0,
        change: |_| {},
        figures: &[Figure::KiloTokensPerSecond, Figure::Mean],
    },
    Row {
        name: "bench_multiturn, one engine, L3 at 1.5 GB/s",
        source: Source::OneEngine,
        speed: 1.0,
        change: |settings| {
            settings.prefetch = Prefetch::WaitComplete;
            gbps(settings, 1.5);
        },
        figures: &[Figure::KiloTokensPerSecond, Figure::Mean],
    },
];

/// Runs the experiments whose name contains one of `only`, or all if there is none, and answers the table.
///
/// # Errors
/// A trace cannot be read.
pub(crate) fn run(
    folder: &Path,
    contenders: &[Contender],
    scheduling: &SchedulerSettings,
    seeds: &RangeInclusive<u64>,
    only: &[String],
    stop: &AtomicBool,
) -> anyhow::Result<String> {
    let read = |name: &str| -> anyhow::Result<Workload> {
        Ok(Workload::of_rows(&read_trace(&folder.join(name), None)?, true))
    };
    let (conversation, synthetic) = (read("conversation_trace.jsonl")?, read("synthetic_trace.jsonl")?);
    let mut lines = Vec::new();
    for row in
        ROWS.iter().filter(|row| only.is_empty() || only.iter().any(|text| row.name.contains(text.as_str())))
    {
        anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
        let replay = Replay { speed: row.speed, jitter_s: JITTER_S, seed: 0 };
        let unmoved = Replay { jitter_s: 0.0, ..replay };
        let load = match row.source {
            Source::Conversation => Load::Open(conversation.clone(), replay),
            Source::Synthetic => Load::Open(synthetic.clone(), replay),
            Source::Agents => Load::Agents(AgentSettings::default(), unmoved),
            Source::MultiTurn(in_flight) => {
                Load::MultiTurn(MultiTurnSettings { clients: 600, in_flight, ..MultiTurnSettings::default() })
            }
            Source::OneEngine => Load::MultiTurn(MultiTurnSettings::default()),
        };
        let mut settings = settings(row.source);
        (row.change)(&mut settings);
        let case = Case {
            settings,
            scheduling: scheduling.clone(),
            load,
            contenders: contenders.to_vec(),
            seeds: seeds.clone(),
        };
        lines.extend(lines_of(row, &run_case(&case, stop)));
    }
    anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped");
    Ok(if contenders.len() > MOST_COLUMNS {
        by_contender(contenders, &lines)
    } else {
        by_setting(contenders, &lines)
    })
}

fn settings(source: Source) -> Settings {
    let base = Settings::eight_plus_four();
    match source {
        Source::Conversation | Source::Synthetic | Source::Agents => base,
        Source::MultiTurn(_) => Settings {
            prefill: 4,
            decode: 0,
            service: ServiceModel::default(),
            prefetch: Prefetch::BestEffort,
            warmup_share: 0.0,
            ..base
        },
        Source::OneEngine => MEASURED[2].settings(),
    }
}

/// One figure of every contender.
struct Line {
    setting: &'static str,
    figure: Figure,
    cells: Vec<String>,
}

fn lines_of(row: &Row, standings: &[Standing]) -> Vec<Line> {
    let cells = |figure: Figure| standings.iter().map(|standing| figure.text(&standing.summary)).collect();
    row.figures.iter().map(|&figure| Line { setting: row.name, figure, cells: cells(figure) }).collect()
}

fn by_setting(contenders: &[Contender], lines: &[Line]) -> String {
    let names: Vec<&str> = contenders.iter().map(|contender| contender.name.as_str()).collect();
    let mut table =
        format!("| setting | figure | {} |\n|---|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for line in lines {
        let _ = writeln!(table, "| {} | {} | {} |", line.setting, line.figure.name(), line.cells.join(" | "));
    }
    table
}

fn by_contender(contenders: &[Contender], lines: &[Line]) -> String {
    let heads: Vec<String> =
        lines.iter().map(|line| format!("{}: {}", line.setting, line.figure.name())).collect();
    let mut table = format!("| policy | {} |\n|---|{}\n", heads.join(" | "), "---:|".repeat(heads.len()));
    for (at, contender) in contenders.iter().enumerate() {
        let cells: Vec<&str> = lines.iter().map(|line| line.cells[at].as_str()).collect();
        let _ = writeln!(table, "| {} | {} |", contender.name, cells.join(" | "));
    }
    table
}

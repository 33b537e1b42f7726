//! The report: one self-contained HTML file.

use std::fmt::Write as _;

use super::outcome::{RequestHistory, SimulationResult};
use super::svg::{AxisScale, SvgPlot};
use super::sweep::{ExperimentLoad, PolicyExperiment, PolicyResult};
use super::table;

/// Points of a plot over time.
const SLOTS: usize = 120;
const CDF_POINTS: usize = 200;
/// Number of line colours; more contenders reuse them with other dashes.
const COLOURS: usize = 8;

const STYLE: &str = "\
:root{--ink:#1d2430;--soft:#667085;--grid:#e4e7ec;--paper:#fff;--c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#dc2626;\
--c4:#7c3aed;--c5:#0891b2;--c6:#be185d;--c7:#4d7c0f}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--grid:#2b3340;--paper:#12161d;--c0:#60a5fa;--c1:#fbbf24;\
--c2:#34d399;--c3:#f87171;--c4:#a78bfa;--c5:#22d3ee;--c6:#f472b6;--c7:#a3e635}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2.2rem}p{color:var(--soft)}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}th:first-child,td:first-child{text-align:left}\
th{color:var(--soft);font-weight:600}svg{width:100%;height:auto}\
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--soft);fill:none}.tick{font-size:11px;fill:var(--soft)}.name{font-size:12px;fill:var(--soft)}\
.paper{fill:var(--paper)}.line{fill:none;stroke-width:1.8}.area{stroke:none;opacity:.8}.dash{stroke-dasharray:6 4}.dot{stroke-dasharray:2 3}\
.key{display:inline-flex;align-items:center;gap:.4rem;margin-right:1.1rem}.key svg{width:26px;height:8px}\
.k0{stroke:var(--c0)}.k1{stroke:var(--c1)}.k2{stroke:var(--c2)}.k3{stroke:var(--c3)}.k4{stroke:var(--c4)}.k5{stroke:var(--c5)}.k6{stroke:var(--c6)}.k7{stroke:var(--c7)}\
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}";

/// Renders the report of an experiment.
pub(crate) fn html(case: &PolicyExperiment, standings: &[PolicyResult]) -> String {
    let mut page = format!(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>\
         <title>Simulated scheduling</title><style>{STYLE}</style></head><body><h1>Simulated scheduling</h1><p>{}</p>",
        describe(case)
    );
    page.push_str(&table::html(standings));
    let _ = write!(
        page,
        "<h2>Time to first token</h2><p>Share of the requests (seed 1) whose first token arrived within a time.</p>{}{}",
        keys(standings),
        ttft_cdf(standings).svg("distribution of times to first token")
    );
    for standing in standings {
        let name = &standing.variant.name;
        let _ = write!(
            page,
            "<h2>{name}: reused tokens by tier</h2><p>{}</p>{}<h2>{name}: prompts at each prefill engine</h2>\
             <p>Sent to the engine and without a first token.</p>{}",
            tier_keys(),
            hits_over_time(&standing.first_run),
            load_over_time(&standing.first_run, case.settings.prefill)
        );
    }
    page.push_str("</body></html>\n");
    page
}

fn describe(case: &PolicyExperiment) -> String {
    let settings = &case.settings;
    let load = match &case.load {
        ExperimentLoad::Open(workload, replay) => {
            format!("{} requests of a trace at speed {}", workload.requests.len(), replay.speed)
        }
        ExperimentLoad::Agents(agents, replay) => {
            format!("{} generated requests of agents at speed {}", agents.requests, replay.speed)
        }
        ExperimentLoad::MultiTurn(turns) => {
            format!("bench_multiturn with {} clients, {} in flight", turns.clients, turns.in_flight)
        }
    };
    format!(
        "{load}; {} prefill and {} decode engines, {} gateway(s), device {} k, host {} k, shared store {} k tokens at {} GB/s, \
         {:?}; mean of {} seed(s).",
        settings.prefill,
        settings.decode,
        settings.gateways,
        settings.l1_tokens / 1_000,
        settings.l2_tokens / 1_000,
        settings.l3_tokens / 1_000,
        settings.service.storage_bytes_per_s / 1e9,
        settings.prefetch,
        case.seeds.clone().count()
    )
}

fn class(index: usize) -> String {
    let dash = ["", " dash", " dot"][(index / COLOURS) % 3];
    format!("k{}{dash}", index % COLOURS)
}

fn keys(standings: &[PolicyResult]) -> String {
    let mut keys = String::from("<div>");
    for (index, standing) in standings.iter().enumerate() {
        let _ = write!(
            keys,
            "<span class='key'><svg viewBox='0 0 26 8'><path class='line {}' d='M0 4H26'/></svg>{}</span>",
            class(index),
            standing.variant.name
        );
    }
    keys + "</div>"
}

/// The distribution of times to first token as an SVG file.
pub(crate) fn plot(standings: &[PolicyResult]) -> String {
    let mut plot = ttft_cdf(standings);
    let names =
        standings.iter().enumerate().map(|(index, standing)| (class(index), standing.variant.name.as_str()));
    plot.legend(&names.collect::<Vec<_>>());
    plot.file("Share of the requests whose first token arrived within a time", STYLE)
}

fn ttft_cdf(standings: &[PolicyResult]) -> SvgPlot {
    let times: Vec<Vec<f64>> = standings.iter().map(|standing| standing.first_run.ttfts()).collect();
    let longest = times.iter().filter_map(|times| times.last()).fold(1.0_f64, |max, time| max.max(*time));
    let x = AxisScale::Log(0.05, longest.max(0.1));
    let mut plot = SvgPlot::new(x, AxisScale::Linear(0.0, 1.0), ("seconds", "share"));
    for (index, (standing, times)) in standings.iter().zip(&times).enumerate() {
        if times.is_empty() {
            continue;
        }
        let points: Vec<(f64, f64)> = (0..=CDF_POINTS)
            .map(|point| {
                let share = point as f64 / CDF_POINTS as f64;
                (times[((times.len() - 1) as f64 * share) as usize], share)
            })
            .collect();
        plot.line(&points, &class(index), &standing.variant.name);
    }
    plot
}

fn tier_keys() -> String {
    let mut keys = String::new();
    for (index, name) in ["device", "host", "shared store"].into_iter().enumerate() {
        let _ = write!(
            keys,
            "<span class='key'><svg viewBox='0 0 26 8'><path class='area f{index}' d='M0 0H26V8H0Z'/></svg>{name}</span>"
        );
    }
    keys
}

fn hits_over_time(outcome: &SimulationResult) -> String {
    let end = outcome.end_s().max(1e-9);
    let slot = |time: f64| ((time / end * SLOTS as f64) as usize).min(SLOTS - 1);
    let mut sums = [[0.0; 4]; SLOTS];
    for (index, record) in
        outcome.records.iter().enumerate().filter(|(_, record)| !record.first_token_s.is_nan())
    {
        let sum = &mut sums[slot(record.first_token_s)];
        sum[0] += f64::from(record.l1_tokens);
        sum[1] += f64::from(record.l2_tokens);
        sum[2] += f64::from(record.l3_tokens);
        sum[3] += f64::from(outcome.input_tokens(index));
    }
    let mut plot = SvgPlot::new(
        AxisScale::Linear(0.0, end),
        AxisScale::Linear(0.0, 1.0),
        ("seconds", "share of prompt tokens"),
    );
    let layer = |tiers: usize| -> Vec<(f64, f64)> {
        let points = sums.iter().enumerate().map(|(index, sum)| {
            let x = (index as f64 + 0.5) / SLOTS as f64 * end;
            (x, sum[..tiers].iter().sum::<f64>() / f64::max(sum[3], 1.0))
        });
        points.collect()
    };
    for (tier, name) in ["device", "host", "shared store"].into_iter().enumerate() {
        plot.area(&layer(tier), &layer(tier + 1), &format!("f{tier}"), name);
    }
    plot.svg("reused tokens by tier over time")
}

fn load_over_time(outcome: &SimulationResult, engines: usize) -> String {
    let end = outcome.end_s().max(1e-9);
    let mut counts = vec![[0.0_f64; SLOTS]; engines];
    let sent = |record: &&RequestHistory| !record.sent_s.is_nan() && !record.first_token_s.is_nan();
    for record in outcome.records.iter().filter(sent) {
        let Some(count) = counts.get_mut(record.engine.get()) else { continue };
        let to_slot = |time: f64| time / end * SLOTS as f64;
        let (from, to) = (to_slot(record.sent_s), to_slot(record.first_token_s));
        for (index, count) in count.iter_mut().enumerate().skip(from as usize).take((to - from) as usize + 2)
        {
            // Part of the slot during which the prompt was present.
            *count += (to.min(index as f64 + 1.0) - from.max(index as f64)).max(0.0);
        }
    }
    let max_count = counts.iter().flatten().fold(1.0_f64, |max, count| max.max(*count));
    let mut plot =
        SvgPlot::new(AxisScale::Linear(0.0, end), AxisScale::Linear(0.0, max_count), ("seconds", "prompts"));
    for (engine, count) in counts.iter().enumerate() {
        let points: Vec<(f64, f64)> = count
            .iter()
            .enumerate()
            .map(|(index, &count)| ((index as f64 + 0.5) / SLOTS as f64 * end, count))
            .collect();
        plot.line(&points, &class(engine), &format!("prefill-{engine}"));
    }
    plot.svg("prompts at each engine over time")
}

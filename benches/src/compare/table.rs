//! Medians and their spread, as Markdown.

use std::fmt::Write as _;
use std::fs;

use super::gateways::BenchGateway;
use super::rounds::BenchRun;
use super::scenarios::Scenario;

/// A run is flagged if other processes used more CPU cores than this.
const NOISY_CORES: f64 = 0.2;

/// Values of one metric of one gateway over the rounds.
#[derive(Debug, Default, PartialEq)]
pub(super) struct MetricSeries {
    /// Values with their round, only of successful runs.
    pub(super) values: Vec<(u32, f64)>,
    pub(super) failed: usize,
}

impl MetricSeries {
    pub(super) fn of(runs: &[BenchRun], gateway: &str, scenario: &str, key: &str) -> Self {
        let mut series = Self::default();
        for run in runs.iter().filter(|run| run.gateway == gateway && run.scenario == scenario) {
            match &run.outcome {
                Ok(report) => series.values.extend(report[key].as_f64().map(|value| (run.round, value))),
                Err(_) => series.failed += 1,
            }
        }
        series
    }

    fn cell(&self) -> String {
        let values: Vec<f64> = self.values.iter().map(|(_, value)| *value).collect();
        let spread = MedianRange::of(&values).map_or_else(String::new, |spread| spread.to_string());
        match (self.failed, values.len()) {
            (0, 0) => "–".to_owned(),
            (0, _) => spread,
            (failed, 0) => format!("**failed ×{failed}**"),
            (failed, _) => format!("{spread} **failed ×{failed}**"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MedianRange {
    pub(super) median: f64,
    min: f64,
    max: f64,
}

impl MedianRange {
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Some(Self { median, min, max })
    }
}

/// The 95 % confidence interval of the median: between two of the measured values, whose ranks are the 95 % range of
/// heads of a fair coin (binomial distribution). `None` if there are too few values for a narrower interval than
/// minimum to maximum.
pub(super) fn median_confidence_interval(values: &[f64]) -> Option<(f64, f64)> {
    const FEWEST: usize = 20;
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half_width = (0.98 * (sorted.len() as f64).sqrt()).ceil() as usize;
    let low = (sorted.len() / 2).checked_sub(half_width)?;
    (sorted.len() >= FEWEST).then(|| (sorted[low], sorted[sorted.len() - 1 - low]))
}

impl std::fmt::Display for MedianRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = match self.max {
            max if max < 2.0 => 2,
            max if max < 100.0 => 1,
            _ => 0,
        };
        write!(f, "{:.digits$} ({:.digits$}–{:.digits$})", self.median, self.min, self.max)
    }
}

pub(super) fn markdown(gateways: &[BenchGateway], scenarios: &[&Scenario], runs: &[BenchRun]) -> String {
    let rounds = runs.iter().map(|run| run.round + 1).max().unwrap_or(0);
    let mut text =
        format!("Median (smallest–largest) of {rounds} interleaved measurements. {}\n\n", machine());
    let mut line = |cells: Vec<String>| text.push_str(&format!("| {} |\n", cells.join(" | ")));
    let header = ["load", "measure"].map(str::to_owned).into_iter();
    line(header.chain(gateways.iter().map(|gateway| gateway.name.clone())).collect());
    line(vec!["---".to_owned(); gateways.len() + 2]);
    for scenario in scenarios {
        for measure in scenario.measures {
            let mut cells = vec![scenario.title.to_owned(), measure.title.to_owned()];
            cells.extend(
                gateways
                    .iter()
                    .map(|gateway| MetricSeries::of(runs, &gateway.name, scenario.name, measure.key).cell()),
            );
            line(cells);
        }
    }
    text.push('\n');
    for gateway in gateways {
        // Writing into a String does not fail.
        let _infallible = writeln!(text, "* {}: {}", gateway.name, gateway.version);
    }
    text.push_str(&failures(runs));
    text.push_str(&noise_summary(runs));
    text
}

fn failures(runs: &[BenchRun]) -> String {
    let mut text = String::new();
    for run in runs {
        if let Err(failure) = &run.outcome {
            let failure = format!("{failure:#}").replace('\n', " ");
            let _infallible = writeln!(
                text,
                "* FAILED: {}, {}, round {}: {failure}",
                run.gateway,
                run.scenario,
                run.round + 1
            );
        }
    }
    text
}

fn noise_summary(runs: &[BenchRun]) -> String {
    let reports = runs.iter().filter_map(|run| run.outcome.as_ref().ok());
    let other_cores: Vec<f64> = reports.filter_map(|report| report["other_cores"].as_f64()).collect();
    let noisy = other_cores.iter().filter(|cores| **cores > NOISY_CORES).count();
    let Some(spread) = MedianRange::of(&other_cores) else { return String::new() };
    let verdict =
        if noisy == 0 { "quiet" } else { "noisy: trust ratios within a round, not absolute values" };
    format!(
        "* Other processes and the host used {spread} cores during the runs, more than {NOISY_CORES} in {noisy} of {} runs: {verdict}.\n",
        other_cores.len()
    )
}

/// CPU and kernel in one sentence.
pub(super) fn machine() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, model)| model);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{} × {}, Linux {}.", cores, model.unwrap_or("unknown CPU").trim(), kernel.trim())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    #[test]
    fn confidence_interval_narrows_with_more_values() {
        let values = |count: u32| (1..=count).map(f64::from).rev().collect::<Vec<_>>();
        assert_eq!(median_confidence_interval(&values(11)), None);
        // 10 ± 1.96 × √20 ÷ 2 heads of 20.
        assert_eq!(median_confidence_interval(&values(20)), Some((6.0, 15.0)));
        assert_eq!(median_confidence_interval(&values(400)), Some((181.0, 220.0)));
    }

    #[test]
    fn failed_rounds_are_shown_and_not_averaged() {
        let run = |round, outcome| BenchRun { round, gateway: "g".to_owned(), scenario: "s", outcome };
        let mut runs = vec![
            run(0, Ok(json!({"x": 10.0}))),
            run(1, Ok(json!({"x": 30.0}))),
            run(2, Ok(json!({"x": 14.0}))),
        ];
        assert_eq!(MetricSeries::of(&runs, "g", "s", "x").cell(), "14.0 (10.0–30.0)");
        runs.push(run(3, Err(Arc::new(anyhow::anyhow!("3 errors")))));
        assert_eq!(MetricSeries::of(&runs, "g", "s", "x").cell(), "14.0 (10.0–30.0) **failed ×1**");
        assert_eq!(MetricSeries::of(&runs[3..], "g", "s", "x").cell(), "**failed ×1**");
        assert_eq!(MetricSeries::of(&runs, "other", "s", "x").cell(), "–");
        assert!(failures(&runs).contains("round 4: 3 errors"));
    }
}

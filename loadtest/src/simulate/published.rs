//! Plot of the published benchmark and of runs of a deployed system.

use serde::{Deserialize, Serialize};

use super::calibrate::PUBLISHED_MEASUREMENTS;
use super::svg::{AxisScale, SvgPlot};

/// Line colours, in the order of the rows; more rows reuse them.
const COLOURS: usize = 4;
const STYLE: &str = "\
:root{--ink:#667085;--grid:#e4e7ec;--paper:#fff;--c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#dc2626}\
@media(prefers-color-scheme:dark){:root{--ink:#98a2b3;--grid:#2b3340;--paper:#12161d;--c0:#60a5fa;--c1:#fbbf24;--c2:#34d399;--c3:#f87171}}\
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--ink);fill:none}.tick{font-size:11px;fill:var(--ink)}\
.name{font-size:12px;fill:var(--ink)}.paper{fill:var(--paper)}.line{fill:none;stroke-width:1.8}\
.k0{stroke:var(--c0)}.k1{stroke:var(--c1)}.k2{stroke:var(--c2)}.k3{stroke:var(--c3)}\
.then,.now{stroke-linecap:round}.then{stroke-width:14;opacity:.35}.now{stroke-width:7}";

/// Results of one run of the benchmark, in the engines' own time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchmarkResult {
    /// Enabled cache levels, as in [`super::PublishedMeasurement::caches`].
    pub caches: String,
    pub policy: String,
    /// Mean time to first token.
    pub ttft_mean_s: f64,
    /// 90th percentile of the time to first token.
    pub ttft_p90_s: f64,
    pub input_tokens_per_s: f64,
    /// Share of the prompt tokens that were reused.
    pub hit: f64,
}

/// An SVG file with a small dot per run, and a line to the large dot of the published result. Runs with unknown cache
/// levels are left out.
#[must_use]
pub fn published_plot(runs: &[BenchmarkResult]) -> String {
    let pairs: Vec<(&BenchmarkResult, [(f64, f64); 2])> = runs
        .iter()
        .filter_map(|run| {
            let then = PUBLISHED_MEASUREMENTS.iter().find(|row| row.caches == run.caches)?;
            let now = (run.ttft_mean_s, run.input_tokens_per_s);
            Some((run, [(then.ttft_mean_s, then.input_tokens_per_s), now]))
        })
        .collect();
    let max_of = |of: fn(&(f64, f64)) -> f64| {
        let all = pairs.iter().flat_map(|(_, ends)| ends.iter().map(of));
        1.1 * all.fold(0.0, f64::max)
    };
    let (x, y) = (AxisScale::Linear(0.0, max_of(|end| end.0)), AxisScale::Linear(0.0, max_of(|end| end.1)));
    let mut plot = SvgPlot::new(x, y, ("mean time to first token, s", "prompt tokens/s"));
    let mut names = Vec::new();
    for (path_of, (run, [then, now])) in pairs.iter().enumerate() {
        let (class, name) = (format!("k{}", path_of % COLOURS), format!("{}, {}", run.caches, run.policy));
        plot.line(&[*then, *now], &class, &name);
        plot.line(&[*then, *then], &format!("{class} then"), &format!("{name}: published"));
        plot.line(&[*now, *now], &format!("{class} now"), &name);
        names.push((class, name));
    }
    let legend: Vec<(String, &str)> =
        names.iter().map(|(class, name)| (class.clone(), name.as_str())).collect();
    plot.legend(&legend);
    plot.file("The published benchmark (large dots) and the deployed system (small dots)", STYLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(caches: &str, input_tokens_per_s: f64) -> BenchmarkResult {
        let policy = "round_robin".to_owned();
        BenchmarkResult {
            caches: caches.to_owned(),
            policy,
            ttft_mean_s: 5.91,
            ttft_p90_s: 12.16,
            input_tokens_per_s,
            hit: 0.02,
        }
    }

    #[test]
    fn each_run_is_joined_to_what_was_published() {
        let svg = published_plot(&[shown("L1", 3_000.0), shown("no caches", 9.0)]);
        assert!(svg.contains("L1, round_robin: published") && !svg.contains("no caches"), "{svg}");
        let dots: Vec<&str> = svg.split("d='M").filter(|part| part.contains(": published")).collect();
        assert_eq!(dots.len(), 1);
        // A run with the published results is a single point.
        let same = published_plot(&[shown("L1", 6_577.0)]);
        let path_of = |class: &str| {
            let (_, path) = same.split_once(&format!("class='line {class}' d='")).expect("drawn");
            path.split_once('\'').expect("ends").0.to_owned()
        };
        assert_eq!(path_of("k0 then"), path_of("k0 now"));
    }
}

//! Performance targets of Moongate, and whether they were met.

use std::fmt::Write as _;

use super::gateways::{BenchGateway, BenchGatewayKind};
use super::rounds::BenchRun;
use super::scenarios::IDLE;
use super::table::{MedianRange, MetricSeries, median_confidence_interval};

struct PerformanceTarget {
    title: &'static str,
    scenario: &'static str,
    key: &'static str,
    limit: f64,
    /// The limit is a multiple of smg's value in the same round.
    relative_to_smg: bool,
}

/// Limits in the default configuration: with a tokenizer and live KV events.
const TARGETS: [PerformanceTarget; 6] = [
    PerformanceTarget {
        title: "CPU per request, 200 B",
        scenario: "json-200b",
        key: "cpu_us_per_request",
        limit: 0.3,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "CPU per request, 32 KiB",
        scenario: "json-32k",
        key: "cpu_us_per_request",
        limit: 0.4,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "CPU per request, 256 KiB",
        scenario: "json-256k",
        key: "cpu_us_per_request",
        limit: 0.6,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "p99 of 32 KiB at full speed, µs",
        scenario: "json-32k",
        key: "p99_us",
        limit: 25_000.0,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "idle RSS, MB",
        scenario: IDLE,
        key: "rss_after_mb",
        limit: 60.0,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "RSS after 256 KiB bodies, MB",
        scenario: "json-256k",
        key: "rss_after_mb",
        limit: 150.0,
        relative_to_smg: false,
    },
];

/// Limits without predictions.
const LEAST_LOAD_TARGETS: [PerformanceTarget; 6] = [
    PerformanceTarget {
        title: "CPU per request, 200 B",
        scenario: "json-200b",
        key: "cpu_us_per_request",
        limit: 0.4,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "CPU per request, 256 KiB",
        scenario: "json-256k",
        key: "cpu_us_per_request",
        limit: 0.3,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "p50 at 200 requests/s",
        scenario: "open-200rps",
        key: "p50_us",
        limit: 0.75,
        relative_to_smg: true,
    },
    PerformanceTarget {
        title: "CPU µs per unpaced chunk",
        scenario: "sse-unpaced",
        key: "cpu_us_per_chunk",
        limit: 7.0,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "idle RSS, MB",
        scenario: IDLE,
        key: "rss_after_mb",
        limit: 25.0,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "RSS after 256 KiB bodies, MB",
        scenario: "json-256k",
        key: "rss_after_mb",
        limit: 90.0,
        relative_to_smg: false,
    },
];

/// Limits on the cost of tracing, as multiples of the values without tracing.
const TRACING_TARGETS: [PerformanceTarget; 4] = [
    PerformanceTarget {
        title: "CPU per request, 200 B",
        scenario: "json-200b",
        key: "cpu_us_per_request",
        limit: 1.03,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "CPU per request, 32 KiB",
        scenario: "json-32k",
        key: "cpu_us_per_request",
        limit: 1.03,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "CPU per unpaced chunk",
        scenario: "sse-unpaced",
        key: "cpu_us_per_chunk",
        limit: 1.03,
        relative_to_smg: false,
    },
    PerformanceTarget {
        title: "CPU per paced chunk",
        scenario: "sse-paced",
        key: "cpu_us_per_chunk",
        limit: 1.03,
        relative_to_smg: false,
    },
];

/// One line per target that was measured.
pub(super) fn target_lines(gateways: &[BenchGateway], runs: &[BenchRun]) -> String {
    let mut text = String::new();
    let own = gateways.iter().filter(|gateway| matches!(gateway.kind, BenchGatewayKind::Moongate { .. }));
    let (traced, own): (Vec<_>, Vec<_>) = own
        .partition(|gateway| matches!(gateway.kind, BenchGatewayKind::Moongate { trace_ratio: Some(_), .. }));
    for gateway in own {
        let predicts = matches!(gateway.kind, BenchGatewayKind::Moongate { tokenizer: Some(_), .. });
        // The traced ones predict nothing, either.
        let traced = traced.iter().filter(|_| !predicts);
        for (target, traced) in
            TRACING_TARGETS.iter().flat_map(|target| traced.clone().map(move |traced| (target, traced)))
        {
            let without = MetricSeries::of(runs, &gateway.name, target.scenario, target.key);
            let with = MetricSeries::of(runs, &traced.name, target.scenario, target.key);
            let title = format!("{}, {}, of {}", target.title, traced.name, gateway.name);
            push_target_line(
                &mut text,
                target,
                &title,
                &ratios(&with, &without),
                with.failed + without.failed,
            );
        }
        for target in if predicts { &TARGETS } else { &LEAST_LOAD_TARGETS } {
            let series = MetricSeries::of(runs, &gateway.name, target.scenario, target.key);
            if !target.relative_to_smg {
                let values: Vec<f64> = series.values.iter().map(|(_, value)| *value).collect();
                let title = format!("{}, {}", gateway.name, target.title);
                push_target_line(&mut text, target, &title, &values, series.failed);
                continue;
            }
            for smg in gateways.iter().filter(|gateway| matches!(gateway.kind, BenchGatewayKind::Smg { .. }))
            {
                let smg_series = MetricSeries::of(runs, &smg.name, target.scenario, target.key);
                let title = format!("{}, {}, of {}", gateway.name, target.title, smg.name);
                push_target_line(
                    &mut text,
                    target,
                    &title,
                    &ratios(&series, &smg_series),
                    series.failed + smg_series.failed,
                );
            }
        }
    }
    if text.is_empty() { text } else { format!("\nTargets (ratios are taken within each round):\n\n{text}") }
}

fn push_target_line(
    text: &mut String,
    target: &PerformanceTarget,
    title: &str,
    values: &[f64],
    failed: usize,
) {
    let limit = target.limit;
    let Some(spread) = MedianRange::of(values) else {
        if failed > 0 {
            let _infallible =
                writeln!(text, "* {title}: not measured, {failed} failed runs (target ≤ {limit})");
        }
        return;
    };
    let verdict = match (spread.median <= limit, failed) {
        (true, 0) => "met".to_owned(),
        (false, 0) => "**missed**".to_owned(),
        (_, failed) => format!("**{failed} failed runs**"),
    };
    let certainty = median_confidence_interval(values)
        .map(|(low, high)| format!(", 95 % certain to be within {low:.3}–{high:.3} for these starts"));
    let certainty = certainty.unwrap_or_default();
    let _infallible = writeln!(text, "* {title}: {spread}{certainty} (target ≤ {limit}): {verdict}");
}

/// Ratio of two series, for each round that has both.
fn ratios(numerator: &MetricSeries, denominator: &MetricSeries) -> Vec<f64> {
    let divisor = |round: u32| {
        denominator.values.iter().find(|(candidate, _)| *candidate == round).map(|(_, value)| *value)
    };
    numerator.values.iter().filter_map(|(round, value)| Some(value / divisor(*round)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round() {
        let series = |values: &[(u32, f64)]| MetricSeries { values: values.to_vec(), failed: 0 };
        let own = series(&[(0, 10.0), (1, 30.0), (2, 50.0)]);
        assert_eq!(ratios(&own, &series(&[(1, 60.0), (2, 50.0), (3, 1.0)])), [0.5, 1.0]);
        let mut text = String::new();
        push_target_line(&mut text, &TARGETS[0], "x", &[0.5, 0.2, 0.25], 0);
        push_target_line(&mut text, &TARGETS[0], "y", &[0.3], 1);
        assert!(text.contains("x: 0.25 (0.20–0.50) (target ≤ 0.3): met"), "{text}");
        assert!(text.contains("y: 0.30 (0.30–0.30) (target ≤ 0.3): **1 failed runs**"), "{text}");
    }
}

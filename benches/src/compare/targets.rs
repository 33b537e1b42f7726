//! What Moongate is to reach, and whether it did.

use std::fmt::Write as _;

use super::gateways::{Gateway, Kind};
use super::rounds::Run;
use super::scenarios::IDLE;
use super::table::{Series, Spread, certainty};

struct Target {
    title: &'static str,
    scenario: &'static str,
    key: &'static str,
    limit: f64,
    /// The limit is a multiple of smg's value in the same round.
    of_smg: bool,
}

const TARGETS: [Target; 6] = [
    Target {
        title: "CPU per request, 200 B",
        scenario: "json-200b",
        key: "cpu_us_per_request",
        limit: 0.4,
        of_smg: true,
    },
    Target {
        title: "CPU per request, 256 KiB",
        scenario: "json-256k",
        key: "cpu_us_per_request",
        limit: 0.3,
        of_smg: true,
    },
    Target {
        title: "p50 at 200 requests/s",
        scenario: "open-200rps",
        key: "p50_us",
        limit: 0.75,
        of_smg: true,
    },
    Target {
        title: "CPU µs per unpaced chunk",
        scenario: "sse-unpaced",
        key: "cpu_us_per_chunk",
        limit: 7.0,
        of_smg: false,
    },
    Target { title: "idle RSS, MB", scenario: IDLE, key: "rss_after_mb", limit: 25.0, of_smg: false },
    Target {
        title: "RSS after 256 KiB bodies, MB",
        scenario: "json-256k",
        key: "rss_after_mb",
        limit: 90.0,
        of_smg: false,
    },
];

/// What traces may cost, as multiples of the same without.
const TRACED: [Target; 4] = [
    Target {
        title: "CPU per request, 200 B",
        scenario: "json-200b",
        key: "cpu_us_per_request",
        limit: 1.03,
        of_smg: false,
    },
    Target {
        title: "CPU per request, 32 KiB",
        scenario: "json-32k",
        key: "cpu_us_per_request",
        limit: 1.03,
        of_smg: false,
    },
    Target {
        title: "CPU per unpaced chunk",
        scenario: "sse-unpaced",
        key: "cpu_us_per_chunk",
        limit: 1.03,
        of_smg: false,
    },
    Target {
        title: "CPU per paced chunk",
        scenario: "sse-paced",
        key: "cpu_us_per_chunk",
        limit: 1.03,
        of_smg: false,
    },
];

/// A line for each target that was measured.
pub(super) fn lines(gateways: &[Gateway], runs: &[Run]) -> String {
    let mut text = String::new();
    let ours = gateways.iter().filter(|gateway| matches!(gateway.kind, Kind::Moongate { .. }));
    let (traced, ours): (Vec<_>, Vec<_>) =
        ours.partition(|gateway| matches!(gateway.kind, Kind::Moongate { traces: Some(_), .. }));
    for our in ours {
        for (target, traced) in
            TRACED.iter().flat_map(|target| traced.iter().map(move |traced| (target, traced)))
        {
            let without = Series::of(runs, &our.name, target.scenario, target.key);
            let with = Series::of(runs, &traced.name, target.scenario, target.key);
            let title = format!("{}, {}, of {}", target.title, traced.name, our.name);
            line(&mut text, target, &title, &ratios(&with, &without), with.failed + without.failed);
        }
        for target in &TARGETS {
            let series = Series::of(runs, &our.name, target.scenario, target.key);
            if !target.of_smg {
                let values: Vec<f64> = series.values.iter().map(|(_, value)| *value).collect();
                line(&mut text, target, target.title, &values, series.failed);
                continue;
            }
            for smg in gateways.iter().filter(|gateway| matches!(gateway.kind, Kind::Smg { .. })) {
                let theirs = Series::of(runs, &smg.name, target.scenario, target.key);
                let title = format!("{}, of {}", target.title, smg.name);
                line(&mut text, target, &title, &ratios(&series, &theirs), series.failed + theirs.failed);
            }
        }
    }
    if text.is_empty() { text } else { format!("\nTargets (ratios are taken within each round):\n\n{text}") }
}

fn line(text: &mut String, target: &Target, title: &str, values: &[f64], failed: usize) {
    let limit = target.limit;
    let Some(spread) = Spread::of(values) else {
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
    let certainty = certainty(values)
        .map(|(low, high)| format!(", 95 % certain to be within {low:.3}–{high:.3} for these starts"));
    let certainty = certainty.unwrap_or_default();
    let _infallible = writeln!(text, "* {title}: {spread}{certainty} (target ≤ {limit}): {verdict}");
}

/// Ours by theirs, for each round that has both.
fn ratios(ours: &Series, theirs: &Series) -> Vec<f64> {
    let their =
        |round: u32| theirs.values.iter().find(|(theirs, _)| *theirs == round).map(|(_, value)| *value);
    ours.values.iter().filter_map(|(round, value)| Some(value / their(*round)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round() {
        let series = |values: &[(u32, f64)]| Series { values: values.to_vec(), failed: 0 };
        let ours = series(&[(0, 10.0), (1, 30.0), (2, 50.0)]);
        assert_eq!(ratios(&ours, &series(&[(1, 60.0), (2, 50.0), (3, 1.0)])), [0.5, 1.0]);
        let mut text = String::new();
        line(&mut text, &TARGETS[0], "x", &[0.5, 0.3, 0.35], 0);
        line(&mut text, &TARGETS[0], "y", &[0.3], 1);
        assert!(text.contains("x: 0.35 (0.30–0.50) (target ≤ 0.4): met"), "{text}");
        assert!(text.contains("y: 0.30 (0.30–0.30) (target ≤ 0.4): **1 failed runs**"), "{text}");
    }
}

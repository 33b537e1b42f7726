//! Results of the comparison as a table.

use std::fmt::Write as _;

use crate::simulate::SimulationSummary;

/// With a larger schedule delay than this share of the mean time to first token, the machine did not keep up.
const MAX_LATENESS_SHARE: f64 = 0.2;

/// Results of one policy in the simulator and with a real gateway.
#[derive(Debug, Clone)]
pub struct PolicyComparison {
    pub policy: String,
    pub simulated: SimulationSummary,
    /// Measured results, in seconds of the engines.
    pub live: SimulationSummary,
    /// 99th percentile of the schedule delay, in seconds of the engines. Shows whether the machine kept up.
    pub lateness: f64,
}

/// Pairs of policies whose mean times to first token differ in the simulator by more than `margin` of the larger one,
/// and whose measured order is reversed: the first one is the simulator's better one.
#[must_use]
pub fn disagreements(rows: &[PolicyComparison], margin: f64) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for better in rows {
        for worse in rows {
            let reversed = better.simulated.ttft_mean_s < worse.simulated.ttft_mean_s * (1.0 - margin);
            if reversed && better.live.ttft_mean_s >= worse.live.ttft_mean_s {
                found.push((better.policy.as_str(), worse.policy.as_str()));
            }
        }
    }
    found
}

pub(super) fn text(rows: &[PolicyComparison], time_scale: f64, reversed: &[(&str, &str)]) -> String {
    let mut text = format!(
        "Simulated / live, in seconds of engines that were {time_scale} times faster.\n\n\
         | policy | mean TTFT, s | p50, s | p90, s | reused, % | failed, % | schedule delay (p99), s |\n|---|---:|---:|---:|---:|---:|---:|\n"
    );
    for PolicyComparison { policy, simulated, live, lateness } in rows {
        let _ = writeln!(
            text,
            "| {policy} | {:.2} / {:.2} | {:.2} / {:.2} | {:.2} / {:.2} | {:.1} / {:.1} | {:.1} / {:.1} | {lateness:.2} |",
            simulated.ttft_mean_s,
            live.ttft_mean_s,
            simulated.ttft_p50_s,
            live.ttft_p50_s,
            simulated.ttft_p90_s,
            live.ttft_p90_s,
            100.0 * simulated.hit(),
            100.0 * live.hit(),
            100.0 * (simulated.failed + simulated.rejected),
            100.0 * (live.failed + live.rejected),
        );
    }
    for PolicyComparison { policy, live, lateness, .. } in rows {
        if *lateness > MAX_LATENESS_SHARE * live.ttft_mean_s {
            let _ = writeln!(
                text,
                "\nWith {policy}, the schedule delay is too long: the machine did not keep up; reduce --time-scale."
            );
        }
    }
    for (better, worse) in reversed {
        let _ = writeln!(
            text,
            "\n{better} is better than {worse} in the simulator, but not in this measurement."
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &str, simulated: f64, live: f64) -> PolicyComparison {
        let summary = |ttft_mean_s| SimulationSummary { ttft_mean_s, ..SimulationSummary::default() };
        PolicyComparison {
            policy: policy.to_owned(),
            simulated: summary(simulated),
            live: summary(live),
            lateness: 0.0,
        }
    }

    #[test]
    fn only_pairs_separated_by_the_simulator_count() {
        let rows = [row("a", 1.0, 3.0), row("b", 1.05, 2.0), row("c", 4.0, 2.5)];
        assert_eq!(disagreements(&rows, 0.1), [("a", "c")]);
        assert_eq!(disagreements(&rows, 0.01), [("a", "b"), ("a", "c")]);
        let text = text(&rows, 20.0, &[("a", "c")]);
        assert!(text.contains("| c | 4.00 / 2.50 |") && text.contains("a is better than c"));
        assert!(!text.contains("keep up"));
    }
}

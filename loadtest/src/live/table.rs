//! What came out.

use std::fmt::Write as _;

use crate::simulate::SimulationSummary;

/// Requests that are sent later than this share of the mean time to first token say that the machine did not keep up.
const MAX_LATENESS_SHARE: f64 = 0.2;

/// One policy in the simulator and behind a real gateway.
#[derive(Debug, Clone)]
pub struct PolicyComparison {
    /// The policy.
    pub policy: String,
    /// What the simulator says.
    pub simulated: SimulationSummary,
    /// What was measured, in seconds of the engines.
    pub live: SimulationSummary,
    /// How late the latest one in a hundred requests was sent, in seconds of the engines. It tells whether the machine kept up.
    pub lateness: f64,
}

/// Pairs of policies that the simulator tells apart by more than `margin` of the larger mean time to first token, and whose order was the other
/// way round: the first one is the simulator's better one.
#[must_use]
pub fn disagreements(rows: &[PolicyComparison], margin: f64) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for better in rows {
        for worse in rows {
            let apart = better.simulated.ttft_mean_s < worse.simulated.ttft_mean_s * (1.0 - margin);
            if apart && better.live.ttft_mean_s >= worse.live.ttft_mean_s {
                found.push((better.policy.as_str(), worse.policy.as_str()));
            }
        }
    }
    found
}

/// A table in Markdown.
pub(super) fn text(rows: &[PolicyComparison], time_scale: f64, apart: &[(&str, &str)]) -> String {
    let mut text = format!(
        "Simulated / live, in seconds of engines that were {time_scale} times faster.\n\n\
         | policy | mean TTFT, s | p50, s | p90, s | reused, % | failed, % | sent late (p99), s |\n|---|---:|---:|---:|---:|---:|---:|\n"
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
                "\nRequests were sent too late with {policy}: the machine did not keep up, try a smaller --time-scale."
            );
        }
    }
    for (better, worse) in apart {
        let _ = writeln!(text, "\n{better} is better than {worse} in the simulator, and not here.");
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
    fn only_what_the_simulator_tells_apart_counts() {
        let rows = [row("a", 1.0, 3.0), row("b", 1.05, 2.0), row("c", 4.0, 2.5)];
        assert_eq!(disagreements(&rows, 0.1), [("a", "c")]);
        assert_eq!(disagreements(&rows, 0.01), [("a", "b"), ("a", "c")]);
        let text = text(&rows, 20.0, &[("a", "c")]);
        assert!(text.contains("| c | 4.00 / 2.50 |") && text.contains("a is better than c"));
        assert!(!text.contains("keep up"));
    }
}

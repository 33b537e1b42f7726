//! Prometheus' text format 0.0.4, for metrics that are read together with those of other programs, and for clients of Mooncake.

use std::fmt::Write as _;

use super::TOTAL;

/// Converts OpenMetrics text without exemplars. Samples are equal in both formats; only the comments differ.
///
/// OpenMetrics has no counters without `_total`; [`MetricsWriter`](super::MetricsWriter) writes those of Mooncake as `unknown`.
pub(super) fn from_open_metrics(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = "";
    for line in open_metrics.lines() {
        if let Some(family) = line.strip_prefix("# HELP ") {
            help = family.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|it| it.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => (TOTAL, "counter"),
                "unknown" => ("", "counter"),
                other => ("", other),
            };
            // Writing to a string cannot fail.
            let _infallible = writeln!(text, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with("# ") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

//! Report of a run, as a table and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::measurements::{LoadMeasurements, per_second, seconds, summary};

/// Result of a load run.
#[derive(Debug)]
pub struct LoadtestReport {
    pub record: LoadMeasurements,
    pub sent: u64,
    /// From the first request to the end of the last.
    pub elapsed: Duration,
    /// Whether the run was stopped before its end.
    pub stopped_early: bool,
}

impl LoadtestReport {
    /// Whether every request that was sent had a complete response.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.record.failed() == 0
    }

    /// One JSON object with all measurements.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let record = &self.record;
        let failures: Map<String, Value> = record
            .failures
            .iter()
            .map(|(kind, failure)| {
                (kind.clone(), json!({"count": failure.count, "example": failure.example}))
            })
            .collect();
        json!({
            "sent": self.sent, "succeeded": record.succeeded, "failed": record.failed(),
            "stopped_early": self.stopped_early, "elapsed_s": self.elapsed.as_secs_f64(),
            "requests_per_s": per_second(record.succeeded, self.elapsed),
            "input_tokens": record.prompt_tokens, "output_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens, "prefix_hit_rate": record.prefix_hit_rate(),
            "input_tokens_per_s": per_second(record.prompt_tokens, self.elapsed),
            "output_tokens_per_s": per_second(record.completion_tokens, self.elapsed),
            "ttft": summary(&record.ttft), "itl": summary(&record.itl), "tpot": summary(&record.tpot),
            "e2e": summary(&record.e2e), "schedule_delay": summary(&record.lateness), "errors": failures,
        })
    }

    /// A table for a terminal.
    #[must_use]
    pub fn to_text(&self) -> String {
        let record = &self.record;
        let mut text = String::new();
        let early = if self.stopped_early { " (stopped early)" } else { "" };
        let _ = writeln!(
            text,
            "{} requests in {:.1} s{early}: {} succeeded, {} failed, {:.2} per second",
            self.sent,
            self.elapsed.as_secs_f64(),
            record.succeeded,
            record.failed(),
            per_second(record.succeeded, self.elapsed),
        );
        let _ = writeln!(
            text,
            "tokens: {} in ({:.0}/s, {:.1} % cached), {} out ({:.0}/s)\n",
            record.prompt_tokens,
            per_second(record.prompt_tokens, self.elapsed),
            record.prefix_hit_rate() * 100.0,
            record.completion_tokens,
            per_second(record.completion_tokens, self.elapsed),
        );
        let _ = writeln!(
            text,
            "{:<22}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "milliseconds", "mean", "p50", "p90", "p99", "max"
        );
        for (name, histogram) in [
            ("first token (TTFT)", &record.ttft),
            ("between tokens (ITL)", &record.itl),
            ("per token (TPOT)", &record.tpot),
            ("whole request (E2E)", &record.e2e),
            ("schedule delay", &record.lateness),
        ] {
            text.push_str(&row(name, histogram));
        }
        for (kind, failure) in &record.failures {
            let _ = writeln!(text, "\n{} × {kind}, first: {}", failure.count, failure.example);
        }
        text
    }
}

fn row(name: &str, histogram: &Histogram<u64>) -> String {
    if histogram.is_empty() {
        return format!("{name:<22}{:>10}\n", "–");
    }
    let quantile_ms = |quantile: f64| seconds(histogram.value_at_quantile(quantile)) * 1e3;
    format!(
        "{name:<22}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>10.1}\n",
        histogram.mean() / 1e3,
        quantile_ms(0.5),
        quantile_ms(0.9),
        quantile_ms(0.99),
        seconds(histogram.max()) * 1e3
    )
}

//! Report of a load run.

use std::time::Duration;

use moongate_loadtest::engine::monotonic_ns;
use serde_json::{Value, json};

use super::client::ResponseTimings;

/// Maximum number of delays recorded per run.
const MAX_SAMPLES: usize = 8 << 20;

/// The measured time, in nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasurementWindow {
    start_ns: u64,
    pub(super) end_ns: u64,
}

impl MeasurementWindow {
    pub(super) fn new(warmup: Duration, duration: Duration) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4);
        let start_ns = monotonic_ns() + ns(warmup);
        Self { start_ns, end_ns: start_ns + ns(duration) }
    }
}

/// Counts of one or more connections.
#[derive(Debug, Default)]
pub(super) struct ExchangeTally {
    requests: u64,
    /// Errors of the whole run, including warm-up.
    errors: u64,
    error_example: Option<String>,
    /// Events of streams that ended in the window or shortly after, weighted by the share of their time inside it.
    chunks: f64,
    latencies_ns: Vec<u64>,
    ttfts_ns: Vec<u64>,
    delays_ns: Vec<u64>,
}

impl ExchangeTally {
    /// Counts one exchange; returns whether it succeeded.
    pub(super) fn count(
        &mut self,
        window: &MeasurementWindow,
        sent: u64,
        ended: u64,
        seen: ResponseTimings,
        outcome: Result<(), String>,
    ) -> bool {
        // CPU time is read at both ends of the window; an exchange across an end counts for its part inside.
        let inside = ended.min(window.end_ns).saturating_sub(sent.max(window.start_ns));
        if inside > 0 {
            self.chunks += to_f64(seen.events) * to_f64(inside) / to_f64(ended - sent);
        }
        if let Err(error) = outcome {
            self.errors += 1;
            self.error_example.get_or_insert(error);
            return false;
        }
        if (window.start_ns..window.end_ns).contains(&ended) {
            self.requests += 1;
            self.latencies_ns.push(ended - sent);
            self.ttfts_ns.push(seen.first_byte_ns.saturating_sub(sent));
            let room = MAX_SAMPLES.saturating_sub(self.delays_ns.len());
            self.delays_ns.extend(seen.delays_ns.into_iter().take(room));
        }
        true
    }

    pub(super) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.error_example = self.error_example.take().or(other.error_example);
        self.chunks += other.chunks;
        self.latencies_ns.extend(other.latencies_ns);
        self.ttfts_ns.extend(other.ttfts_ns);
        let room = MAX_SAMPLES.saturating_sub(self.delays_ns.len());
        self.delays_ns.extend(other.delays_ns.into_iter().take(room));
    }
}

#[derive(Debug)]
pub(super) struct CpuTimes {
    pub(super) gateway_ns: Option<u64>,
    pub(super) engine_ns: Option<u64>,
    pub(super) load_generator_ns: u64,
    pub(super) machine_ns: u64,
}

impl CpuTimes {
    pub(super) fn since(&self, before: &Self) -> Self {
        let minus = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        Self {
            gateway_ns: minus(self.gateway_ns, before.gateway_ns),
            engine_ns: minus(self.engine_ns, before.engine_ns),
            load_generator_ns: self.load_generator_ns.saturating_sub(before.load_generator_ns),
            machine_ns: self.machine_ns.saturating_sub(before.machine_ns),
        }
    }

    /// CPU time of all processes outside the benchmark.
    fn other_processes_ns(&self) -> u64 {
        let ours = self.load_generator_ns + self.gateway_ns.unwrap_or(0) + self.engine_ns.unwrap_or(0);
        self.machine_ns.saturating_sub(ours)
    }
}

pub(super) fn report(
    mut tally: ExchangeTally,
    usage: &CpuTimes,
    duration: Duration,
    rss: (Option<u64>, Option<u64>),
) -> Value {
    let seconds = duration.as_secs_f64();
    let cores = |ns: u64| round(to_f64(ns) / 1e9 / seconds);
    let cpu_us_per =
        |count: f64| usage.gateway_ns.filter(|_| count > 0.0).map(|ns| round(to_f64(ns) / 1e3 / count));
    let latencies = &mut tally.latencies_ns;
    latencies.sort_unstable();
    tally.ttfts_ns.sort_unstable();
    tally.delays_ns.sort_unstable();
    json!({
        "requests": tally.requests,
        "errors": tally.errors,
        "error_example": tally.error_example,
        "requests_per_s": round(to_f64(tally.requests) / seconds),
        "p50_us": quantile_us(&tally.latencies_ns, 50),
        "p90_us": quantile_us(&tally.latencies_ns, 90),
        "p99_us": quantile_us(&tally.latencies_ns, 99),
        "ttft_p50_us": quantile_us(&tally.ttfts_ns, 50),
        "chunks": tally.chunks.round(),
        "chunks_per_s": round(tally.chunks / seconds),
        "chunk_delay_p50_us": quantile_us(&tally.delays_ns, 50),
        "chunk_delay_p99_us": quantile_us(&tally.delays_ns, 99),
        "cpu_us_per_request": cpu_us_per(to_f64(tally.requests)),
        "cpu_us_per_chunk": cpu_us_per(tally.chunks),
        "cpu_cores": usage.gateway_ns.map(cores),
        "engine_cores": usage.engine_ns.map(cores),
        "load_generator_cores": cores(usage.load_generator_ns),
        "other_cores": cores(usage.other_processes_ns()),
        "rss_before_mb": rss.0.map(megabytes),
        "rss_after_mb": rss.1.map(megabytes),
    })
}

fn quantile_us(sorted_ns: &[u64], percent: usize) -> Option<f64> {
    let index = (sorted_ns.len() * percent / 100).min(sorted_ns.len().checked_sub(1)?);
    Some(round(to_f64(sorted_ns[index]) / 1e3))
}

/// Converts KiB to MB of a million bytes.
fn megabytes(kib: u64) -> f64 {
    round(to_f64(kib) * 1024.0 / 1e6)
}

fn to_f64(count: u64) -> f64 {
    count as f64
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_across_an_end_of_the_window_counts_for_its_part() {
        let window = MeasurementWindow { start_ns: 1000, end_ns: 2000 };
        let mut tally = ExchangeTally::default();
        let seen = |events| ResponseTimings { events, ..ResponseTimings::default() };
        assert!(tally.count(&window, 500, 1500, seen(10), Ok(())));
        assert!(tally.count(&window, 1500, 2500, seen(10), Ok(())));
        assert!(tally.count(&window, 100, 900, seen(10), Ok(())));
        assert!(!tally.count(&window, 1100, 1200, seen(0), Err("x".to_owned())));
        let usage =
            CpuTimes { gateway_ns: Some(20_000), engine_ns: None, load_generator_ns: 0, machine_ns: 50_000 };
        let report = report(tally, &usage, Duration::from_nanos(1000), (Some(1000), None));
        assert_eq!(report["chunks"], 10.0);
        assert_eq!(report["cpu_us_per_chunk"], 2.0);
        assert_eq!((report["requests"].as_u64(), report["errors"].as_u64()), (Some(1), Some(1)));
        assert_eq!(report["rss_before_mb"], 1.02);
    }
}

//! Scenarios and their metrics.

/// A metric of a run's report.
#[derive(Debug, Clone, Copy)]
pub(super) struct BenchMetric {
    pub(super) key: &'static str,
    pub(super) title: &'static str,
}

#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) load: &'static [&'static str],
    pub(super) measures: &'static [BenchMetric],
}

/// Name of the run that only reads memory.
pub(super) const IDLE: &str = "idle";

const CPU_REQUEST: BenchMetric = BenchMetric { key: "cpu_us_per_request", title: "CPU µs/request" };
const CPU_CHUNK: BenchMetric = BenchMetric { key: "cpu_us_per_chunk", title: "CPU µs/chunk" };
const RATE: BenchMetric = BenchMetric { key: "requests_per_s", title: "requests/s" };
const P50: BenchMetric = BenchMetric { key: "p50_us", title: "p50 µs" };
const P99: BenchMetric = BenchMetric { key: "p99_us", title: "p99 µs" };
const RSS: BenchMetric = BenchMetric { key: "rss_after_mb", title: "RSS after, MB" };
const TTFT: BenchMetric = BenchMetric { key: "ttft_p50_us", title: "TTFT p50 µs" };
const DELAY: BenchMetric = BenchMetric { key: "chunk_delay_p50_us", title: "chunk delay p50 µs" };

/// In order of execution; the scenario that fills a gateway's memory is last.
pub(super) const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: IDLE,
        title: "idle",
        load: &[],
        measures: &[BenchMetric { key: "rss_after_mb", title: "RSS, MB" }],
    },
    Scenario {
        name: "json-200b",
        title: "JSON 200 B, 32 connections",
        load: &["--body-bytes", "200", "--conc", "32"],
        measures: &[CPU_REQUEST, RATE, P50],
    },
    Scenario {
        name: "open-200rps",
        title: "JSON 200 B, 200 requests/s",
        load: &["--body-bytes", "200", "--rps", "200"],
        measures: &[P50, P99, CPU_REQUEST],
    },
    Scenario {
        name: "json-32k",
        title: "JSON 32 KiB, 32 connections",
        load: &["--body-bytes", "32768", "--conc", "32"],
        measures: &[CPU_REQUEST, RATE, P50, P99],
    },
    Scenario {
        name: "sse-unpaced",
        title: "SSE 64 tokens unpaced, 32 connections",
        load: &["--body-bytes", "300", "--conc", "32", "--stream", "--max-tokens", "64"],
        measures: &[CPU_CHUNK, BenchMetric { key: "chunks_per_s", title: "chunks/s" }, TTFT],
    },
    Scenario {
        name: "sse-paced",
        title: "SSE 10 ms per token, 100 streams",
        // Streams last one second and their starts are spread over the first second, so that each step has about as
        // many tokens.
        load: &[
            "--body-bytes",
            "300",
            "--conc",
            "100",
            "--stream",
            "--max-tokens",
            "100",
            "--itl-ms",
            "10",
            "--warmup",
            "2",
        ],
        measures: &[CPU_CHUNK, DELAY, TTFT],
    },
    Scenario {
        name: "json-256k",
        title: "JSON 256 KiB, 16 connections",
        load: &["--body-bytes", "262144", "--conc", "16"],
        measures: &[CPU_REQUEST, RATE, RSS],
    },
];

//! Polls and parses the load that an engine reports.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::StatusCode;
use serde::Deserialize;

use crate::error::root_cause;
use crate::kv_cache::MAX_RANKS;
use crate::topology::EngineKind;

/// Time limit of a query of the load, body included.
pub const LOAD_QUERY_TIMEOUT: Duration = Duration::from_secs(2);
const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
const CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
/// Metrics of vLLM that contain its load.
const VLLM_LOAD_METRICS: [&str; 4] = [RUNNING, WAITING, CACHE_USAGE, "vllm:cache_config_info"];

/// Largest accepted response in bytes.
pub const MAX_LOAD_BYTES: usize = 4 << 20;

/// Load of an engine, or of one of its data-parallel ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Number of running requests.
    pub running: u32,
    /// Number of queued requests.
    pub waiting: u32,
    /// Uncached prompt tokens of queued requests; 0 if not reported, as by vLLM.
    pub waiting_uncached_tokens: u64,
    /// KV cache tokens of running requests.
    pub used_tokens: u64,
    /// Capacity of the KV cache in tokens; 0 if not reported.
    pub capacity_tokens: u64,
    /// Requests whose KV cache is being transferred between the engines of a pair; only SGLang reports it.
    pub handing_over: u32,
}

impl EngineLoad {
    fn add(&mut self, other: &Self) {
        self.running = self.running.saturating_add(other.running);
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.waiting_uncached_tokens =
            self.waiting_uncached_tokens.saturating_add(other.waiting_uncached_tokens);
        self.used_tokens = self.used_tokens.saturating_add(other.used_tokens);
        self.capacity_tokens = self.capacity_tokens.saturating_add(other.capacity_tokens);
        self.handing_over = self.handing_over.saturating_add(other.handing_over);
    }

    /// The part of one of `ranks` ranks; what cannot be divided evenly goes to the first ones.
    fn part_of_rank(&self, rank: u32, ranks: u32) -> Self {
        let ranks = ranks.max(1);
        let requests = |count: u32| count / ranks + u32::from(count % ranks > rank);
        let tokens = |count: u64| {
            let ranks = u64::from(ranks);
            count / ranks + u64::from(count % ranks > u64::from(rank))
        };
        Self {
            running: requests(self.running),
            waiting: requests(self.waiting),
            waiting_uncached_tokens: tokens(self.waiting_uncached_tokens),
            used_tokens: tokens(self.used_tokens),
            capacity_tokens: tokens(self.capacity_tokens),
            handing_over: requests(self.handing_over),
        }
    }
}

/// Load of an engine by data-parallel rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankLoads(Vec<EngineLoad>);

impl RankLoads {
    /// Load of the whole engine.
    #[must_use]
    pub fn total(&self) -> EngineLoad {
        let mut total = EngineLoad::default();
        self.0.iter().for_each(|load| total.add(load));
        total
    }

    /// Load of one of the engine's `ranks` ranks. If the engine does not report each of them, they share the total evenly.
    #[must_use]
    pub fn of_rank(&self, rank: u32, ranks: u32) -> EngineLoad {
        let reported = self.0.get(rank as usize).filter(|_| self.0.len() == ranks as usize);
        reported.copied().unwrap_or_else(|| self.total().part_of_rank(rank, ranks))
    }
}

/// Why polling an engine's load failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineLoadError {
    /// No complete response arrived within the time limit.
    #[error("GET {0}: no response in time")]
    TimedOut(String),
    /// No complete response arrived.
    #[error("GET {url}: {}", root_cause(source))]
    Exchange { url: String, source: reqwest::Error },
    /// The response has an error status of the server, 500 or above.
    #[error("GET {url}: HTTP {status}")]
    Status { url: String, status: StatusCode },
    /// The engine responds, but does not report its load.
    #[error("GET {url}: {source}")]
    Missing { url: String, source: MissingLoadError },
}

/// Why a response does not contain the load: metrics may be disabled.
#[derive(Debug, thiserror::Error)]
pub enum MissingLoadError {
    /// The engine rejects the request.
    #[error("HTTP {0}")]
    Rejected(StatusCode),
    #[error("more than {MAX_LOAD_BYTES} bytes")]
    TooLarge,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("the metrics do not contain vllm:kv_cache_usage_perc")]
    NoCacheUsage,
}

impl EngineLoadError {
    /// Whether the request timed out.
    #[must_use]
    pub fn timed_out(&self) -> bool {
        matches!(self, Self::TimedOut(_))
    }
}

/// Path and query at which an engine reports its load.
#[must_use]
pub fn load_path(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::Sglang => "/v1/loads?include=core,disagg",
        EngineKind::Vllm => "/metrics",
    }
}

/// Requests the load from the engine at `base`, `http://host:port` or `https://host:port`.
///
/// # Errors
/// [`EngineLoadError`].
pub async fn fetch_load(
    client: &reqwest::Client,
    engine: EngineKind,
    base: &str,
    api_key: Option<&str>,
) -> Result<RankLoads, EngineLoadError> {
    let url = format!("{base}{}", load_path(engine));
    let failed = |error: reqwest::Error| match error.is_timeout() {
        true => EngineLoadError::TimedOut(url.clone()),
        false => EngineLoadError::Exchange { url: url.clone(), source: error },
    };
    let missing = |source| EngineLoadError::Missing { url: url.clone(), source };
    let mut request = client.get(&url).timeout(LOAD_QUERY_TIMEOUT);
    if let Some(key) = api_key {
        request = request.bearer_auth(key);
    }
    let mut response = moongate_runtime::net::send_request(request).await.map_err(failed)?;
    let status = response.status();
    if status.is_client_error() {
        return Err(missing(MissingLoadError::Rejected(status)));
    }
    if !status.is_success() {
        return Err(EngineLoadError::Status { url, status });
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_LOAD_BYTES {
            return Err(missing(MissingLoadError::TooLarge));
        }
    }
    parse_load(engine, &body).map_err(missing)
}

/// Parses the response body of [`load_path`].
///
/// # Errors
/// [`MissingLoadError`] if the body does not contain the load.
pub fn parse_load(engine: EngineKind, body: &[u8]) -> Result<RankLoads, MissingLoadError> {
    match engine {
        EngineKind::Sglang => sglang(body),
        EngineKind::Vllm => vllm(&String::from_utf8_lossy(body)),
    }
}

/// SGLang's `/v1/loads`: an entry for each data-parallel rank.
fn sglang(body: &[u8]) -> Result<RankLoads, MissingLoadError> {
    #[derive(Deserialize)]
    struct SglangLoads {
        loads: Vec<SglangRankLoad>,
    }
    #[derive(Deserialize)]
    #[serde(default)]
    #[derive(Default)]
    struct SglangRankLoad {
        dp_rank: u32,
        num_running_reqs: u32,
        num_waiting_reqs: u32,
        num_waiting_uncached_tokens: u64,
        num_used_tokens: u64,
        max_total_num_tokens: u64,
        disaggregation: Option<SglangDisaggregationQueues>,
    }
    #[derive(Deserialize, Default)]
    #[serde(default)]
    struct SglangDisaggregationQueues {
        prefill_bootstrap_queue_reqs: u32,
        prefill_inflight_queue_reqs: u32,
        decode_prealloc_queue_reqs: u32,
        decode_transfer_queue_reqs: u32,
        decode_retracted_queue_reqs: u32,
    }
    let SglangLoads { mut loads } = serde_json::from_slice(body)?;
    loads.sort_by_key(|rank| rank.dp_rank);
    let loads = loads.into_iter().take(MAX_RANKS as usize).map(|rank| {
        let queues = rank.disaggregation.unwrap_or_default();
        let handing_over = [
            queues.prefill_bootstrap_queue_reqs,
            queues.prefill_inflight_queue_reqs,
            queues.decode_prealloc_queue_reqs,
            queues.decode_transfer_queue_reqs,
            queues.decode_retracted_queue_reqs,
        ];
        EngineLoad {
            running: rank.num_running_reqs,
            waiting: rank.num_waiting_reqs,
            waiting_uncached_tokens: rank.num_waiting_uncached_tokens,
            used_tokens: rank.num_used_tokens,
            capacity_tokens: rank.max_total_num_tokens,
            handing_over: handing_over.into_iter().fold(0, u32::saturating_add),
        }
    });
    Ok(RankLoads(loads.collect()))
}

/// Samples of one rank in vLLM's metrics.
#[derive(Default)]
struct VllmRankMetrics {
    running: f64,
    waiting: f64,
    /// Used share of the KV cache; `None` if not reported.
    cache_usage: Option<f64>,
    capacity_tokens: u64,
}

/// vLLM's metrics: samples of each data-parallel rank, by the label `engine`. They do not contain the number of queued tokens.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what the type holds")]
fn vllm(text: &str) -> Result<RankLoads, MissingLoadError> {
    let mut ranks: BTreeMap<u32, VllmRankMetrics> = BTreeMap::new();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('{') else { continue };
        if !VLLM_LOAD_METRICS.contains(&name) {
            continue;
        }
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let value: f64 = value.trim().parse().unwrap_or(0.0);
        let number = label(labels, "engine").and_then(|engine| engine.parse().ok()).unwrap_or(0);
        if ranks.len() >= MAX_RANKS as usize && !ranks.contains_key(&number) {
            continue;
        }
        let rank = ranks.entry(number).or_default();
        match name {
            RUNNING => rank.running += value,
            WAITING => rank.waiting += value,
            CACHE_USAGE => rank.cache_usage = Some(value),
            _ => rank.capacity_tokens = rank.capacity_tokens.saturating_add(capacity_tokens(labels)),
        }
    }
    if ranks.values().all(|rank| rank.cache_usage.is_none()) {
        return Err(MissingLoadError::NoCacheUsage);
    }
    let load = |rank: &VllmRankMetrics| {
        let capacity = rank.capacity_tokens;
        let used = (rank.cache_usage.unwrap_or(0.0).clamp(0.0, 1.0) * capacity as f64) as u64;
        EngineLoad {
            running: rank.running as u32,
            waiting: rank.waiting as u32,
            used_tokens: used.min(capacity),
            capacity_tokens: capacity,
            ..EngineLoad::default()
        }
    };
    Ok(RankLoads(ranks.values().map(load).collect()))
}

/// Capacity of the KV cache by the labels of vLLM's cache configuration.
fn capacity_tokens(labels: &str) -> u64 {
    let number = |name| label(labels, name).and_then(|text| text.parse::<u64>().ok());
    // Older releases report blocks only.
    let blocks = || Some(number("block_size")?.saturating_mul(number("num_gpu_blocks")?));
    number("kv_cache_size_tokens").or_else(blocks).unwrap_or(0)
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split(',').find_map(|pair| {
        let (found, value) = pair.split_once('=')?;
        (found == name).then(|| value.trim_matches('"'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sglang_reports_each_rank() {
        let rank = concat!(
            r#"{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"num_waiting_uncached_tokens":500,"num_used_tokens":70,"#,
            r#""max_total_num_tokens":1000,"disaggregation":{"mode":"prefill","prefill_inflight_queue_reqs":3},"more":[1]}"#
        );
        let idle = r#"{"dp_rank":1,"max_total_num_tokens":1000}"#;
        let loads = sglang(format!(r#"{{"timestamp":1.5,"loads":[{idle},{rank}]}}"#).as_bytes()).unwrap();
        assert_eq!((loads.of_rank(0, 2).running, loads.of_rank(1, 2).running), (2, 0));
        let expected = EngineLoad {
            running: 2,
            waiting: 1,
            waiting_uncached_tokens: 500,
            used_tokens: 70,
            capacity_tokens: 2000,
            handing_over: 3,
        };
        assert_eq!(loads.total(), expected);
        assert!(sglang(b"[]").is_err());
    }

    #[test]
    fn metrics_are_read() {
        let text = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n";
        let load = vllm(text).unwrap().of_rank(0, 1);
        assert_eq!((load.running, load.waiting, load.used_tokens, load.capacity_tokens), (3, 2, 400, 1600));
        assert!(vllm("nothing\n").is_err());
    }

    /// A node of a hybrid deployment numbers its ranks from the number of the first one.
    #[test]
    fn vllm_reports_each_rank() {
        let rank = |engine: u32, running: u32| {
            format!(
                "vllm:num_requests_running{{engine=\"{engine}\"}} {running}.0\n\
                 vllm:kv_cache_usage_perc{{engine=\"{engine}\"}} 0.5\n\
                 vllm:cache_config_info{{engine=\"{engine}\",kv_cache_size_tokens=\"100\"}} 1.0\n"
            )
        };
        let loads = vllm(&(rank(10, 7) + &rank(9, 2))).unwrap();
        let ranks = [0, 1].map(|rank| loads.of_rank(rank, 2));
        assert_eq!(
            ranks.map(|load| (load.running, load.used_tokens, load.capacity_tokens)),
            [(2, 50, 100), (7, 50, 100)]
        );
        let shares = [0, 1, 2].map(|rank| loads.of_rank(rank, 3).running);
        assert_eq!(shares, [3, 3, 3], "another number of ranks: the total is divided");
        assert_eq!((loads.of_rank(0, 4).running, loads.of_rank(3, 4).running), (3, 2));
    }

    #[test]
    fn impossible_capacities_of_ranks_do_not_overflow() {
        let rank = "vllm:cache_config_info{kv_cache_size_tokens=\"18446744073709551615\"} 1.0\n";
        let text = format!("vllm:kv_cache_usage_perc{{engine=\"0\"}} 1.0\n{rank}{rank}");
        let load = vllm(&text).unwrap().total();
        assert_eq!((load.used_tokens, load.capacity_tokens), (u64::MAX, u64::MAX));
    }
}

//! Polls and parses the load that an engine reports.

use std::time::Duration;

use reqwest::StatusCode;
use serde::Deserialize;

use crate::error::root_cause;
use crate::topology::EngineKind;

/// Time limit for one request, body included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest accepted response in bytes.
const MAX_BYTES: usize = 4 << 20;

/// Load of an engine, summed over its data-parallel ranks.
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
    #[error("more than {MAX_BYTES} bytes")]
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

/// Requests the load from the engine at `base`, `http://host:port` or `https://host:port`.
///
/// # Errors
/// [`EngineLoadError`].
pub async fn fetch_load(
    client: &reqwest::Client,
    engine: EngineKind,
    base: &str,
    api_key: Option<&str>,
) -> Result<EngineLoad, EngineLoadError> {
    let path = match engine {
        EngineKind::Sglang => "/v1/loads?include=core,disagg",
        EngineKind::Vllm => "/metrics",
    };
    let url = format!("{base}{path}");
    let failed = |error: reqwest::Error| match error.is_timeout() {
        true => EngineLoadError::TimedOut(url.clone()),
        false => EngineLoadError::Exchange { url: url.clone(), source: error },
    };
    let missing = |source| EngineLoadError::Missing { url: url.clone(), source };
    let mut request = client.get(&url).timeout(REQUEST_TIMEOUT);
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
        if body.len() > MAX_BYTES {
            return Err(missing(MissingLoadError::TooLarge));
        }
    }
    parse_load(engine, &body).map_err(missing)
}

/// Parses the response body of [`fetch_load`].
///
/// # Errors
/// [`MissingLoadError`] if the body does not contain the load.
pub fn parse_load(engine: EngineKind, body: &[u8]) -> Result<EngineLoad, MissingLoadError> {
    match engine {
        EngineKind::Sglang => sglang(body),
        EngineKind::Vllm => vllm(&String::from_utf8_lossy(body)),
    }
}

/// SGLang's `/v1/loads`: an entry for each data-parallel rank.
fn sglang(body: &[u8]) -> Result<EngineLoad, MissingLoadError> {
    #[derive(Deserialize)]
    struct SglangLoads {
        loads: Vec<SglangRankLoad>,
    }
    #[derive(Deserialize)]
    #[serde(default)]
    #[derive(Default)]
    struct SglangRankLoad {
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
    let SglangLoads { loads } = serde_json::from_slice(body)?;
    let mut sum = EngineLoad::default();
    for rank in loads {
        sum.running = sum.running.saturating_add(rank.num_running_reqs);
        sum.waiting = sum.waiting.saturating_add(rank.num_waiting_reqs);
        sum.waiting_uncached_tokens =
            sum.waiting_uncached_tokens.saturating_add(rank.num_waiting_uncached_tokens);
        sum.used_tokens = sum.used_tokens.saturating_add(rank.num_used_tokens);
        sum.capacity_tokens = sum.capacity_tokens.saturating_add(rank.max_total_num_tokens);
        let queues = rank.disaggregation.unwrap_or_default();
        for queue in [
            queues.prefill_bootstrap_queue_reqs,
            queues.prefill_inflight_queue_reqs,
            queues.decode_prealloc_queue_reqs,
            queues.decode_transfer_queue_reqs,
            queues.decode_retracted_queue_reqs,
        ] {
            sum.handing_over = sum.handing_over.saturating_add(queue);
        }
    }
    Ok(sum)
}

/// vLLM's metrics: a line for each data-parallel engine. They do not contain the number of queued tokens.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what the type holds")]
fn vllm(text: &str) -> Result<EngineLoad, MissingLoadError> {
    let (mut running, mut waiting, mut usage, mut engines, mut capacity) = (0.0, 0.0, 0.0, 0.0, 0);
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('{') else { continue };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let value: f64 = value.trim().parse().unwrap_or(0.0);
        match name {
            "vllm:num_requests_running" => running += value,
            "vllm:num_requests_waiting" => waiting += value,
            "vllm:kv_cache_usage_perc" => {
                usage += value;
                engines += 1.0;
            }
            "vllm:cache_config_info" => {
                let number = |name| label(labels, name).and_then(|text| text.parse::<u64>().ok());
                // Older releases report blocks only.
                let blocks = || Some(number("block_size")?.saturating_mul(number("num_gpu_blocks")?));
                let tokens = number("kv_cache_size_tokens").or_else(blocks).unwrap_or(0);
                capacity = u64::saturating_add(capacity, tokens);
            }
            _ => {}
        }
    }
    if engines == 0.0 {
        return Err(MissingLoadError::NoCacheUsage);
    }
    let share = (usage / engines).clamp(0.0, 1.0);
    Ok(EngineLoad {
        running: running as u32,
        waiting: waiting as u32,
        used_tokens: (share * capacity as f64) as u64,
        capacity_tokens: capacity,
        ..EngineLoad::default()
    })
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
    fn ranks_are_added() {
        let rank = concat!(
            r#"{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"num_waiting_uncached_tokens":500,"num_used_tokens":70,"#,
            r#""max_total_num_tokens":1000,"disaggregation":{"mode":"prefill","prefill_inflight_queue_reqs":3},"more":[1]}"#
        );
        let load = sglang(format!(r#"{{"timestamp":1.5,"loads":[{rank},{rank}]}}"#).as_bytes()).unwrap();
        let expected = EngineLoad {
            running: 4,
            waiting: 2,
            waiting_uncached_tokens: 1000,
            used_tokens: 140,
            capacity_tokens: 2000,
            handing_over: 6,
        };
        assert_eq!(load, expected);
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
        let load = vllm(text).unwrap();
        assert_eq!((load.running, load.waiting, load.used_tokens, load.capacity_tokens), (3, 2, 400, 1600));
        assert!(vllm("nothing\n").is_err());
    }

    #[test]
    fn impossible_capacities_of_ranks_do_not_overflow() {
        let rank = "vllm:cache_config_info{kv_cache_size_tokens=\"18446744073709551615\"} 1.0\n";
        let text = format!("vllm:kv_cache_usage_perc{{engine=\"0\"}} 1.0\n{rank}{rank}");
        let load = vllm(&text).unwrap();
        assert_eq!((load.used_tokens, load.capacity_tokens), (u64::MAX, u64::MAX));
    }
}

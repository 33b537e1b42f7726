//! `/metrics` with the engines' own metric names.

use std::fmt::Write as _;

use super::api_sglang::fraction;
use super::rank::SimRank;
use super::stats::SimStats;
use super::{SimEngineState, SimRole, VllmConnector};

/// Collects lines of the Prometheus text format.
struct PrometheusPage {
    text: String,
    labels: String,
}

impl PrometheusPage {
    fn metric(&mut self, kind: &str, name: &str, values: &[(&str, f64)]) {
        // A counter's family name has no `_total`, as Python's client writes it.
        let family = name.strip_suffix("_total").filter(|_| kind == "counter").unwrap_or(name);
        let _ = writeln!(self.text, "# HELP {family} {family}\n# TYPE {family} {kind}");
        for (extra, value) in values {
            let comma = if extra.is_empty() { "" } else { "," };
            let _ = writeln!(self.text, "{name}{{{}{comma}{extra}}} {value:?}", self.labels);
        }
    }

    /// A gauge with one sample for each data-parallel rank, in the label `engine`.
    fn rank_gauge(&mut self, name: &str, ranks: &[RankMetrics<'_>], value: impl Fn(&RankMetrics<'_>) -> f64) {
        let _ = writeln!(self.text, "# HELP {name} {name}\n# TYPE {name} gauge");
        for rank in ranks {
            let RankMetrics { number, labels, .. } = rank;
            let _ = writeln!(self.text, "{name}{{engine=\"{number}\",{labels}}} {:?}", value(rank));
        }
    }

    fn gauge(&mut self, name: &str, value: f64) {
        self.metric("gauge", name, &[("", value)]);
    }

    fn counter(&mut self, name: &str, value: u64) {
        self.metric("counter", name, &[("", number(value))]);
    }

    /// A histogram with only a count and a sum.
    fn histogram(&mut self, name: &str, count: u64, sum: f64) {
        let labels = &self.labels;
        let count = number(count);
        let _ = writeln!(
            self.text,
            "# HELP {name} {name}\n# TYPE {name} histogram\n\
             {name}_bucket{{{labels},le=\"+Inf\"}} {count:?}\n\
             {name}_count{{{labels}}} {count:?}\n{name}_sum{{{labels}}} {sum:?}"
        );
    }
}

/// What vLLM reports of one data-parallel rank.
struct RankMetrics<'a> {
    number: u64,
    /// Labels besides the rank's number.
    labels: &'a str,
    running: u64,
    waiting: u64,
    transferring: u64,
    used_tokens: u64,
    capacity_tokens: u64,
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus values are floats")]
fn number(value: u64) -> f64 {
    value as f64
}

fn cached(stats: &SimStats) -> u64 {
    stats.cached_device_tokens + stats.cached_host_tokens + stats.cached_storage_tokens
}

fn cache_usage(engine: &SimEngineState) -> [u64; 4] {
    engine.ranks.iter().fold([0; 4], |sum, rank| {
        let cache = rank.cache.lock();
        let ((used, capacity), (host_used, host)) = (cache.device_usage(), cache.host_usage());
        [sum[0] + used, sum[1] + capacity, sum[2] + host_used, sum[3] + host]
    })
}

/// Outcomes of a real store's objects. Real engines have no such metric.
fn write_store_objects(page: &mut PrometheusPage, stats: &SimStats) {
    page.metric(
        "counter",
        "sim:store_objects_total",
        &[
            ("outcome=\"hit\"", number(stats.store_hits)),
            ("outcome=\"miss\"", number(stats.store_misses)),
            ("outcome=\"corrupt\"", number(stats.store_corrupt)),
            ("outcome=\"failed\"", number(stats.store_failures)),
            ("outcome=\"put\"", number(stats.store_puts)),
            ("outcome=\"put_failed\"", number(stats.store_put_failures)),
        ],
    );
}

pub(crate) fn sglang(engine: &SimEngineState) -> String {
    let stats = engine.stats.snapshot();
    let [used, capacity, host_used, host] = cache_usage(engine);
    let kind = match engine.options.role {
        SimRole::Prefill => "prefill",
        SimRole::Decode => "decode",
        SimRole::Plain => "unified",
    };
    let labels = format!(
        "engine_type=\"{kind}\",model_name=\"{}\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"",
        engine.options.model
    );
    let mut page = PrometheusPage { text: String::new(), labels };
    let prefill = engine.options.role == SimRole::Prefill;
    let transferring = number(stats.transferring);
    page.gauge("sglang:max_total_num_tokens", number(capacity));
    page.gauge("sglang:page_size", number(engine.options.page_size as u64));
    page.gauge("sglang:context_len", number(engine.options.context_tokens as u64));
    page.gauge("sglang:num_running_reqs", number(stats.running));
    page.gauge("sglang:num_queue_reqs", number(stats.waiting));
    page.gauge("sglang:token_usage", fraction(used, capacity));
    page.gauge("sglang:num_used_tokens", number(used));
    page.gauge("sglang:cache_hit_rate", fraction(cached(&stats), stats.prompt_tokens));
    page.gauge("sglang:gen_throughput", 0.0);
    page.gauge("sglang:utilization", fraction(stats.running, engine.options.max_running as u64));
    page.gauge("sglang:num_prefill_bootstrap_queue_reqs", number(stats.bootstrapping));
    page.gauge("sglang:num_prefill_inflight_queue_reqs", if prefill { transferring } else { 0.0 });
    page.gauge("sglang:num_decode_prealloc_queue_reqs", 0.0);
    page.gauge("sglang:num_decode_transfer_queue_reqs", if prefill { 0.0 } else { transferring });
    page.gauge("sglang:pending_prealloc_token_usage", 0.0);
    page.gauge("sglang:kv_transfer_speed_gb_s", engine.options.service.transfer_bytes_per_s / 1e9);
    page.gauge("sglang:kv_transfer_latency_ms", engine.options.service.transfer_latency_s * 1e3);
    page.gauge("sglang:hicache_host_used_tokens", number(host_used));
    page.gauge("sglang:hicache_host_total_tokens", number(host));
    page.counter("sglang:num_transfer_failed_reqs_total", stats.failed);
    page.counter("sglang:storage_prefetch_hit_tokens_total", stats.cached_storage_tokens);
    page.counter("sglang:prompt_tokens_total", stats.prompt_tokens);
    page.counter("sglang:generation_tokens_total", stats.completion_tokens);
    page.counter("sglang:num_requests_total", stats.finished);
    page.counter("sglang:num_aborted_requests_total", stats.aborted_by_disconnect + stats.aborted_by_rid);
    page.metric(
        "counter",
        "sglang:cached_tokens_total",
        &[
            ("cache_source=\"device\"", number(stats.cached_device_tokens)),
            ("cache_source=\"host\"", number(stats.cached_host_tokens)),
            ("cache_source=\"storage\"", number(stats.cached_storage_tokens)),
        ],
    );
    write_store_objects(&mut page, &stats);
    page.text
}

pub(crate) fn vllm(engine: &SimEngineState) -> String {
    let stats = engine.stats.snapshot();
    let model_label = format!("model_name=\"{}\"", engine.options.model);
    let ranks = rank_metrics(engine, &stats, &model_label);
    let mut page = PrometheusPage { text: String::new(), labels: format!("engine=\"0\",{model_label}") };
    let prompt_tokens = stats.prompt_tokens + stats.transferred_tokens;
    let external = stats.cached_storage_tokens + stats.transferred_tokens;
    page.rank_gauge("vllm:num_requests_running", &ranks, |rank| number(rank.running));
    page.rank_gauge("vllm:num_requests_waiting", &ranks, |rank| number(rank.waiting + rank.transferring));
    page.metric(
        "gauge",
        "vllm:num_requests_waiting_by_reason",
        &[
            ("reason=\"capacity\"", number(stats.waiting)),
            ("reason=\"deferred\"", number(stats.transferring)),
        ],
    );
    page.rank_gauge("vllm:kv_cache_usage_perc", &ranks, |rank| {
        fraction(rank.used_tokens, rank.capacity_tokens)
    });
    page.counter("vllm:prefix_cache_queries_total", prompt_tokens);
    page.counter("vllm:prefix_cache_hits_total", stats.cached_device_tokens);
    page.counter(
        "vllm:external_prefix_cache_queries_total",
        prompt_tokens - stats.cached_device_tokens.min(prompt_tokens),
    );
    page.counter("vllm:external_prefix_cache_hits_total", external);
    page.counter("vllm:num_preemptions_total", 0);
    page.counter("vllm:prompt_tokens_total", prompt_tokens);
    page.metric(
        "counter",
        "vllm:prompt_tokens_by_source_total",
        &[
            (
                "source=\"local_compute\"",
                number(stats.prompt_tokens - cached(&stats).min(stats.prompt_tokens)),
            ),
            ("source=\"local_cache_hit\"", number(stats.cached_device_tokens + stats.cached_host_tokens)),
            ("source=\"external_kv_transfer\"", number(external)),
        ],
    );
    page.counter("vllm:generation_tokens_total", stats.completion_tokens);
    page.metric(
        "counter",
        "vllm:request_success_total",
        &[
            ("finished_reason=\"stop\"", 0.0),
            ("finished_reason=\"length\"", number(stats.finished)),
            ("finished_reason=\"abort\"", 0.0),
            ("finished_reason=\"error\"", number(stats.failed)),
        ],
    );
    let config = cache_config(engine);
    let of_config: Vec<RankMetrics<'_>> =
        ranks.into_iter().map(|rank| RankMetrics { labels: &config, ..rank }).collect();
    page.rank_gauge("vllm:cache_config_info", &of_config, |_| 1.0);
    write_connector(&mut page, engine, &stats);
    write_store_objects(&mut page, &stats);
    page.text
}

/// The ranks of an engine. Its requests are counted as a whole, so each rank shows its share.
fn rank_metrics<'a>(engine: &SimEngineState, stats: &SimStats, labels: &'a str) -> Vec<RankMetrics<'a>> {
    let count = engine.ranks.len() as u64;
    let of_rank = |(number, rank): (u64, &SimRank)| {
        let share = |requests: u64| requests / count + u64::from(requests % count > number);
        let (used_tokens, capacity_tokens) = rank.cache.lock().device_usage();
        RankMetrics {
            number,
            labels,
            running: share(stats.running),
            waiting: share(stats.waiting),
            transferring: share(stats.transferring),
            used_tokens,
            capacity_tokens,
        }
    };
    (0..).zip(&engine.ranks).map(of_rank).collect()
}

/// Labels with the block size and cache configuration.
fn cache_config(engine: &SimEngineState) -> String {
    let (block, tokens) = (engine.options.page_size, engine.options.device_tokens);
    format!(
        "_block_size_resolved=\"True\",block_size=\"{block}\",cache_dtype=\"auto\",effective_attention_block_size=\"{block}\",\
         enable_prefix_caching=\"True\",hash_block_size=\"None\",kv_cache_size_tokens=\"{tokens}\",num_gpu_blocks=\"{}\",\
         prefix_caching_hash_algo=\"sha256_cbor\",sliding_window=\"None\"",
        tokens / block
    )
}

fn write_connector(page: &mut PrometheusPage, engine: &SimEngineState, stats: &SimStats) {
    let model = &engine.options.service;
    let bytes = stats.transferred_tokens.saturating_mul(model.kv_bytes_per_token);
    let seconds = number(bytes) / model.transfer_bytes_per_s.max(1.0)
        + model.transfer_latency_s * number(stats.kv_received);
    match engine.options.connector {
        VllmConnector::Nixl => {
            page.histogram("vllm:nixl_xfer_time_seconds", stats.kv_received, seconds);
            page.histogram("vllm:nixl_bytes_transferred", stats.kv_received, number(bytes));
            page.counter("vllm:nixl_num_failed_transfers_total", 0);
            page.counter("vllm:nixl_num_kv_expired_reqs_total", 0);
        }
        VllmConnector::Mooncake => {
            page.histogram("vllm:mooncake_xfer_time_seconds", stats.kv_received, seconds);
            page.histogram("vllm:mooncake_bytes_transferred", stats.kv_received, number(bytes));
            page.counter("vllm:mooncake_num_failed_transfers_total", 0);
            page.counter("vllm:mooncake_num_failed_recvs_total", 0);
            page.counter("vllm:mooncake_num_kv_expired_reqs_total", 0);
        }
        VllmConnector::Store => {
            let read = stats.cached_storage_tokens;
            let keys = read / engine.options.page_size as u64;
            let extra = "operation=\"load_get\",status=\"ok\"";
            let bytes = read.saturating_mul(model.kv_bytes_per_token);
            page.metric("counter", "vllm:mooncake_store_operation_keys_total", &[(extra, number(keys))]);
            page.metric("counter", "vllm:mooncake_store_operation_bytes_total", &[(extra, number(bytes))]);
            page.metric("counter", "vllm:mooncake_store_operation_failed_keys_total", &[(extra, 0.0)]);
        }
    }
}

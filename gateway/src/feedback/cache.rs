//! Accuracy of cache-hit predictions, and the event feeds that they depend on.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use moongate_runtime::metrics::MetricsRegistry;
use moongate_scheduler::TierHits;
use moongate_telemetry::TraceId;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::prediction_causes::{PredictedEngine, PredictionCauseMetrics};
use crate::kv_index::{HashRuleStatus, LeftOutBlocks, PromptCheckpoints};
use crate::request_body::InferenceApi;

/// Error of a prediction as a share of the prompt.
const ERROR_BUCKETS: [f64; 8] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Smaller predictions are not counted as refuted: engines round down to blocks, and skip short prefixes.
const MIN_REFUTED_TOKENS: u64 = 256;
/// Most models with their own label; the others share [`OTHER_MODELS`].
const MAX_MODELS: usize = 100;
const OTHER_MODELS: &str = "other";
/// A prediction that is wrong by more than this part of the prompt is traced.
const MISPREDICTED_DIVISOR: u64 = 4;
/// Seconds between two log lines about false predictions.
const WARN_INTERVAL_S: i64 = 30;

/// Predicted hits of the engine that computes a prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExpectedHits {
    pub(crate) hits: TierHits,
    /// Prompt tokens as counted by the gateway.
    pub(crate) input_tokens: u32,
    /// Tokens among `hits` that earlier requests are computing on the engine.
    pub(crate) pending_tokens: u32,
    /// Cached tokens that are not among `hits`, because the engine computes its last cached block again.
    pub(crate) dropped_tokens: u32,
    /// Whether `hits` has chunks of LMCache.
    pub(crate) in_chunks: bool,
    pub(crate) engine: Option<PredictedEngine>,
    /// What the end of the request shows about later ones with the same prompt.
    pub(crate) checkpoints: Option<PromptCheckpoints>,
}

impl ExpectedHits {
    /// Adds tokens that earlier requests are computing on the engine. The last block of them is the one that the engine drops.
    pub(crate) fn with_pending(mut self, pending_tokens: u32) -> Self {
        let pending_tokens = pending_tokens.saturating_sub(self.dropped_tokens);
        self.pending_tokens = pending_tokens;
        self.hits.l1_tokens = self.hits.l1_tokens.saturating_add(pending_tokens);
        self.hits.l3_tokens = self.hits.l3_tokens.saturating_sub(pending_tokens);
        self
    }
}

/// Metrics of engines' KV-event feeds.
#[derive(Debug)]
pub(crate) struct EventFeedMetrics {
    pub(crate) connected: Gauge,
    pub(crate) applied: Counter,
    pub(crate) lost: Counter,
    pub(crate) undecodable: Counter,
    pub(crate) replays: Counter,
    hash_rules: Family<HashRuleLabel, Counter>,
    left_out: Family<LeftOutLabel, Counter>,
}

/// Seconds from an event of the master until it is applied: one response of the master, plus the difference of the two clocks.
const LAG_BUCKETS: [f64; 11] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

/// State of the gateway's view of the store.
#[derive(Debug)]
pub(crate) struct StoreViewMetrics {
    pub(crate) nodes: Gauge,
    pub(crate) objects: Gauge,
    pub(crate) scans: Counter,
    pub(crate) confirmed: Counter,
    pub(crate) unconfirmed: Counter,
    pub(crate) events_in_sync: Gauge,
    pub(crate) events: Counter,
    pub(crate) undecodable_events: Counter,
    pub(crate) event_gaps: Counter,
    pub(crate) event_lag: Histogram,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnpredictedLabels {
    reason: &'static str,
}

/// Reasons for which blocks are not indexed.
const OVER_CAPACITY: &str = "over_capacity";
const UNKNOWN_CONTENT: &str = "unknown_content";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LeftOutLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HashRuleLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    tier: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ComparedLabels {
    model: String,
    api: &'static str,
}

/// Accuracy of predictions, compared with engines' reports.
#[derive(Debug)]
pub(crate) struct PredictionMetrics {
    unpredicted: Family<UnpredictedLabels, Counter>,
    predicted: Family<TierLabel, Counter>,
    compared: Family<ComparedLabels, Counter>,
    missed: Family<ComparedLabels, Counter>,
    false_hits: Family<ComparedLabels, Counter>,
    refuted: Family<ComparedLabels, Counter>,
    /// Models that have their own label.
    models: Mutex<HashSet<String>>,
    error: Histogram,
    causes: PredictionCauseMetrics,
    /// Seconds since 1970 of the last log line about a false prediction.
    last_warned: AtomicI64,
}

impl EventFeedMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let hash_rules: Family<HashRuleLabel, Counter> = Family::default();
        // Created even at 0, so that rates can be computed.
        for outcome in ["confirmed", "other_rule", "unknown_rule"] {
            hash_rules.get_or_create(&HashRuleLabel { outcome }).inc_by(0);
        }
        let left_out: Family<LeftOutLabel, Counter> = Family::default();
        for reason in [OVER_CAPACITY, UNKNOWN_CONTENT] {
            left_out.get_or_create(&LeftOutLabel { reason }).inc_by(0);
        }
        Self {
            connected: registry.register(
                "moongate_kv_events_connections",
                "Connections to engines' event sockets",
                Gauge::default(),
            ),
            applied: registry.register(
                "moongate_kv_events_messages_total",
                "Messages applied to the index",
                Counter::default(),
            ),
            lost: registry.register(
                "moongate_kv_events_messages_lost_total",
                "Messages that were missed and could not be replayed",
                Counter::default(),
            ),
            undecodable: registry.register(
                "moongate_kv_events_undecodable_total",
                "Messages and events that could not be decoded",
                Counter::default(),
            ),
            replays: registry.register(
                "moongate_kv_events_replays_total",
                "Replays requested for missed messages",
                Counter::default(),
            ),
            hash_rules: registry.register(
                "moongate_kv_events_hash_rules_total",
                "Comparisons of the hashes in an engine's events with those of predictions that had a new result",
                hash_rules,
            ),
            left_out: registry.register(
                "moongate_kv_events_left_out_blocks_total",
                "Stored blocks that are not indexed, of engines whose blocks are indexed by the tokens in their events: more than 1,048,576 per rank (`over_capacity`), or blocks that depend on more than tokens or follow unknown ones (`unknown_content`)",
                left_out,
            ),
        }
    }

    /// Stored blocks were not indexed.
    pub(crate) fn record_left_out(&self, blocks: LeftOutBlocks) {
        for (reason, blocks) in [(OVER_CAPACITY, blocks.over_capacity), (UNKNOWN_CONTENT, blocks.unknown)] {
            if blocks > 0 {
                self.left_out.get_or_create(&LeftOutLabel { reason }).inc_by(blocks);
            }
        }
    }

    /// The hashes of an engine were compared with those that predictions compute, with a new result.
    pub(crate) fn record_hash_rule(&self, status: &HashRuleStatus) {
        let outcome = match status {
            HashRuleStatus::Unchecked => return,
            HashRuleStatus::Confirmed => "confirmed",
            HashRuleStatus::Different { actual: Some(_) } => "other_rule",
            HashRuleStatus::Different { actual: None } => "unknown_rule",
        };
        self.hash_rules.get_or_create(&HashRuleLabel { outcome }).inc();
    }
}

impl StoreViewMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            nodes: registry.register("moongate_store_nodes", "Live store nodes", Gauge::default()),
            objects: registry.register(
                "moongate_store_objects",
                "Objects of known blocks found by the last scan of the store's keys. A full index adds no further blocks from a scan",
                Gauge::default(),
            ),
            scans: registry.register(
                "moongate_store_scans_total",
                "Complete scans of the store's keys",
                Counter::default(),
            ),
            confirmed: registry.register(
                "moongate_store_confirmations_total",
                "Prompts whose blocks the master confirmed",
                Counter::default(),
            ),
            unconfirmed: registry.register(
                "moongate_store_confirmation_failures_total",
                "Prompts for which the master did not answer in time",
                Counter::default(),
            ),
            events: registry.register(
                "moongate_store_events_total",
                "Events of the store's master about objects of known blocks (`--mooncake-events`)",
                Counter::default(),
            ),
            undecodable_events: registry.register(
                "moongate_store_events_undecodable_total",
                "Messages and events of the master that could not be decoded",
                Counter::default(),
            ),
            event_gaps: registry.register(
                "moongate_store_event_gaps_total",
                "Gaps in the event stream. Known blocks are kept, and all keys are scanned again",
                Counter::default(),
            ),
            events_in_sync: registry.register(
                "moongate_store_events_in_sync",
                "1 while the event stream is connected and complete. While it is 0, all keys are scanned every 10 s",
                Gauge::default(),
            ),
            event_lag: registry.register(
                "moongate_store_event_lag_seconds",
                "Time from an event until it is applied. The event's time is the master's, so a clock difference is included",
                Histogram::new(LAG_BUCKETS),
            ),
        }
    }
}

impl PredictionMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            unpredicted: registry.register(
                "moongate_unpredicted_requests_total",
                "Requests without a prediction: `no_cache_info` (the engines report too little about their caches), `no_tokenizer` (and engines are not queried), `not_single_prompt` (no prompt, more than 1,024, or several texts without a local tokenizer), `prompt_memory` (`--prompt-memory` is exhausted), `late` (not tokenized within `--prompt-timeout`) or `unsupported_prompt` (only the engine can compute its tokens). Without a local tokenizer, when engines are queried: `tokenize_too_large` (the body), `tokenize_not_offered` (no available engine supports it for such a request), `tokenize_busy` (eight concurrent queries per engine are in progress), `tokenize_timeout`, `tokenize_rejected` (the engine rejected the request as invalid) or `tokenize_failed`",
                Family::default(),
            ),
            predicted: registry.register(
                "moongate_prediction_cached_tokens_total",
                "Predicted hits in tokens, of requests whose hits the engine reported: `l1` (device), `l2` (host), `l3` (store)",
                Family::default(),
            ),
            compared: registry.register(
                "moongate_prediction_compared_tokens_total",
                "Prompt tokens of requests whose hits the engine reported",
                Family::default(),
            ),
            missed: registry.register(
                "moongate_prediction_false_negative_tokens_total",
                "Tokens found in a cache but not predicted",
                Family::default(),
            ),
            false_hits: registry.register(
                "moongate_prediction_false_positive_tokens_total",
                "Tokens predicted but not found in a cache. Accuracy is 1 − (false negatives + false positives) / compared",
                Family::default(),
            ),
            refuted: registry.register(
                "moongate_prediction_refuted_requests_total",
                "Requests with at least 256 predicted tokens and none found. If this grows, hash scheme, block size or release do not match; the log says what to check",
                Family::default(),
            ),
            models: Mutex::default(),
            error: registry.register(
                "moongate_prediction_error",
                "Prediction error as a share of the prompt",
                Histogram::new(ERROR_BUCKETS),
            ),
            causes: PredictionCauseMetrics::register(registry),
            last_warned: AtomicI64::new(0),
        }
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.unpredicted.get_or_create(&UnpredictedLabels { reason: "" }).inc_by(0);
        self.predicted.get_or_create(&TierLabel { tier: "" }).inc_by(0);
        for family in [&self.compared, &self.missed, &self.false_hits, &self.refuted] {
            family.get_or_create(&ComparedLabels { model: String::new(), api: "" }).inc_by(0);
        }
        self.causes.init_all_series();
    }

    /// The label of a model. Each LoRA adapter is a model: above [`MAX_MODELS`], the others share one label.
    fn label(&self, model: &str, api: InferenceApi) -> ComparedLabels {
        let mut labelled = self.models.lock();
        let has_own_label =
            labelled.contains(model) || (labelled.len() < MAX_MODELS && labelled.insert(model.to_owned()));
        let model = if has_own_label { model } else { OTHER_MODELS };
        ComparedLabels { model: model.to_owned(), api: api.as_str() }
    }

    /// A request has no prediction.
    pub(crate) fn record_unpredicted(&self, reason: &'static str) {
        self.unpredicted.get_or_create(&UnpredictedLabels { reason }).inc();
    }

    /// An engine has reported how many prompt tokens it found in its caches. Returns whether the prediction was far off.
    pub(crate) fn compare(
        &self,
        (model, api): (&str, InferenceApi),
        expected: &ExpectedHits,
        cached: u64,
        trace: Option<TraceId>,
    ) -> bool {
        self.causes.compare(expected, cached);
        if let Some(engine) = &expected.engine {
            engine.observe(expected, cached);
        }
        let hits = expected.hits;
        for (tier, tokens) in [("l1", hits.l1_tokens), ("l2", hits.l2_tokens), ("l3", hits.l3_tokens)] {
            self.predicted.get_or_create(&TierLabel { tier }).inc_by(tokens.into());
        }
        let label = self.label(model, api);
        let predicted = u64::from(hits.total());
        let input = u64::from(expected.input_tokens.max(1));
        self.compared.get_or_create(&label).inc_by(input);
        self.missed.get_or_create(&label).inc_by(cached.saturating_sub(predicted));
        self.false_hits.get_or_create(&label).inc_by(predicted.saturating_sub(cached));
        self.error.observe(predicted.abs_diff(cached) as f64 / input as f64);
        // Created even at 0, so that its rate can be computed.
        let refuted = self.refuted.get_or_create(&label);
        if predicted >= MIN_REFUTED_TOKENS && cached == 0 {
            refuted.inc();
            self.warn_refuted(model, hits, trace);
        }
        let error_tokens = predicted.abs_diff(cached);
        error_tokens >= MIN_REFUTED_TOKENS && error_tokens > input / MISPREDICTED_DIVISOR
    }

    fn warn_refuted(&self, model: &str, hits: TierHits, trace: Option<TraceId>) {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
        let last = self.last_warned.load(Ordering::Relaxed);
        let is_due = now - last >= WARN_INTERVAL_S
            && self.last_warned.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !is_due {
            return;
        }
        let check = if hits.l3_tokens > hits.l1_tokens + hits.l2_tokens {
            "the store: do engine and master run the same Mooncake release, and can the engine reach the store nodes?"
        } else {
            "the engine: compare its page size and hash algorithm with `moongate doctor`, and check whether it restarted"
        };
        tracing::warn!(
            model,
            predicted = hits.total(),
            check,
            trace_id = trace.map(tracing::field::display),
            "predicted cache hits were not found by the engine"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_bounded() {
        let metrics = PredictionMetrics::register(&mut MetricsRegistry::default());
        let labels: HashSet<_> = (0..3 * MAX_MODELS)
            .map(|number| metrics.label(&number.to_string(), InferenceApi::Chat))
            .collect();
        assert_eq!(labels.len(), MAX_MODELS + 1);
        assert_eq!(metrics.label("7", InferenceApi::Chat).model, "7");
        assert_eq!(metrics.label("a new one", InferenceApi::Chat).model, OTHER_MODELS);
    }

    #[test]
    fn correct_missed_and_false_tokens_are_distinguished() {
        let mut registry = MetricsRegistry::default();
        let metrics = PredictionMetrics::register(&mut registry);
        let expected = |l1_tokens| ExpectedHits {
            hits: TierHits { l1_tokens, ..TierHits::default() },
            input_tokens: 1000,
            ..ExpectedHits::default()
        };
        assert!(!metrics.compare(("m", InferenceApi::Chat), &expected(512), 512, None));
        assert!(!metrics.compare(("m", InferenceApi::Chat), &expected(0), 64, None));
        assert!(metrics.compare(("m", InferenceApi::Chat), &expected(512), 0, None));
        metrics.record_unpredicted("not_single_prompt");
        let text = registry.open_metrics();
        for line in [
            "moongate_prediction_compared_tokens_total{model=\"m\",api=\"chat\"} 3000",
            "moongate_prediction_false_negative_tokens_total{model=\"m\",api=\"chat\"} 64",
            "moongate_prediction_false_positive_tokens_total{model=\"m\",api=\"chat\"} 512",
            "moongate_prediction_refuted_requests_total{model=\"m\",api=\"chat\"} 1",
            "moongate_prediction_cached_tokens_total{tier=\"l1\"} 1024",
            "moongate_unpredicted_requests_total{reason=\"not_single_prompt\"} 1",
            "moongate_prediction_error_bucket{le=\"0.0\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}

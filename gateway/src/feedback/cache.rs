//! How well cache hits are predicted, and the feeds that predictions rest on.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use moongate_scheduler::TierHits;
use moongate_telemetry::TraceId;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Share of the prompt by which a prediction was wrong.
const ERROR_BUCKETS: [f64; 8] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Fewer tokens than this are not worth an alarm: engines round down to pages, and leave small prefixes alone.
const MIN_REFUTED_TOKENS: u64 = 256;
/// Models that have labels of their own, and the label of the others.
const MAX_MODELS: usize = 100;
const OTHER_MODELS: &str = "other";
/// Wrong by more than this part of the prompt is a misprediction that is worth a trace.
const MISPREDICTED_DIVISOR: u64 = 4;
/// Seconds between two log lines about false predictions.
const WARN_INTERVAL_S: i64 = 30;

/// What was expected of the engine that computes a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpectedHits {
    pub(crate) hits: TierHits,
    /// Prompt tokens as counted here.
    pub(crate) input_tokens: u32,
}

/// Events that have arrived from engines.
#[derive(Debug, Default)]
pub(crate) struct EventFeedMetrics {
    pub(crate) connected: Gauge,
    pub(crate) applied: Counter,
    pub(crate) lost: Counter,
    pub(crate) undecodable: Counter,
    pub(crate) replays: Counter,
}

/// Seconds from an event of the store's master to its being applied: an answer of the master, and then what two clocks differ by.
const LAG_BUCKETS: [f64; 11] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];

/// What is known of the store, and how.
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

impl Default for StoreViewMetrics {
    fn default() -> Self {
        Self {
            nodes: Gauge::default(),
            objects: Gauge::default(),
            scans: Counter::default(),
            confirmed: Counter::default(),
            unconfirmed: Counter::default(),
            events_in_sync: Gauge::default(),
            events: Counter::default(),
            undecodable_events: Counter::default(),
            event_gaps: Counter::default(),
            event_lag: Histogram::new(LAG_BUCKETS),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnpredictedLabels {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    tier: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model: String,
}

/// Predictions against what engines report.
#[derive(Debug)]
pub(crate) struct PredictionMetrics {
    unpredicted: Family<UnpredictedLabels, Counter>,
    predicted: Family<TierLabel, Counter>,
    compared: Family<ModelLabel, Counter>,
    missed: Family<ModelLabel, Counter>,
    false_hits: Family<ModelLabel, Counter>,
    refuted: Family<ModelLabel, Counter>,
    /// Models that have labels of their own.
    models: Mutex<HashSet<String>>,
    error: Histogram,
    /// Seconds since 1970 of the last log line about a false prediction.
    last_warned: AtomicI64,
}

impl EventFeedMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let sub = registry.sub_registry_with_prefix("kv_events");
        sub.register("connections", "Connections to engines' event sockets", self.connected.clone());
        for (name, help, counter) in [
            ("messages", "Messages applied to the index", &self.applied),
            ("messages_lost", "Messages that were missed and could not be had again", &self.lost),
            ("unread", "Messages and events that were not understood", &self.undecodable),
            ("replays", "Times that missed messages were asked for", &self.replays),
        ] {
            sub.register(name, help, counter.clone());
        }
    }
}

impl StoreViewMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let sub = registry.sub_registry_with_prefix("store");
        sub.register("nodes", "Store nodes that are there", self.nodes.clone());
        sub.register("objects", "Objects of known pages that the last reading of the store's keys has found. A full index takes no further pages from a reading", self.objects.clone());
        for (name, help, counter) in [
            ("readings", "Complete readings of the store's keys", &self.scans),
            ("confirmations", "Prompts whose pages the master was asked for", &self.confirmed),
            (
                "confirmation_failures",
                "Prompts for which the master did not answer in time",
                &self.unconfirmed,
            ),
            (
                "events",
                "Events of the store's master about objects of known pages (`--mooncake-events`)",
                &self.events,
            ),
            (
                "events_unread",
                "Messages and events of the master that were not understood",
                &self.undecodable_events,
            ),
            (
                "event_gaps",
                "Times that events were missed. Nothing is forgotten; all keys are read once more",
                &self.event_gaps,
            ),
        ] {
            sub.register(name, help, counter.clone());
        }
        sub.register(
            "events_current",
            "1 while events are followed and what was missed before has been read. While it is 0 for long, all keys are read every 10 s",
            self.events_in_sync.clone(),
        );
        sub.register(
            "event_lag_seconds",
            "From an event to its being applied. The event's time is the master's: if the two clocks differ, so does this",
            self.event_lag.clone(),
        );
    }
}

impl PredictionMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            unpredicted: Family::default(),
            predicted: Family::default(),
            compared: Family::default(),
            missed: Family::default(),
            false_hits: Family::default(),
            refuted: Family::default(),
            models: Mutex::default(),
            error: Histogram::new(ERROR_BUCKETS),
            last_warned: AtomicI64::new(0),
        };
        let sub = registry.sub_registry_with_prefix("prediction");
        sub.register("none", "Requests without a prediction: `engines` (they report too little about their caches), `no_tokenizer` (and engines are not queried), `batch` (not exactly one prompt), `memory` (`--prompt-memory` is in use) or `prompt` (what it becomes is only known in the engine). With no tokenizer here and engines asked: `tokenize_too_large` (the body), `tokenize_not_offered` (by any engine that is well, for such a request), `tokenize_busy` (eight questions at once are as many as an engine is asked), `tokenize_timeout`, `tokenize_refused` (the engine takes the request for wrong) or `tokenize_failed`", metrics.unpredicted.clone());
        sub.register(
            "cached_tokens",
            "Predicted tokens of requests that could be checked: `l1` (device), `l2` (host), `l3` (store)",
            metrics.predicted.clone(),
        );
        for (name, help, family) in [
            ("compared_tokens", "Prompt tokens of requests that could be checked", &metrics.compared),
            ("missed_tokens", "Tokens found in a cache beyond the prediction", &metrics.missed),
            (
                "false_tokens",
                "Tokens predicted but not found. Accuracy is 1 − (missed + false) / compared",
                &metrics.false_hits,
            ),
            (
                "refuted_requests",
                "Requests with at least 256 predicted tokens and none found. If this grows, hash scheme, page size or release do not match; the log says what to check",
                &metrics.refuted,
            ),
        ] {
            sub.register(name, help, family.clone());
        }
        sub.register("error", "Wrongly predicted share of the prompt", metrics.error.clone());
        metrics
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.unpredicted.get_or_create(&UnpredictedLabels { reason: "" }).inc_by(0);
        self.predicted.get_or_create(&TierLabel { tier: "" }).inc_by(0);
        for family in [&self.compared, &self.missed, &self.false_hits, &self.refuted] {
            family.get_or_create(&ModelLabel { model: String::new() }).inc_by(0);
        }
    }

    /// The label of a model. Adapters come and go, and each is a model: beyond so many, all others are one.
    fn label(&self, model: &str) -> ModelLabel {
        let mut known = self.models.lock();
        let is_told = known.contains(model) || (known.len() < MAX_MODELS && known.insert(model.to_owned()));
        ModelLabel { model: if is_told { model } else { OTHER_MODELS }.to_owned() }
    }

    /// There is no prediction for a request.
    pub(crate) fn record_unpredicted(&self, reason: &'static str) {
        self.unpredicted.get_or_create(&UnpredictedLabels { reason }).inc();
    }

    /// An engine has told how much it found in its caches. Returns whether that is far from the prediction.
    pub(crate) fn compare(
        &self,
        model: &str,
        expected: ExpectedHits,
        found: u64,
        trace: Option<TraceId>,
    ) -> bool {
        let hits = expected.hits;
        for (tier, tokens) in [("l1", hits.l1_tokens), ("l2", hits.l2_tokens), ("l3", hits.l3_tokens)] {
            self.predicted.get_or_create(&TierLabel { tier }).inc_by(tokens.into());
        }
        let label = self.label(model);
        let predicted = u64::from(hits.total());
        let input = u64::from(expected.input_tokens.max(1));
        self.compared.get_or_create(&label).inc_by(input);
        self.missed.get_or_create(&label).inc_by(found.saturating_sub(predicted));
        self.false_hits.get_or_create(&label).inc_by(predicted.saturating_sub(found));
        self.error.observe(predicted.abs_diff(found) as f64 / input as f64);
        // Also there while it is none, for whoever looks at its rate.
        let refuted = self.refuted.get_or_create(&label);
        if predicted >= MIN_REFUTED_TOKENS && found == 0 {
            refuted.inc();
            self.warn_refuted(model, hits, trace);
        }
        let wrong = predicted.abs_diff(found);
        wrong >= MIN_REFUTED_TOKENS && wrong > input / MISPREDICTED_DIVISOR
    }

    fn warn_refuted(&self, model: &str, hits: TierHits, trace: Option<TraceId>) {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
        let last = self.last_warned.load(Ordering::Relaxed);
        let mine = now - last >= WARN_INTERVAL_S
            && self.last_warned.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !mine {
            return;
        }
        let check = if hits.l3_tokens > hits.l1_tokens + hits.l2_tokens {
            "the store's side: do engine and master run the same Mooncake release, and does the engine reach the store nodes?"
        } else {
            "the engine's side: its page size and hash algorithm against `moongate doctor`, and whether it restarted"
        };
        tracing::warn!(
            model,
            predicted = hits.total(),
            check,
            trace_id = trace.map(tracing::field::display),
            "hits were predicted, but the engine found none"
        );
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn models_are_bounded() {
        let metrics = PredictionMetrics::register(&mut Registry::default());
        let labels: HashSet<_> = (0..3 * MAX_MODELS).map(|at| metrics.label(&at.to_string())).collect();
        assert_eq!(labels.len(), MAX_MODELS + 1);
        assert_eq!(metrics.label("7").model, "7");
        assert_eq!(metrics.label("a new one").model, OTHER_MODELS);
    }

    #[test]
    fn right_missed_and_false_tokens_are_distinguished() {
        let mut registry = Registry::default();
        let metrics = PredictionMetrics::register(&mut registry);
        let expected = |l1_tokens| ExpectedHits {
            hits: TierHits { l1_tokens, ..TierHits::default() },
            input_tokens: 1000,
        };
        assert!(!metrics.compare("m", expected(512), 512, None));
        assert!(!metrics.compare("m", expected(0), 64, None));
        assert!(metrics.compare("m", expected(512), 0, None));
        metrics.record_unpredicted("batch");
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "prediction_compared_tokens_total{model=\"m\"} 3000",
            "prediction_missed_tokens_total{model=\"m\"} 64",
            "prediction_false_tokens_total{model=\"m\"} 512",
            "prediction_refuted_requests_total{model=\"m\"} 1",
            "prediction_cached_tokens_total{tier=\"l1\"} 1024",
            "prediction_none_total{reason=\"batch\"} 1",
            "prediction_error_bucket{le=\"0.0\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}

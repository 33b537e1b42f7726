//! Prometheus metrics. All names start with `moongate_`; `docs/metrics.md` lists them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use moongate_runtime::metrics::MetricsRegistry;
use moongate_scheduler::InstanceLoad;
use moongate_telemetry::TraceId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use super::access::AccessRejectionMetrics;
use super::adapter_loads::AdapterLoadMetrics;
use super::aliases::MetricAliases;
use super::api_histogram::{ApiHistogram, ExemplarHistogram};
use super::batches::BatchMetrics;
use super::cache::{EventFeedMetrics, PredictionMetrics, StoreViewMetrics};
use super::engines::EngineGauges;
use super::legs::LegMetrics;
use super::model_aliases::ModelAliasMetrics;
use super::overload::OverloadMetrics;
use super::prompt_reports::PromptReportMetrics;
use super::request_counters::{RequestCounters, RequestTotals};
use super::sessions::SessionMetrics;
use super::shared_queue::SharedQueueMetrics;
use super::silence::SilenceMetrics;
use super::tokenize::TokenizeMetrics;
use crate::fleet::FleetSnapshot;
use crate::kv_index::KvIndex;
use crate::request_body::InferenceApi;

/// Seconds; from a cache hit on an idle engine to a long prompt in a queue.
const TTFT_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
/// Seconds between two chunks of a stream.
const ITL_BUCKETS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Seconds of whole requests.
const DURATION_BUCKETS: [f64; 13] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0];
/// Seconds of scheduling decisions and predictions.
const DECIDE_BUCKETS: [f64; 9] = [1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 1e-4, 1e-3, 1e-2, 1e-1];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLabels {
    api: &'static str,
    code: &'static str,
}

/// All metrics of the gateway.
#[derive(Debug)]
pub(crate) struct GatewayMetrics {
    pub(super) registry: MetricsRegistry,
    pub(super) requests: Family<RequestLabels, Counter>,
    pub(super) durations: ApiHistogram,
    pub(super) ttft: ApiHistogram,
    itl: Histogram,
    decide: Histogram,
    /// For which the scheduler's lock was held.
    pub(crate) scheduler_lock_seconds: Counter<f64, AtomicU64>,
    pub(super) queue_wait: Histogram,
    pub(super) in_flight: Gauge,
    pub(super) requests_queued: Gauge,
    pub(crate) legs: LegMetrics,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    pub(crate) refusals: AccessRejectionMetrics,
    pub(crate) model_aliases: ModelAliasMetrics,
    pub(crate) adapter_loads: AdapterLoadMetrics,
    pub(crate) silence: SilenceMetrics,
    pub(crate) overload: OverloadMetrics,
    pub(crate) predictions: PredictionMetrics,
    pub(crate) tokenize: Arc<TokenizeMetrics>,
    pub(crate) feeds: Arc<EventFeedMetrics>,
    pub(crate) store: Arc<StoreViewMetrics>,
    pub(crate) prompt_reports: PromptReportMetrics,
    pub(crate) sessions: SessionMetrics,
    pub(crate) shared_queue: SharedQueueMetrics,
    pub(crate) batches: BatchMetrics,
    predict: Histogram,
    pub(super) index_blocks: Gauge,
    index_bytes: Gauge,
    pub(super) engines: EngineGauges,
    counters: RequestCounters,
}

impl GatewayMetrics {
    /// With aliases, some metrics are also exported under these.
    pub(crate) fn new(aliases: Option<MetricAliases>) -> Self {
        let mut registry = MetricsRegistry::default();
        let mut metrics = Self {
            requests: registry.register(
                "moongate_requests_total",
                "Requests that have ended. `code` is `ok`, a code of docs/errors.md, `engine_rejected` or `client_closed`",
                Family::default(),
            ),
            durations: ApiHistogram::register(
                &mut registry,
                "moongate_request_duration_seconds",
                "Time from the request's headers to the end of the response, successful or not",
                || ExemplarHistogram::new(DURATION_BUCKETS.into_iter()),
            ),
            ttft: ApiHistogram::register(
                &mut registry,
                "moongate_ttft_seconds",
                "Time from the request's headers to the first chunk of a stream that goes to the client. Non-streamed responses are excluded",
                || ExemplarHistogram::new(TTFT_BUCKETS.into_iter()),
            ),
            itl: registry.register(
                "moongate_itl_seconds",
                "Time between two chunks of a stream. A chunk contains several tokens if the engine sends them together",
                Histogram::new(ITL_BUCKETS),
            ),
            decide: registry.register(
                "moongate_decision_seconds",
                "Time to choose a route, once per attempt, without queueing",
                Histogram::new(DECIDE_BUCKETS),
            ),
            scheduler_lock_seconds: registry.register(
                "moongate_scheduler_lock_seconds_total",
                "Time for which the scheduler was locked. All requests share this lock, so near one second per second more gateways are needed",
                Counter::default(),
            ),
            queue_wait: registry.register(
                "moongate_queue_wait_seconds",
                "Time that queued requests waited for engines",
                Histogram::new(TTFT_BUCKETS),
            ),
            in_flight: registry.register(
                "moongate_requests_in_flight",
                "Requests that have not ended",
                Gauge::default(),
            ),
            requests_queued: registry.register(
                "moongate_requests_queued",
                "Requests queued for engines",
                Gauge::default(),
            ),
            legs: LegMetrics::register(&mut registry),
            prompt_tokens: registry.register(
                "moongate_prompt_tokens_total",
                "Prompt tokens, as engines report them. Streams count only if the client asked for usage (`stream_options.include_usage`) or the engine sends it anyway",
                Counter::default(),
            ),
            cached_tokens: registry.register(
                "moongate_cached_tokens_total",
                "Prompt tokens that engines found in a cache. For a pair whose prefill reports it: the tokens that the prefill did not compute",
                Counter::default(),
            ),
            completion_tokens: registry.register(
                "moongate_completion_tokens_total",
                "Generated tokens, as engines report them",
                Counter::default(),
            ),
            refusals: AccessRejectionMetrics::register(&mut registry),
            model_aliases: ModelAliasMetrics::register(&mut registry),
            adapter_loads: AdapterLoadMetrics::register(&mut registry),
            silence: SilenceMetrics::register(&mut registry),
            overload: OverloadMetrics::register(&mut registry),
            predictions: PredictionMetrics::register(&mut registry),
            tokenize: Arc::new(TokenizeMetrics::register(&mut registry)),
            feeds: Arc::new(EventFeedMetrics::register(&mut registry)),
            store: Arc::new(StoreViewMetrics::register(&mut registry)),
            prompt_reports: PromptReportMetrics::register(&mut registry),
            sessions: SessionMetrics::register(&mut registry),
            shared_queue: SharedQueueMetrics::register(&mut registry),
            batches: BatchMetrics::register(&mut registry),
            predict: registry.register(
                "moongate_prediction_seconds",
                "Time to predict one request: tokens, block hashes and the lookup",
                Histogram::new(DECIDE_BUCKETS),
            ),
            index_blocks: registry.register(
                "moongate_index_blocks",
                "Blocks in the index of KV caches",
                Gauge::default(),
            ),
            index_bytes: registry.register(
                "moongate_index_bytes",
                "Memory of the index of KV caches",
                Gauge::default(),
            ),
            engines: EngineGauges::register(&mut registry),
            counters: RequestCounters::default(),
            registry,
        };
        if let Some(aliases) = aliases {
            aliases.register(&mut metrics);
        }
        metrics
    }

    pub(crate) fn request_started(&self) {
        self.in_flight.inc();
    }

    /// `code` is an error code, `ok`, `client_closed` or `engine_rejected`; `trace` is set if the trace is exported.
    pub(crate) fn request_ended(
        &self,
        api: InferenceApi,
        code: &'static str,
        took: Duration,
        trace: Option<TraceId>,
    ) {
        self.in_flight.dec();
        self.counters.record_ended(code);
        self.requests.get_or_create(&RequestLabels { api: api.as_str(), code }).inc();
        self.durations.observe(api, took, trace);
    }

    pub(crate) fn first_token(&self, api: InferenceApi, after: Duration, trace: Option<TraceId>) {
        self.ttft.observe(api, after, trace);
        self.counters.record_first_token(after);
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.itl.observe(after.as_secs_f64());
    }

    pub(crate) fn record_decision(&self, took: Duration) {
        self.decide.observe(took.as_secs_f64());
    }

    pub(crate) fn record_queue_wait(&self, took: Duration) {
        self.queue_wait.observe(took.as_secs_f64());
    }

    pub(crate) fn record_prediction(&self, took: Duration) {
        self.predict.observe(took.as_secs_f64());
    }

    pub(crate) fn record_tokens(&self, prompt: u64, cached: u64, completion: u64) {
        self.prompt_tokens.inc_by(prompt);
        self.cached_tokens.inc_by(cached);
        self.completion_tokens.inc_by(completion);
    }

    /// Totals of all requests since the start.
    pub(crate) fn totals(&self) -> RequestTotals {
        let tokens = [&self.prompt_tokens, &self.cached_tokens, &self.completion_tokens];
        self.counters.totals(self.in_flight.get(), tokens.map(Counter::get))
    }

    /// Gives every other family a sample, so that the text contains all of them. Label values do not matter.
    pub(super) fn init_all_series(&self) {
        self.requests.get_or_create(&RequestLabels { api: "", code: "" }).inc_by(0);
        self.refusals.init_all_series();
        self.model_aliases.init_all_series();
        self.predictions.init_all_series();
        self.tokenize.init_all_series();
        self.engines.init_all_series();
    }

    /// The text that Prometheus scrapes. `loads` are those of the fleet, `queued` is the number of queued requests.
    pub(crate) fn scrape(
        &self,
        (fleet, loads): (&FleetSnapshot, &[InstanceLoad]),
        queued: usize,
        index: &KvIndex,
    ) -> String {
        self.engines.set(fleet, loads);
        self.requests_queued.set(i64::try_from(queued).unwrap_or(i64::MAX));
        let size = index.size();
        self.index_blocks.set(i64::try_from(size.blocks).unwrap_or(i64::MAX));
        self.index_bytes.set(i64::try_from(size.bytes).unwrap_or(i64::MAX));
        self.text()
    }

    pub(super) fn text(&self) -> String {
        self.registry.open_metrics()
    }
}

/// All metrics of a gateway in OpenMetrics text, each with a sample: the source of the tables in `docs/metrics.md`.
#[must_use]
pub fn all_metrics() -> String {
    let metrics = GatewayMetrics::new(Some(MetricAliases::Smg));
    metrics.init_all_series();
    metrics.text()
}

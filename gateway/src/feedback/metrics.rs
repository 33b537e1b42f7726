//! Prometheus metrics. All names start with `moongate_`; `docs/metrics.md` lists them.

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::access::AccessRejectionMetrics;
use super::aliases::MetricAliases;
use super::cache::{EventFeedMetrics, PredictionMetrics, StoreViewMetrics};
use super::engines::EngineGauges;
use super::overload::OverloadMetrics;
use super::request_counters::{RequestCounters, RequestTotals};
use super::silence::SilenceMetrics;
use super::tokenize::TokenizeMetrics;
use crate::fleet::FleetSnapshot;
use crate::kv_index::KvIndex;
use crate::request_body::InferenceApi;
use crate::upstream::{LegError, LegKind};
use moongate_scheduler::InstanceLoad;
use moongate_telemetry::TraceId;

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
struct RequestLabels {
    api: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegLabels {
    side: LegKindLabel,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegKindLabels {
    side: LegKindLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ExemplarLabels {
    trace_id: TraceIdLabel,
}

/// Formatted only when scraped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TraceIdLabel(TraceId);

impl EncodeLabelValue for TraceIdLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        write!(encoder, "{}", self.0)
    }
}

/// A histogram whose buckets link to the trace of their latest value.
type ExemplarHistogram = HistogramWithExemplars<ExemplarLabels>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LegKindLabel(LegKind);

impl EncodeLabelValue for LegKindLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.0.as_str())
    }
}

/// All metrics of the gateway.
#[derive(Debug)]
pub(crate) struct GatewayMetrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: [ExemplarHistogram; 4],
    ttft: [ExemplarHistogram; 4],
    itl: Histogram,
    decide: Histogram,
    queue_wait: Histogram,
    in_flight: Gauge,
    requests_queued: Gauge,
    leg_failures: Family<LegLabels, Counter>,
    aborts: Family<LegKindLabels, Counter>,
    retries: Family<LegKindLabels, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    pub(crate) refusals: AccessRejectionMetrics,
    pub(crate) silence: SilenceMetrics,
    pub(crate) overload: OverloadMetrics,
    pub(crate) predictions: PredictionMetrics,
    pub(crate) tokenize: Arc<TokenizeMetrics>,
    pub(crate) feeds: Arc<EventFeedMetrics>,
    pub(crate) store: Arc<StoreViewMetrics>,
    predict: Histogram,
    index_blocks: Gauge,
    index_bytes: Gauge,
    engines: EngineGauges,
    counters: RequestCounters,
    aliases: Option<MetricAliases>,
}

impl GatewayMetrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("moongate");
        let requests = Family::default();
        registry.register("requests", "Requests that have ended. `code` is `ok`, a code of docs/errors.md, `engine_rejected` or `client_closed`", requests.clone());
        let durations = histogram_per_api(
            &mut registry,
            "request_duration",
            "Time from the request's headers to the end of the response, successful or not",
            &DURATION_BUCKETS,
        );
        let ttft = histogram_per_api(
            &mut registry,
            "ttft",
            "Time from the request's headers to the first chunk of a stream that goes to the client. Non-streamed responses are excluded",
            &TTFT_BUCKETS,
        );
        let itl = seconds_histogram(
            &mut registry,
            "itl",
            "Time between two chunks of a stream. A chunk contains several tokens if the engine sends them together",
            &ITL_BUCKETS,
        );
        let decide = seconds_histogram(
            &mut registry,
            "decision",
            "Time to choose a route, once per attempt, without queueing",
            &DECIDE_BUCKETS,
        );
        let queue_wait = seconds_histogram(
            &mut registry,
            "queue_wait",
            "Time that queued requests waited for engines",
            &TTFT_BUCKETS,
        );
        let in_flight = Gauge::default();
        registry.register("requests_in_flight", "Requests that have not ended", in_flight.clone());
        let requests_queued = Gauge::default();
        registry.register("requests_queued", "Requests queued for engines", requests_queued.clone());
        let leg_failures = Family::default();
        registry.register("leg_failures", "Legs that failed before the response started. `reason` is `connect`, `no_connection_left` (this gateway's limit of open files), `transport`, `closed`, `timeout`, `silent` (no output for longer than expected, see docs/protocols.md), `status_4xx`, `status_5xx`, `protocol_violation` (not the engine's protocol) or `engine_error` (an error event in a stream)", leg_failures.clone());
        let aborts = Family::default();
        registry.register(
            "leg_aborts",
            "Legs that the gateway aborted: the other leg failed, or the client left",
            aborts.clone(),
        );
        let retries = Family::default();
        registry.register("retries", "Attempts after the first, by the leg that had failed", retries.clone());
        let [prompt_tokens, cached_tokens, completion_tokens] = [
            ("prompt_tokens", "Prompt tokens, as engines report them. Streams count only if the client asked for usage (`stream_options.include_usage`) or the engine sends it anyway"),
            ("cached_tokens", "Prompt tokens that engines found in a cache. For a pair whose prefill reports it: the tokens that the prefill did not compute"),
            ("completion_tokens", "Generated tokens, as engines report them"),
        ]
        .map(|(name, help)| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        });
        let refusals = AccessRejectionMetrics::register(&mut registry);
        let silence = SilenceMetrics::register(&mut registry);
        let overload = OverloadMetrics::register(&mut registry);
        let predictions = PredictionMetrics::register(&mut registry);
        let tokenize = Arc::new(TokenizeMetrics::register(&mut registry));
        let feeds = Arc::new(EventFeedMetrics::default());
        feeds.register(&mut registry);
        let store = Arc::new(StoreViewMetrics::default());
        store.register(&mut registry);
        let predict = seconds_histogram(
            &mut registry,
            "prediction",
            "Time to predict one request: tokens, block hashes and the lookup",
            &DECIDE_BUCKETS,
        );
        let [index_blocks, index_bytes] = [
            ("index_blocks", "Blocks in the index of KV caches"),
            ("index_bytes", "Memory of the index of KV caches"),
        ]
        .map(|(name, help)| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        });
        let engines = EngineGauges::register(&mut registry);
        let metrics = Self {
            registry,
            requests,
            durations,
            ttft,
            itl,
            decide,
            queue_wait,
            in_flight,
            requests_queued,
            leg_failures,
            aborts,
            retries,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            refusals,
            silence,
            overload,
            predictions,
            tokenize,
            feeds,
            store,
            predict,
            index_blocks,
            index_bytes,
            engines,
            counters: RequestCounters::default(),
            aliases: None,
        };
        metrics.init_failure_series();
        metrics
    }

    /// Creates failure series at 0: Prometheus cannot compute an increase from a missing sample.
    fn init_failure_series(&self) {
        for side in LegKind::ALL.map(LegKindLabel) {
            for reason in LegError::REASONS {
                self.leg_failures.get_or_create(&LegLabels { side, reason }).inc_by(0);
            }
            for family in [&self.aborts, &self.retries] {
                family.get_or_create(&LegKindLabels { side }).inc_by(0);
            }
        }
    }

    /// Also exports the metrics under their aliases.
    pub(crate) fn with_aliases(self, aliases: Option<MetricAliases>) -> Self {
        Self { aliases, ..self }
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
        self.requests.get_or_create(&RequestLabels { api: api_label(api), code }).inc();
        observe(&self.durations[api as usize], took, trace);
    }

    pub(crate) fn first_token(&self, api: InferenceApi, after: Duration, trace: Option<TraceId>) {
        observe(&self.ttft[api as usize], after, trace);
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

    pub(crate) fn record_leg_failure(&self, side: LegKind, error: &LegError) {
        let labels = LegLabels { side: LegKindLabel(side), reason: error.reason() };
        self.leg_failures.get_or_create(&labels).inc();
    }

    pub(crate) fn record_abort(&self, side: LegKind) {
        self.aborts.get_or_create(&LegKindLabels { side: LegKindLabel(side) }).inc();
    }

    pub(crate) fn record_retry(&self, side: LegKind) {
        self.retries.get_or_create(&LegKindLabels { side: LegKindLabel(side) }).inc();
    }

    /// Gives every other family a sample, so that the text contains all of them. Label values do not matter.
    fn init_all_series(&self) {
        self.requests.get_or_create(&RequestLabels { api: "", code: "" }).inc_by(0);
        self.refusals.init_all_series();
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
        let mut text = self.text();
        if let Some(aliases) = self.aliases {
            aliases.add(&mut text);
        }
        text
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            let _infallible = writeln!(text, "# encoding failed: {error}");
        }
        moongate_runtime::append_process_metrics(&mut text);
        text
    }
}

/// All metrics of a gateway in Prometheus text format, each with a sample: the source of the table in `docs/metrics.md`.
#[must_use]
pub fn all_metrics() -> String {
    let metrics = GatewayMetrics::new();
    metrics.init_all_series();
    metrics.text()
}

/// One histogram per API, distinguished by a label; indexed by `InferenceApi as usize`.
fn histogram_per_api(
    registry: &mut Registry,
    metric: &str,
    help: &str,
    buckets: &'static [f64],
) -> [ExemplarHistogram; 4] {
    #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct ApiLabel {
        api: &'static str,
    }
    let family: Family<ApiLabel, ExemplarHistogram, _> =
        Family::new_with_constructor(move || ExemplarHistogram::new(buckets.iter().copied()));
    registry.register_with_unit(metric, help, Unit::Seconds, family.clone());
    [InferenceApi::Chat, InferenceApi::Completions, InferenceApi::Generate, InferenceApi::Other]
        .map(|api| family.get_or_create_owned(&ApiLabel { api: api_label(api) }))
}

fn observe(histogram: &ExemplarHistogram, took: Duration, trace: Option<TraceId>) {
    let label = trace.map(|trace| ExemplarLabels { trace_id: TraceIdLabel(trace) });
    histogram.observe(took.as_secs_f64(), label, None);
}

fn seconds_histogram(
    registry: &mut Registry,
    metric: &str,
    help: &str,
    buckets: &'static [f64],
) -> Histogram {
    let histogram = Histogram::new(buckets.iter().copied());
    registry.register_with_unit(metric, help, Unit::Seconds, histogram.clone());
    histogram
}

fn api_label(api: InferenceApi) -> &'static str {
    match api {
        InferenceApi::Chat => "chat",
        InferenceApi::Completions => "completions",
        InferenceApi::Generate => "generate",
        InferenceApi::Other => "other",
    }
}

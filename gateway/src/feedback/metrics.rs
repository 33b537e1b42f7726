//! Prometheus metrics. All names start with `moongate_`; `docs/metrics.md` lists them.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::cache::{FeedMetrics, PredictionMetrics, StoreMetrics};
use super::tokenize::TokenizeMetrics;
use crate::dispatch::Side;
use crate::fleet::Fleet;
use crate::predict::KvIndex;
use crate::prompt::Api;
use crate::upstream::LegError;
use moongate_scheduler::Load;

/// Seconds; from a cache hit on an idle engine to a long prompt in a queue.
const TTFT_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];
/// Seconds between two pieces of a stream.
const ITL_BUCKETS: [f64; 11] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Seconds; whole requests.
const DURATION_BUCKETS: [f64; 13] =
    [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0];
/// Seconds; the scheduler, and what it is told.
const DECIDE_BUCKETS: [f64; 9] = [1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 1e-4, 1e-3, 1e-2, 1e-1];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    api: &'static str,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegLabels {
    side: SideLabel,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SideOnly {
    side: SideLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    instance: String,
    role: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SideLabel(Side);

impl EncodeLabelValue for SideLabel {
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::LabelValueEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        encoder.write_str(self.0.as_str())
    }
}

/// Everything that is counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: [Histogram; 4],
    ttft: [Histogram; 4],
    itl: Histogram,
    decide: Histogram,
    held: Histogram,
    in_flight: Gauge,
    requests_held: Gauge,
    leg_failures: Family<LegLabels, Counter>,
    aborts: Family<SideOnly, Counter>,
    retries: Family<SideOnly, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    completion_tokens: Counter,
    pub(crate) predictions: PredictionMetrics,
    pub(crate) tokenize: Arc<TokenizeMetrics>,
    pub(crate) feeds: Arc<FeedMetrics>,
    pub(crate) store: Arc<StoreMetrics>,
    predict: Histogram,
    index_pages: Gauge,
    index_bytes: Gauge,
    engines: EngineGauges,
}

/// Set from the fleet when scraped.
#[derive(Debug, Default)]
struct EngineGauges {
    up: Family<EngineLabels, Gauge>,
    breaker_open: Family<EngineLabels, Gauge>,
    in_flight: Family<EngineLabels, Gauge>,
    pending_prefill_tokens: Family<EngineLabels, Gauge>,
    active_decode_tokens: Family<EngineLabels, Gauge>,
    connections: Family<EngineLabels, Gauge>,
    idle_connections: Family<EngineLabels, Gauge>,
    waiting: Gauge,
    generation: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("moongate");
        let requests = Family::default();
        registry.register("requests", "Requests by API and outcome", requests.clone());
        let durations = per_api(&mut registry, "request_duration", "Whole requests", &DURATION_BUCKETS);
        let ttft = per_api(&mut registry, "ttft", "Time to first token, as clients see it", &TTFT_BUCKETS);
        let itl = seconds(&mut registry, "itl", "Time between two pieces of a stream", &ITL_BUCKETS);
        let decide = seconds(&mut registry, "decide", "Time to choose a route", &DECIDE_BUCKETS);
        let held =
            seconds(&mut registry, "held", "Time that held requests waited for engines", &TTFT_BUCKETS);
        let in_flight = Gauge::default();
        registry.register("requests_in_flight", "Requests that have not ended", in_flight.clone());
        let requests_held = Gauge::default();
        registry.register("requests_held", "Requests that wait for engines", requests_held.clone());
        let leg_failures = Family::default();
        registry.register("leg_failures", "Failed legs by side and reason", leg_failures.clone());
        let aborts = Family::default();
        registry.register("leg_aborts", "Legs that the gateway stopped before their end", aborts.clone());
        let retries = Family::default();
        registry.register(
            "retries",
            "Attempts on another pair, by the side that had failed",
            retries.clone(),
        );
        let [prompt_tokens, cached_tokens, completion_tokens] = [
            ("prompt_tokens", "Prompt tokens, as engines report them"),
            ("cached_tokens", "Prompt tokens that engines found in a cache"),
            ("completion_tokens", "Generated tokens, as engines report them"),
        ]
        .map(|(name, help)| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        });
        let predictions = PredictionMetrics::register(&mut registry);
        let tokenize = Arc::new(TokenizeMetrics::register(&mut registry));
        let feeds = Arc::new(FeedMetrics::default());
        feeds.register(&mut registry);
        let store = Arc::new(StoreMetrics::default());
        store.register(&mut registry);
        let predict = seconds(&mut registry, "predict", "Time to predict cache hits", &DECIDE_BUCKETS);
        let [index_pages, index_bytes] = [
            ("index_pages", "Pages in the index of KV caches"),
            ("index_bytes", "Memory of the index of KV caches"),
        ]
        .map(|(name, help)| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        });
        let engines = EngineGauges::register(&mut registry);
        Self {
            registry,
            requests,
            durations,
            ttft,
            itl,
            decide,
            held,
            in_flight,
            requests_held,
            leg_failures,
            aborts,
            retries,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            predictions,
            tokenize,
            feeds,
            store,
            predict,
            index_pages,
            index_bytes,
            engines,
        }
    }

    pub(crate) fn request_started(&self) {
        self.in_flight.inc();
    }

    /// `code` is an error code, `ok`, `client_closed` or `engine_rejected`.
    pub(crate) fn request_ended(&self, api: Api, code: &'static str, took: Duration) {
        self.in_flight.dec();
        self.requests.get_or_create(&RequestLabels { api: name(api), code }).inc();
        self.durations[api as usize].observe(took.as_secs_f64());
    }

    pub(crate) fn first_token(&self, api: Api, after: Duration) {
        self.ttft[api as usize].observe(after.as_secs_f64());
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.itl.observe(after.as_secs_f64());
    }

    pub(crate) fn decided(&self, took: Duration) {
        self.decide.observe(took.as_secs_f64());
    }

    pub(crate) fn held(&self, took: Duration) {
        self.held.observe(took.as_secs_f64());
    }

    pub(crate) fn predicted(&self, took: Duration) {
        self.predict.observe(took.as_secs_f64());
    }

    pub(crate) fn tokens(&self, prompt: u64, cached: u64, completion: u64) {
        self.prompt_tokens.inc_by(prompt);
        self.cached_tokens.inc_by(cached);
        self.completion_tokens.inc_by(completion);
    }

    pub(crate) fn leg_failed(&self, side: Side, error: &LegError) {
        let reason = match error {
            LegError::Connect(_) => "connect",
            LegError::Transport(_) => "transport",
            LegError::Closed => "closed",
            LegError::Timeout(..) => "timeout",
            LegError::Status(status, _) if status.is_client_error() => "status_4xx",
            LegError::Status(..) => "status_5xx",
            LegError::Garbage(_) => "garbage",
            LegError::Reported(_) => "reported",
        };
        self.leg_failures.get_or_create(&LegLabels { side: SideLabel(side), reason }).inc();
    }

    pub(crate) fn aborted(&self, side: Side) {
        self.aborts.get_or_create(&SideOnly { side: SideLabel(side) }).inc();
    }

    pub(crate) fn retried(&self, side: Side) {
        self.retries.get_or_create(&SideOnly { side: SideLabel(side) }).inc();
    }

    /// The text that Prometheus scrapes. `loads` are those of the fleet, `held` requests wait.
    pub(crate) fn scrape(&self, (fleet, loads): (&Fleet, &[Load]), held: usize, index: &KvIndex) -> String {
        self.engines.set(fleet, loads);
        self.requests_held.set(i64::try_from(held).unwrap_or(i64::MAX));
        let size = index.size();
        self.index_pages.set(i64::try_from(size.pages).unwrap_or(i64::MAX));
        self.index_bytes.set(i64::try_from(size.bytes).unwrap_or(i64::MAX));
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            let _infallible = writeln!(text, "# encoding failed: {error}");
        }
        text
    }
}

impl EngineGauges {
    fn register(registry: &mut Registry) -> Self {
        let gauges = EngineGauges::default();
        let sub = registry.sub_registry_with_prefix("engine");
        for (name, help, family) in [
            ("up", "1 if health checks pass", &gauges.up),
            ("breaker_open", "1 while the circuit breaker keeps traffic away", &gauges.breaker_open),
            ("requests_in_flight", "Requests of this gateway on the engine", &gauges.in_flight),
            (
                "pending_prefill_tokens",
                "Prompt tokens that wait for their first token",
                &gauges.pending_prefill_tokens,
            ),
            ("active_decode_tokens", "Tokens that running requests may hold", &gauges.active_decode_tokens),
            ("connections", "Open connections", &gauges.connections),
            ("idle_connections", "Open connections without a request", &gauges.idle_connections),
        ] {
            sub.register(name, help, family.clone());
        }
        registry.register("engines_waiting", "Engines that are known but not usable", gauges.waiting.clone());
        registry.register("topology_generation", "Topology changes seen", gauges.generation.clone());
        gauges
    }

    fn set(&self, fleet: &Fleet, loads: &[Load]) {
        let families = [
            &self.up,
            &self.breaker_open,
            &self.in_flight,
            &self.pending_prefill_tokens,
            &self.active_decode_tokens,
            &self.connections,
            &self.idle_connections,
        ];
        families.iter().for_each(|family| family.clear());
        for (member, load) in fleet.members.iter().zip(loads) {
            let endpoint = &member.endpoint;
            let labels =
                EngineLabels { instance: endpoint.id.to_string(), role: member.instance.role.to_string() };
            let values = [
                i64::from(endpoint.is_healthy()),
                i64::from(endpoint.breaker.is_open()),
                i64::from(endpoint.in_flight.count()),
                i64::try_from(load.pending_prefill_tokens).unwrap_or(i64::MAX),
                i64::try_from(load.active_decode_tokens).unwrap_or(i64::MAX),
                i64::try_from(endpoint.pool.open()).unwrap_or(i64::MAX),
                i64::try_from(endpoint.pool.idle()).unwrap_or(i64::MAX),
            ];
            for (family, value) in families.iter().zip(values) {
                family.get_or_create(&labels).set(value);
            }
        }
        self.waiting.set(i64::try_from(fleet.waiting.len()).unwrap_or(i64::MAX));
        self.generation.set(i64::try_from(fleet.generation).unwrap_or(i64::MAX));
    }
}

/// One histogram per API, told apart by a label; indexed by `Api as usize`.
fn per_api(registry: &mut Registry, metric: &str, help: &str, buckets: &'static [f64]) -> [Histogram; 4] {
    #[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct ApiLabel {
        api: &'static str,
    }
    let family: Family<ApiLabel, Histogram, _> =
        Family::new_with_constructor(move || Histogram::new(buckets.iter().copied()));
    registry.register_with_unit(metric, help, Unit::Seconds, family.clone());
    [Api::Chat, Api::Completions, Api::Generate, Api::Other]
        .map(|api| family.get_or_create_owned(&ApiLabel { api: name(api) }))
}

fn seconds(registry: &mut Registry, metric: &str, help: &str, buckets: &'static [f64]) -> Histogram {
    let histogram = Histogram::new(buckets.iter().copied());
    registry.register_with_unit(metric, help, Unit::Seconds, histogram.clone());
    histogram
}

fn name(api: Api) -> &'static str {
    match api {
        Api::Chat => "chat",
        Api::Completions => "completions",
        Api::Generate => "generate",
        Api::Other => "other",
    }
}

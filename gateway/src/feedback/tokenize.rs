//! Who makes the tokens that predictions rest on.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Seconds; an engine's answer, from an idle front end to the limit and beyond.
const BUCKETS: [f64; 9] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

/// Who made the tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum TokenSource {
    /// The prompt came as token ids.
    #[default]
    Client,
    /// This gateway, with the model's own files.
    Gateway,
    /// An engine that was asked.
    Engine,
    /// An engine, when it was asked about an equal prompt.
    EngineCache,
}

impl TokenSource {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            TokenSource::Client => "client",
            TokenSource::Gateway => "gateway",
            TokenSource::Engine => "engine",
            TokenSource::EngineCache => "memory",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenSourceLabels {
    by: &'static str,
}

/// Counts them.
#[derive(Debug)]
pub(crate) struct TokenizeMetrics {
    prompts: Family<TokenSourceLabels, Counter>,
    engine_wait: Histogram,
}

impl TokenizeMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics =
            Self { prompts: Family::default(), engine_wait: Histogram::new(BUCKETS.iter().copied()) };
        registry.register(
            "tokenized_prompts",
            "Requests with a prediction, by who made their tokens: `client` (they came as ids), `gateway` (with the model's own files), `engine` (that was asked) or `memory` (an engine, when it was asked about an equal prompt)",
            metrics.prompts.clone(),
        );
        registry.register_with_unit(
            "tokenize_engine",
            "For how long requests waited for an engine to tell their tokens, whatever came of it",
            Unit::Seconds,
            metrics.engine_wait.clone(),
        );
        metrics
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.prompts.get_or_create(&TokenSourceLabels { by: "" }).inc_by(0);
    }

    /// The tokens of a prompt are known.
    pub(crate) fn record_prompt(&self, by: TokenSource) {
        self.prompts.get_or_create(&TokenSourceLabels { by: by.as_str() }).inc();
    }

    /// A request has waited so long for an engine, whatever came of it.
    pub(crate) fn record_engine_wait(&self, waited: Duration) {
        self.engine_wait.observe(waited.as_secs_f64());
    }
}

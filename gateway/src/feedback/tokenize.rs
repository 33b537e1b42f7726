//! Sources of the tokens that predictions use.

use std::time::Duration;

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// Seconds of an engine's response, from an idle front end to beyond the limit.
const BUCKETS: [f64; 9] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

/// Source of a prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum TokenSource {
    /// The prompt was sent as token ids.
    #[default]
    Client,
    /// Tokenized by this gateway with the model's own files.
    Gateway,
    Engine,
    /// Returned by an engine earlier, for an equal prompt.
    EngineCache,
}

impl TokenSource {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            TokenSource::Client => "client",
            TokenSource::Gateway => "gateway",
            TokenSource::Engine => "engine",
            TokenSource::EngineCache => "engine_cache",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenSourceLabels {
    by: &'static str,
}

/// Metrics of tokenization by source.
#[derive(Debug)]
pub(crate) struct TokenizeMetrics {
    prompts: Family<TokenSourceLabels, Counter>,
    engine_wait: Histogram,
}

impl TokenizeMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            prompts: registry.register(
                "moongate_tokenized_prompts_total",
                "Requests with a prediction, by the source of their tokens: `client` (sent as ids), `gateway` (local tokenizer), `engine` (queried for this request) or `engine_cache` (cached from an equal prompt)",
                Family::default(),
            ),
            engine_wait: registry.register(
                "moongate_tokenize_engine_seconds",
                "Time that requests waited for an engine to tokenize their prompt, successfully or not",
                Histogram::new(BUCKETS),
            ),
        }
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.prompts.get_or_create(&TokenSourceLabels { by: "" }).inc_by(0);
    }

    /// The tokens of a prompt are known.
    pub(crate) fn record_prompt(&self, by: TokenSource) {
        self.prompts.get_or_create(&TokenSourceLabels { by: by.as_str() }).inc();
    }

    /// A request has waited for an engine's tokens, successfully or not.
    pub(crate) fn record_engine_wait(&self, waited: Duration) {
        self.engine_wait.observe(waited.as_secs_f64());
    }
}

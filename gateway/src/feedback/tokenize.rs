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

/// Result of a query for the tokens of an image, a recording or a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum MediaQueryResult {
    /// The tokens of later prompts with it are exact.
    Learned,
    /// The engine did not return tokens that fit to those of the chat template.
    Failed,
    /// Not sent, for lack of memory, or of an engine that is able to.
    Dropped,
}

impl MediaQueryResult {
    fn as_str(self) -> &'static str {
        match self {
            MediaQueryResult::Learned => "learned",
            MediaQueryResult::Failed => "failed",
            MediaQueryResult::Dropped => "dropped",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MediaLabels {
    tokens: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MediaQueryLabels {
    result: &'static str,
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
    media: Family<MediaLabels, Counter>,
    media_queries: Family<MediaQueryLabels, Counter>,
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
            media: registry.register(
                "moongate_prompt_media_total",
                "Images, recordings and videos of requests with a prediction, by their tokens: `exact` (as an engine returned them) or `estimated`",
                Family::default(),
            ),
            media_queries: registry.register(
                "moongate_media_queries_total",
                "Queries for the tokens of an image, recording or video, by result: `learned`, `failed` or `dropped` (not sent; a later request with it repeats the query)",
                Family::default(),
            ),
        }
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.prompts.get_or_create(&TokenSourceLabels { by: "" }).inc_by(0);
        self.media.get_or_create(&MediaLabels { tokens: "" }).inc_by(0);
        self.media_queries.get_or_create(&MediaQueryLabels { result: "" }).inc_by(0);
    }

    /// A request with a prediction has media.
    pub(crate) fn record_media(&self, exact: u32, estimated: u32) {
        for (tokens, count) in [("exact", exact), ("estimated", estimated)] {
            if count > 0 {
                self.media.get_or_create(&MediaLabels { tokens }).inc_by(count.into());
            }
        }
    }

    /// A query for the tokens of one medium has ended.
    pub(crate) fn record_media_query(&self, result: MediaQueryResult) {
        self.media_queries.get_or_create(&MediaQueryLabels { result: result.as_str() }).inc();
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

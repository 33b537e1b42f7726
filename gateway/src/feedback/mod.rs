//! Metrics, decision history and traces of requests.

mod access;
mod adapter_loads;
mod aliases;
mod api_histogram;
mod batches;
mod cache;
mod decision_history;
mod engines;
mod legs;
mod metrics;
mod model_aliases;
mod overload;
mod prediction_causes;
mod prompt_reports;
mod request;
mod request_counters;
mod sessions;
mod shared_queue;
mod silence;
mod spans;
mod tokenize;

pub(crate) use adapter_loads::{AdapterLoadMetrics, AdapterLoadOutcome};
pub use aliases::MetricAliases;
pub(crate) use cache::{EventFeedMetrics, ExpectedHits, StoreViewMetrics};
pub(crate) use decision_history::{DecidedRequest, DecisionHistory};
pub(crate) use metrics::GatewayMetrics;
pub use metrics::all_metrics;
pub(crate) use model_aliases::{AliasOutcome, ModelAliasMetrics};
pub(crate) use overload::OverloadReason;
pub(crate) use prediction_causes::PredictedEngine;
pub(crate) use prompt_reports::{
    HintSource, PromptHint, PromptReportQueue, StoredPrompt, run_prompt_reports,
};
pub(crate) use request::{RequestRecorder, ResponseCapture, TtftPrediction};
pub(crate) use request_counters::RequestTotals;
pub(crate) use shared_queue::SharedQueueMetrics;
pub(crate) use silence::RedispatchReason;
pub(crate) use spans::{AttemptTrace, DecidedRoute, LegSpan, RequestDescription, RequestSpan};
pub(crate) use tokenize::{MediaQueryResult, TokenSource, TokenizeMetrics};

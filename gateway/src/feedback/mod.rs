//! What is learned from each request: metrics and spans.

mod access;
mod aliases;
mod cache;
mod decisions;
mod engines;
mod metrics;
mod overload;
mod request;
mod silence;
mod spans;
mod tally;
mod tokenize;

pub use aliases::MetricAliases;
pub(crate) use cache::{Expected, FeedMetrics, StoreMetrics};
pub(crate) use decisions::Decisions;
pub(crate) use metrics::Metrics;
pub use metrics::all_metrics;
pub(crate) use overload::OverloadReason;
pub(crate) use request::{Feedback, Foreseen};
pub(crate) use spans::{LegSpan, RequestSpan, Try};
pub(crate) use tally::Totals;
pub(crate) use tokenize::{TokenizeMetrics, TokenizedBy};

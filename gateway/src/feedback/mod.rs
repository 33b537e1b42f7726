//! What is learned from each request: metrics and spans.

mod cache;
mod decisions;
mod metrics;
mod request;
mod spans;
mod tokenize;

pub(crate) use cache::{Expected, FeedMetrics, StoreMetrics};
pub(crate) use decisions::Decisions;
pub(crate) use metrics::Metrics;
pub(crate) use request::Feedback;
pub(crate) use spans::RequestSpan;
pub(crate) use tokenize::{TokenizeMetrics, TokenizedBy};

//! What is learned from each request: metrics and spans.

mod metrics;
mod request;
mod spans;

pub(crate) use metrics::Metrics;
pub(crate) use request::Feedback;
pub(crate) use spans::RequestSpan;

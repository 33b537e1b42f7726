//! Reads a request body into one piece, within limits of size and time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, EXPECT};
use http::{HeaderMap, HeaderValue};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use moongate_runtime::Supervisor;
use tokio::time::{Instant, timeout, timeout_at};

use super::body_buffer::BodyBuffer;
use crate::error::{ApiError, Code};
use crate::memory::MemoryBudget;

/// How long the rest of a body that is too large is read and dropped. If the connection were closed while the client still
/// sends, it would be reset, and the client might never see why.
const DISCARD_FOR: Duration = Duration::from_secs(5);

/// When a client should send a body again that found no memory: most are complete, or have broken off, within a second.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bounds of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits {
    pub(crate) max_bytes: usize,
    /// Longest pause between two pieces.
    pub(crate) idle: Duration,
    /// Longest time for all of it.
    pub(crate) whole: Duration,
}

/// Collects `body`.
pub(crate) async fn collect(
    headers: &HeaderMap,
    mut body: Body,
    limits: BodyLimits,
    budget: &Arc<MemoryBudget>,
    supervisor: &Supervisor,
) -> Result<Bytes, ApiError> {
    let deadline = Instant::now() + limits.whole;
    let declared = headers.get(CONTENT_LENGTH).and_then(length);
    if declared.is_some_and(|length| length > limits.max_bytes as u64) {
        discard(headers, body, supervisor);
        return Err(too_large(limits));
    }
    let declared = declared.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
    let mut buffer = BodyBuffer::new(declared, budget.reserve(0).map_err(|_| no_memory())?);
    loop {
        let until = deadline.min(Instant::now() + limits.idle);
        let frame = match timeout_at(until, body.frame()).await {
            Err(_) if until == deadline => {
                let text = format!("the body was not complete after {:?}", limits.whole);
                return Err(ApiError::new(Code::BodyIncomplete, text));
            }
            Err(_) => {
                let text = format!(
                    "no data for {:?} before the body was complete; send it without pauses",
                    limits.idle
                );
                return Err(ApiError::new(Code::BodyIncomplete, text));
            }
            Ok(None) => break,
            Ok(Some(Err(error))) => {
                return Err(ApiError::new(Code::BodyIncomplete, format!("the body broke off: {error}")));
            }
            Ok(Some(Ok(frame))) => frame,
        };
        let Ok(data) = frame.into_data() else { continue };
        if buffer.len() + data.len() > limits.max_bytes {
            discard(headers, body, supervisor);
            return Err(too_large(limits));
        }
        if buffer.push(data, budget).is_err() {
            // Before the rest is read, so that others find the memory.
            drop(buffer);
            discard(headers, body, supervisor);
            return Err(no_memory());
        }
    }
    Ok(buffer.finish())
}

/// Reads the rest of a refused body in the background, beside the answer that goes out.
pub(super) fn discard(headers: &HeaderMap, mut body: Body, supervisor: &Supervisor) {
    // A client that waits for `100 Continue` sends nothing after a refusal.
    if headers.contains_key(EXPECT) || body.is_end_stream() {
        return;
    }
    supervisor.spawn("discard a body", async move {
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        // What is still sent after that time is cut off.
        drop(timeout(DISCARD_FOR, rest).await);
    });
}

fn length(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

/// The bodies of all requests together have no room for this one.
pub(super) fn no_memory() -> ApiError {
    let text = "the request bodies in this gateway leave no memory for this one; send it again soon, or raise --body-memory";
    let mut error = ApiError::new(Code::GatewayOverloaded, text);
    error.retry_after = Some(RETRY_AFTER);
    error
}

fn too_large(limits: BodyLimits) -> ApiError {
    let megabytes = limits.max_bytes as f64 / f64::from(1 << 20);
    let text = format!(
        "the body is larger than {megabytes:.1} MiB; shorten it, or raise the gateway's --max-body-bytes ({})",
        limits.max_bytes
    );
    ApiError::new(Code::BodyTooLarge, text)
}

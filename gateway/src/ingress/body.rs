//! Reads a request body into one buffer, within limits of size and time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::header::{CONTENT_LENGTH, EXPECT};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Uri};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use moongate_runtime::Supervisor;
use tokio::time::{Instant, timeout, timeout_at};

use super::body_buffer::BodyBuffer;
use crate::error::{ApiError, ApiErrorCode};
use crate::memory::{MemoryBudget, MemoryReservation};

/// How long the rest of a body that is too large is read and discarded. If the connection were closed while the client still sends,
/// it would be reset, and the client might never get the error.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// `Retry-After` when there is no memory for a body: most bodies are complete, or truncated, within a second.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bytes that a connection needs while it waits for the rest of a body, in addition to the body: its buffers, and the task.
const UNFINISHED_BODY_COST: usize = 32 << 10;
/// Such connections may use this fraction of `--body-memory`. With 512 MiB, it is enough for 2,048 of them.
const UNFINISHED_BUDGET_DIVISOR: u64 = 8;

/// Limits of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits {
    pub(crate) max_bytes: usize,
    /// Longest pause between two chunks.
    pub(crate) idle: Duration,
    /// Longest time for the whole body.
    pub(crate) total: Duration,
}

/// Reads the bodies of all requests within one memory budget.
#[derive(Debug)]
pub(crate) struct BodyReader {
    pub(crate) limits: BodyLimits,
    /// Budget for the bytes of all bodies.
    pub(crate) memory: Arc<MemoryBudget>,
    /// Budget for connections that wait for the rest of a body.
    pub(crate) unfinished: Arc<MemoryBudget>,
    supervisor: Supervisor,
}

/// A body that did not arrive at once.
struct UnfinishedBody {
    deadline: Instant,
    _connection: MemoryReservation,
}

impl BodyReader {
    pub(crate) fn new(limits: BodyLimits, memory: Arc<MemoryBudget>, supervisor: Supervisor) -> Self {
        let unfinished = MemoryBudget::new("--body-memory", memory.limit() / UNFINISHED_BUDGET_DIVISOR);
        Self { limits, memory, unfinished, supervisor }
    }

    /// Collects the body of a request with the head `parts`.
    pub(super) async fn collect(&self, parts: &mut Parts, body: Body) -> Result<Bytes, ApiError> {
        self.collect_within(self.limits, parts, body).await
    }

    pub(super) async fn collect_within(
        &self,
        limits: BodyLimits,
        parts: &mut Parts,
        mut body: Body,
    ) -> Result<Bytes, ApiError> {
        let declared = parts.headers.get(CONTENT_LENGTH).and_then(parse_content_length);
        if declared.is_some_and(|length| length > limits.max_bytes as u64) {
            self.discard(&parts.headers, body);
            return Err(too_large(limits));
        }
        let declared = declared.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
        let mut buffer = BodyBuffer::new(declared, self.memory.reserve(0).map_err(|_| no_memory())?);
        let mut unfinished = None;
        loop {
            let frame = match body.frame().now_or_never() {
                Some(frame) => frame,
                None => {
                    let unfinished = match &mut unfinished {
                        Some(unfinished) => unfinished,
                        empty => empty.insert(self.begin_waiting(limits, parts)?),
                    };
                    buffer.detach();
                    wait_for_frame(&mut body, limits, unfinished.deadline).await?
                }
            };
            let data = match frame {
                None => return Ok(buffer.finish()),
                Some(Ok(frame)) => frame.into_data(),
                Some(Err(error)) => {
                    return Err(ApiError::new(
                        ApiErrorCode::BodyIncomplete,
                        format!("the body was truncated: {error}"),
                    ));
                }
            };
            let Ok(data) = data else { continue };
            if buffer.len() + data.len() > limits.max_bytes {
                self.discard(&parts.headers, body);
                return Err(too_large(limits));
            }
            if buffer.push(data, &self.memory).is_err() {
                // Before the rest is read, so that other requests can use the memory.
                drop(buffer);
                self.discard(&parts.headers, body);
                return Err(no_memory());
            }
        }
    }

    /// Reserves the connection's memory, and frees what the head would keep allocated in the meantime. When too many bodies are
    /// incomplete, the connection is closed after the error: reading the rest would need the same memory.
    fn begin_waiting(&self, limits: BodyLimits, parts: &mut Parts) -> Result<UnfinishedBody, ApiError> {
        let connection = self.unfinished.reserve(UNFINISHED_BODY_COST).map_err(|_| too_many_unfinished())?;
        detach(parts);
        Ok(UnfinishedBody { deadline: Instant::now() + limits.total, _connection: connection })
    }

    /// Reads the rest of a rejected body in the background, while the response is sent.
    pub(super) fn discard(&self, headers: &HeaderMap, mut body: Body) {
        // A client that waits for `100 Continue` sends no body after an error.
        if headers.contains_key(EXPECT) || body.is_end_stream() {
            return;
        }
        self.supervisor.spawn("discard-body", async move {
            let remaining_body = async { while let Some(Ok(_)) = body.frame().await {} };
            // The connection is closed after this time.
            drop(timeout(DISCARD_TIMEOUT, remaining_body).await);
        });
    }
}

/// Next frame of a body; `None` at its end.
type NextFrame = Option<Result<Frame<Bytes>, axum::Error>>;

async fn wait_for_frame(
    body: &mut Body,
    limits: BodyLimits,
    deadline: Instant,
) -> Result<NextFrame, ApiError> {
    let until = deadline.min(Instant::now() + limits.idle);
    timeout_at(until, body.frame()).await.map_err(|_| {
        let text = if until == deadline {
            format!("the body was not complete after {:?}", limits.total)
        } else {
            format!("no data for {:?} before the body was complete; send it without pauses", limits.idle)
        };
        ApiError::new(ApiErrorCode::BodyIncomplete, text)
    })
}

/// Copies a head out of the connection's read buffer, so that the buffer is freed while the body is awaited.
fn detach(parts: &mut Parts) {
    let mut copied = BytesMut::with_capacity(parts.headers.values().map(HeaderValue::len).sum());
    for value in parts.headers.values_mut() {
        copied.extend_from_slice(value.as_bytes());
        if let Ok(mut copy) = HeaderValue::from_maybe_shared(copied.split().freeze()) {
            copy.set_sensitive(value.is_sensitive());
            *value = copy;
        }
    }
    if let Ok(copy) = Uri::try_from(parts.uri.to_string()) {
        parts.uri = copy;
    }
}

fn parse_content_length(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

/// Error if the budget for bodies is exhausted.
pub(super) fn no_memory() -> ApiError {
    let text = "no memory left for request bodies in this gateway; retry soon, or raise --body-memory";
    let mut error = ApiError::new(ApiErrorCode::GatewayOverloaded, text);
    error.retry_after = Some(RETRY_AFTER);
    error
}

fn too_many_unfinished() -> ApiError {
    let text = "too many incomplete request bodies in this gateway; retry soon, or raise --body-memory";
    let mut error = ApiError::new(ApiErrorCode::GatewayOverloaded, text);
    error.retry_after = Some(RETRY_AFTER);
    error
}

fn too_large(limits: BodyLimits) -> ApiError {
    let megabytes = limits.max_bytes as f64 / f64::from(1 << 20);
    let text = format!(
        "the body is larger than {megabytes:.1} MiB; shorten it, or raise the gateway's --max-body-bytes ({})",
        limits.max_bytes
    );
    ApiError::new(ApiErrorCode::BodyTooLarge, text)
}

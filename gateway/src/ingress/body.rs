//! Reads a request body into one piece, within limits of size and time.

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

/// How long the rest of a body that is too large is read and dropped. If the connection were closed while the client still
/// sends, it would be reset, and the client might never see why.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// When a client should send a body again that found no memory: most are complete, or have broken off, within a second.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// What one connection costs that waits for the rest of a body, beside the body: its buffers, and the task.
const UNFINISHED_BODY_COST: usize = 32 << 10;
/// The part of `--body-memory` that such connections may take together. With 512 MiB that is 2,048 of them.
const UNFINISHED_BUDGET_DIVISOR: u64 = 8;

/// Bounds of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimits {
    pub(crate) max_bytes: usize,
    /// Longest pause between two pieces.
    pub(crate) idle: Duration,
    /// Longest time for all of it.
    pub(crate) total: Duration,
}

/// Reads the bodies of all requests, within one memory budget.
#[derive(Debug)]
pub(crate) struct BodyReader {
    pub(crate) limits: BodyLimits,
    /// For the bytes of all bodies.
    pub(crate) memory: Arc<MemoryBudget>,
    /// For what connections cost while they wait for the rest of a body.
    pub(crate) unfinished: Arc<MemoryBudget>,
    supervisor: Supervisor,
}

/// A body that has not arrived at once.
struct UnfinishedBody {
    deadline: Instant,
    _connection: MemoryReservation,
}

impl BodyReader {
    pub(crate) fn new(limits: BodyLimits, memory: Arc<MemoryBudget>, supervisor: Supervisor) -> Self {
        let unfinished = MemoryBudget::new("--body-memory", memory.limit() / UNFINISHED_BUDGET_DIVISOR);
        Self { limits, memory, unfinished, supervisor }
    }

    /// Collects the body of a request whose head is `parts`.
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
                        none => none.insert(self.begin_waiting(limits, parts)?),
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
                        format!("the body broke off: {error}"),
                    ));
                }
            };
            let Ok(data) = data else { continue };
            if buffer.len() + data.len() > limits.max_bytes {
                self.discard(&parts.headers, body);
                return Err(too_large(limits));
            }
            if buffer.push(data, &self.memory).is_err() {
                // Before the rest is read, so that others find the memory.
                drop(buffer);
                self.discard(&parts.headers, body);
                return Err(no_memory());
            }
        }
    }

    /// Reserves what the connection costs, and frees what the head would keep allocated until then. When too many wait, the connection is
    /// closed after the refusal: reading the rest would cost the same memory.
    fn begin_waiting(&self, limits: BodyLimits, parts: &mut Parts) -> Result<UnfinishedBody, ApiError> {
        let connection = self.unfinished.reserve(UNFINISHED_BODY_COST).map_err(|_| too_many_unfinished())?;
        detach(parts);
        Ok(UnfinishedBody { deadline: Instant::now() + limits.total, _connection: connection })
    }

    /// Reads the rest of a refused body in the background, beside the answer that goes out.
    pub(super) fn discard(&self, headers: &HeaderMap, mut body: Body) {
        // A client that waits for `100 Continue` sends nothing after a refusal.
        if headers.contains_key(EXPECT) || body.is_end_stream() {
            return;
        }
        self.supervisor.spawn("discard a body", async move {
            let rest = async { while let Some(Ok(_)) = body.frame().await {} };
            // What is still sent after that time is cut off.
            drop(timeout(DISCARD_TIMEOUT, rest).await);
        });
    }
}

/// What a body reports next; `None` at its end.
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

/// Copies a head out of the buffer that the connection has read it into, so that the buffer is freed while the body is awaited.
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

/// The bodies of all requests together have no room for this one.
pub(super) fn no_memory() -> ApiError {
    let text = "the request bodies in this gateway leave no memory for this one; send it again soon, or raise --body-memory";
    let mut error = ApiError::new(ApiErrorCode::GatewayOverloaded, text);
    error.retry_after = Some(RETRY_AFTER);
    error
}

fn too_many_unfinished() -> ApiError {
    let text = "too many clients of this gateway have sent a part of a body only; send it again soon, or raise --body-memory";
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

//! The body of a response that has started: chunks from the engine to the client, until its end, a failure, or the client's
//! disconnect.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::response_feedback::ResponseFeedback;
use crate::error::{ApiError, ApiErrorCode, ErrorFormat};
use crate::legs::{LegPair, PairEvent, failure_code};
use crate::upstream::LegError;

/// Received events are coalesced into writes of about this many bytes: a system call costs more than copying them.
const MAX_COALESCED_BYTES: usize = 16 << 10;

/// Context of one relayed response.
pub(crate) struct RelayContext {
    /// Held until the stream is dropped.
    pub(crate) feedback: ResponseFeedback,
    pub(crate) error_format: ErrorFormat,
    /// Resolves when the drain's deadline has passed.
    pub(crate) force_close: Pin<Box<WaitForCancellationFutureOwned>>,
}

enum RelayState {
    /// The first chunk has not been passed on yet.
    FirstChunk(Bytes),
    Streaming,
    /// Data received before the failure has been passed on; the error is next.
    Failing(ApiError),
    /// An error event has been passed on; the connection is closed next, so that no client mistakes it for a complete response. One
    /// poll in between lets the server flush the event.
    Aborting {
        flushed: bool,
    },
}

/// The response body. Polled only when the client can receive more, which is the back-pressure on the engine.
pub(crate) struct ResponseRelay {
    /// `None` once the stream has ended or failed: dropping the pair aborts the engines. Declared before `parts`, so that the legs'
    /// spans end before the request's.
    pair: Option<Box<LegPair>>,
    context: RelayContext,
    state: RelayState,
}

impl ResponseRelay {
    pub(crate) fn new(pair: Box<LegPair>, first: Bytes, context: RelayContext) -> Self {
        Self { context, pair: Some(pair), state: RelayState::FirstChunk(first) }
    }

    fn frame(&mut self, chunk: Bytes) -> Result<Bytes, ApiError> {
        match &mut self.context.feedback.events {
            None => Ok(chunk),
            Some(events) => events.push(chunk).map_err(|error| self.leg_error(&LegError::from(error))),
        }
    }

    /// The engine's response has ended: checks that it is complete, and records it.
    fn end(&mut self) -> Result<Bytes, ApiError> {
        let rest = match &mut self.context.feedback.events {
            None => Ok(Bytes::new()),
            Some(events) => events.finish(),
        };
        let rest = rest.map_err(|error| self.leg_error(&LegError::from(error)))?;
        let mut prefill_usage = None;
        if let Some(mut pair) = self.pair.take() {
            pair.main_endpoint().breaker.record_success();
            prefill_usage = pair.prefill_usage();
            pair.detach_prefill();
        }
        self.context.feedback.record_stream_complete(prefill_usage);
        Ok(rest)
    }

    fn leg_error(&mut self, error: &LegError) -> ApiError {
        let Some(pair) = &mut self.pair else {
            return ApiError::new(ApiErrorCode::WorkerFailed, error.to_string());
        };
        let side = pair.main_kind();
        pair.record_failure(side, error);
        let endpoint = pair.main_endpoint();
        endpoint.record_failure(error);
        let message = format!("{} engine {} {error}; the response is incomplete", side.as_str(), endpoint.id);
        ApiError::new(failure_code(side, error), message)
    }

    /// The next chunk to pass on; `None` after the last.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        loop {
            let Some(pair) = self.pair.as_mut() else { return Poll::Ready(None) };
            let chunk = match pair.poll_after_first_token(cx) {
                Poll::Ready(PairEvent::Data(data)) => self.frame(data),
                Poll::Ready(PairEvent::End) => self.end(),
                // Reported only before the first byte.
                Poll::Ready(PairEvent::Silent(_)) => continue,
                Poll::Ready(PairEvent::Failed(_, error)) => Err(self.leg_error(&error)),
                Poll::Pending => {
                    if self.context.force_close.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let text = "the gateway is shutting down and its drain deadline has passed; the response is incomplete";
                    Err(ApiError::new(ApiErrorCode::ShuttingDown, text))
                }
            };
            // Empty: an event whose end has not arrived.
            if !chunk.as_ref().is_ok_and(Bytes::is_empty) {
                return Poll::Ready(Some(chunk));
            }
        }
    }

    /// Ends the stream with an error that the client can detect.
    fn fail(&mut self, error: &ApiError) -> Poll<Option<Result<Frame<Bytes>, RelayAborted>>> {
        match &mut self.context.feedback.recorder {
            Some(recorder) => {
                recorder.failed(error);
                recorder.span().log_stream_failure(error);
            }
            None => tracing::warn!(%error, "stream of one sample failed"),
        }
        self.pair = None;
        self.state = RelayState::Aborting { flushed: false };
        match self.context.feedback.events {
            Some(_) => Poll::Ready(Some(Ok(Frame::data(error.event(self.context.error_format))))),
            None => Poll::Ready(Some(Err(RelayAborted))),
        }
    }
}

/// Chunks that are combined into one write.
#[derive(Debug, Default)]
struct CoalescedWrite {
    /// Not copied as long as it is the only chunk.
    first: Bytes,
    all: BytesMut,
}

impl CoalescedWrite {
    fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }

    fn push(&mut self, chunk: Bytes) {
        if self.len() == 0 {
            self.first = chunk;
            return;
        }
        self.all.extend_from_slice(&std::mem::take(&mut self.first));
        self.all.extend_from_slice(&chunk);
    }

    fn into_bytes(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.freeze() }
    }
}

/// Makes the server close the connection without the final chunk.
#[derive(Debug)]
pub(crate) struct RelayAborted;

impl fmt::Display for RelayAborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the response is incomplete")
    }
}

impl std::error::Error for RelayAborted {}

impl From<Infallible> for RelayAborted {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Body for ResponseRelay {
    type Data = Bytes;
    type Error = RelayAborted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayAborted>>> {
        match &mut self.state {
            RelayState::FirstChunk(first) => {
                let first = std::mem::take(first);
                self.state = RelayState::Streaming;
                self.context.feedback.record_chunk();
                return Poll::Ready(Some(Ok(Frame::data(first))));
            }
            RelayState::Aborting { flushed: true } => return Poll::Ready(Some(Err(RelayAborted))),
            RelayState::Aborting { flushed } => {
                *flushed = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            RelayState::Failing(_) => {
                let RelayState::Failing(error) = std::mem::replace(&mut self.state, RelayState::Streaming)
                else {
                    return Poll::Ready(None);
                };
                return self.fail(&error);
            }
            RelayState::Streaming => {}
        }
        let mut write = CoalescedWrite::default();
        while write.len() < MAX_COALESCED_BYTES {
            match self.poll_chunk(cx) {
                Poll::Ready(Some(Ok(chunk))) => {
                    self.context.feedback.record_chunk();
                    write.push(chunk);
                    // Only event streams have small chunks.
                    if self.context.feedback.events.is_none() {
                        break;
                    }
                }
                Poll::Ready(Some(Err(error))) if write.len() == 0 => return self.fail(&error),
                Poll::Ready(Some(Err(error))) => {
                    self.state = RelayState::Failing(error);
                    break;
                }
                Poll::Ready(None) if write.len() == 0 => return Poll::Ready(None),
                Poll::Pending if write.len() == 0 => return Poll::Pending,
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(Frame::data(write.into_bytes()))))
    }
}

impl fmt::Debug for ResponseRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseRelay").field("pair", &self.pair).finish_non_exhaustive()
    }
}

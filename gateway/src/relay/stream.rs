//! The body of a response that has begun: pieces from the engine to the client, until the end, a failure, or the
//! client's leaving.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::response_fields::ResponseSummary;
use super::sse::SseFramer;
use crate::dispatch::{InFlightGuard, LegPair, PairEvent, failure_code};
use crate::error::{ApiError, ApiErrorCode};
use crate::feedback::RequestRecorder;
use crate::upstream::LegError;

/// Events that have already arrived go to the client in one write of about this many bytes: a system call costs more than copying
/// them.
const MAX_COALESCED_BYTES: usize = 16 << 10;

/// What a relay is made of.
pub(crate) struct RelayContext {
    pub(crate) framer: Option<SseFramer>,
    /// Whether a stream without `[DONE]` is incomplete.
    pub(crate) expects_done: bool,
    /// Held for as long as the stream lives.
    pub(crate) _in_flight: InFlightGuard,
    /// `None` for a part of a larger answer.
    pub(crate) recorder: Option<RequestRecorder>,
    /// Resolves when the drain's deadline has passed.
    pub(crate) force_close: Pin<Box<WaitForCancellationFutureOwned>>,
}

enum RelayState {
    /// The first piece has not been passed on yet.
    FirstChunk(Bytes),
    Streaming,
    /// What came before the failure has been passed on; next comes the failure.
    Failing(ApiError),
    /// An error event has been passed on; next the connection is broken, so that nobody takes it for an end. One poll in between
    /// lets the server flush the event.
    Aborting {
        flushed: bool,
    },
}

/// The response body. Polled only when the client can take more, which is what slows the engine down.
pub(crate) struct ResponseRelay {
    /// `None` once the stream has ended or failed: dropping the pair is what aborts the engines. Before the parts, so that the legs' spans end
    /// before the request's.
    pair: Option<LegPair>,
    parts: RelayContext,
    state: RelayState,
}

impl ResponseRelay {
    pub(crate) fn new(pair: LegPair, first: Bytes, parts: RelayContext) -> Self {
        Self { parts, pair: Some(pair), state: RelayState::FirstChunk(first) }
    }

    fn count_chunk(&mut self) {
        match (&mut self.parts.recorder, &self.parts.framer) {
            (Some(feedback), Some(_)) => feedback.record_chunk(),
            (Some(feedback), None) => feedback.set_sample_of_batch(),
            (None, _) => {}
        }
    }

    fn frame(&mut self, piece: Bytes) -> Result<Bytes, ApiError> {
        match &mut self.parts.framer {
            None => Ok(piece),
            Some(gate) => gate.push(piece).map_err(|fault| self.leg_error(&LegError::from(fault))),
        }
    }

    /// The engine's answer is complete: checks that it is, and closes the books.
    fn end(&mut self) -> Result<Bytes, ApiError> {
        let rest = match &mut self.parts.framer {
            None => Ok(Bytes::new()),
            Some(gate) => gate.finish(self.parts.expects_done),
        };
        let rest = rest.map_err(|fault| self.leg_error(&LegError::from(fault)))?;
        let mut prefill_usage = None;
        if let Some(mut pair) = self.pair.take() {
            pair.main_endpoint().breaker.record_success();
            prefill_usage = pair.prefill_usage();
            pair.detach_prefill();
        }
        if let Some(feedback) = &mut self.parts.recorder {
            let gate = self.parts.framer.as_ref();
            let said = gate.map(|gate| ResponseSummary::read(gate.last_payload())).unwrap_or_default();
            feedback.completed(said.usage, prefill_usage, |ending| {
                if let Some(gate) = gate {
                    ending.add(&ResponseSummary::read(gate.previous_payload()));
                }
                ending.add(&said);
            });
        }
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
        let message = format!("{} engine {} {error}; the answer is incomplete", side.as_str(), endpoint.id);
        ApiError::new(failure_code(side, error), message)
    }

    /// The next piece that can be passed on; `None` after the last.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        loop {
            let Some(pair) = self.pair.as_mut() else { return Poll::Ready(None) };
            let piece = match pair.poll_after_first_token(cx) {
                Poll::Ready(PairEvent::Data(data)) => self.frame(data),
                Poll::Ready(PairEvent::End) => self.end(),
                // Only comes before the first byte.
                Poll::Ready(PairEvent::Silent(_)) => continue,
                Poll::Ready(PairEvent::Failed(_, error)) => Err(self.leg_error(&error)),
                Poll::Pending => {
                    if self.parts.force_close.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let text = "the gateway is shutting down and its time for open streams is over; the answer is incomplete";
                    Err(ApiError::new(ApiErrorCode::ShuttingDown, text))
                }
            };
            // Empty: a started event, whose end is still to come.
            if !piece.as_ref().is_ok_and(Bytes::is_empty) {
                return Poll::Ready(Some(piece));
            }
        }
    }

    /// Ends the stream with an error that the client cannot miss.
    fn fail(&mut self, error: &ApiError) -> Poll<Option<Result<Frame<Bytes>, RelayAborted>>> {
        match &mut self.parts.recorder {
            Some(feedback) => {
                feedback.failed(error);
                feedback.span().log_stream_failure(error);
            }
            None => tracing::warn!(%error, "stream of one sample failed"),
        }
        self.pair = None;
        self.state = RelayState::Aborting { flushed: false };
        match self.parts.framer {
            Some(_) => Poll::Ready(Some(Ok(Frame::data(error.event())))),
            None => Poll::Ready(Some(Err(RelayAborted))),
        }
    }
}

/// Pieces for one write.
#[derive(Debug, Default)]
struct CoalescedWrite {
    /// Not copied as long as it is alone.
    first: Bytes,
    all: BytesMut,
}

impl CoalescedWrite {
    fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }

    fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        self.all.extend_from_slice(&std::mem::take(&mut self.first));
        self.all.extend_from_slice(&piece);
    }

    fn into_bytes(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.freeze() }
    }
}

/// Tells the server to close the connection without the final chunk.
#[derive(Debug)]
pub(crate) struct RelayAborted;

impl fmt::Display for RelayAborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer is incomplete")
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
                self.count_chunk();
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
        let mut together = CoalescedWrite::default();
        while together.len() < MAX_COALESCED_BYTES {
            match self.poll_chunk(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    self.count_chunk();
                    together.push(piece);
                    // Only events are small.
                    if self.parts.framer.is_none() {
                        break;
                    }
                }
                Poll::Ready(Some(Err(error))) if together.len() == 0 => return self.fail(&error),
                Poll::Ready(Some(Err(error))) => {
                    self.state = RelayState::Failing(error);
                    break;
                }
                Poll::Ready(None) if together.len() == 0 => return Poll::Ready(None),
                Poll::Pending if together.len() == 0 => return Poll::Pending,
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        Poll::Ready(Some(Ok(Frame::data(together.into_bytes()))))
    }
}

impl fmt::Debug for ResponseRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("pair", &self.pair).finish_non_exhaustive()
    }
}

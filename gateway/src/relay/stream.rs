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

use super::answer::Summary;
use super::sse::SseGate;
use crate::dispatch::{Booked, Pair, PairEvent, failure_code};
use crate::error::{ApiError, Code};
use crate::feedback::Feedback;
use crate::upstream::LegError;

/// Events that have already arrived go to the client in one write of about this many bytes: a system call costs more than copying
/// them.
const WRITTEN_TOGETHER: usize = 16 << 10;

/// What a relay is made of.
pub(crate) struct RelayParts {
    pub(crate) gate: Option<SseGate>,
    /// Whether a stream without `[DONE]` is incomplete.
    pub(crate) expects_done: bool,
    /// Held for as long as the stream lives.
    pub(crate) _booked: Booked,
    /// `None` for a part of a larger answer.
    pub(crate) feedback: Option<Feedback>,
    /// Resolves when the drain's deadline has passed.
    pub(crate) forced_end: Pin<Box<WaitForCancellationFutureOwned>>,
}

enum State {
    /// The first piece has not been passed on yet.
    First(Bytes),
    Flowing,
    /// What came before the failure has been passed on; next comes the failure.
    Failing(ApiError),
    /// An error event has been passed on; next the connection is broken, so that nobody takes it for an end. One poll in between
    /// lets the server flush the event.
    Breaking {
        flushed: bool,
    },
}

/// The response body. Polled only when the client can take more, which is what slows the engine down.
pub(crate) struct Relay {
    /// `None` once the stream has ended or failed: dropping the pair is what aborts the engines. Before the parts, so that the legs' spans end
    /// before the request's.
    pair: Option<Pair>,
    parts: RelayParts,
    state: State,
}

impl Relay {
    pub(crate) fn new(pair: Pair, first: Bytes, parts: RelayParts) -> Self {
        Self { parts, pair: Some(pair), state: State::First(first) }
    }

    fn count_piece(&mut self) {
        match (&mut self.parts.feedback, &self.parts.gate) {
            (Some(feedback), Some(_)) => feedback.piece(),
            (Some(feedback), None) => feedback.part_of_whole(),
            (None, _) => {}
        }
    }

    fn take(&mut self, piece: Bytes) -> Result<Bytes, ApiError> {
        match &mut self.parts.gate {
            None => Ok(piece),
            Some(gate) => gate.push(piece).map_err(|fault| self.leg_error(&LegError::from(fault))),
        }
    }

    /// The engine's answer is complete: checks that it is, and closes the books.
    fn end(&mut self) -> Result<Bytes, ApiError> {
        let rest = match &mut self.parts.gate {
            None => Ok(Bytes::new()),
            Some(gate) => gate.finish(self.parts.expects_done),
        };
        let rest = rest.map_err(|fault| self.leg_error(&LegError::from(fault)))?;
        let mut prefill_usage = None;
        if let Some(mut pair) = self.pair.take() {
            pair.main_endpoint().breaker.success();
            prefill_usage = pair.prefill_usage();
            pair.leave_prefill_to_finish();
        }
        if let Some(feedback) = &mut self.parts.feedback {
            let gate = self.parts.gate.as_ref();
            let said = gate.map(|gate| Summary::read(gate.last_payload())).unwrap_or_default();
            feedback.completed(said.usage, prefill_usage, |ending| {
                if let Some(gate) = gate {
                    ending.add(&Summary::read(gate.payload_before_last()));
                }
                ending.add(&said);
            });
        }
        Ok(rest)
    }

    fn leg_error(&mut self, error: &LegError) -> ApiError {
        let Some(pair) = &mut self.pair else { return ApiError::new(Code::WorkerFailed, error.to_string()) };
        let side = pair.main_side();
        pair.blame(side, error);
        let endpoint = pair.main_endpoint();
        endpoint.failed(error);
        let message = format!("{} engine {} {error}; the answer is incomplete", side.as_str(), endpoint.id);
        ApiError::new(failure_code(side, error), message)
    }

    /// The next piece that can be passed on; `None` after the last.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, ApiError>>> {
        loop {
            let Some(pair) = self.pair.as_mut() else { return Poll::Ready(None) };
            let piece = match pair.poll_after_first_token(cx) {
                Poll::Ready(PairEvent::Data(data)) => self.take(data),
                Poll::Ready(PairEvent::End) => self.end(),
                // Only comes before the first byte.
                Poll::Ready(PairEvent::Silent(_)) => continue,
                Poll::Ready(PairEvent::Failed(_, error)) => Err(self.leg_error(&error)),
                Poll::Pending => {
                    if self.parts.forced_end.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let text = "the gateway is shutting down and its time for open streams is over; the answer is incomplete";
                    Err(ApiError::new(Code::ShuttingDown, text))
                }
            };
            // Empty: a started event, whose end is still to come.
            if !piece.as_ref().is_ok_and(Bytes::is_empty) {
                return Poll::Ready(Some(piece));
            }
        }
    }

    /// Ends the stream with an error that the client cannot miss.
    fn fail(&mut self, error: &ApiError) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match &mut self.parts.feedback {
            Some(feedback) => {
                feedback.failed(error);
                feedback.span().log_stream_failure(error);
            }
            None => tracing::warn!(%error, "stream of one sample failed"),
        }
        self.pair = None;
        self.state = State::Breaking { flushed: false };
        match self.parts.gate {
            Some(_) => Poll::Ready(Some(Ok(Frame::data(error.event())))),
            None => Poll::Ready(Some(Err(Broken))),
        }
    }
}

/// Pieces for one write.
#[derive(Debug, Default)]
struct Together {
    /// Not copied as long as it is alone.
    first: Bytes,
    all: BytesMut,
}

impl Together {
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
pub(crate) struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer is incomplete")
    }
}

impl std::error::Error for Broken {}

impl From<Infallible> for Broken {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match &mut self.state {
            State::First(first) => {
                let first = std::mem::take(first);
                self.state = State::Flowing;
                self.count_piece();
                return Poll::Ready(Some(Ok(Frame::data(first))));
            }
            State::Breaking { flushed: true } => return Poll::Ready(Some(Err(Broken))),
            State::Breaking { flushed } => {
                *flushed = true;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            State::Failing(_) => {
                let State::Failing(error) = std::mem::replace(&mut self.state, State::Flowing) else {
                    return Poll::Ready(None);
                };
                return self.fail(&error);
            }
            State::Flowing => {}
        }
        let mut together = Together::default();
        while together.len() < WRITTEN_TOGETHER {
            match self.poll_piece(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    self.count_piece();
                    together.push(piece);
                    // Only events are small.
                    if self.parts.gate.is_none() {
                        break;
                    }
                }
                Poll::Ready(Some(Err(error))) if together.len() == 0 => return self.fail(&error),
                Poll::Ready(Some(Err(error))) => {
                    self.state = State::Failing(error);
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

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("pair", &self.pair).finish_non_exhaustive()
    }
}

//! One leg of a request: an exchange with one engine, as a stream of events with time limits.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use moongate_runtime::tls_error_hint;
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::{EngineResponseBody, TransportError};
use super::pool::{ConnectionPool, PreparedRequest};
use super::response_parser::NotHttp;
use crate::lora_adapters::AdapterLoadError;
use crate::response::SseError;

/// The role of a leg within its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LegKind {
    Prefill,
    Decode,
    Worker,
}

impl LegKind {
    pub(crate) const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Worker];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LegKind::Prefill => "prefill",
            LegKind::Decode => "decode",
            LegKind::Worker => "worker",
        }
    }
}

/// Time limits of one leg.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LegTimeouts {
    /// From sending to the first byte of the body.
    pub(crate) first_byte: Duration,
    /// Between two chunks of the body.
    pub(crate) idle: Duration,
    /// Interval of [`LegEvent::Idle`] before the first byte of the body.
    pub(crate) first_byte_check: Duration,
    /// Interval of [`LegEvent::Idle`] between two chunks.
    pub(crate) idle_check: Duration,
}

impl LegTimeouts {
    /// Time limits of a leg that never reports [`LegEvent::Idle`].
    pub(crate) fn new(first_byte: Duration, idle: Duration) -> Self {
        Self { first_byte, idle, first_byte_check: first_byte, idle_check: idle }
    }
}

/// The next event of a leg.
#[derive(Debug)]
pub(crate) enum LegEvent {
    /// Status and headers. Always the first event.
    Head(Response<()>),
    /// A chunk of the body.
    Data(Bytes),
    /// No data for one of the check intervals. The leg continues.
    Idle,
    /// The body is complete. Always the last event.
    End,
    /// The leg failed. Always the last event.
    Failed(LegError),
}

#[derive(Debug)]
pub(crate) enum LegError {
    /// The connection could not be opened.
    Connect(io::Error),
    /// All connections that this gateway may have to engines are in use.
    NoConnectionLeft,
    /// The connection broke.
    Transport(io::Error),
    /// The response was not HTTP.
    NotHttp(NotHttp),
    /// The peer closed before the response was complete.
    Closed,
    /// A time limit passed; the text says which.
    Timeout(&'static str, Duration),
    /// The engine has produced no output for this long, for this request or any other, and the request can be redispatched.
    Silent(Duration),
    /// The engine responded with an error status.
    Status(http::StatusCode, Bytes),
    /// The response violates the engine's protocol.
    ProtocolViolation(&'static str),
    /// The engine sent an error event in a stream.
    EngineError(Bytes),
    /// The engine has not loaded the request's LoRA adapter, so that it did not get the request.
    AdapterLoad(AdapterLoadError),
}

impl fmt::Display for LegError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LegError::Connect(error) => {
                write!(f, "no connection: {error}")?;
                write_source(f, error)
            }
            LegError::NoConnectionLeft => {
                f.write_str("not contacted: this gateway has reached its limit of open files (ulimit -n)")
            }
            LegError::Transport(error) => {
                write!(f, "the connection broke: {error}")?;
                write_source(f, error)
            }
            LegError::NotHttp(error) => write!(f, "{error}"),
            LegError::Closed => f.write_str("closed the connection before the response was complete"),
            LegError::Timeout(what, limit) => write!(f, "{what} within {limit:?}"),
            LegError::Silent(silence) => write!(f, "has produced no output for {silence:?}"),
            LegError::Status(status, body) => write!(f, "responded with {status}: {}", excerpt(body)),
            LegError::ProtocolViolation(what) => f.write_str(what),
            LegError::EngineError(event) => write!(f, "reported an error: {}", excerpt(event)),
            LegError::AdapterLoad(error) => error.fmt(f),
        }
    }
}

/// Adds a hint how to fix it, if TLS caused the error.
fn write_source(f: &mut fmt::Formatter<'_>, error: &(dyn std::error::Error + 'static)) -> fmt::Result {
    tls_error_hint(error).map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
}

/// The start of an engine's text, for messages.
fn excerpt(body: &[u8]) -> String {
    const MAX_BYTES: usize = 300;
    let text = String::from_utf8_lossy(&body[..body.len().min(MAX_BYTES)]);
    text.trim().to_owned()
}

impl From<TransportError> for LegError {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Closed => LegError::Closed,
            TransportError::Io(error) => LegError::Transport(error),
            TransportError::NotHttp(error) => LegError::NotHttp(error),
        }
    }
}

impl From<SseError> for LegError {
    fn from(error: SseError) -> Self {
        match error {
            SseError::Malformed(what) => LegError::ProtocolViolation(what),
            SseError::EngineError(json) => LegError::EngineError(json),
        }
    }
}

impl LegError {
    /// All values of [`LegError::reason`].
    pub(crate) const REASONS: [&str; 11] = [
        "connect",
        "no_connection_left",
        "transport",
        "closed",
        "timeout",
        "silent",
        "status_4xx",
        "status_5xx",
        "protocol_violation",
        "engine_error",
        "adapter_load",
    ];

    /// Kind of the error, for metrics and traces.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            LegError::Connect(_) => "connect",
            LegError::NoConnectionLeft => "no_connection_left",
            LegError::Transport(_) | LegError::NotHttp(_) => "transport",
            LegError::Closed => "closed",
            LegError::Timeout(..) => "timeout",
            LegError::Silent(_) => "silent",
            LegError::Status(status, _) if status.is_client_error() => "status_4xx",
            LegError::Status(..) => "status_5xx",
            LegError::ProtocolViolation(_) => "protocol_violation",
            LegError::EngineError(_) => "engine_error",
            LegError::AdapterLoad(_) => "adapter_load",
        }
    }

    /// Whether the engine itself is at fault, so that its breaker should count it. Client errors such as 400 or 404 are not.
    pub(crate) fn blames_engine(&self) -> bool {
        match self {
            LegError::Status(status, _) => status.is_server_error(),
            LegError::NoConnectionLeft | LegError::AdapterLoad(_) => false,
            _ => true,
        }
    }
}

type ExchangeFuture =
    Pin<Box<dyn Future<Output = Result<(Response<()>, EngineResponseBody), LegError>> + Send>>;

enum LegState {
    Opening(ExchangeFuture),
    Body(Box<EngineResponseBody>),
    Ended,
}

/// An exchange in progress. Dropping it closes the connection unless the response was read to its end.
pub(crate) struct LegExchange {
    state: LegState,
    pool: Arc<ConnectionPool>,
    limits: LegTimeouts,
    timer: Pin<Box<Sleep>>,
    /// End of the current time limit. The timer is only moved when it fires, because moving it costs more than reading the clock;
    /// it fires at the check intervals too.
    deadline: Instant,
    started: Instant,
    /// When the last chunk of the body arrived.
    last_data_at: Option<Instant>,
    running: bool,
}

impl LegExchange {
    /// Prepares an exchange: nothing is sent before the first poll.
    pub(crate) fn start(
        pool: Arc<ConnectionPool>,
        request: PreparedRequest,
        limits: LegTimeouts,
        now: Instant,
    ) -> Self {
        let deadline = now + limits.first_byte;
        let opening = {
            let pool = pool.clone();
            Box::pin(async move { pool.exchange(request).await })
        };
        let timer = Box::pin(sleep_until(deadline.min(now + limits.first_byte_check)));
        Self {
            state: LegState::Opening(opening),
            pool,
            limits,
            timer,
            deadline,
            started: now,
            last_data_at: None,
            running: true,
        }
    }

    /// Whether more events can follow.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, LegState::Ended)
    }

    /// Whether the engine may still be processing the request.
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// When the last chunk of the body arrived.
    pub(crate) fn last_data_at(&self) -> Option<Instant> {
        self.last_data_at
    }

    /// The next event. After [`LegEvent::End`] or [`LegEvent::Failed`] it stays pending.
    pub(crate) fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<LegEvent> {
        let event = match &mut self.state {
            LegState::Ended => return Poll::Pending,
            LegState::Opening(opening) => match opening.as_mut().poll(cx) {
                Poll::Pending => return self.poll_deadline(cx),
                Poll::Ready(Ok((head, body))) => {
                    self.state = LegState::Body(Box::new(body));
                    return Poll::Ready(LegEvent::Head(head));
                }
                Poll::Ready(Err(error)) => LegEvent::Failed(error),
            },
            LegState::Body(body) => match body.poll_data(cx) {
                Poll::Pending => return self.poll_deadline(cx),
                Poll::Ready(Some(Ok(data))) => {
                    let now = Instant::now();
                    self.last_data_at = Some(now);
                    self.deadline = now + self.limits.idle;
                    return Poll::Ready(LegEvent::Data(data));
                }
                Poll::Ready(Some(Err(error))) => LegEvent::Failed(error.into()),
                Poll::Ready(None) => LegEvent::End,
            },
        };
        self.running = false;
        let state = std::mem::replace(&mut self.state, LegState::Ended);
        if let (LegEvent::End, LegState::Body(body)) = (&event, state)
            && let Some(connection) = body.into_connection()
        {
            self.pool.checkin(connection);
        }
        Poll::Ready(event)
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<LegEvent> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if now >= self.deadline {
                // `running` stays true: the silent engine has not been aborted yet.
                self.state = LegState::Ended;
                let error = if self.last_data_at.is_some() {
                    LegError::Timeout("sent no more data", self.limits.idle)
                } else {
                    LegError::Timeout("sent no data", self.limits.first_byte)
                };
                return Poll::Ready(LegEvent::Failed(error));
            }
            let (since, check) = match self.last_data_at {
                Some(last_data) => (last_data, self.limits.idle_check),
                None => (self.started, self.limits.first_byte_check),
            };
            let is_idle = now >= since + check;
            let next = if is_idle { now + check } else { since + check };
            self.timer.as_mut().reset(next.min(self.deadline));
            if is_idle {
                return Poll::Ready(LegEvent::Idle);
            }
        }
        Poll::Pending
    }
}

impl fmt::Debug for LegExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LegExchange")
            .field("engine", &self.pool.authority())
            .field("running", &self.running)
            .finish()
    }
}

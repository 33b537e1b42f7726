//! The order of the messages about one request: pure, so that every order can be tested.
//!
//! The proxy sends the parts of the request, then those of the response. The picker answers the request's parts when it has a route, and
//! the response's parts one by one. Instead of a route it may respond itself at any time before.

/// A message of the proxy: a part of a request or of its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMessage {
    /// `ends`: the request has no body and no trailers.
    RequestHeaders {
        ends: bool,
    },
    /// `ends`: it is the last chunk, and no trailers follow.
    RequestBody {
        ends: bool,
    },
    RequestTrailers,
    /// `ends`: the response has no body and no trailers.
    ResponseHeaders {
        ends: bool,
    },
    /// `ends`: it is the last chunk, and no trailers follow.
    ResponseBody {
        ends: bool,
    },
    ResponseTrailers,
}

/// What to do with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeStep {
    /// Begin to pick. `ends`: with an empty body.
    BeginRequest { ends: bool },
    /// Add the chunk to the body. `ends`: it is complete.
    AddToBody { ends: bool },
    /// The body is complete.
    EndBody,
    /// The proxy responds by itself before it has a route: stop picking, and let its response pass.
    Abandon,
    /// Record the head of the response, and let it pass. `ends`: it is complete.
    BeginResponse { ends: bool },
    /// Record the chunk of the response, and let it pass. `ends`: it is complete.
    PassBody { ends: bool },
    /// Let the trailers pass; the response is complete.
    EndResponse,
    /// Let the message of an unobserved response pass.
    PassUnobserved,
    /// The exchange has ended: ignore the message.
    Ignore,
}

/// The parts of a request, all of which the proxy awaits when its route is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AwaitedParts {
    pub body: bool,
    pub trailers: bool,
}

/// A message that the protocol does not allow at this point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{message:?} is out of order: {expected}")]
pub struct OutOfOrderError {
    message: ProxyMessage,
    expected: &'static str,
}

/// The messages about one request so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Exchange {
    phase: ExchangePhase,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ExchangePhase {
    #[default]
    Idle,
    ReadsRequest,
    /// The request is complete, and has no route yet.
    Picks(AwaitedParts),
    /// The request is on its way to the engine.
    Sent,
    ReadsResponse,
    /// The proxy's own response passes.
    Unobserved,
    Ended,
}

impl Exchange {
    /// The next message of the proxy.
    ///
    /// # Errors
    ///
    /// [`OutOfOrderError`] if the message cannot follow those before it; the exchange has not changed.
    pub fn receive(&mut self, message: ProxyMessage) -> Result<ExchangeStep, OutOfOrderError> {
        use ExchangePhase as Phase;
        use ProxyMessage as Message;
        let fail = |expected| Err(OutOfOrderError { message, expected });
        let until_end = |ends, phase| if ends { Phase::Ended } else { phase };
        let (phase, step) = match (self.phase, message) {
            (Phase::Ended, _) => (Phase::Ended, ExchangeStep::Ignore),
            (Phase::Idle, Message::RequestHeaders { ends: true }) => {
                let parts = AwaitedParts { body: false, trailers: false };
                (Phase::Picks(parts), ExchangeStep::BeginRequest { ends: true })
            }
            (Phase::Idle, Message::RequestHeaders { ends: false }) => {
                (Phase::ReadsRequest, ExchangeStep::BeginRequest { ends: false })
            }
            (Phase::Idle, _) => return fail("the headers of the request are first"),
            (Phase::ReadsRequest, Message::RequestBody { ends: true }) => {
                let parts = AwaitedParts { body: true, trailers: false };
                (Phase::Picks(parts), ExchangeStep::AddToBody { ends: true })
            }
            (Phase::ReadsRequest, Message::RequestBody { ends: false }) => {
                (Phase::ReadsRequest, ExchangeStep::AddToBody { ends: false })
            }
            (Phase::ReadsRequest, Message::RequestTrailers) => {
                let parts = AwaitedParts { body: true, trailers: true };
                (Phase::Picks(parts), ExchangeStep::EndBody)
            }
            (Phase::ReadsRequest | Phase::Picks(_), Message::ResponseHeaders { ends }) => {
                (until_end(ends, Phase::Unobserved), ExchangeStep::Abandon)
            }
            (_, Message::RequestHeaders { .. }) => return fail("a request has headers only once"),
            (_, Message::RequestBody { .. } | Message::RequestTrailers) => {
                return fail("the request is already complete");
            }
            (Phase::Sent, Message::ResponseHeaders { ends }) => {
                (until_end(ends, Phase::ReadsResponse), ExchangeStep::BeginResponse { ends })
            }
            (Phase::ReadsRequest | Phase::Picks(_) | Phase::Sent, _) => {
                return fail("the headers of the response are first");
            }
            (Phase::ReadsResponse | Phase::Unobserved, Message::ResponseHeaders { .. }) => {
                return fail("a response has headers only once");
            }
            (Phase::ReadsResponse, Message::ResponseBody { ends }) => {
                (until_end(ends, Phase::ReadsResponse), ExchangeStep::PassBody { ends })
            }
            (Phase::ReadsResponse, Message::ResponseTrailers) => (Phase::Ended, ExchangeStep::EndResponse),
            (Phase::Unobserved, Message::ResponseBody { ends }) => {
                (until_end(ends, Phase::Unobserved), ExchangeStep::PassUnobserved)
            }
            (Phase::Unobserved, Message::ResponseTrailers) => (Phase::Ended, ExchangeStep::PassUnobserved),
        };
        self.phase = phase;
        Ok(step)
    }

    /// The request has a route. Returns the parts that the proxy awaits; `None` if it does not await a route.
    pub fn route(&mut self) -> Option<AwaitedParts> {
        let ExchangePhase::Picks(parts) = self.phase else { return None };
        self.phase = ExchangePhase::Sent;
        Some(parts)
    }

    /// The picker responds itself. Returns whether the proxy still awaits that.
    pub fn respond(&mut self) -> bool {
        let awaits = matches!(self.phase, ExchangePhase::ReadsRequest | ExchangePhase::Picks(_));
        if awaits {
            self.phase = ExchangePhase::Ended;
        }
        awaits
    }

    /// Whether no message is expected any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.phase == ExchangePhase::Ended
    }
}

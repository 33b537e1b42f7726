//! Methods to query an engine for tokens: which of them it supports, and the limit of concurrent queries.

use std::time::Duration;

use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// Pause of a method that the engine does not support. Support changes only with a restart of the engine, after which its facts are
/// new but its address is often the same.
const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(300);
/// Pause of a method that keeps failing. Then one request tries it again.
const FAILURE_PAUSE: Duration = Duration::from_secs(30);
/// Consecutive failures until the pause.
const MAX_FAILURES: u32 = 3;
/// Concurrent queries per engine. Its front end answers them one after the other, and further ones would be late.
const MAX_CONCURRENT_QUERIES: usize = 8;

/// A query method. Chats and texts are separate, because older engines tokenize texts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizeMethod {
    /// vLLM, with `--enable-scale-out`: takes the body of a chat completion.
    RenderChat,
    /// vLLM, with `--enable-scale-out`: takes the body of a completion.
    RenderText,
    /// vLLM, with `--enable-scale-out`: takes the body of a Messages request.
    RenderMessages,
    /// vLLM, with `--enable-scale-out`: takes the body of a Responses request.
    RenderResponses,
    /// Both engines: some members of a chat completion's body.
    TokenizeChat,
    /// Both engines: a text.
    TokenizeText,
}

impl TokenizeMethod {
    /// Number of methods.
    pub(crate) const COUNT: usize = 6;

    pub(crate) fn uri(self) -> Uri {
        Uri::from_static(match self {
            TokenizeMethod::RenderChat => "/v1/chat/completions/render",
            TokenizeMethod::RenderText => "/v1/completions/render",
            TokenizeMethod::RenderMessages => "/v1/messages/render",
            TokenizeMethod::RenderResponses => "/v1/responses/render",
            TokenizeMethod::TokenizeChat | TokenizeMethod::TokenizeText => "/tokenize",
        })
    }
}

/// Outcome of a query for tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenizeOutcome {
    Tokenized,
    /// The path does not exist, or access is denied.
    Unsupported,
    /// The engine rejects the request: it is invalid, or the engine is older than this method.
    Rejected,
    /// No valid response in time.
    Failed,
}

impl TokenizeOutcome {
    /// Outcome for the status of a response without tokens. vLLM answers 403 without `--enable-scale-out`.
    pub(crate) fn of_status(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED => TokenizeOutcome::Unsupported,
            status if status.is_client_error() => TokenizeOutcome::Rejected,
            _ => TokenizeOutcome::Failed,
        }
    }
}

/// State of one engine's query methods.
#[derive(Debug)]
pub(crate) struct TokenizeMethods {
    states: Mutex<[TokenizeMethodState; TokenizeMethod::COUNT]>,
    permits: Semaphore,
}

impl Default for TokenizeMethods {
    fn default() -> Self {
        Self { states: Mutex::default(), permits: Semaphore::new(MAX_CONCURRENT_QUERIES) }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct TokenizeMethodState {
    /// Whether it has returned tokens before.
    proven: bool,
    failures: u32,
    closed_until: Option<Instant>,
}

impl TokenizeMethods {
    /// Whether the method may be used now.
    pub(crate) fn is_open(&self, method: TokenizeMethod) -> bool {
        self.states.lock()[method as usize].closed_until.is_none_or(|until| Instant::now() >= until)
    }

    /// As [`TokenizeMethods::is_open`], for the caller that then queries and records the outcome: after a pause, no other caller is
    /// admitted until the outcome is recorded.
    pub(crate) fn try_enter(&self, method: TokenizeMethod) -> bool {
        let (now, state) = (Instant::now(), &mut self.states.lock()[method as usize]);
        match &mut state.closed_until {
            None => true,
            Some(until) if now < *until => false,
            Some(until) => {
                *until = now + FAILURE_PAUSE;
                true
            }
        }
    }

    /// A permit for a concurrent query of the engine, released on drop.
    pub(crate) fn try_acquire(&self) -> Option<SemaphorePermit<'_>> {
        self.permits.try_acquire().ok()
    }

    /// Whether a permit is available now.
    pub(crate) fn has_permit(&self) -> bool {
        self.permits.available_permits() > 0
    }

    pub(crate) fn record(&self, method: TokenizeMethod, outcome: TokenizeOutcome) {
        let state = &mut self.states.lock()[method as usize];
        match outcome {
            TokenizeOutcome::Tokenized => {
                *state = TokenizeMethodState { proven: true, ..TokenizeMethodState::default() }
            }
            TokenizeOutcome::Unsupported => state.closed_until = Some(Instant::now() + UNSUPPORTED_PAUSE),
            // One client's invalid request must not disable predictions for others; and the engine has responded.
            TokenizeOutcome::Rejected if state.proven => {
                *state = TokenizeMethodState { proven: true, ..TokenizeMethodState::default() }
            }
            TokenizeOutcome::Rejected | TokenizeOutcome::Failed => {
                state.failures = state.failures.saturating_add(1);
                if state.failures >= MAX_FAILURES {
                    state.closed_until = Some(Instant::now() + FAILURE_PAUSE);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pass(time: Duration) {
        tokio::time::advance(time).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_unsupported_path_is_not_queried_for_a_while() {
        let methods = TokenizeMethods::default();
        methods.record(TokenizeMethod::RenderChat, TokenizeOutcome::of_status(StatusCode::FORBIDDEN));
        assert!(!methods.is_open(TokenizeMethod::RenderChat));
        assert!(methods.is_open(TokenizeMethod::RenderText) && methods.is_open(TokenizeMethod::TokenizeChat));
        pass(UNSUPPORTED_PAUSE).await;
        assert!(methods.is_open(TokenizeMethod::RenderChat));
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_failures_pause_a_method_until_one_retry() {
        let methods = TokenizeMethods::default();
        let fail = || {
            methods.record(TokenizeMethod::TokenizeText, TokenizeOutcome::of_status(StatusCode::BAD_GATEWAY));
        };
        (0..MAX_FAILURES).for_each(|_| {
            assert!(methods.is_open(TokenizeMethod::TokenizeText));
            fail();
        });
        assert!(!methods.is_open(TokenizeMethod::TokenizeText));
        pass(FAILURE_PAUSE).await;
        assert!(
            methods.is_open(TokenizeMethod::TokenizeText) && methods.try_enter(TokenizeMethod::TokenizeText)
        );
        assert!(
            !methods.is_open(TokenizeMethod::TokenizeText)
                && !methods.try_enter(TokenizeMethod::TokenizeText),
            "one tries first"
        );
        fail();
        assert!(!methods.is_open(TokenizeMethod::TokenizeText));
        pass(FAILURE_PAUSE).await;
        assert!(methods.try_enter(TokenizeMethod::TokenizeText));
        methods.record(TokenizeMethod::TokenizeText, TokenizeOutcome::Tokenized);
        fail();
        assert!(methods.is_open(TokenizeMethod::TokenizeText));
    }

    #[test]
    fn concurrent_queries_are_bounded() {
        let methods = TokenizeMethods::default();
        let permits: Vec<_> = (0..MAX_CONCURRENT_QUERIES).map_while(|_| methods.try_acquire()).collect();
        assert!(
            permits.len() == MAX_CONCURRENT_QUERIES
                && methods.try_acquire().is_none()
                && !methods.has_permit()
        );
        drop(permits);
        assert!(methods.has_permit());
    }

    #[test]
    fn rejections_close_only_an_unproven_method() {
        let methods = TokenizeMethods::default();
        let reject = |times| {
            (0..times).for_each(|_| {
                methods.record(
                    TokenizeMethod::TokenizeChat,
                    TokenizeOutcome::of_status(StatusCode::BAD_REQUEST),
                );
            });
        };
        methods.record(TokenizeMethod::TokenizeChat, TokenizeOutcome::Tokenized);
        reject(10 * MAX_FAILURES);
        assert!(methods.is_open(TokenizeMethod::TokenizeChat));
        let methods = TokenizeMethods::default();
        (0..MAX_FAILURES)
            .for_each(|_| methods.record(TokenizeMethod::TokenizeChat, TokenizeOutcome::Rejected));
        assert!(!methods.is_open(TokenizeMethod::TokenizeChat));
    }
}

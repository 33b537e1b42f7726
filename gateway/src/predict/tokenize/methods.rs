//! The ways in which an engine can be asked for tokens, which of them it does not offer, and how much it is asked at once.

use std::time::Duration;

use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// How long a way is left alone that the engine does not offer. It only comes with a restart of the engine, after which its facts are
/// new but its address often is not.
const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(300);
/// How long a way is left alone that keeps failing. Then one request tries it again.
const FAILURE_PAUSE: Duration = Duration::from_secs(30);
/// Troubles in a row until then.
const MAX_FAILURES: u32 = 3;
/// Questions that an engine is asked at once. Its front end answers them one after the other, and the last ones would be late.
const MAX_CONCURRENT_QUERIES: usize = 8;

/// A way to ask. Chats and texts count apart, because older engines tokenise texts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenizeMethod {
    /// vLLM, with `--enable-scale-out`: takes the body of a chat completion.
    RenderChat,
    /// vLLM, with `--enable-scale-out`: takes the body of a completion.
    RenderText,
    /// Both engines: some members of a chat completion's body.
    TokenizeChat,
    /// Both engines: a text.
    TokenizeText,
}

impl TokenizeMethod {
    pub(super) fn uri(self) -> Uri {
        Uri::from_static(match self {
            TokenizeMethod::RenderChat => "/v1/chat/completions/render",
            TokenizeMethod::RenderText => "/v1/completions/render",
            TokenizeMethod::TokenizeChat | TokenizeMethod::TokenizeText => "/tokenize",
        })
    }
}

/// How asking went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenizeOutcome {
    Tokenized,
    /// There is no such path, or it is closed to us.
    Unsupported,
    /// The engine takes the request for wrong: it is, or the engine is older than this way.
    Rejected,
    /// No answer in time, or none that can be used.
    Failed,
}

impl TokenizeOutcome {
    /// What the status of an answer without tokens means. vLLM answers 403 while `--enable-scale-out` is not given.
    pub(super) fn of_status(status: StatusCode) -> Self {
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

/// What is known of one engine's ways.
#[derive(Debug)]
pub(crate) struct TokenizeMethods {
    states: Mutex<[TokenizeMethodState; 4]>,
    permits: Semaphore,
}

impl Default for TokenizeMethods {
    fn default() -> Self {
        Self { states: Mutex::default(), permits: Semaphore::new(MAX_CONCURRENT_QUERIES) }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct TokenizeMethodState {
    /// It has told tokens before.
    proven: bool,
    failures: u32,
    closed_until: Option<Instant>,
}

impl TokenizeMethods {
    /// Whether it is worth asking so now.
    pub(super) fn is_open(&self, way: TokenizeMethod) -> bool {
        self.states.lock()[way as usize].closed_until.is_none_or(|until| Instant::now() >= until)
    }

    /// As [`TokenizeMethods::is_open`], by the one who then asks and tells how it went: after a pause nobody else is let in until that is
    /// known.
    pub(super) fn try_enter(&self, way: TokenizeMethod) -> bool {
        let (now, state) = (Instant::now(), &mut self.states.lock()[way as usize]);
        match &mut state.closed_until {
            None => true,
            Some(until) if now < *until => false,
            Some(until) => {
                *until = now + FAILURE_PAUSE;
                true
            }
        }
    }

    /// A place among the questions that the engine is asked at once, until it is dropped.
    pub(super) fn try_acquire(&self) -> Option<SemaphorePermit<'_>> {
        self.permits.try_acquire().ok()
    }

    /// Whether there is such a place now.
    pub(super) fn has_permit(&self) -> bool {
        self.permits.available_permits() > 0
    }

    pub(super) fn record(&self, way: TokenizeMethod, outcome: TokenizeOutcome) {
        let state = &mut self.states.lock()[way as usize];
        match outcome {
            TokenizeOutcome::Tokenized => {
                *state = TokenizeMethodState { proven: true, ..TokenizeMethodState::default() }
            }
            TokenizeOutcome::Unsupported => state.closed_until = Some(Instant::now() + UNSUPPORTED_PAUSE),
            // A client's mistake must not keep others from their predictions; and the engine has answered.
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
        let ways = TokenizeMethods::default();
        ways.record(TokenizeMethod::RenderChat, TokenizeOutcome::of_status(StatusCode::FORBIDDEN));
        assert!(!ways.is_open(TokenizeMethod::RenderChat));
        assert!(ways.is_open(TokenizeMethod::RenderText) && ways.is_open(TokenizeMethod::TokenizeChat));
        pass(UNSUPPORTED_PAUSE).await;
        assert!(ways.is_open(TokenizeMethod::RenderChat));
    }

    #[tokio::test(start_paused = true)]
    async fn consecutive_failures_open_the_breaker_and_one_after_pause() {
        let ways = TokenizeMethods::default();
        let fail =
            || ways.record(TokenizeMethod::TokenizeText, TokenizeOutcome::of_status(StatusCode::BAD_GATEWAY));
        (0..MAX_FAILURES).for_each(|_| {
            assert!(ways.is_open(TokenizeMethod::TokenizeText));
            fail();
        });
        assert!(!ways.is_open(TokenizeMethod::TokenizeText));
        pass(FAILURE_PAUSE).await;
        assert!(ways.is_open(TokenizeMethod::TokenizeText) && ways.try_enter(TokenizeMethod::TokenizeText));
        assert!(
            !ways.is_open(TokenizeMethod::TokenizeText) && !ways.try_enter(TokenizeMethod::TokenizeText),
            "one tries first"
        );
        fail();
        assert!(!ways.is_open(TokenizeMethod::TokenizeText));
        pass(FAILURE_PAUSE).await;
        assert!(ways.try_enter(TokenizeMethod::TokenizeText));
        ways.record(TokenizeMethod::TokenizeText, TokenizeOutcome::Tokenized);
        fail();
        assert!(ways.is_open(TokenizeMethod::TokenizeText));
    }

    #[test]
    fn concurrent_queries_are_bounded() {
        let ways = TokenizeMethods::default();
        let taken: Vec<_> = (0..MAX_CONCURRENT_QUERIES).map_while(|_| ways.try_acquire()).collect();
        assert!(taken.len() == MAX_CONCURRENT_QUERIES && ways.try_acquire().is_none() && !ways.has_permit());
        drop(taken);
        assert!(ways.has_permit());
    }

    #[test]
    fn rejections_close_only_an_unproven_method() {
        let ways = TokenizeMethods::default();
        let refuse = |times| {
            (0..times).for_each(|_| {
                ways.record(
                    TokenizeMethod::TokenizeChat,
                    TokenizeOutcome::of_status(StatusCode::BAD_REQUEST),
                );
            });
        };
        ways.record(TokenizeMethod::TokenizeChat, TokenizeOutcome::Tokenized);
        refuse(10 * MAX_FAILURES);
        assert!(ways.is_open(TokenizeMethod::TokenizeChat));
        let ways = TokenizeMethods::default();
        (0..MAX_FAILURES).for_each(|_| ways.record(TokenizeMethod::TokenizeChat, TokenizeOutcome::Rejected));
        assert!(!ways.is_open(TokenizeMethod::TokenizeChat));
    }
}

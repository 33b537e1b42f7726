//! The ways in which an engine can be asked for tokens, and which of them it does not offer.

use std::time::Duration;

use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::time::Instant;

/// How long a way is left alone that the engine does not offer. It only comes with a restart of the engine, after which its facts are
/// new but its address often is not.
const MISSING_PAUSE: Duration = Duration::from_secs(300);
/// How long a way is left alone that keeps failing: the longest time for which one request out of many waits in vain.
const TROUBLE_PAUSE: Duration = Duration::from_secs(30);
/// Troubles in a row until then.
const TROUBLES: u32 = 3;

/// A way to ask. Chats and texts count apart, because older engines tokenise texts only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// vLLM, with `--enable-scale-out`: takes the body of a chat completion.
    RenderChat,
    /// vLLM, with `--enable-scale-out`: takes the body of a completion.
    RenderText,
    /// Both engines: some members of a chat completion's body.
    TokenizeChat,
    /// Both engines: a text.
    TokenizeText,
}

impl Way {
    pub(super) fn uri(self) -> Uri {
        Uri::from_static(match self {
            Way::RenderChat => "/v1/chat/completions/render",
            Way::RenderText => "/v1/completions/render",
            Way::TokenizeChat | Way::TokenizeText => "/tokenize",
        })
    }
}

/// How asking went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Told,
    /// There is no such path, or it is closed to us.
    Missing,
    /// The engine takes the request for wrong: it is, or the engine is older than this way.
    Refused,
    /// No answer in time, or none that can be used.
    Failed,
}

impl Outcome {
    /// What the status of an answer without tokens means. vLLM answers 403 while `--enable-scale-out` is not given.
    pub(super) fn of_status(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED => Outcome::Missing,
            status if status.is_client_error() => Outcome::Refused,
            _ => Outcome::Failed,
        }
    }
}

/// What is known of one engine's ways.
#[derive(Debug, Default)]
pub(crate) struct TokenizeWays {
    states: Mutex<[State; 4]>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    /// It has told tokens before.
    proven: bool,
    troubles: u32,
    closed_until: Option<Instant>,
}

impl TokenizeWays {
    /// Whether it is worth asking so now.
    pub(super) fn is_open(&self, way: Way) -> bool {
        self.states.lock()[way as usize].closed_until.is_none_or(|until| Instant::now() >= until)
    }

    pub(super) fn record(&self, way: Way, outcome: Outcome) {
        let state = &mut self.states.lock()[way as usize];
        match outcome {
            Outcome::Told => *state = State { proven: true, ..State::default() },
            Outcome::Missing => state.closed_until = Some(Instant::now() + MISSING_PAUSE),
            // A client's mistake must not keep others from their predictions.
            Outcome::Refused if state.proven => {}
            Outcome::Refused | Outcome::Failed => {
                state.troubles = state.troubles.saturating_add(1);
                if state.troubles >= TROUBLES {
                    state.closed_until = Some(Instant::now() + TROUBLE_PAUSE);
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
    async fn a_missing_path_is_not_asked_for_a_while() {
        let ways = TokenizeWays::default();
        ways.record(Way::RenderChat, Outcome::of_status(StatusCode::FORBIDDEN));
        assert!(!ways.is_open(Way::RenderChat));
        assert!(ways.is_open(Way::RenderText) && ways.is_open(Way::TokenizeChat));
        pass(MISSING_PAUSE).await;
        assert!(ways.is_open(Way::RenderChat));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_in_a_row_close_a_way_and_one_more_does_after_the_pause() {
        let ways = TokenizeWays::default();
        let fail = || ways.record(Way::TokenizeText, Outcome::of_status(StatusCode::BAD_GATEWAY));
        (0..TROUBLES).for_each(|_| {
            assert!(ways.is_open(Way::TokenizeText));
            fail();
        });
        assert!(!ways.is_open(Way::TokenizeText));
        pass(TROUBLE_PAUSE).await;
        assert!(ways.is_open(Way::TokenizeText));
        fail();
        assert!(!ways.is_open(Way::TokenizeText));
        pass(TROUBLE_PAUSE).await;
        ways.record(Way::TokenizeText, Outcome::Told);
        fail();
        assert!(ways.is_open(Way::TokenizeText));
    }

    #[test]
    fn wrong_requests_close_only_a_way_that_never_worked() {
        let ways = TokenizeWays::default();
        let refuse = |times| {
            (0..times)
                .for_each(|_| ways.record(Way::TokenizeChat, Outcome::of_status(StatusCode::BAD_REQUEST)));
        };
        ways.record(Way::TokenizeChat, Outcome::Told);
        refuse(10 * TROUBLES);
        assert!(ways.is_open(Way::TokenizeChat));
        let ways = TokenizeWays::default();
        (0..TROUBLES).for_each(|_| ways.record(Way::TokenizeChat, Outcome::Refused));
        assert!(!ways.is_open(Way::TokenizeChat));
    }
}

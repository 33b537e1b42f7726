//! The ways in which an engine can be asked for tokens, which of them it does not offer, and how much it is asked at once.

use std::time::Duration;

use http::{StatusCode, Uri};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// How long a way is left alone that the engine does not offer. It only comes with a restart of the engine, after which its facts are
/// new but its address often is not.
const MISSING_PAUSE: Duration = Duration::from_secs(300);
/// How long a way is left alone that keeps failing. Then one request tries it again.
const TROUBLE_PAUSE: Duration = Duration::from_secs(30);
/// Troubles in a row until then.
const TROUBLES: u32 = 3;
/// Questions that an engine is asked at once. Its front end answers them one after the other, and the last ones would be late.
const PLACES: usize = 8;

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
#[derive(Debug)]
pub(crate) struct TokenizeWays {
    states: Mutex<[State; 4]>,
    places: Semaphore,
}

impl Default for TokenizeWays {
    fn default() -> Self {
        Self { states: Mutex::default(), places: Semaphore::new(PLACES) }
    }
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

    /// As [`TokenizeWays::is_open`], by the one who then asks and tells how it went: after a pause nobody else is let in until that is
    /// known.
    pub(super) fn enter(&self, way: Way) -> bool {
        let (now, state) = (Instant::now(), &mut self.states.lock()[way as usize]);
        match &mut state.closed_until {
            None => true,
            Some(until) if now < *until => false,
            Some(until) => {
                *until = now + TROUBLE_PAUSE;
                true
            }
        }
    }

    /// A place among the questions that the engine is asked at once, until it is dropped.
    pub(super) fn place(&self) -> Option<SemaphorePermit<'_>> {
        self.places.try_acquire().ok()
    }

    /// Whether there is such a place now.
    pub(super) fn has_place(&self) -> bool {
        self.places.available_permits() > 0
    }

    pub(super) fn record(&self, way: Way, outcome: Outcome) {
        let state = &mut self.states.lock()[way as usize];
        match outcome {
            Outcome::Told => *state = State { proven: true, ..State::default() },
            Outcome::Missing => state.closed_until = Some(Instant::now() + MISSING_PAUSE),
            // A client's mistake must not keep others from their predictions; and the engine has answered.
            Outcome::Refused if state.proven => *state = State { proven: true, ..State::default() },
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
        assert!(ways.is_open(Way::TokenizeText) && ways.enter(Way::TokenizeText));
        assert!(!ways.is_open(Way::TokenizeText) && !ways.enter(Way::TokenizeText), "one tries first");
        fail();
        assert!(!ways.is_open(Way::TokenizeText));
        pass(TROUBLE_PAUSE).await;
        assert!(ways.enter(Way::TokenizeText));
        ways.record(Way::TokenizeText, Outcome::Told);
        fail();
        assert!(ways.is_open(Way::TokenizeText));
    }

    #[test]
    fn places_are_bounded_and_given_back() {
        let ways = TokenizeWays::default();
        let taken: Vec<_> = (0..PLACES).map_while(|_| ways.place()).collect();
        assert!(taken.len() == PLACES && ways.place().is_none() && !ways.has_place());
        drop(taken);
        assert!(ways.has_place());
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

//! Times that refused clients were told to come back at.

use std::collections::BTreeMap;

use super::super::PolicyInput;
use crate::request::Seconds;

/// A client is told to come back no sooner than this.
const MIN_RETRY_AFTER: Seconds = 1.0;

/// How much before its time a client may come: clocks and whole seconds of a header.
const EARLY_TOLERANCE: Seconds = 1.0;

/// How long after its time a client still finds its place kept.
const RESERVATION_TTL: Seconds = 60.0;

/// Promises remembered. Who is refused beyond that is told a time, but has no place.
const MAX_RESERVATIONS: usize = 4096;

/// A promise of a place at a time, so that a client who comes back when it was told to is served then. Promised work is spread
/// so that it takes only a share of the fleet.
#[derive(Debug, Default)]
pub(super) struct RetryReservations {
    /// By prompt: when.
    due_by_prompt: BTreeMap<(u64, u32), Seconds>,
    /// When the fleet's share for promised work is next free.
    free_at: Seconds,
}

impl RetryReservations {
    /// Promises a place to a request that takes `service` of one of `engines` engines; answers in how many seconds.
    pub(super) fn reserve(
        &mut self,
        input: &PolicyInput<'_>,
        service: Seconds,
        engines: usize,
        share: f64,
    ) -> Seconds {
        let at = self.free_at.max(input.now + MIN_RETRY_AFTER);
        if share > 0.0 && engines > 0 {
            self.free_at = at + service / (share * engines as f64);
        }
        if let Some(prompt) = prompt_key(input) {
            if self.due_by_prompt.len() >= MAX_RESERVATIONS {
                self.due_by_prompt.retain(|_, promised| *promised + RESERVATION_TTL > input.now);
            }
            if self.due_by_prompt.len() < MAX_RESERVATIONS {
                self.due_by_prompt.insert(prompt, at);
            }
        }
        at - input.now
    }

    /// Whether the request is one that was promised a place about now.
    pub(super) fn has_reservation(&self, input: &PolicyInput<'_>) -> bool {
        // Most fleets never refuse anybody.
        !self.due_by_prompt.is_empty()
            && prompt_key(input)
                .and_then(|prompt| self.due_by_prompt.get(&prompt))
                .is_some_and(|&at| (at - EARLY_TOLERANCE..at + RESERVATION_TTL).contains(&input.arrived))
    }

    /// The promise is kept.
    pub(super) fn redeem(&mut self, input: &PolicyInput<'_>) {
        if self.has_reservation(input)
            && let Some(prompt) = prompt_key(input)
        {
            self.due_by_prompt.remove(&prompt);
        }
    }
}

/// What tells one prompt from another, if it was read: the key of its last full page stands for all before.
fn prompt_key(input: &PolicyInput<'_>) -> Option<(u64, u32)> {
    Some((*input.prediction.pages.last()?, input.request.input_tokens))
}

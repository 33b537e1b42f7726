//! Reserved capacity for rejected clients that retry at the time in `Retry-After`.

use std::collections::BTreeMap;

use super::super::PolicyInput;
use crate::seconds::Seconds;

/// Minimum value of `Retry-After` in seconds.
const MIN_RETRY_AFTER: Seconds = 1.0;

/// How much before its time a client may retry: covers clock differences and the header's whole seconds.
const EARLY_TOLERANCE: Seconds = 1.0;

/// How long after its time a client's reservation stays valid.
const RESERVATION_TTL: Seconds = 60.0;

/// Maximum number of reservations. Clients rejected beyond it get a `Retry-After` without a reservation.
const MAX_RESERVATIONS: usize = 4096;

/// Reservations of capacity at a time, so that a client that retries when `Retry-After` says is served then. Reserved
/// work is spread so that it takes only a share of the fleet.
#[derive(Debug, Default)]
pub(super) struct RetryReservations {
    /// Reserved time, by prompt.
    due_by_prompt: BTreeMap<(u64, u32), Seconds>,
    /// When the fleet's reserved share is next free.
    free_at: Seconds,
}

impl RetryReservations {
    /// Reserves capacity for a request that takes `service` on one of `engines` engines; returns in how many seconds.
    pub(super) fn reserve(
        &mut self,
        input: &PolicyInput<'_>,
        service: Seconds,
        engines: usize,
        share: f64,
    ) -> Seconds {
        let due = self.free_at.max(input.now + MIN_RETRY_AFTER);
        if share > 0.0 && engines > 0 {
            self.free_at = due + service / (share * engines as f64);
        }
        if let Some(prompt) = prompt_key(input) {
            if self.due_by_prompt.len() >= MAX_RESERVATIONS {
                self.due_by_prompt.retain(|_, promised| *promised + RESERVATION_TTL > input.now);
            }
            if self.due_by_prompt.len() < MAX_RESERVATIONS {
                self.due_by_prompt.insert(prompt, due);
            }
        }
        due - input.now
    }

    /// Whether the request has a reservation for about now.
    pub(super) fn has_reservation(&self, input: &PolicyInput<'_>) -> bool {
        // Most fleets never reject a request.
        !self.due_by_prompt.is_empty()
            && prompt_key(input)
                .and_then(|prompt| self.due_by_prompt.get(&prompt))
                .is_some_and(|&due| (due - EARLY_TOLERANCE..due + RESERVATION_TTL).contains(&input.arrived))
    }

    /// Removes the reservation of a request that is served.
    pub(super) fn redeem(&mut self, input: &PolicyInput<'_>) {
        if self.has_reservation(input)
            && let Some(prompt) = prompt_key(input)
        {
            self.due_by_prompt.remove(&prompt);
        }
    }
}

/// Identifies a prompt, if it was tokenized: by its whole text if that is long and hence may not be tokenized completely, otherwise by its
/// length and the key of its last full block, which covers all before.
fn prompt_key(input: &PolicyInput<'_>) -> Option<(u64, u32)> {
    match input.prediction.text_prefixes.last() {
        Some(whole) => Some((whole.key, 0)),
        None => Some((*input.prediction.pages.last()?, input.request.input_tokens)),
    }
}

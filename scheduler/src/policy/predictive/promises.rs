//! Times that refused clients were told to come back at.

use std::collections::BTreeMap;

use super::super::Input;
use crate::request::Seconds;

/// A client is told to come back no sooner than this.
const SOONEST: Seconds = 1.0;

/// How much before its time a client may come: clocks and whole seconds of a header.
const EARLY: Seconds = 1.0;

/// How long after its time a client still finds its place kept.
const KEPT: Seconds = 60.0;

/// Promises remembered. Who is refused beyond that is told a time, but has no place.
const MOST_PROMISES: usize = 4096;

/// A promise of a place at a time, so that a client who comes back when it was told to is served then. Promised work is spread
/// so that it takes only a share of the fleet.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// By prompt: when.
    at: BTreeMap<(u64, u32), Seconds>,
    /// When the fleet's share for promised work is next free.
    free_at: Seconds,
}

impl Promises {
    /// Promises a place to a request that takes `service` of one of `engines` engines; answers in how many seconds.
    pub(super) fn make(
        &mut self,
        input: &Input<'_>,
        service: Seconds,
        engines: usize,
        share: f64,
    ) -> Seconds {
        let at = self.free_at.max(input.now + SOONEST);
        if share > 0.0 && engines > 0 {
            self.free_at = at + service / (share * engines as f64);
        }
        if let Some(prompt) = prompt(input) {
            if self.at.len() >= MOST_PROMISES {
                self.at.retain(|_, promised| *promised + KEPT > input.now);
            }
            if self.at.len() < MOST_PROMISES {
                self.at.insert(prompt, at);
            }
        }
        at - input.now
    }

    /// Whether the request is one that was promised a place about now.
    pub(super) fn holds(&self, input: &Input<'_>) -> bool {
        // Most fleets never refuse anybody.
        !self.at.is_empty()
            && prompt(input)
                .and_then(|prompt| self.at.get(&prompt))
                .is_some_and(|&at| (at - EARLY..at + KEPT).contains(&input.arrived))
    }

    /// The promise is kept.
    pub(super) fn keep(&mut self, input: &Input<'_>) {
        if self.holds(input)
            && let Some(prompt) = prompt(input)
        {
            self.at.remove(&prompt);
        }
    }
}

/// What tells one prompt from another, if it was read: the key of its last full page stands for all before.
fn prompt(input: &Input<'_>) -> Option<(u64, u32)> {
    Some((*input.prediction.pages.last()?, input.request.input_tokens))
}

//! What a prefill replica can do: the tokens that it computes per second while it is busy, and how busy a number of
//! replicas may be so that prompts rarely wait too long.

use serde::{Deserialize, Serialize};

use crate::input::PlannerInput;
use crate::smoothed::SmoothedMean;

/// Time constant of the learned values in seconds.
const LEARN_S: f64 = 900.0;
/// Least busy share from which anything is learned.
const MIN_BUSY: f64 = 0.02;
/// The computation of a prompt varies: times the mean one that the target has to leave for it.
const LONG_PROMPT: f64 = 2.0;
/// Part of the target that is available for waiting at least.
const MIN_WAIT_PART: f64 = 0.1;
/// Mean number of busy replicas that counts as none: what is left of the mean demand of a deployment that is idle.
pub(crate) const NEGLIGIBLE: f64 = 1e-3;
/// Most replicas that are considered.
const MAX_REPLICAS: u32 = 100_000;

/// Learned capacity of prefill replicas.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PrefillCapacity {
    /// Tokens per second of a busy engine.
    busy_tokens_per_s: SmoothedMean,
    /// Computation of one prompt in seconds.
    prompt_s: SmoothedMean,
    /// Tokens to compute of one request.
    tokens_per_request: SmoothedMean,
}

impl PrefillCapacity {
    /// Returns whether everything needed was in the input.
    pub(crate) fn record(&mut self, input: &PlannerInput, step_s: f64) -> bool {
        let signals = &input.prefill;
        let ready = f64::from(input.prefill_replicas.ready);
        if let (Some(tokens), Some(requests)) = (signals.arriving_tokens_per_s, input.requests_per_s)
            && requests > 0.0
        {
            self.tokens_per_request.add(tokens / requests, step_s, LEARN_S);
        }
        let (Some(computed), Some(busy)) = (signals.computed_tokens_per_s, signals.busy_share) else {
            return false;
        };
        let busy_engines = busy * ready;
        if busy > MIN_BUSY && busy_engines > 0.0 && computed > 0.0 {
            self.busy_tokens_per_s.add(computed / busy_engines, step_s * busy.min(1.0), LEARN_S);
            if let Some(tokens) = self.tokens_per_request.get().filter(|&tokens| tokens > 0.0) {
                self.prompt_s.add(busy_engines * tokens / computed, step_s, LEARN_S);
            }
        }
        true
    }

    pub(crate) fn busy_tokens_per_s(&self, first: Option<f64>) -> Option<f64> {
        self.busy_tokens_per_s.get().or(first).filter(|&rate| rate > 0.0)
    }

    pub(crate) fn tokens_per_request(&self) -> Option<f64> {
        self.tokens_per_request.get()
    }

    /// The fewest replicas with which at most this share of prompts waits too long, when so many engines are busy on
    /// average.
    pub(crate) fn replicas(&self, busy_engines: f64, ttft_s: f64, too_late: f64) -> u32 {
        if busy_engines < NEGLIGIBLE {
            return 0;
        }
        let prompt_s = self.prompt_s.get().unwrap_or(ttft_s / 4.0).max(1e-6);
        let wait_s = (ttft_s - LONG_PROMPT * prompt_s).max(MIN_WAIT_PART * ttft_s);
        let least = busy_engines.floor().clamp(0.0, f64::from(MAX_REPLICAS)) as u32;
        // The blocking probability of Erlang's first formula, by its recursion.
        let mut blocking = 1.0;
        for replicas in 1..=least.saturating_add(1_000) {
            let count = f64::from(replicas);
            blocking = busy_engines * blocking / (count + busy_engines * blocking);
            if count <= busy_engines {
                continue;
            }
            let waits = blocking / (1.0 - (busy_engines / count) * (1.0 - blocking));
            if waits * (-(count - busy_engines) * wait_s / prompt_s).exp() <= too_late {
                return replicas;
            }
        }
        MAX_REPLICAS
    }
}

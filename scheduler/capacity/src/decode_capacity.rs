//! What a decode replica can do: the tokens per second of the largest batch that meets the target of the time per output
//! token and fits in the KV cache.

use serde::{Deserialize, Serialize};

use crate::input::PlannerInput;
use crate::smoothed::SmoothedMean;

/// Time constants of the learned values in seconds.
const LINE_S: f64 = 7_200.0;
const RATIO_S: f64 = 900.0;
/// Factor on the largest batch seen up to which the line is extended.
const EXTENSION: f64 = 1.3;
/// How fast the largest batch fades, per second.
const BATCH_FADE: f64 = 1e-5;
/// Share of the KV cache that sequences may occupy.
const KV_SHARE: f64 = 0.9;
/// Before batches of different sizes have been seen, part of a step that does not depend on the batch.
const FIRST_FIXED_PART: f64 = 0.5;
const FIRST_WEIGHT: f64 = 0.02;

/// Learned capacity of decode replicas.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct DecodeCapacity {
    /// Means of batch, step time, and their products, for the line of the step time over the batch.
    batch: SmoothedMean,
    step: SmoothedMean,
    batch_square: SmoothedMean,
    batch_step: SmoothedMean,
    /// Time per output token at the target's share, divided by the mean step.
    tail: SmoothedMean,
    largest_batch: f64,
    kv_per_sequence: SmoothedMean,
    tokens_per_request: SmoothedMean,
}

/// Capacity of one replica.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BatchCapacity {
    pub(crate) tokens_per_s: f64,
    pub(crate) sequences: f64,
    /// Whether the KV cache limits the batch.
    pub(crate) by_memory: bool,
}

impl DecodeCapacity {
    /// Returns whether everything needed was in the input.
    pub(crate) fn record(&mut self, input: &PlannerInput, step_s: f64) -> bool {
        let signals = &input.decode;
        let ready = f64::from(input.decode_replicas.ready);
        if let (Some(generated), Some(requests)) = (signals.generated_tokens_per_s, input.requests_per_s)
            && requests > 0.0
        {
            self.tokens_per_request.add(generated / requests, step_s * requests, LINE_S);
        }
        let (Some(running), Some(generated)) = (signals.running, signals.generated_tokens_per_s) else {
            return false;
        };
        if let Some(kv) = signals.kv_occupancy
            && running >= 1.0
        {
            self.kv_per_sequence.add(kv * ready / running, step_s, RATIO_S);
        }
        if running >= 1.0 && generated > 0.0 && ready > 0.0 {
            let (batch, step) = (running / ready, running / generated);
            self.batch.add(batch, step_s, LINE_S);
            self.step.add(step, step_s, LINE_S);
            self.batch_square.add(batch * batch, step_s, LINE_S);
            self.batch_step.add(batch * step, step_s, LINE_S);
            self.largest_batch = (self.largest_batch * (1.0 - BATCH_FADE * step_s).max(0.0)).max(batch);
            if let Some(tpot_s) = signals.tpot_s {
                self.tail.add((tpot_s / step).clamp(0.8, 3.0), step_s, RATIO_S);
            }
        }
        signals.tpot_s.is_some()
    }

    pub(crate) fn tokens_per_request(&self) -> Option<f64> {
        self.tokens_per_request.get()
    }

    /// Step time without a batch, and what each sequence adds.
    fn line(&self) -> Option<(f64, f64)> {
        let (batch, step) = (self.batch.get()?, self.step.get()?);
        let variance = self.batch_square.get()? - batch * batch;
        let covariance = self.batch_step.get()? - batch * step;
        // A weak assumption that batches of different sizes outweigh.
        let first_slope = (1.0 - FIRST_FIXED_PART) * step / batch.max(1e-9);
        let weight = FIRST_WEIGHT * batch * batch;
        let slope = (covariance + weight * first_slope) / (variance.max(0.0) + weight).max(1e-12);
        let slope = slope.max(1e-3 * first_slope);
        Some(((step - slope * batch).max(0.0), slope))
    }

    /// The capacity of one replica at the target; `None` if nothing is known.
    pub(crate) fn at_target(&self, tpot_s: f64, first: Option<f64>) -> Option<BatchCapacity> {
        let Some((fixed, slope)) = self.line() else {
            let sequences = |tokens_per_s: f64| tokens_per_s * tpot_s;
            return first.map(|tokens_per_s| BatchCapacity {
                tokens_per_s,
                sequences: sequences(tokens_per_s),
                by_memory: false,
            });
        };
        let longest_step = tpot_s / self.tail.get().unwrap_or(1.0);
        let by_time = ((longest_step - fixed) / slope).max(1.0);
        let by_memory = self.kv_per_sequence.get().filter(|&kv| kv > 0.0).map(|kv| (KV_SHARE / kv).max(1.0));
        let seen = (EXTENSION * self.largest_batch).max(1.0);
        let sequences = by_time.min(seen).min(by_memory.unwrap_or(f64::INFINITY));
        Some(BatchCapacity {
            tokens_per_s: sequences / (fixed + slope * sequences),
            sequences,
            by_memory: by_memory.is_some_and(|most| most <= by_time.min(seen)),
        })
    }
}

//! Model of a decode engine's time per token, and of the length of responses.

use crate::least_squares::{DurationTerm, LeastSquaresLearner, adapted_speed};
use crate::seconds::Seconds;

/// Initial variance of the coefficients, in squares of the start value: engines differ much in what a sequence and
/// its tokens add.
const INITIAL_VARIANCE: [f64; 3] = [1.0, 10.0, 10.0];

/// Expected length of a response before any has ended, in tokens.
const INITIAL_RESPONSE_TOKENS: f64 = 512.0;

/// Weight of a new response in the mean length.
const RESPONSE_GAIN: f64 = 0.01;

/// Time of one decode step: `speed * (base + per_sequence*sequences + per_token*tokens)` for a batch of `sequences`
/// that hold `tokens` of KV cache. With speculative decoding it is the time per token.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct DecodeStepModel {
    /// Constant seconds per step.
    pub base: f64,
    /// Seconds per sequence of the batch.
    pub per_sequence: f64,
    /// Seconds per token of the batch's KV cache, which every step reads.
    pub per_token: f64,
    /// Slowdown of one engine against its group: 2 is twice as slow.
    pub speed: f64,
}

impl Default for DecodeStepModel {
    /// The order of magnitude of a large model on eight GPUs. Only a start value: it is refitted to the responses
    /// observed.
    fn default() -> Self {
        Self { base: 0.02, per_sequence: 2e-4, per_token: 1.5e-8, speed: 1.0 }
    }
}

/// Sequences that generate together, or their mean over a time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct DecodeBatch {
    pub(crate) sequences: f64,
    /// Tokens of their KV cache.
    pub(crate) tokens: f64,
}

impl std::ops::Add for DecodeBatch {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { sequences: self.sequences + other.sequences, tokens: self.tokens + other.tokens }
    }
}

impl DecodeStepModel {
    /// Seconds of one step.
    #[must_use]
    pub(crate) fn seconds(&self, batch: DecodeBatch) -> Seconds {
        self.speed * (self.base + self.per_sequence * batch.sequences + self.per_token * batch.tokens)
    }

    /// How many sequences with `tokens_each` can generate together with steps of at most `target` seconds.
    #[must_use]
    pub(crate) fn max_sequences(&self, target: Seconds, tokens_each: f64) -> f64 {
        (target / self.speed - self.base) / (self.per_sequence + self.per_token * tokens_each)
    }
}

/// Learns the step time from responses; shared by engines of one group.
#[derive(Debug, Clone)]
pub(crate) struct DecodeStepLearner {
    terms: LeastSquaresLearner<3>,
    response_tokens: f64,
}

impl DecodeStepLearner {
    pub(crate) fn new(prior: &DecodeStepModel) -> Self {
        let prior = [prior.base, prior.per_sequence, prior.per_token];
        let term = |index: usize| DurationTerm {
            prior: prior[index],
            variance: INITIAL_VARIANCE[index],
            follows_level: true,
        };
        Self {
            terms: LeastSquaresLearner::new(std::array::from_fn(term)),
            response_tokens: INITIAL_RESPONSE_TOKENS,
        }
    }

    /// The model of an engine with this `speed` factor.
    pub(crate) fn model(&self, speed: f64) -> DecodeStepModel {
        let [base, per_sequence, per_token] = self.terms.coefficients();
        DecodeStepModel { base, per_sequence, per_token, speed }
    }

    /// Mean length of a response in tokens.
    pub(crate) fn response_tokens(&self) -> f64 {
        self.response_tokens
    }

    /// Learns from a sequence that generated with `batch` at `step` seconds per token, on an engine with this `speed`
    /// factor; returns the engine's new factor.
    pub(crate) fn observe_step(&mut self, batch: DecodeBatch, step: Seconds, speed: f64) -> f64 {
        let sizes = [speed, speed * batch.sequences, speed * batch.tokens];
        match self.terms.observe(sizes, step) {
            Some(learned) => adapted_speed(speed, learned.relative_error),
            None => speed,
        }
    }

    pub(crate) fn observe_response(&mut self, tokens: u64) {
        self.response_tokens += RESPONSE_GAIN * (tokens as f64 - self.response_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Batches of 1 to 200 sequences with 1,000 to 9,000 tokens each.
    fn batches() -> impl Iterator<Item = DecodeBatch> {
        let mut bits = 12345_u64;
        std::iter::repeat_with(move || {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let sequences = (1 + (bits >> 33) % 200) as f64;
            DecodeBatch { sequences, tokens: sequences * (1_000 + (bits >> 13) % 8_000) as f64 }
        })
    }

    #[test]
    fn learns_another_engine_and_its_slow_member() {
        let truth = DecodeStepModel { base: 0.008, per_sequence: 5e-5, per_token: 4e-8, speed: 1.0 };
        let mut learner = DecodeStepLearner::new(&DecodeStepModel::default());
        let mut speeds = [1.0, 1.0];
        for (count, batch) in batches().take(2_000).enumerate() {
            let engine = count % 2;
            let factor = if engine == 1 { 1.5 } else { 1.0 };
            let noise = [0.9, 1.1, 1.0, 0.95, 1.05][count % 5];
            let step = noise * factor * truth.seconds(batch);
            speeds[engine] = learner.observe_step(batch, step, speeds[engine]);
        }
        assert!((speeds[1] / speeds[0] - 1.5).abs() < 0.1, "{speeds:?}");
        for batch in batches().skip(3_000).take(50) {
            let (learned, right) = (learner.model(speeds[0]).seconds(batch), truth.seconds(batch));
            assert!((learned / right - 1.0).abs() < 0.1, "{batch:?}: {learned} instead of {right}");
        }
    }

    #[test]
    fn largest_batch_of_a_target_takes_just_the_target() {
        let model = DecodeStepModel { speed: 1.5, ..DecodeStepModel::default() };
        let sequences = model.max_sequences(0.05, 10_000.0);
        let batch = DecodeBatch { sequences, tokens: sequences * 10_000.0 };
        assert!((model.seconds(batch) - 0.05).abs() < 1e-12);
        assert!(model.max_sequences(0.01, 10_000.0) < 0.0);
    }

    #[test]
    fn mean_response_follows_the_responses() {
        let mut learner = DecodeStepLearner::new(&DecodeStepModel::default());
        (0..1_000).for_each(|count| learner.observe_response(if count % 2 == 0 { 100 } else { 300 }));
        assert!((learner.response_tokens() - 200.0).abs() < 10.0, "{}", learner.response_tokens());
    }
}

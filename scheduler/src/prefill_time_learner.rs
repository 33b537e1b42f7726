//! Learns from first tokens how long engines compute, and how long they read from the shared store.

use crate::least_squares::{DurationTerm, LeastSquaresLearner, adapted_speed};
use crate::prefill_time::PrefillTimeModel;
use crate::seconds::Seconds;

/// Terms of the time from an engine's start on a prompt to its first token, each with its own coefficient: constant,
/// new tokens, new tokens times the tokens they attend to, tokens transferred to a decode at the end, and reading from
/// the shared store.
const TERMS: usize = 5;
const HANDOVER: usize = 3;
const FETCH: usize = 4;

/// Initial variance of each coefficient, in squares of the start value. Engines do not report how fast they read.
const INITIAL_VARIANCE: [f64; TERMS] = [4.0, 4.0, 4.0, 4.0, 100.0];

/// Weight of one observation in the relative error.
const ERROR_GAIN: f64 = 0.02;

/// Work of one prompt on an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct PrefillWork {
    pub(crate) computed_tokens: u64,
    /// Number of tokens found in caches.
    pub(crate) cached_tokens: u64,
    /// Tokens whose KV cache was transferred after the computation; the rest was transferred before.
    pub(crate) handover_tokens: u64,
    /// Nominal seconds, by the engine's parameters, of its read from the shared store; 0 if the duration was not
    /// observable.
    pub(crate) fetch_seconds: Seconds,
    /// Whether it was computed in the pass of another prompt, whose work contains it. Its time says nothing.
    pub(crate) shares_pass: bool,
}

/// Model shared by engines of one group.
#[derive(Debug, Clone)]
pub(crate) struct PrefillTimeLearner {
    terms: LeastSquaresLearner<TERMS>,
    /// Recent mean absolute relative error.
    relative_error: f64,
}

impl PrefillTimeLearner {
    pub(crate) fn new(prior: &PrefillTimeModel, handover_per_token: f64) -> Self {
        let prior = [prior.c0, prior.a, prior.b, handover_per_token, 1.0];
        // Where computing takes a tenth of the usual time, models are small, and so are their KV caches. How fast a store is read says
        // nothing about engines.
        let term = |index: usize| DurationTerm {
            prior: prior[index],
            variance: INITIAL_VARIANCE[index],
            follows_level: index < FETCH,
        };
        Self { terms: LeastSquaresLearner::new(std::array::from_fn(term)), relative_error: 0.0 }
    }

    /// The time model of an engine with this `speed` factor.
    pub(crate) fn model(&self, speed: f64) -> PrefillTimeModel {
        let [c0, a, b, ..] = self.terms.coefficients();
        PrefillTimeModel { c0, a, b, speed }
    }

    /// Seconds per token that is transferred after the computation.
    pub(crate) fn handover_per_token(&self) -> f64 {
        self.terms.coefficients()[HANDOVER]
    }

    /// Ratio of observed to nominal time of reads from the shared store.
    pub(crate) fn fetch_slowness(&self) -> f64 {
        self.terms.coefficients()[FETCH]
    }

    /// Mean absolute error of predictions, as a share of the prediction.
    pub(crate) fn relative_error(&self) -> f64 {
        self.relative_error
    }

    /// Learns from a prompt that took `duration` seconds on an engine with this `speed` factor; returns the engine's
    /// new factor.
    pub(crate) fn observe(&mut self, work: PrefillWork, duration: Seconds, speed: f64) -> f64 {
        let (new, cached) = (work.computed_tokens as f64, work.cached_tokens as f64);
        let handover = work.handover_tokens as f64;
        // An engine that computes slowly does not read slowly.
        if work.shares_pass {
            return speed;
        }
        let sizes =
            [speed, speed * new, speed * new * (cached + new / 2.0), speed * handover, work.fetch_seconds];
        let Some(learned) = self.terms.observe(sizes, duration) else { return speed };
        self.relative_error += ERROR_GAIN * (learned.relative_error.abs() - self.relative_error);
        let computing = 1.0 - learned.shares[FETCH];
        adapted_speed(speed, learned.relative_error * computing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_TOKEN: f64 = 7.7e-6;

    fn works() -> impl Iterator<Item = PrefillWork> {
        let mut bits = 12345_u64;
        std::iter::repeat_with(move || {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let total = 200 + (bits >> 33) % 40_000;
            let cached = (bits >> 13) % total;
            PrefillWork {
                computed_tokens: total - cached,
                cached_tokens: cached,
                handover_tokens: total.min(8_192),
                fetch_seconds: 0.0,
                shares_pass: false,
            }
        })
    }

    fn seconds(model: &PrefillTimeModel, handover: f64, work: PrefillWork) -> f64 {
        model.seconds(work.computed_tokens, work.cached_tokens) + handover * work.handover_tokens as f64
    }

    #[test]
    fn learns_another_engine_and_its_slow_member() {
        let truth = PrefillTimeModel { c0: 0.1, a: 3e-5, b: 2e-9, speed: 1.0 };
        let mut learner = PrefillTimeLearner::new(&PrefillTimeModel::default(), PER_TOKEN);
        let mut speeds = [1.0, 1.0];
        for (count, work) in works().take(3000).enumerate() {
            let slow = count % 2;
            let factor = if slow == 1 { 2.0 } else { 1.0 };
            let duration = factor * seconds(&truth, 1e-5, work);
            speeds[slow] = learner.observe(work, duration, speeds[slow]);
        }
        assert!((speeds[1] / speeds[0] - 2.0).abs() < 0.1, "{speeds:?}");
        for work in works().skip(5000).take(50) {
            let learned = seconds(&learner.model(1.0), learner.handover_per_token(), work) * speeds[0];
            let right = seconds(&truth, 1e-5, work);
            assert!((learned / right - 1.0).abs() < 0.05, "{work:?}: {learned} instead of {right}");
        }
        assert!(learner.relative_error() < 0.05, "{}", learner.relative_error());
    }

    #[test]
    fn noise_and_outliers_do_not_bias_the_model() {
        let truth = PrefillTimeModel::default();
        let mut learner = PrefillTimeLearner::new(&truth, PER_TOKEN);
        let mut speed = 1.0;
        for (count, work) in works().take(3000).enumerate() {
            let noise = [0.7, 1.3, 1.0, 0.8, 1.2][count % 5];
            let outlier = if count % 50 == 0 { 30.0 } else { 1.0 };
            speed = learner.observe(work, noise * outlier * seconds(&truth, PER_TOKEN, work), speed);
        }
        for work in works().skip(5000).take(50) {
            let learned = seconds(&learner.model(1.0), learner.handover_per_token(), work) * speed;
            let right = seconds(&truth, PER_TOKEN, work);
            assert!((learned / right - 1.0).abs() < 0.15, "{work:?}: {learned} instead of {right}");
        }
        assert!((0.1..0.3).contains(&learner.relative_error()), "{}", learner.relative_error());
    }

    #[test]
    fn equal_prompts_do_not_destabilize_the_model() {
        let truth = PrefillTimeModel::default();
        let mut learner = PrefillTimeLearner::new(&truth, PER_TOKEN);
        let mut speeds = [1.0; 4];
        // Conversations of six turns, each of which adds the same length; sometimes a prompt is behind another one.
        let work = |count: usize| {
            let cached = 1024 * (count / 4 % 6) as u64;
            PrefillWork {
                computed_tokens: 1024,
                cached_tokens: cached,
                handover_tokens: 1024 + cached,
                fetch_seconds: 0.0,
                shares_pass: false,
            }
        };
        for count in 0..40_000 {
            let noise = [1.0, 1.02, 0.98, 1.0, 1.3][count % 5];
            let duration = noise * seconds(&truth, PER_TOKEN, work(count));
            speeds[count % 4] = learner.observe(work(count), duration, speeds[count % 4]);
            let learned = learner.model(1.0).seconds(1024, work(count).cached_tokens) * speeds[count % 4];
            let right = truth.seconds(1024, work(count).cached_tokens);
            assert!((learned / right - 1.0).abs() < 0.3, "{count}: {learned} instead of {right} {learner:?}");
        }
    }

    #[test]
    fn slow_store_is_distinguished_from_slow_engines() {
        let truth = PrefillTimeModel { c0: 0.1, a: 2e-4, b: 1e-8, speed: 1.0 };
        let mut learner = PrefillTimeLearner::new(&PrefillTimeModel::default(), PER_TOKEN);
        let mut speed = 1.0;
        for (count, work) in works().take(2000).enumerate() {
            // Every other prompt is read from a store that takes five times as long as configured.
            let read_seconds = if count % 2 == 1 { work.cached_tokens as f64 * 1e-5 } else { 0.0 };
            let noise = [0.8, 1.2, 1.0, 0.9, 1.1][count % 5];
            let duration = noise * seconds(&truth, PER_TOKEN, work) + 5.0 * read_seconds;
            speed = learner.observe(PrefillWork { fetch_seconds: read_seconds, ..work }, duration, speed);
        }
        assert!((learner.fetch_slowness() / 5.0 - 1.0).abs() < 0.1, "{}", learner.fetch_slowness());
        for work in works().skip(5000).take(50) {
            let learned = seconds(&learner.model(1.0), learner.handover_per_token(), work) * speed;
            let right = seconds(&truth, PER_TOKEN, work);
            assert!((learned / right - 1.0).abs() < 0.1, "{work:?}: {learned} instead of {right}");
        }
    }

    #[test]
    fn constant_of_shared_passes_is_learned_once() {
        let truth = PrefillTimeModel { c0: 0.02, a: 1e-5, b: 0.0, speed: 1.0 };
        let mut learner = PrefillTimeLearner::new(&PrefillTimeModel::default(), 0.0);
        let mut speed = 1.0;
        for count in 0..3000_u64 {
            let new = 32 + 97 * (count % 7);
            let work = PrefillWork { computed_tokens: new, ..PrefillWork::default() };
            let pass = PrefillWork { computed_tokens: 3 * new, ..work };
            speed = learner.observe(pass, truth.seconds(3 * new, 0), speed);
            for _ in 0..2 {
                speed = learner.observe(PrefillWork { shares_pass: true, ..work }, 1e-5, speed);
            }
        }
        let learned = learner.model(speed).seconds(32, 0);
        assert!((learned / truth.seconds(32, 0) - 1.0).abs() < 0.15, "{learned} {learner:?}");
    }

    #[test]
    fn invalid_times_are_not_learned() {
        let mut learner = PrefillTimeLearner::new(&PrefillTimeModel::default(), PER_TOKEN);
        let work = PrefillWork { computed_tokens: 1000, handover_tokens: 1000, ..PrefillWork::default() };
        for duration in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(learner.observe(work, duration, 1.5), 1.5);
        }
        assert_eq!(learner.model(1.0), PrefillTimeModel::default());
    }
}

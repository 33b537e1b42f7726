//! Least squares on the relative error, so that short durations count as much as long ones. What the recent observations
//! leave open follows the start values: prompts of one length say nothing about the time of others.

/// Weight of past observations relative to a new one: the effective window of a thousand observations is about an hour
/// of a busy engine.
const FORGETTING_FACTOR: f64 = 0.999;

/// Largest relative error with which a single observation counts in full; larger ones have the influence of this one (Huber's weights).
/// Many of them are not the work observed: a stalled network, an aborted neighbour, another gateway's prompt.
const MAX_RELATIVE_ERROR: f64 = 0.5;

/// Limit of a learned coefficient, as a factor of its start value at the learned level, in both directions.
const MAX_SCALE: f64 = 100.0;

/// Limit of the level and of an engine's speed factor, in both directions.
const MAX_LEVEL: f64 = 1000.0;

/// Weight of one observation in the level.
const LEVEL_GAIN: f64 = 0.2;

/// Weight of one observation in an engine's own speed factor.
const SPEED_GAIN: f64 = 0.05;

/// Share by which a speed factor returns to 1 with each observation. Whether all engines of a group or the coefficients have changed
/// cannot be observed; the factors adapt sooner, and then the coefficients take over.
const SPEED_DECAY: f64 = 0.001;

/// Each one changes one coefficient at a time, beginning with the last result. The error of the observations is least after one or two;
/// how the coefficients share it, after many observations.
const DESCENT_SWEEPS: usize = 8;

/// One term of a duration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DurationTerm {
    /// Start value of the coefficient.
    pub(crate) prior: f64,
    /// Initial variance of the coefficient, in squares of the start value.
    pub(crate) variance: f64,
    /// Whether a group of slow engines is expected to be slow in this term, too.
    pub(crate) follows_level: bool,
}

/// A duration as a sum of terms, each of which has a learned coefficient.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquaresLearner<const TERMS: usize> {
    terms: [DurationTerm; TERMS],
    /// Recent mean factor on the start values, of the terms that follow it.
    level: f64,
    /// Factors on the start values.
    scale: [f64; TERMS],
    /// Products of the terms' parts in past observations, weighted by age.
    products: [[f64; TERMS]; TERMS],
    /// Products of the terms' parts and the duration, weighted by age.
    observed: [f64; TERMS],
}

/// An observation that was learned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LearnedDuration<const TERMS: usize> {
    /// Observed duration relative to the expected one, minus 1, within limits.
    pub(crate) relative_error: f64,
    /// Share of each term in the expected duration.
    pub(crate) shares: [f64; TERMS],
}

impl<const TERMS: usize> LeastSquaresLearner<TERMS> {
    pub(crate) fn new(terms: [DurationTerm; TERMS]) -> Self {
        Self {
            terms,
            level: 1.0,
            scale: [1.0; TERMS],
            products: [[0.0; TERMS]; TERMS],
            observed: [0.0; TERMS],
        }
    }

    pub(crate) fn coefficients(&self) -> [f64; TERMS] {
        std::array::from_fn(|index| self.terms[index].prior * self.scale[index])
    }

    /// Learns from a duration in seconds with these sizes of the terms; `None` if it is not usable.
    pub(crate) fn observe(&mut self, sizes: [f64; TERMS], duration: f64) -> Option<LearnedDuration<TERMS>> {
        let parts: [f64; TERMS] = std::array::from_fn(|index| self.terms[index].prior * sizes[index]);
        let expected = dot(&parts, &self.scale);
        if !(duration > 0.0 && duration.is_finite() && expected > 0.0 && expected.is_finite()) {
            return None;
        }
        let relative_error = duration / expected - 1.0;
        let shares = std::array::from_fn(|index| parts[index] * self.scale[index] / expected);
        self.add(&parts.map(|part| part / expected), relative_error);
        self.adapt_level(&parts, &shares);
        self.fit();
        let relative_error = relative_error.clamp(-MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR);
        Some(LearnedDuration { relative_error, shares })
    }

    /// Adds an observation whose terms had these parts, in multiples of the expected duration.
    fn add(&mut self, parts: &[f64; TERMS], relative_error: f64) {
        let weight = (MAX_RELATIVE_ERROR / relative_error.abs()).min(1.0);
        for (row, &part) in parts.iter().enumerate() {
            let observed = weight * part * (1.0 + relative_error);
            self.observed[row] = FORGETTING_FACTOR * self.observed[row] + observed;
            for (column, &other) in parts.iter().enumerate() {
                let product = weight * part * other;
                self.products[row][column] = FORGETTING_FACTOR * self.products[row][column] + product;
            }
        }
    }

    /// Moves the level towards the mean factor of the terms that follow it, as far as an observation consists of them.
    fn adapt_level(&mut self, parts: &[f64; TERMS], shares: &[f64; TERMS]) {
        let following = |values: [f64; TERMS]| -> f64 {
            let values = values.iter().zip(&self.terms).filter(|(_, term)| term.follows_level);
            values.map(|(value, _)| value).sum()
        };
        let at_start = following(*parts);
        if at_start > 0.0 {
            let mean = following(std::array::from_fn(|index| parts[index] * self.scale[index])) / at_start;
            self.level += LEVEL_GAIN * following(*shares) * (mean - self.level);
            self.level = self.level.clamp(1.0 / MAX_LEVEL, MAX_LEVEL);
        }
    }

    /// Minimizes the squared errors of all observations and, by the initial variances, of the coefficients against their start values at
    /// the level.
    fn fit(&mut self) {
        for _ in 0..DESCENT_SWEEPS {
            for index in 0..TERMS {
                let DurationTerm { variance, follows_level, .. } = self.terms[index];
                let start = if follows_level { self.level } else { 1.0 };
                let weight = 1.0 / (variance * start * start);
                let own = self.products[index][index] + weight;
                let others =
                    dot(&self.products[index], &self.scale) - self.products[index][index] * self.scale[index];
                let best = (self.observed[index] + weight * start - others) / own;
                self.scale[index] = best.clamp(start / MAX_SCALE, start * MAX_SCALE);
            }
        }
    }
}

/// The new speed factor of an engine for whose speed an observation had this relative error.
pub(crate) fn adapted_speed(speed: f64, relative_error: f64) -> f64 {
    let adapted = speed * (1.0 + SPEED_GAIN * relative_error);
    adapted.powf(1.0 - SPEED_DECAY).clamp(1.0 / MAX_LEVEL, MAX_LEVEL)
}

fn dot<const TERMS: usize>(left: &[f64; TERMS], right: &[f64; TERMS]) -> f64 {
    left.iter().zip(right).map(|(l, r)| l * r).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A constant and a time per unit, both 1 at the start.
    fn learner() -> LeastSquaresLearner<2> {
        LeastSquaresLearner::new([DurationTerm { prior: 1.0, variance: 1.0, follows_level: true }; 2])
    }

    /// Durations of work of size 1 that are mostly equal, and sometimes much longer, or too short to be work.
    fn durations() -> impl Iterator<Item = f64> {
        (0..50_000)
            .map(|count| 0.004 * [1.0, 0.9, 1.2, 0.01, 30.0][[0, 1, 2, 0, 1, 3, 0, 2, 4, 1][count % 10]])
    }

    #[test]
    fn unobserved_sizes_follow_the_start_values() {
        let mut learner = learner();
        for (count, duration) in durations().enumerate() {
            learner.observe([1.0, 1.0], duration);
            if count < 100 {
                continue;
            }
            let [constant, per_unit] = learner.coefficients();
            let ratio = (constant + 1000.0 * per_unit) / (constant + per_unit);
            assert!((300.0..700.0).contains(&ratio), "501 at the start: {ratio} {learner:?}");
        }
        let [constant, per_unit] = learner.coefficients();
        assert!(((constant + per_unit) / 0.004 - 1.0).abs() < 0.3, "{learner:?}");
    }

    #[test]
    fn other_sizes_are_learned_from_their_first_observations() {
        let mut learner = learner();
        for duration in durations() {
            learner.observe([1.0, 1.0], duration);
        }
        // The time does not depend on the size.
        let expected = |learner: &LeastSquaresLearner<2>| dot(&learner.coefficients(), &[1.0, 1000.0]);
        for _ in 0..30 {
            learner.observe([1.0, 1000.0], 0.004);
        }
        assert!(expected(&learner) < 0.02, "{learner:?}");
    }

    #[test]
    fn speeds_of_a_group_return_to_one() {
        let mut learner = learner();
        let mut speeds = [1.0, 1.0];
        for count in 0..100_000 {
            let engine = count % 2;
            let size = 1.0 + (count % 7) as f64;
            let duration = 0.02 * (1.0 + engine as f64) * (1.0 + size);
            let learned = learner.observe([speeds[engine], speeds[engine] * size], duration).unwrap();
            speeds[engine] = adapted_speed(speeds[engine], learned.relative_error);
        }
        assert!((speeds[1] / speeds[0] - 2.0).abs() < 0.1, "{speeds:?}");
        assert!((speeds[1] * speeds[0] - 1.0).abs() < 0.1, "{speeds:?}");
    }
}

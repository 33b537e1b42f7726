//! Recursive least squares on the relative error, so that short durations count as much as long ones.

/// Weight of past observations relative to a new one: the effective window of a thousand observations is about an hour
/// of a busy engine.
const FORGETTING_FACTOR: f64 = 0.999;

/// Largest relative error with which a single observation counts in full. Larger errors are not the work observed: a
/// stalled network, an aborted neighbour, another gateway's prompt.
const MAX_RELATIVE_ERROR: f64 = 0.5;

/// Limit of a learned coefficient, as a factor of its start value in both directions.
pub(crate) const MAX_SCALE: f64 = 100.0;

/// A duration as a sum of terms, each of which has a learned coefficient.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquaresLearner<const TERMS: usize> {
    /// Start values of the coefficients.
    prior: [f64; TERMS],
    /// Initial variance of each coefficient, in multiples of the start value.
    initial_variance: [f64; TERMS],
    /// Factors on the start values.
    scale: [f64; TERMS],
    covariance: [[f64; TERMS]; TERMS],
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
    pub(crate) fn new(prior: [f64; TERMS], initial_variance: [f64; TERMS]) -> Self {
        let mut covariance = [[0.0; TERMS]; TERMS];
        for (index, row) in covariance.iter_mut().enumerate() {
            row[index] = initial_variance[index];
        }
        Self { prior, initial_variance, scale: [1.0; TERMS], covariance }
    }

    pub(crate) fn coefficients(&self) -> [f64; TERMS] {
        std::array::from_fn(|index| self.prior[index] * self.scale[index])
    }

    /// Learns from a duration in seconds with these sizes of the terms; `None` if it is not usable.
    pub(crate) fn observe(&mut self, sizes: [f64; TERMS], duration: f64) -> Option<LearnedDuration<TERMS>> {
        let parts: [f64; TERMS] = std::array::from_fn(|index| self.prior[index] * sizes[index]);
        let expected: f64 = parts.iter().zip(&self.scale).map(|(part, scale)| part * scale).sum();
        if !(duration > 0.0 && duration.is_finite() && expected > 0.0 && expected.is_finite()) {
            return None;
        }
        let relative_error = (duration / expected - 1.0).clamp(-MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR);
        let shares = std::array::from_fn(|index| parts[index] * self.scale[index] / expected);
        self.fit(parts.map(|part| part / expected), relative_error);
        Some(LearnedDuration { relative_error, shares })
    }

    fn fit(&mut self, regressors: [f64; TERMS], error: f64) {
        let along: [f64; TERMS] = std::array::from_fn(|row| dot(&self.covariance[row], &regressors));
        let gain_below = FORGETTING_FACTOR + dot(&along, &regressors);
        for (index, scale) in self.scale.iter_mut().enumerate() {
            *scale = (*scale + along[index] / gain_below * error).clamp(1.0 / MAX_SCALE, MAX_SCALE);
        }
        for (row, &along_row) in along.iter().enumerate() {
            for (column, &along_column) in along.iter().enumerate() {
                let entry = &mut self.covariance[row][column];
                *entry = (*entry - along_row * along_column / gain_below) / FORGETTING_FACTOR;
            }
        }
        // Exponential weighting must not increase the variance of directions that equal observations never excite. Rows
        // and columns shrink together: entries that are cut one by one soon form no valid covariance, and the estimates
        // diverge.
        let shrink: [f64; TERMS] = std::array::from_fn(|index| {
            let initial = self.initial_variance[index];
            (initial / self.covariance[index][index].max(initial)).sqrt()
        });
        for (row, by_row) in shrink.iter().enumerate() {
            for (column, by_column) in shrink.iter().enumerate() {
                self.covariance[row][column] *= by_row * by_column;
            }
        }
    }
}

fn dot<const TERMS: usize>(left: &[f64; TERMS], right: &[f64; TERMS]) -> f64 {
    left.iter().zip(right).map(|(l, r)| l * r).sum()
}

//! Means that follow their values with a time constant.

use serde::{Deserialize, Serialize};

/// An exponentially weighted mean. Until the time constant has passed it is the mean of all values.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SmoothedMean {
    sum: f64,
    weight: f64,
}

impl SmoothedMean {
    /// Adds a value that held for `weight` seconds, or for a number of requests, and lets earlier ones fade.
    pub(crate) fn add(&mut self, value: f64, weight: f64, time_constant: f64) {
        if !value.is_finite() || weight.is_nan() || weight <= 0.0 {
            return;
        }
        let keep = (-weight / time_constant.max(1e-9)).exp();
        self.sum = keep * self.sum + weight * value;
        self.weight = keep * self.weight + weight;
    }

    /// The mean; `None` without a value.
    pub(crate) fn get(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

//! The share of requests that a role may serve too late, and a correction of its capacity so that this share is used and
//! not exceeded.

use serde::{Deserialize, Serialize};

use crate::settings::DAY_S;
use crate::smoothed::SmoothedMean;

/// Part of the allowed share that is planned for; the rest is in reserve.
const PLANNED_PART: f64 = 0.85;
/// Time constant over which the attained share is accounted, in seconds.
const ACCOUNT_S: f64 = 21_600.0;
/// How fast the correction follows, per second and unit of relative excess at the mean rate of requests.
const CORRECTION_RATE: f64 = 1e-5;
/// Bounds of the correction, as the logarithm of a factor on demand.
const MAX_CORRECTION: f64 = 0.4;
const MIN_CORRECTION: f64 = -0.15;

/// Account of one role.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ErrorBudget {
    missed: SmoothedMean,
    /// Mean requests per second of a day.
    requests: SmoothedMean,
    /// Logarithm of the factor on demand.
    correction: f64,
}

impl ErrorBudget {
    /// Records the share of requests that the role served too late, of a number of requests per second.
    pub(crate) fn record(&mut self, missed: f64, allowed: f64, step_s: f64, requests: f64) {
        self.missed.add(missed.clamp(0.0, 1.0), step_s * requests.max(1e-3), ACCOUNT_S * requests.max(1e-3));
        self.requests.add(requests, step_s, DAY_S);
        let weight = self.requests.get().filter(|&mean| mean > 0.0).map_or(0.0, |mean| requests / mean);
        let excess = missed / allowed.max(1e-3) - 1.0;
        self.correction += CORRECTION_RATE * step_s * weight * excess;
        self.correction = self.correction.clamp(MIN_CORRECTION, MAX_CORRECTION);
    }

    /// Share of requests that were too late recently.
    pub(crate) fn missed(&self) -> Option<f64> {
        self.missed.get()
    }

    /// Factor on demand.
    pub(crate) fn correction(&self) -> f64 {
        self.correction.exp()
    }

    /// The share that this role may miss, when the other role misses so many and both may miss `allowed` together.
    pub(crate) fn share_of(allowed: f64, other_missed: Option<f64>) -> f64 {
        let half = PLANNED_PART * allowed / 2.0;
        let unused = (half - other_missed.unwrap_or(half)).max(0.0);
        half + PLANNED_PART * unused
    }
}

//! Arrival rates that rise and fall, as over a day.

use std::f64::consts::TAU;

/// Steps of the bisection; enough for the precision of a time.
const BISECTIONS: usize = 60;

/// A rate that follows a sine around its mean, from a minimum on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArrivalTide {
    /// Highest divided by lowest rate; 1 for a constant rate.
    pub ratio: f64,
    /// Seconds between two maxima.
    pub period_s: f64,
}

impl ArrivalTide {
    pub const CONSTANT: Self = Self { ratio: 1.0, period_s: 86_400.0 };

    /// Deviation from the mean rate at a maximum, as a share of the mean.
    fn amplitude(self) -> f64 {
        (self.ratio - 1.0) / (self.ratio + 1.0)
    }

    /// Rate at a time, divided by the mean rate.
    pub(crate) fn relative_rate(self, time: f64) -> f64 {
        1.0 - self.amplitude() * (TAU * time / self.period_s).cos()
    }

    /// Time at the mean rate until which as many requests arrive as until `time` with the tide.
    fn mean_rate_s(self, time: f64) -> f64 {
        time - self.amplitude() * self.period_s / TAU * (TAU * time / self.period_s).sin()
    }

    /// The time of an arrival that is due at `due_s` at the mean rate.
    pub(crate) fn arrival_s(self, due_s: f64) -> f64 {
        if self.ratio <= 1.0 {
            return due_s;
        }
        let most_s = self.amplitude() * self.period_s / TAU;
        let (mut low, mut high) = (due_s - most_s, due_s + most_s);
        for _ in 0..BISECTIONS {
            let middle = f64::midpoint(low, high);
            if self.mean_rate_s(middle) < due_s {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_differ_by_the_ratio_and_the_mean_stays() {
        let tide = ArrivalTide { ratio: 10.0, period_s: 1_000.0 };
        let arrivals: Vec<f64> = (0..10_000).map(|number| tide.arrival_s(f64::from(number) / 10.0)).collect();
        let between =
            |from: f64, to: f64| arrivals.iter().filter(|&&time| (from..to).contains(&time)).count() as f64;
        let (lowest, highest) = (between(0.0, 20.0), between(490.0, 510.0));
        assert!((9.0..=11.0).contains(&(highest / lowest)), "{highest} {lowest}");
        assert!((between(0.0, 500.0) - 5_000.0).abs() < 2.0);
        assert!(arrivals.is_sorted() && arrivals[9_999] < 1_000.0);
        assert_eq!(ArrivalTide::CONSTANT.arrival_s(3.5), 3.5);
    }
}

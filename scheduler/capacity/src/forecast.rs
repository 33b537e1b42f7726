//! Expected demand of the next minutes: the present level, moved by the tide of previous days or else by the trend, and
//! the margin that the errors of earlier forecasts require.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::settings::DAY_S;
use crate::smoothed::SmoothedMean;

/// Time constants in seconds: of the level, and of the two means whose difference is the trend.
const LEVEL_S: f64 = 60.0;
const TREND_FAST_S: f64 = 300.0;
const TREND_SLOW_S: f64 = 900.0;
/// Bins of a day.
const BINS: usize = 288;
const BIN_S: f64 = DAY_S / BINS as f64;
/// Bins on either side over which the first day is smoothed; fewer after several days.
const FIRST_SMOOTHING: usize = 6;
/// Weight of a new day in a bin, once there are several.
const DAY_WEIGHT: f64 = 0.3;
/// Greatest change up to the horizon.
const MAX_CHANGE: f64 = 3.0;
/// Greatest change up to the horizon according to the trend alone.
const MAX_TREND: f64 = 0.3;
/// How fast the margin follows the errors, per second.
const MARGIN_RATE: f64 = 0.000_2;
/// Greatest margin, as the logarithm of a factor.
const MAX_MARGIN: f64 = 0.5;
/// Margin before any error is known.
const FIRST_MARGIN: f64 = 0.1;
/// Most forecasts whose errors are not known yet.
const MAX_PENDING: usize = 1_024;

/// Demand of one role in the past, and its forecast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct DemandForecast {
    level: SmoothedMean,
    fast: SmoothedMean,
    slow: SmoothedMean,
    /// Mean demand in each part of the day, and the number of days in it.
    tide: Vec<f64>,
    days: Vec<u16>,
    /// The bin of the present, with its demand so far.
    bin: Option<usize>,
    bin_demand: SmoothedMean,
    /// Logarithm of the factor on forecasts that demand exceeds rarely.
    margin: f64,
    /// Forecasts that are due later: due time and value.
    pending: VecDeque<(f64, f64)>,
}

impl Default for DemandForecast {
    fn default() -> Self {
        Self {
            level: SmoothedMean::default(),
            fast: SmoothedMean::default(),
            slow: SmoothedMean::default(),
            tide: vec![0.0; BINS],
            days: vec![0; BINS],
            bin: None,
            bin_demand: SmoothedMean::default(),
            margin: FIRST_MARGIN,
            pending: VecDeque::new(),
        }
    }
}

fn bin_of(time_s: f64) -> usize {
    ((time_s.rem_euclid(DAY_S) / BIN_S) as usize).min(BINS - 1)
}

impl DemandForecast {
    /// Records the demand of the last `step_s` seconds. `exceeded` is the share of the forecasts that demand may exceed.
    pub(crate) fn record(&mut self, time_s: f64, step_s: f64, demand: f64, exceeded: f64) {
        self.level.add(demand, step_s, LEVEL_S);
        self.fast.add(demand, step_s, TREND_FAST_S);
        self.slow.add(demand, step_s, TREND_SLOW_S);
        self.learn_tide(time_s, step_s, demand);
        self.learn_margin(time_s, step_s, exceeded);
    }

    /// Restored states may have been edited.
    fn is_complete(&self) -> bool {
        self.tide.len() == BINS && self.days.len() == BINS
    }

    fn learn_tide(&mut self, time_s: f64, step_s: f64, demand: f64) {
        if !self.is_complete() {
            (self.tide, self.days) = (vec![0.0; BINS], vec![0; BINS]);
        }
        let bin = bin_of(time_s);
        if self.bin != Some(bin) {
            if let (Some(ended), Some(mean)) = (self.bin.replace(bin), self.bin_demand.get()) {
                let weight = f64::max(DAY_WEIGHT, 1.0 / f64::from(self.days[ended] + 1));
                self.tide[ended] += weight * (mean - self.tide[ended]);
                self.days[ended] = self.days[ended].saturating_add(1).min(u16::MAX - 1);
            }
            self.bin_demand = SmoothedMean::default();
        }
        self.bin_demand.add(demand, step_s, 10.0 * BIN_S);
    }

    fn learn_margin(&mut self, time_s: f64, step_s: f64, exceeded: f64) {
        let Some(level) = self.level.get() else { return };
        while let Some(&(due_s, forecast)) = self.pending.front()
            && due_s <= time_s
        {
            self.pending.pop_front();
            if forecast <= 0.0 || level <= 0.0 || time_s - due_s > 60.0 {
                continue;
            }
            let step = MARGIN_RATE * step_s.min(60.0);
            let is_exceeded = (level / forecast).ln() > self.margin;
            self.margin += if is_exceeded { step * (1.0 - exceeded) } else { -step * exceeded };
            self.margin = self.margin.clamp(0.0, MAX_MARGIN);
        }
    }

    /// Factor on demand that covers the errors of the forecast.
    pub(crate) fn margin(&self) -> f64 {
        self.margin.exp()
    }

    /// Expected demand at `time_s + ahead_s`, and the greatest until then.
    pub(crate) fn expect(&self, time_s: f64, ahead_s: f64) -> Option<(f64, f64)> {
        let level = self.level.get()?;
        let steps = (ahead_s / BIN_S).ceil().clamp(1.0, 48.0);
        let mut greatest = level;
        let mut last = level;
        for step in 1..=steps as usize {
            last = level * self.change(time_s, ahead_s * step as f64 / steps);
            greatest = greatest.max(last);
        }
        Some((last, greatest))
    }

    /// Remembers a forecast, so that its error is learned when its time has come.
    pub(crate) fn remember(&mut self, due_s: f64, forecast: f64) {
        if self.pending.len() >= MAX_PENDING {
            self.pending.pop_front();
        }
        self.pending.push_back((due_s, forecast));
    }

    /// Demand at a later time divided by the present one.
    fn change(&self, time_s: f64, ahead_s: f64) -> f64 {
        let by_tide = self.tide_at(time_s).zip(self.tide_at(time_s + ahead_s)).map(|(now, then)| then / now);
        by_tide.unwrap_or_else(|| self.trend(ahead_s)).clamp(1.0 / MAX_CHANGE, MAX_CHANGE)
    }

    fn trend(&self, ahead_s: f64) -> f64 {
        let Some((fast, slow)) = self.fast.get().zip(self.slow.get()) else { return 1.0 };
        if fast <= 0.0 || slow <= 0.0 {
            return 1.0;
        }
        // The means are older than the present by their time constants.
        let per_s = (fast / slow).ln() / (TREND_SLOW_S - TREND_FAST_S);
        (per_s * ahead_s).clamp(-MAX_TREND, MAX_TREND).exp()
    }

    /// Demand at this time of previous days, smoothed and interpolated; `None` without a complete day.
    fn tide_at(&self, time_s: f64) -> Option<f64> {
        if !self.is_complete() {
            return None;
        }
        let position = time_s.rem_euclid(DAY_S) / BIN_S - 0.5;
        let bin = position.floor();
        let before = self.smoothed_bin((bin + BINS as f64) as usize % BINS)?;
        let after = self.smoothed_bin((bin + 1.0) as usize % BINS)?;
        let share = position - bin;
        let demand = before * (1.0 - share) + after * share;
        (demand > 0.0).then_some(demand)
    }

    fn smoothed_bin(&self, bin: usize) -> Option<f64> {
        let days = usize::from(*self.days.get(bin)?);
        let width = FIRST_SMOOTHING.checked_div(days)?.max(1);
        let (mut sum, mut count) = (0.0, 0.0);
        for offset in 0..=2 * width {
            let near = (bin + BINS + offset - width) % BINS;
            if self.days[near] > 0 {
                sum += self.tide[near];
                count += 1.0;
            }
        }
        (count > 0.0).then(|| sum / count)
    }
}

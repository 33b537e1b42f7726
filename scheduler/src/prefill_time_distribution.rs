//! Recent distribution of the engines' work over prompts of different computation time.

use serde::{Deserialize, Serialize};

use crate::seconds::Seconds;

/// Four bins per factor of two, from about a millisecond to four hours.
const BINS: usize = 96;
const BINS_PER_OCTAVE: f64 = 4.0;
const MIN_LOG2: f64 = -10.0;

/// Decay of a prompt's weight with each later prompt: the effective window is a thousand prompts.
const DECAY: f64 = 0.999;

/// Recent work, by the time that each prompt needs on an engine of usual speed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillTimeDistribution {
    /// Work of prompts up to the end of each bin. The last is all work.
    cumulative: Vec<Seconds>,
}

impl Default for PrefillTimeDistribution {
    fn default() -> Self {
        Self { cumulative: vec![0.0; BINS] }
    }
}

impl PrefillTimeDistribution {
    /// Adds a prompt that takes `service` seconds.
    pub(crate) fn add(&mut self, service: Seconds) {
        if !(service > 0.0 && service.is_finite()) {
            return;
        }
        let bin = bin(service);
        for (index, cumulative) in self.cumulative.iter_mut().enumerate() {
            *cumulative = *cumulative * DECAY + if index >= bin { service } else { 0.0 };
        }
    }

    /// Share of the work that belongs to shorter prompts than one of `service` seconds, between 0 and 1; `None` without
    /// data. Of the work of prompts in the same bin, the share `chance` counts as shorter.
    #[must_use]
    pub fn share_below(&self, service: Seconds, chance: f64) -> Option<f64> {
        let bin = bin(service);
        let cumulative = |bin: usize| self.cumulative.get(bin).copied().unwrap_or(0.0);
        let below = bin.checked_sub(1).map_or(0.0, cumulative);
        let all = self.cumulative.last().copied().unwrap_or(0.0);
        (all > 0.0).then(|| (below + chance * (cumulative(bin) - below)) / all)
    }
}

fn bin(service: Seconds) -> usize {
    // NaN goes to the first bin.
    (((service.log2() - MIN_LOG2) * BINS_PER_OCTAVE).max(0.0) as usize).min(BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_weighted_by_work() {
        let mut times = PrefillTimeDistribution::default();
        assert_eq!(times.share_below(1.0, 0.5), None);
        let shorter = |times: &PrefillTimeDistribution, service| times.share_below(service, 0.5).unwrap();
        for _ in 0..100 {
            times.add(0.1);
        }
        times.add(10.0);
        // One prompt is half of the work.
        assert!((shorter(&times, 1.0) - 0.5).abs() < 0.03, "{times:?}");
        assert!((shorter(&times, 0.1) - 0.25).abs() < 0.03);
        assert!((shorter(&times, 10.0) - 0.75).abs() < 0.03);
        assert_eq!((shorter(&times, 0.01), shorter(&times, 1e9)), (0.0, 1.0));
        let among_equals = times.share_below(10.0, 0.9).unwrap() - times.share_below(10.0, 0.1).unwrap();
        assert!((among_equals - 0.4).abs() < 0.03);
    }

    #[test]
    fn old_work_decays_and_invalid_times_are_ignored() {
        let mut times = PrefillTimeDistribution::default();
        times.add(1000.0);
        for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            times.add(nonsense);
            assert!(times.share_below(nonsense, 0.5).unwrap().is_finite());
        }
        assert_eq!(times.share_below(1.0, 0.5), Some(0.0));
        (0..20_000).for_each(|_| times.add(0.1));
        assert!(times.share_below(1.0, 0.5).unwrap() > 0.99);
    }
}

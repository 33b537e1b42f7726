//! What the engines' work is made of: prompts that take how long.

use serde::{Deserialize, Serialize};

use crate::request::Seconds;

/// Four bins for each factor of two, from about a millisecond to four hours.
const BINS: usize = 96;
const BINS_PER_OCTAVE: f64 = 4.0;
const MIN_LOG2: f64 = -10.0;

/// What a prompt's entry still counts after each later one: a thousand prompts are remembered.
const DECAY: f64 = 0.999;

/// Recent work by the time that each prompt needs on an engine of usual speed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillTimeDistribution {
    /// Work in prompts up to the end of each bin. The last is all work.
    up_to: Vec<Seconds>,
}

impl Default for PrefillTimeDistribution {
    fn default() -> Self {
        Self { up_to: vec![0.0; BINS] }
    }
}

impl PrefillTimeDistribution {
    /// Enters a prompt that takes so long.
    pub(crate) fn add(&mut self, service: Seconds) {
        if !(service > 0.0 && service.is_finite()) {
            return;
        }
        let bin = bin(service);
        for (at, up_to) in self.up_to.iter_mut().enumerate() {
            *up_to = *up_to * DECAY + if at >= bin { service } else { 0.0 };
        }
    }

    /// Share of the work that is in shorter prompts than one that takes so long, between 0 and 1; `None` while nothing is known. Of the
    /// work in prompts that are about as long, the share `chance` counts as shorter.
    #[must_use]
    pub fn share_below(&self, service: Seconds, chance: f64) -> Option<f64> {
        let bin = bin(service);
        let up_to = |bin: usize| self.up_to.get(bin).copied().unwrap_or(0.0);
        let below = bin.checked_sub(1).map_or(0.0, up_to);
        let all = self.up_to.last().copied().unwrap_or(0.0);
        (all > 0.0).then(|| (below + chance * (up_to(bin) - below)) / all)
    }
}

fn bin(service: Seconds) -> usize {
    // Not a number goes to the first.
    (((service.log2() - MIN_LOG2) * BINS_PER_OCTAVE).max(0.0) as usize).min(BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_not_prompts() {
        let mut mix = PrefillTimeDistribution::default();
        assert_eq!(mix.share_below(1.0, 0.5), None);
        let shorter = |mix: &PrefillTimeDistribution, service| mix.share_below(service, 0.5).unwrap();
        for _ in 0..100 {
            mix.add(0.1);
        }
        mix.add(10.0);
        // Half of the work is in one prompt.
        assert!((shorter(&mix, 1.0) - 0.5).abs() < 0.03, "{mix:?}");
        assert!((shorter(&mix, 0.1) - 0.25).abs() < 0.03);
        assert!((shorter(&mix, 10.0) - 0.75).abs() < 0.03);
        assert_eq!((shorter(&mix, 0.01), shorter(&mix, 1e9)), (0.0, 1.0));
        let among_equals = mix.share_below(10.0, 0.9).unwrap() - mix.share_below(10.0, 0.1).unwrap();
        assert!((among_equals - 0.4).abs() < 0.03);
    }

    #[test]
    fn old_work_is_forgotten_and_nonsense_not_entered() {
        let mut mix = PrefillTimeDistribution::default();
        mix.add(1000.0);
        for nonsense in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            mix.add(nonsense);
            assert!(mix.share_below(nonsense, 0.5).unwrap().is_finite());
        }
        assert_eq!(mix.share_below(1.0, 0.5), Some(0.0));
        (0..20_000).for_each(|_| mix.add(0.1));
        assert!(mix.share_below(1.0, 0.5).unwrap() > 0.99);
    }
}

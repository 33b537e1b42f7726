//! Which decisions are explained with all candidates, and captured with their inputs: both cost time and memory per instance.

use crate::seconds::Seconds;

/// Fleets of up to this many instances keep all decisions, within the rate.
const ALWAYS_KEPT_INSTANCES: usize = 64;

/// Average time between kept decisions: more than a thousand a second are of no use to a person, and each copies kilobytes.
const INTERVAL: Seconds = 0.001;

/// Number of decisions that may be kept at once.
const BURST: f64 = 256.0;

/// A bound for the rate of kept decisions.
#[derive(Debug, Default)]
pub(super) struct SnapshotBudget {
    /// When all of the burst may be kept again.
    full_at: Seconds,
}

impl SnapshotBudget {
    /// Whether decision `number`, from 0, is kept. Of a large fleet's decisions it is one in (instances / 64)², fewer than one in a hundred
    /// of a thousand.
    pub(super) fn allows(&self, now: Seconds, number: u64, instances: usize) -> bool {
        let ratio = instances.div_ceil(ALWAYS_KEPT_INSTANCES).max(1);
        number.is_multiple_of((ratio * ratio) as u64) && self.full_at - now < BURST * INTERVAL
    }

    /// A decision was kept.
    pub(super) fn spend(&mut self, now: Seconds) {
        self.full_at = self.full_at.max(now) + INTERVAL;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(decisions: u64, interval: Seconds, instances: usize) -> usize {
        let mut budget = SnapshotBudget::default();
        let is_kept = |number: &u64| {
            let now = 5.0 + *number as f64 * interval;
            let is_kept = budget.allows(now, *number, instances);
            if is_kept {
                budget.spend(now);
            }
            is_kept
        };
        (0..decisions).filter(is_kept).count()
    }

    #[test]
    fn rate_of_kept_decisions_is_bounded() {
        assert_eq!(kept(2000, 0.002, 64), 2000, "as often as people look at");
        assert_eq!(kept(2000, 0.0, 64), 256, "the first of a burst");
        let fast = kept(100_000, 0.00002, 64);
        assert!((2200..2300).contains(&fast), "{fast} in two seconds");
    }

    #[test]
    fn one_in_many_of_a_large_fleets_decisions_is_kept() {
        assert_eq!(kept(1000, 0.01, 65), 250);
        assert_eq!(kept(1000, 0.01, 1000), 4);
    }
}

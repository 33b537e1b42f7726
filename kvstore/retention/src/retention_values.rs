//! Values of keeping blocks, by class and age.

use crate::age_bins::{AGE_BINS, age_bin, length_s};
use crate::block_class::BlockClass;

/// Probability per bin that a block of that age returns within the bin.
pub(crate) type ReturnHazards = [f64; AGE_BINS];

/// Value of keeping a block, in returns per second of occupied space; an immutable snapshot of a learner.
#[derive(Debug, Clone)]
pub struct RetentionValues(Box<[[f32; AGE_BINS]]>);

impl Default for RetentionValues {
    /// All values are zero: ages alone decide.
    fn default() -> Self {
        Self(vec![[0.0; AGE_BINS]; BlockClass::COUNT].into())
    }
}

impl RetentionValues {
    /// Computes the values of every class from its hazards.
    pub(crate) fn of_hazards(hazards: impl Iterator<Item = ReturnHazards>) -> Self {
        Self(hazards.map(|hazards| std::array::from_fn(|bin| gittins_index(&hazards, bin))).collect())
    }

    /// Value of a block of this class, and this many milliseconds after its last use.
    #[must_use]
    pub fn value(&self, class: BlockClass, age_ms: u64) -> f32 {
        self.0.get(class.index()).map_or(0.0, |values| values[age_bin(age_ms)])
    }
}

/// The largest ratio of the probability of a return until the end of a bin to the expected time until the return or
/// that end, for a block at the start of `first`.
#[expect(clippy::cast_possible_truncation, reason = "the precision of f32 is enough to compare")]
fn gittins_index(hazards: &ReturnHazards, first: usize) -> f32 {
    let (mut absent, mut returned, mut seconds, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
    for (bin, hazard) in hazards.iter().enumerate().skip(first) {
        let returning = absent * hazard;
        absent -= returning;
        returned += returning;
        // Within a bin, returns are in its middle on average.
        seconds += length_s(bin) * (absent + returning / 2.0);
        best = best.max(returned / seconds);
    }
    best as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_rate_has_one_value_at_every_age() {
        // A return rate of 0.01 per second.
        let hazards = std::array::from_fn(|bin| 1.0 - (-0.01 * length_s(bin)).exp());
        for bin in 0..24 {
            let value = gittins_index(&hazards, bin);
            assert!((0.009..0.012).contains(&value), "{bin}: {value}");
        }
    }

    #[test]
    fn a_certain_return_is_worth_more_the_nearer_it_is() {
        let mut hazards = [0.0; AGE_BINS];
        hazards[20] = 1.0;
        let values: Vec<f32> = (0..=21).map(|bin| gittins_index(&hazards, bin)).collect();
        assert!(values[..=20].is_sorted());
        assert_eq!(values[21], 0.0);
    }
}

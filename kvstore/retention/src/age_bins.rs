//! Logarithmic bins of times since a block's last use: three per doubling from one second to about a day.

/// Number of bins; the last one is unbounded.
pub(crate) const AGE_BINS: usize = 52;

const BINS_PER_DOUBLING: f64 = 3.0;

/// The bin of an age. The first bin ends at one second.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is positive and below AGE_BINS"
)]
pub(crate) fn age_bin(age_ms: u64) -> usize {
    if age_ms < 1_000 {
        return 0;
    }
    let doublings = (age_ms as f64 / 1_000.0).log2();
    ((doublings * BINS_PER_DOUBLING) as usize + 1).min(AGE_BINS - 1)
}

/// Start of a bin in seconds.
pub(crate) fn start_s(bin: usize) -> f64 {
    if bin == 0 { 0.0 } else { ((bin - 1) as f64 / BINS_PER_DOUBLING).exp2() }
}

/// Length of a bin in seconds; the last one counts like the one before it.
pub(crate) fn length_s(bin: usize) -> f64 {
    let bin = bin.min(AGE_BINS - 2);
    start_s(bin + 1) - start_s(bin)
}

/// Splits the time between two ages over the bins: calls `each` with every bin and the seconds spent in it.
pub(crate) fn split_by_bin(from_ms: u64, to_ms: u64, mut each: impl FnMut(usize, f64)) {
    let (from, to) = (from_ms as f64 / 1_000.0, to_ms as f64 / 1_000.0);
    for bin in age_bin(from_ms)..=age_bin(to_ms) {
        let end = if bin == AGE_BINS - 1 { f64::INFINITY } else { start_s(bin + 1) };
        let seconds = to.min(end) - from.max(start_s(bin));
        if seconds > 0.0 {
            each(bin, seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_cover_all_ages_in_order() {
        assert_eq!(
            [age_bin(0), age_bin(999), age_bin(1_000), age_bin(2_000), age_bin(4_000)],
            [0, 0, 1, 4, 7]
        );
        assert_eq!(age_bin(u64::MAX), AGE_BINS - 1);
        assert_eq!((start_s(0), start_s(1), start_s(4)), (0.0, 1.0, 2.0));
        for bin in 1..AGE_BINS - 1 {
            assert_eq!(age_bin((start_s(bin) * 1_000.0).ceil() as u64 + 1), bin);
        }
    }

    #[test]
    fn split_times_add_up() {
        let mut parts = Vec::new();
        split_by_bin(500, 4_000, |bin, seconds| parts.push((bin, seconds)));
        assert_eq!((parts[0], parts[6].0), ((0, 0.5), 6));
        assert!((parts.iter().map(|(_, seconds)| seconds).sum::<f64>() - 3.5).abs() < 1e-9);
        split_by_bin(7_000, 7_000, |_, _| panic!("no time has passed"));
    }
}

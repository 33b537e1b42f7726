//! Minimum of a stream of costs, with random ties.

/// The cheapest member of a stream; equal members have the same probability (reservoir of one).
#[derive(Debug, Clone, Copy)]
pub(super) struct MinCostSampler<T> {
    best: Option<(T, f64)>,
    ties: u64,
    bits: u64,
}

impl<T> MinCostSampler<T> {
    /// An empty reservoir; the bits of `entropy` decide ties.
    pub(super) fn new(entropy: u64) -> Self {
        Self { best: None, ties: 0, bits: entropy }
    }

    /// Adds one member with its cost.
    pub(super) fn offer(&mut self, member: T, cost: f64) {
        match self.best {
            Some((_, least)) if cost > least => return,
            Some((_, least)) if cost == least => {
                self.ties += 1;
                self.bits = self.bits.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                if !(self.bits >> 33).is_multiple_of(self.ties) {
                    return;
                }
            }
            _ => self.ties = 1,
        }
        self.best = Some((member, cost));
    }

    /// The lowest cost so far.
    pub(super) fn least(&self) -> Option<f64> {
        self.best.as_ref().map(|(_, cost)| *cost)
    }

    /// The cheapest member with its cost; `None` of an empty stream.
    pub(super) fn into_best(self) -> Option<(T, f64)> {
        self.best
    }
}

/// The cheapest member of an iterator.
pub(super) fn min_cost<T>(priced: impl Iterator<Item = (T, f64)>, entropy: u64) -> Option<T> {
    let mut lightest = MinCostSampler::new(entropy);
    priced.for_each(|(member, cost)| lightest.offer(member, cost));
    lightest.into_best().map(|(member, _)| member)
}

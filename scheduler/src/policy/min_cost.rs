//! The cheapest of many, with ties drawn.

/// The cheapest member of a stream; among equals each is as likely as any other (reservoir of one).
#[derive(Debug, Clone, Copy)]
pub(super) struct MinCostSampler<T> {
    best: Option<(T, f64)>,
    ties: u64,
    bits: u64,
}

impl<T> MinCostSampler<T> {
    /// Nothing yet; ties will be drawn by the bits of `entropy`.
    pub(super) fn new(entropy: u64) -> Self {
        Self { best: None, ties: 0, bits: entropy }
    }

    /// One more member.
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

    /// The least cost so far.
    pub(super) fn least(&self) -> Option<f64> {
        self.best.as_ref().map(|(_, cost)| *cost)
    }

    /// The cheapest with its cost, unless there was none.
    pub(super) fn into_best(self) -> Option<(T, f64)> {
        self.best
    }
}

/// The cheapest of a list.
pub(super) fn min_cost<T>(priced: impl Iterator<Item = (T, f64)>, entropy: u64) -> Option<T> {
    let mut lightest = MinCostSampler::new(entropy);
    priced.for_each(|(member, cost)| lightest.offer(member, cost));
    lightest.into_best().map(|(member, _)| member)
}

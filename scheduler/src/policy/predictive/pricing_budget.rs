//! Which requests of a round are priced on all engines, so that a round of a large fleet is short.

/// In one round, requests are priced on about this many engines in total, for at least [`MIN_PRICED`] requests; the others a moment
/// later. So a round of a large fleet is short, however many requests are queued.
const PRICES_PER_ROUND: usize = 2048;
const MIN_PRICED: usize = 2;

/// Which requests of a round are priced on all engines: half of them the first that need it, the others in turn, so that none waits for
/// long.
#[derive(Debug, Default)]
pub(super) struct PricingBudget {
    /// Remaining prices of either kind.
    first: usize,
    in_turn: usize,
    /// Position in the queue whose turn it is.
    turn: usize,
    /// The first position from there on that was not priced.
    postponed: Option<usize>,
}

impl PricingBudget {
    /// Starts a round in a fleet of this many engines.
    pub(super) fn start_round(&mut self, engines: usize) {
        let prices = (PRICES_PER_ROUND / engines.max(1)).max(MIN_PRICED);
        (self.first, self.in_turn) = (prices - prices / 2, prices / 2);
        self.turn = self.postponed.take().unwrap_or(0);
    }

    /// Whether the request at this position of the queue may be priced. Positions are in ascending order within a round.
    pub(super) fn take(&mut self, position: usize) -> bool {
        if let Some(fewer) = self.first.checked_sub(1) {
            self.first = fewer;
            return true;
        }
        if position < self.turn {
            return false;
        }
        if let Some(fewer) = self.in_turn.checked_sub(1) {
            self.in_turn = fewer;
            return true;
        }
        self.postponed.get_or_insert(position);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_prices_the_first_requests_and_others_in_turn() {
        let mut budget = PricingBudget::default();
        let mut round = || {
            budget.start_round(1_000);
            (0..5).filter(|position| budget.take(*position)).collect::<Vec<_>>()
        };
        assert_eq!(round(), [0, 1]);
        assert_eq!(round(), [0, 2]);
        assert_eq!(round(), [0, 3]);
        assert_eq!(round(), [0, 4]);
        assert_eq!(round(), [0, 1], "the next turn begins");
    }

    #[test]
    fn small_fleets_price_many_requests_in_a_round() {
        let mut budget = PricingBudget::default();
        budget.start_round(8);
        assert!((0..PRICES_PER_ROUND / 8).all(|position| budget.take(position)));
    }
}

//! Replicas that were needed until recently: one that was needed a moment ago is likely to be needed again before it
//! could be created again.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Part of the break-even time for which a replica must have been superfluous; for the whole time, it must be expected.
const OBSERVED_PART: f64 = 0.5;

/// The needs of a window, as far as no later one is as great.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RecentNeeds(VecDeque<(f64, u32)>);

impl RecentNeeds {
    /// Adds a need, and returns the greatest that counts.
    pub(crate) fn greatest(&mut self, time_s: f64, needed: u32, break_even_s: f64) -> u32 {
        while self.0.back().is_some_and(|&(_, earlier)| earlier <= needed) {
            self.0.pop_back();
        }
        self.0.push_back((time_s, needed));
        while self.0.len() > 1
            && self.0.front().is_some_and(|&(at_s, _)| at_s < time_s - OBSERVED_PART * break_even_s)
        {
            self.0.pop_front();
        }
        self.0.front().map_or(needed, |&(_, greatest)| greatest)
    }
}

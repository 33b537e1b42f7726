//! Whose records a log has: who began to write where.
//!
//! Several masters number their records alike, one leader after the other. A record is known for certain by its number and by the
//! *epoch* in which it was written: a random number that each leader takes when it begins, and writes as its first record. Two logs
//! that have the same record of the same epoch are the same up to it.

use std::collections::VecDeque;

/// Epochs that are remembered. Who was away for longer needs the whole state.
const MAX_EPOCHS: usize = 64;

/// One leader's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeaderEpoch {
    id: u64,
    /// The first of its records.
    first: u64,
}

/// The newest epochs of a log, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EpochHistory(VecDeque<LeaderEpoch>);

impl EpochHistory {
    /// An epoch begins with this record. Telling it again changes nothing.
    pub fn begin(&mut self, id: u64, first: u64) {
        if self.0.iter().any(|it| it.id == id) {
            return;
        }
        self.0.push_back(LeaderEpoch { id, first });
        if self.0.len() > MAX_EPOCHS {
            self.0.pop_front();
        }
    }

    /// The epoch of the last record.
    pub fn current(&self) -> Option<u64> {
        self.0.back().map(|it| it.id)
    }

    /// Whether a log whose last record is `last` has the record with this number of this epoch.
    pub fn contains(&self, last: u64, (id, number): (u64, u64)) -> bool {
        let Some(at) = self.0.iter().position(|it| it.id == id) else { return false };
        let end = self.0.get(at + 1).map_or(last, |next| next.first - 1);
        self.0.get(at).is_some_and(|it| (it.first..=end).contains(&number))
    }

    /// Forgets epochs that begin after the record `last`.
    pub fn truncate(&mut self, last: u64) {
        self.0.retain(|it| it.first <= last);
    }

    /// Each epoch and its first record.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().map(|it| (it.id, it.first))
    }
}

impl FromIterator<(u64, u64)> for EpochHistory {
    fn from_iter<T: IntoIterator<Item = (u64, u64)>>(all: T) -> Self {
        let mut epochs = Self::default();
        all.into_iter().filter(|(_, first)| *first > 0).for_each(|(id, first)| epochs.begin(id, first));
        epochs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_known_by_its_epoch() {
        let mut epochs: EpochHistory = [(7, 1), (9, 5), (8, 9)].into_iter().collect();
        assert_eq!(epochs.current(), Some(8));
        assert!(epochs.contains(12, (7, 4)) && epochs.contains(12, (9, 5)) && epochs.contains(12, (8, 12)));
        assert!(!epochs.contains(12, (7, 5)), "what the next leader never had");
        assert!(
            !epochs.contains(12, (8, 13)) && !epochs.contains(12, (6, 2)) && !epochs.contains(12, (9, 4))
        );
        epochs.begin(8, 11);
        assert_eq!(epochs.current(), Some(8));
        epochs.truncate(8);
        assert_eq!(epochs.current(), Some(9));
        for id in 100..200 {
            epochs.begin(id, id);
        }
        assert!(!epochs.contains(199, (9, 6)) && epochs.contains(199, (199, 199)));
        assert_eq!(epochs.iter().count(), MAX_EPOCHS);
    }
}

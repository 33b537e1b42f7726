//! History of a log's epochs: which leader wrote which records.
//!
//! All leaders use one sequence of record numbers. A record is identified by its number and the *epoch* in which it was written: a
//! random number that each leader chooses at its start and writes as its first record. Two logs that contain the same record of the same
//! epoch are identical up to that record.

use std::collections::VecDeque;

/// Maximum number of stored epochs. A follower with an older one needs the full state.
const MAX_EPOCHS: usize = 64;

/// The epoch of one leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderEpoch {
    pub id: u64,
    /// Number of its first record.
    pub first: u64,
}

/// Identifies a record in the logs of all masters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogPosition {
    /// Id of the epoch in which it was written.
    pub epoch: u64,
    pub number: u64,
}

/// The newest epochs of a log, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EpochHistory(VecDeque<LeaderEpoch>);

impl EpochHistory {
    /// Starts an epoch with this record. A repeated call has no effect.
    pub fn begin(&mut self, id: u64, first: u64) {
        if self.0.iter().any(|epoch| epoch.id == id) {
            return;
        }
        self.0.push_back(LeaderEpoch { id, first });
        if self.0.len() > MAX_EPOCHS {
            self.0.pop_front();
        }
    }

    /// The epoch of the log's last record.
    pub fn current(&self) -> Option<u64> {
        self.0.back().map(|epoch| epoch.id)
    }

    /// Whether a log that ends with record `last` contains a record.
    pub fn contains(&self, last: u64, position: LogPosition) -> bool {
        let LogPosition { epoch: id, number } = position;
        let Some(index) = self.0.iter().position(|epoch| epoch.id == id) else { return false };
        let end = self.0.get(index + 1).map_or(last, |next| next.first - 1);
        self.0.get(index).is_some_and(|epoch| (epoch.first..=end).contains(&number))
    }

    /// Removes epochs that start after the record `last`.
    pub fn truncate(&mut self, last: u64) {
        self.0.retain(|epoch| epoch.first <= last);
    }

    pub fn iter(&self) -> impl Iterator<Item = LeaderEpoch> {
        self.0.iter().copied()
    }
}

impl FromIterator<LeaderEpoch> for EpochHistory {
    fn from_iter<T: IntoIterator<Item = LeaderEpoch>>(all: T) -> Self {
        let mut epochs = Self::default();
        all.into_iter().filter(|epoch| epoch.first > 0).for_each(|epoch| epochs.begin(epoch.id, epoch.first));
        epochs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_identified_by_epoch_and_number() {
        let started = [(7, 1), (9, 5), (8, 9)].map(|(id, first)| LeaderEpoch { id, first });
        let mut epochs: EpochHistory = started.into_iter().collect();
        let has = |epochs: &EpochHistory, last, (epoch, number)| {
            epochs.contains(last, LogPosition { epoch, number })
        };
        assert_eq!(epochs.current(), Some(8));
        assert!(has(&epochs, 12, (7, 4)) && has(&epochs, 12, (9, 5)) && has(&epochs, 12, (8, 12)));
        assert!(!has(&epochs, 12, (7, 5)), "a record that the next leader never had");
        assert!(!has(&epochs, 12, (8, 13)) && !has(&epochs, 12, (6, 2)) && !has(&epochs, 12, (9, 4)));
        epochs.begin(8, 11);
        assert_eq!(epochs.current(), Some(8));
        epochs.truncate(8);
        assert_eq!(epochs.current(), Some(9));
        for id in 100..200 {
            epochs.begin(id, id);
        }
        assert!(!has(&epochs, 199, (9, 6)) && has(&epochs, 199, (199, 199)));
        assert_eq!(epochs.iter().count(), MAX_EPOCHS);
    }
}

//! Detects missed messages of the master.

/// Sequence numbers of one connection to the master's event socket.
#[derive(Debug, Default)]
pub(super) struct EventSequence {
    /// Number of the next message, once it is known.
    next: Option<u64>,
    /// Number of the last message received on this connection.
    last_received: Option<u64>,
    /// Number of published messages at the last check.
    published: u64,
}

/// What a message's number reveals about earlier messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SequenceCheck {
    /// All earlier messages were received.
    Complete,
    /// This many were not received.
    Missed(u64),
    /// Another publisher sent them.
    Restarted,
}

impl EventSequence {
    /// A new connection; messages after number `published` can have been missed.
    pub(super) fn connected(published: Option<u64>) -> Self {
        Self {
            next: published.map(|published| published.saturating_add(1)),
            published: published.unwrap_or(0),
            last_received: None,
        }
    }

    pub(super) fn message(&mut self, number: u64) -> SequenceCheck {
        let next = self.next.unwrap_or(number);
        let after = number.saturating_add(1);
        if self.last_received.replace(number).is_some_and(|last| number <= last) {
            self.next = Some(after);
            return SequenceCheck::Restarted;
        }
        self.next = Some(next.max(after));
        match number.checked_sub(next) {
            // Negative: it was published before the master reported the count.
            Some(0) | None => SequenceCheck::Complete,
            Some(missed) => SequenceCheck::Missed(missed),
        }
    }

    /// Compares with the master's count. Returns whether a message that was published before the previous check is missing. Numbers
    /// may start at 0 or at 1, so a single one is only missed when the next one arrives.
    pub(super) fn check(&mut self, published: u64) -> bool {
        let missing = self.next.is_some_and(|next| next < self.published);
        if missing {
            self.next = Some(published.saturating_add(1));
        }
        self.published = published;
        missing
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_published_count_reveals_missed_messages() {
        assert_eq!(
            EventSequence::default().message(7),
            SequenceCheck::Complete,
            "no earlier message is known"
        );
        assert_eq!(EventSequence::connected(Some(6)).message(7), SequenceCheck::Complete);
        assert_eq!(EventSequence::connected(Some(4)).message(7), SequenceCheck::Missed(2));
        let mut late = EventSequence::connected(Some(7));
        assert_eq!([6, 7, 8].map(|number| late.message(number)), [SequenceCheck::Complete; 3]);
        assert_eq!(late.message(0), SequenceCheck::Restarted);
        assert_eq!(
            [1, 3].map(|number| late.message(number)),
            [SequenceCheck::Complete, SequenceCheck::Missed(1)]
        );
    }

    #[test]
    fn messages_that_never_come_are_missed() {
        let mut sequence = EventSequence::connected(Some(3));
        assert!(!sequence.check(3));
        assert!(!sequence.check(9), "they may be on their way");
        assert_eq!(sequence.message(4), SequenceCheck::Complete);
        assert!(sequence.check(9));
        assert!(!sequence.check(9), "reported once");
        assert_eq!(sequence.message(10), SequenceCheck::Complete);
    }

    proptest! {
        /// Every lost message is counted, except those after the last received one.
        #[test]
        fn losses_are_counted(first in 0_u64..3, lost in prop::collection::vec(any::<bool>(), 1..60)) {
            let mut sequence = EventSequence::connected(Some(first));
            let (mut missed_total, mut last) = (0, 0);
            for (number, lost) in (first + 1..).zip(&lost) {
                if !lost {
                    last = number - first;
                    match sequence.message(number) {
                        SequenceCheck::Complete => {}
                        SequenceCheck::Missed(missed) => missed_total += missed,
                        SequenceCheck::Restarted => prop_assert!(false, "numbers only grow"),
                    }
                }
            }
            let before_last = lost.iter().take(last as usize).filter(|lost| **lost).count();
            prop_assert_eq!(missed_total, before_last as u64);
        }
    }
}

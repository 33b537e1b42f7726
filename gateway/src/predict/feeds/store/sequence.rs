//! Whether messages of the master were missed.

/// Sequence numbers of one connection to the master's event socket.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    /// Number of the next message, once it is known.
    next: Option<u64>,
    /// Number of the last message that came on this connection.
    heard: Option<u64>,
    /// Messages that had been published at the last check.
    due: u64,
}

/// What a message's number says about those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// All of them have been heard.
    Heard,
    /// So many have not.
    Missed(u64),
    /// They were another publisher's.
    Restarted,
}

impl Sequence {
    /// A new connection, on which `published` messages can have been missed.
    pub(super) fn connected(published: Option<u64>) -> Self {
        Self {
            next: published.map(|published| published.saturating_add(1)),
            due: published.unwrap_or(0),
            heard: None,
        }
    }

    /// A message has come.
    pub(super) fn message(&mut self, number: u64) -> Before {
        let next = self.next.unwrap_or(number);
        let after = number.saturating_add(1);
        if self.heard.replace(number).is_some_and(|heard| number <= heard) {
            self.next = Some(after);
            return Before::Restarted;
        }
        self.next = Some(next.max(after));
        match number.checked_sub(next) {
            // Below: it was published before the master said how many there were.
            Some(0) | None => Before::Heard,
            Some(missed) => Before::Missed(missed),
        }
    }

    /// The master says how many it has published. Returns whether one has not come that was published before the last check. Numbers
    /// may begin at 0 or at 1, so a single one is only missed when the next one comes.
    pub(super) fn check(&mut self, published: u64) -> bool {
        let missing = self.next.is_some_and(|next| next < self.due);
        if missing {
            self.next = Some(published.saturating_add(1));
        }
        self.due = published;
        missing
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_masters_count_tells_what_the_first_message_misses() {
        assert_eq!(Sequence::default().message(7), Before::Heard, "nobody knows better");
        assert_eq!(Sequence::connected(Some(6)).message(7), Before::Heard);
        assert_eq!(Sequence::connected(Some(4)).message(7), Before::Missed(2));
        let mut late = Sequence::connected(Some(7));
        assert_eq!([6, 7, 8].map(|number| late.message(number)), [Before::Heard; 3]);
        assert_eq!(late.message(0), Before::Restarted);
        assert_eq!([1, 3].map(|number| late.message(number)), [Before::Heard, Before::Missed(1)]);
    }

    #[test]
    fn messages_that_never_come_are_missed() {
        let mut sequence = Sequence::connected(Some(3));
        assert!(!sequence.check(3));
        assert!(!sequence.check(9), "they may be on their way");
        assert_eq!(sequence.message(4), Before::Heard);
        assert!(sequence.check(9));
        assert!(!sequence.check(9), "told once");
        assert_eq!(sequence.message(10), Before::Heard);
    }

    proptest! {
        /// Whatever is lost on the way is told, to the message.
        #[test]
        fn losses_are_counted(first in 0_u64..3, lost in prop::collection::vec(any::<bool>(), 1..60)) {
            let mut sequence = Sequence::connected(Some(first));
            let (mut told, mut heard) = (0, 0);
            for (number, lost) in (first + 1..).zip(&lost) {
                if !lost {
                    heard = number - first;
                    match sequence.message(number) {
                        Before::Heard => {}
                        Before::Missed(missed) => told += missed,
                        Before::Restarted => prop_assert!(false, "numbers only grow"),
                    }
                }
            }
            let before_last = lost.iter().take(heard as usize).filter(|lost| **lost).count();
            prop_assert_eq!(told, before_last as u64);
        }
    }
}

//! Numbers of events and messages, none of which is given out twice, even by another master or after a start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::journal::Journal;
use crate::record;
use crate::state::AuxState;

/// How many numbers are reserved at a time.
const RESERVATION: u64 = 1 << 16;
/// Pause after a journal that could not be written.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Numbers, of which the journal knows up to where they may have been given out.
///
/// One bound serves events and messages: both begin behind it, and there are no more messages than events.
#[derive(Default)]
pub struct EventNumberAllocator {
    persistence: Option<(Arc<dyn Journal>, Arc<AuxState>)>,
    starts_after: u64,
    reserved: AtomicU64,
}

impl EventNumberAllocator {
    /// Those that follow what was given out as far as `beside` knows.
    pub fn new(journal: Arc<dyn Journal>, beside: Arc<AuxState>) -> Self {
        let starts_after = beside.events();
        Self { persistence: Some((journal, beside)), starts_after, reserved: AtomicU64::new(starts_after) }
    }

    /// The last number that may have been given out before.
    pub(super) fn starts_after(&self) -> u64 {
        self.starts_after
    }

    /// The last number that can be given out at once.
    pub(super) fn reserved(&self) -> u64 {
        if self.persistence.is_some() { self.reserved.load(Relaxed) } else { u64::MAX }
    }

    /// Returns when numbers up to this one can be given out.
    pub(super) async fn reserve(&self, number: u64) {
        let Some((journal, beside)) = self.persistence.as_ref().filter(|_| number > self.reserved()) else {
            return;
        };
        let bound = number.saturating_add(RESERVATION);
        // Before it is in the journal: a snapshot that is begun in between must have it too.
        beside.reserve_events(bound);
        let record = journal.append(&record::events(bound));
        loop {
            let journal = Arc::clone(journal);
            match tokio::task::spawn_blocking(move || journal.commit(record)).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => tracing::debug!(%error, "numbers of KV events cannot be reserved"),
                Err(error) => tracing::debug!(%error, "reserving numbers of KV events was broken off"),
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        self.reserved.store(bound, Relaxed);
    }
}

impl std::fmt::Debug for EventNumberAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Numbers").field("reserved", &self.reserved()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MemoryJournal;

    #[tokio::test]
    async fn numbers_go_on_behind_what_was_reserved() {
        let (journal, beside) = (Arc::new(MemoryJournal::new(1 << 20)), Arc::new(AuxState::default()));
        let numbers = EventNumberAllocator::new(journal.clone(), Arc::clone(&beside));
        assert_eq!((numbers.starts_after(), numbers.reserved()), (0, 0));
        numbers.reserve(3).await;
        assert_eq!((numbers.reserved(), journal.next()), (3 + RESERVATION, 2));
        numbers.reserve(3 + RESERVATION).await;
        assert_eq!(journal.next(), 2, "they are reserved already");
        assert_eq!(EventNumberAllocator::new(journal, beside).starts_after(), 3 + RESERVATION);
        assert_eq!(EventNumberAllocator::default().reserved(), u64::MAX);
    }
}

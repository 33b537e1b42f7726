//! Allocates numbers of events and messages, each used once, across restarts and changes of the leader.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::journal::Journal;
use crate::record;
use crate::state::AuxState;

/// Number of numbers that are reserved at a time.
const RESERVATION: u64 = 1 << 16;
/// Pause before a failed write of the journal is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Allocates numbers below a bound that is stored in the journal.
///
/// Events and messages share one bound: both start after it, and there are no more messages than events.
#[derive(Default)]
pub struct EventNumberAllocator {
    persistence: Option<(Arc<dyn Journal>, Arc<AuxState>)>,
    starts_after: u64,
    reserved: AtomicU64,
}

impl EventNumberAllocator {
    /// Continues after the numbers reserved in `aux`.
    pub fn new(journal: Arc<dyn Journal>, aux: Arc<AuxState>) -> Self {
        let starts_after = aux.events();
        Self { persistence: Some((journal, aux)), starts_after, reserved: AtomicU64::new(starts_after) }
    }

    /// The last number that may have been used before.
    pub(super) fn starts_after(&self) -> u64 {
        self.starts_after
    }

    /// The last number that can be used without a further reservation.
    pub(super) fn reserved(&self) -> u64 {
        if self.persistence.is_some() { self.reserved.load(Relaxed) } else { u64::MAX }
    }

    /// Waits until all numbers up to this one are reserved.
    pub(super) async fn reserve(&self, number: u64) {
        let Some((journal, aux)) = self.persistence.as_ref().filter(|_| number > self.reserved()) else {
            return;
        };
        let bound = number.saturating_add(RESERVATION);
        // Updated before the journal: a snapshot that starts in between must contain the new bound.
        aux.reserve_events(bound);
        let record = journal.append(&record::events(bound));
        loop {
            let journal = Arc::clone(journal);
            match tokio::task::spawn_blocking(move || journal.commit(record)).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => tracing::debug!(%error, "cannot reserve KV event numbers"),
                Err(error) => tracing::debug!(%error, "the task that reserves KV event numbers failed"),
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        self.reserved.store(bound, Relaxed);
    }
}

impl std::fmt::Debug for EventNumberAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventNumberAllocator").field("reserved", &self.reserved()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MemoryJournal;

    #[tokio::test]
    async fn numbers_continue_after_the_reserved_ones() {
        let (journal, aux) = (Arc::new(MemoryJournal::new(1 << 20)), Arc::new(AuxState::default()));
        let numbers = EventNumberAllocator::new(journal.clone(), Arc::clone(&aux));
        assert_eq!((numbers.starts_after(), numbers.reserved()), (0, 0));
        numbers.reserve(3).await;
        assert_eq!((numbers.reserved(), journal.next()), (3 + RESERVATION, 2));
        numbers.reserve(3 + RESERVATION).await;
        assert_eq!(journal.next(), 2, "the number is already reserved");
        assert_eq!(EventNumberAllocator::new(journal, aux).starts_after(), 3 + RESERVATION);
        assert_eq!(EventNumberAllocator::default().reserved(), u64::MAX);
    }
}

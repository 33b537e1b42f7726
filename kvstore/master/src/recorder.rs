//! Records the changes of the state machine.

use std::io;
use std::sync::Arc;

use moongate_master_core::{ReplicaLocation, StateChange, StateChangeSink};

use crate::journal::Journal;
use crate::object_feed::ObjectFeed;

/// Encodes changes into a journal, and tracks which record has to be committed before the reply.
pub struct FactRecorder {
    journal: Arc<dyn Journal>,
    feed: Option<Arc<ObjectFeed>>,
    encoded: Vec<u8>,
    last_uncommitted: Option<u64>,
}

impl FactRecorder {
    /// A recorder without uncommitted records.
    pub fn new(journal: Arc<dyn Journal>) -> Self {
        Self { journal, feed: None, encoded: Vec::new(), last_uncommitted: None }
    }

    /// A recorder that also reports changes of the objects in segments.
    pub(crate) fn with_feed(journal: Arc<dyn Journal>, feed: Arc<ObjectFeed>) -> Self {
        Self { feed: Some(feed), ..Self::new(journal) }
    }

    /// Waits until the records since the last commit are durable.
    ///
    /// # Errors
    /// As [`Journal::commit`].
    pub fn commit(&mut self) -> io::Result<()> {
        self.last_uncommitted
            .take()
            .map_or_else(|| self.journal.may_reply(), |last| self.journal.commit(last))
    }

    /// Drops the pending commit: no reply depends on it.
    pub(crate) fn discard_pending(&mut self) {
        self.last_uncommitted = None;
    }

    /// [`Self::commit`] for another thread; `None` if nothing was recorded.
    pub fn take_commit(&mut self) -> Option<impl FnOnce() -> io::Result<()> + Send + use<>> {
        let (last, journal) = (self.last_uncommitted.take()?, Arc::clone(&self.journal));
        Some(move || journal.commit(last))
    }
}

impl StateChangeSink for FactRecorder {
    fn record(&mut self, fact: StateChange<'_>) {
        self.encoded.clear();
        moongate_master_core::encode(&fact, &mut self.encoded);
        self.last_uncommitted = Some(self.journal.append_fact(&fact, &self.encoded));
        if let Some(feed) = &self.feed {
            feed.observe(&fact);
        }
    }

    fn range_vacated(&mut self, location: ReplicaLocation) {
        if let Some(feed) = &self.feed {
            feed.vacated(location);
        }
    }
}

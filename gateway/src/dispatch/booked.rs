//! A request's entries in the books of its engines.

use std::sync::Arc;

use moongate_scheduler::Ticket;

use super::desk::Desk;
use crate::fleet::{Endpoint, OnEngine};
use crate::relay::Usage;

/// Entries that are taken back when dropped.
#[derive(Debug)]
pub(crate) struct Booked {
    entry: OnEngine,
    _exit: Option<OnEngine>,
    /// `None` for what is passed through without a decision.
    sent: Option<(Arc<Desk>, Ticket)>,
    computed: bool,
}

impl Booked {
    /// A request that the scheduler has sent. For a plain worker, there is no exit.
    pub(super) fn sent(
        desk: Arc<Desk>,
        ticket: Ticket,
        entry: Arc<Endpoint>,
        exit: Option<Arc<Endpoint>>,
    ) -> Self {
        let (entry, exit) = (OnEngine::new(entry), exit.map(OnEngine::new));
        Self { entry, _exit: exit, sent: Some((desk, ticket)), computed: false }
    }

    /// A request that is passed through.
    pub(super) fn passing(endpoint: Arc<Endpoint>) -> Self {
        Self { entry: OnEngine::new(endpoint), _exit: None, sent: None, computed: true }
    }

    /// The engine that computes the prompt.
    pub(crate) fn entry(&self) -> &Arc<Endpoint> {
        self.entry.endpoint()
    }

    /// The prompt is computed. `usage` is what its engine says of it, if it has said so yet.
    pub(super) fn computed(&mut self, usage: Option<Usage>) {
        if !std::mem::replace(&mut self.computed, true)
            && let Some((desk, ticket)) = &self.sent
        {
            let cached = usage.and_then(|usage| usage.cached_tokens);
            desk.computed(*ticket, cached.and_then(|tokens| u32::try_from(tokens).ok()));
        }
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        if let Some((desk, ticket)) = self.sent.take() {
            desk.ended(ticket);
        }
    }
}

//! A request's entries in the books of its engines.

use std::sync::Arc;

use moongate_scheduler::AttemptId;

use super::admission_queue::AdmissionQueue;
use crate::fleet::{EngineInFlightGuard, UpstreamEndpoint};
use crate::relay::TokenUsage;

/// Entries that are taken back when dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard {
    prefill: EngineInFlightGuard,
    _decode: Option<EngineInFlightGuard>,
    /// `None` for what is passed through without a decision.
    attempt: Option<(Arc<AdmissionQueue>, AttemptId)>,
    prompt_computed: bool,
}

impl InFlightGuard {
    /// A request that the scheduler has sent. For a plain worker, there is no exit.
    pub(super) fn routed(
        desk: Arc<AdmissionQueue>,
        ticket: AttemptId,
        entry: Arc<UpstreamEndpoint>,
        exit: Option<Arc<UpstreamEndpoint>>,
    ) -> Self {
        let (prefill, exit) = (EngineInFlightGuard::new(entry), exit.map(EngineInFlightGuard::new));
        Self { prefill, _decode: exit, attempt: Some((desk, ticket)), prompt_computed: false }
    }

    /// A request that is passed through.
    pub(super) fn passthrough(endpoint: Arc<UpstreamEndpoint>) -> Self {
        Self {
            prefill: EngineInFlightGuard::new(endpoint),
            _decode: None,
            attempt: None,
            prompt_computed: true,
        }
    }

    /// The engine that computes the prompt.
    pub(crate) fn prefill_endpoint(&self) -> &Arc<UpstreamEndpoint> {
        self.prefill.endpoint()
    }

    /// The prompt is computed. `usage` is what its engine says of it, if it has said so yet.
    pub(super) fn record_prompt_computed(&mut self, usage: Option<TokenUsage>) {
        if !std::mem::replace(&mut self.prompt_computed, true)
            && let Some((desk, ticket)) = &self.attempt
        {
            let cached = usage.and_then(|usage| usage.cached_tokens);
            desk.record_prompt_computed(*ticket, cached.and_then(|tokens| u32::try_from(tokens).ok()));
        }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if let Some((desk, ticket)) = self.attempt.take() {
            desk.record_ended(ticket);
        }
    }
}

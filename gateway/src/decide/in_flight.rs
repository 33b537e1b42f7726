//! In-flight counts of a request at its engines and in the scheduler.

use std::sync::Arc;

use moongate_scheduler::AttemptId;

use super::admission_queue::AdmissionQueue;
use crate::fleet::{EngineInFlightGuard, UpstreamEndpoint};
use crate::response::TokenUsage;

/// Counts a request as in flight until dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard {
    prefill: EngineInFlightGuard,
    decode: Option<EngineInFlightGuard>,
    /// `None` for requests that bypass the scheduler.
    attempt: Option<(Arc<AdmissionQueue>, AttemptId)>,
    prompt_computed: bool,
    /// Generated tokens of a complete response.
    output_tokens: Option<u64>,
}

impl InFlightGuard {
    /// Guard of a request that the scheduler has sent. A plain worker has no `decode`.
    pub(super) fn routed(
        queue: Arc<AdmissionQueue>,
        attempt: AttemptId,
        prefill: Arc<UpstreamEndpoint>,
        decode: Option<Arc<UpstreamEndpoint>>,
    ) -> Self {
        let (prefill, decode) = (EngineInFlightGuard::new(prefill), decode.map(EngineInFlightGuard::new));
        Self { prefill, decode, attempt: Some((queue, attempt)), prompt_computed: false, output_tokens: None }
    }

    /// Guard of a request that bypasses the scheduler.
    pub(crate) fn passthrough(endpoint: Arc<UpstreamEndpoint>) -> Self {
        Self {
            prefill: EngineInFlightGuard::new(endpoint),
            decode: None,
            attempt: None,
            prompt_computed: true,
            output_tokens: None,
        }
    }

    /// The engine that computes the prompt.
    pub(crate) fn prefill_endpoint(&self) -> &Arc<UpstreamEndpoint> {
        self.prefill.endpoint()
    }

    /// The engine that answers the client.
    pub(crate) fn main_endpoint(&self) -> &Arc<UpstreamEndpoint> {
        self.decode.as_ref().unwrap_or(&self.prefill).endpoint()
    }

    /// The engines have loaded the request's LoRA adapter.
    pub(crate) fn record_adapter_wait_ended(&self) {
        if let Some((queue, attempt)) = &self.attempt {
            queue.record_adapter_wait_ended(*attempt);
        }
    }

    /// The prompt has been computed. `usage` holds its engine's token counts, if already reported.
    pub(crate) fn record_prompt_computed(&mut self, usage: Option<TokenUsage>) {
        if !std::mem::replace(&mut self.prompt_computed, true)
            && let Some((queue, attempt)) = &self.attempt
        {
            let cached = usage.and_then(|usage| usage.cached_tokens);
            queue.record_prompt_computed(*attempt, cached.and_then(|tokens| u32::try_from(tokens).ok()));
        }
    }

    /// The response is complete, with this number of generated tokens.
    pub(crate) fn record_response_complete(&mut self, output_tokens: u64) {
        self.output_tokens = (output_tokens > 0).then_some(output_tokens);
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if let Some((queue, attempt)) = self.attempt.take() {
            queue.record_ended(attempt, self.output_tokens);
        }
    }
}

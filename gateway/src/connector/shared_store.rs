//! vLLM with a shared store: prefill first, then decode finds the blocks in the store.

use super::{ConnectorAttempt, LegConnector, LegOrder, PrefillLeg, vllm};
use crate::upstream::PreparedRequest;

/// The legs are linked only by the keys of their blocks.
#[derive(Debug)]
pub(super) struct SharedStoreConnector;

impl LegConnector for SharedStoreConnector {
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        vllm::prefill_leg(attempt, None, LegOrder::PrefillFirst)
    }

    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        _: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        Ok(vllm::decode_request(attempt, None))
    }
}

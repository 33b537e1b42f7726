//! vLLM with a shared store: prefill first, then decode finds the blocks in the store.

use super::{ConnectorAttempt, LegConnector, LegOrder, PrefillLeg, vllm};
use crate::request_body::InferenceApi;
use crate::upstream::PreparedRequest;

/// The legs are linked only by the keys of their blocks.
#[derive(Debug)]
pub(super) struct SharedStoreConnector;

impl LegConnector for SharedStoreConnector {
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        // vLLM permits a limit below a budget for thinking only with this parameter, which the connector itself does not read.
        let is_message = attempt.routed.api == InferenceApi::Messages;
        let params = is_message.then(|| r#"{"do_remote_decode":true}"#.to_owned());
        vllm::prefill_leg(attempt, params, LegOrder::PrefillFirst)
    }

    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        _: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        Ok(vllm::decode_request(attempt, None))
    }
}

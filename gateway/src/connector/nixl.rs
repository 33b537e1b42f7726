//! vLLM's NixlConnector: prefill first, then decode with the prefill's parameters.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{ConnectorAttempt, LegConnector, LegOrder, PrefillLeg, vllm};
use crate::upstream::PreparedRequest;

/// `kv_transfer_params` of the prefill.
const PREFILL_PARAMS: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

#[derive(Debug)]
pub(super) struct NixlConnector;

impl LegConnector for NixlConnector {
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        vllm::prefill_leg(attempt, Some(PREFILL_PARAMS.to_owned()), LegOrder::PrefillFirst)
    }

    /// The decode gets the prefill's parameters verbatim. Without parameters (a prefill with no KV cache to hand over), it computes
    /// the prompt itself.
    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        prefill_response: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        let params = prefill_response.map(parse_transfer_params).transpose();
        let params = params.map_err(|_| "returned a prefill response that is not JSON")?.flatten();
        Ok(vllm::decode_request(attempt, params))
    }
}

/// `kv_transfer_params` of a prefill's response, byte for byte. `Ok(None)` if it is null or absent.
fn parse_transfer_params(response: &[u8]) -> Result<Option<String>, serde_json::Error> {
    #[derive(Deserialize)]
    struct PrefillResponse<'a> {
        #[serde(borrow)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let response: PrefillResponse<'_> = serde_json::from_slice(response)?;
    Ok(response.kv_transfer_params.map(|raw| raw.get().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_pass_verbatim() {
        let raw = r#"{"remote_block_ids": [[1,2]],  "future":1.50}"#;
        let response = format!(r#"{{"id":"x","kv_transfer_params":{raw},"usage":{{}}}}"#);
        assert_eq!(parse_transfer_params(response.as_bytes()).unwrap().as_deref(), Some(raw));
        assert_eq!(parse_transfer_params(br#"{"kv_transfer_params":null}"#).unwrap(), None);
        assert_eq!(parse_transfer_params(br#"{"id":1}"#).unwrap(), None);
        assert!(parse_transfer_params(b"<html>").is_err());
    }
}

//! vLLM's MooncakeConnector: both legs at once, except for messages, linked by a transfer id.

use std::collections::BTreeMap;

use moongate_discovery::BootstrapAddress;
use serde::Deserialize;

use super::{ConnectorAttempt, LegConnector, LegOrder, PrefillLeg, vllm};
use crate::request_body::InferenceApi;
use crate::routed_request::random_uuid;
use crate::upstream::PreparedRequest;

/// The values that link the legs of a pair.
#[derive(Debug)]
pub(super) struct MooncakeConnector<'a> {
    bootstrap: &'a BootstrapAddress,
    /// Id of the prefill's rank, new after each of its restarts.
    engine_id: &'a str,
    transfer_id: String,
}

impl<'a> MooncakeConnector<'a> {
    pub(super) fn new(
        bootstrap: Option<&'a BootstrapAddress>,
        engine_ids: &'a BTreeMap<u32, String>,
        rank: u32,
    ) -> Result<Self, &'static str> {
        let bootstrap = bootstrap.ok_or("has no bootstrap address")?;
        // A node of a hybrid deployment numbers its ranks from another number than 0.
        let engine_id = engine_ids.values().nth(rank as usize).or_else(|| engine_ids.values().next());
        let engine_id = engine_id.ok_or("has no engine id at its bootstrap server")?;
        Ok(Self { bootstrap, engine_id, transfer_id: format!("xfer-{}", random_uuid()) })
    }

    fn prefill_params(&self) -> String {
        let transfer_id = &self.transfer_id;
        format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer_id}"}}"#)
    }

    fn decode_params(&self) -> String {
        let Self { bootstrap, engine_id, transfer_id } = self;
        let host = if bootstrap.host.contains(':') {
            format!("[{}]", bootstrap.host)
        } else {
            bootstrap.host.clone()
        };
        let address = serde_json::Value::from(format!("http://{host}:{}", bootstrap.port));
        let engine_id = serde_json::Value::from(*engine_id);
        format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{address},"remote_engine_id":{engine_id},"transfer_id":"{transfer_id}"}}"#
        )
    }
}

impl LegConnector for MooncakeConnector<'_> {
    /// An aborted prefill blocks one of the engine's few sender workers for eight minutes
    /// (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), whereas it ends after one token anyway. Without a decode that waits for it, it blocks none.
    ///
    /// Only Messages cannot forbid an early end, so the decode of a message starts when the end of the prefill is known: it would wait the
    /// same eight minutes for blocks that were dropped.
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        let order = match attempt.routed.api {
            InferenceApi::Messages => LegOrder::PrefillFirst,
            _ => LegOrder::Together { may_cancel: false },
        };
        vllm::prefill_leg(attempt, Some(self.prefill_params()), order)
    }

    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        prefill_response: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        // Without parameters the decode computes the prompt.
        let has_dropped = prefill_response.map(has_dropped_blocks).transpose()?.unwrap_or(false);
        let params = (!has_dropped).then(|| self.decode_params());
        Ok(vllm::decode_request(attempt, params))
    }

    /// After a restart, a prefill has a new engine id, and the decode answers 500 to the old one.
    fn depends_on_prefill_facts(&self) -> bool {
        true
    }
}

/// Whether the prefill of a message has dropped its blocks: vLLM keeps only those of a request that ended by length. It has ended so, for
/// the engine, at a stop sequence too.
fn has_dropped_blocks(prefill_response: &[u8]) -> Result<bool, &'static str> {
    #[derive(Deserialize)]
    struct MessageEnd<'a> {
        stop_reason: Option<&'a str>,
    }
    // The decode would wait for blocks that may not be there.
    let end: MessageEnd<'_> = serde_json::from_slice(prefill_response)
        .map_err(|_| "has a prefill that answered with no message")?;
    Ok(!matches!(end.stop_reason, Some("max_tokens" | "stop_sequence")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::connector::LegEngine;
    use crate::routed_request::RoutedRequest;

    #[test]
    fn blocks_are_kept_at_the_limit_only() {
        let is_dropped =
            |reason: &str| has_dropped_blocks(format!(r#"{{"stop_reason":{reason}}}"#).as_bytes()).unwrap();
        assert!(is_dropped(r#""end_turn""#) && is_dropped("null"));
        assert!(!is_dropped(r#""max_tokens""#) && !is_dropped(r#""stop_sequence""#));
        assert!(has_dropped_blocks(b"not JSON").is_err());
    }

    #[test]
    fn mooncake_names_transfer_and_bootstrap() {
        let routed = RoutedRequest::of_body(InferenceApi::Completions, r#"{"prompt":"a","max_tokens":24}"#);
        let bootstrap = BootstrapAddress { host: "::1".into(), port: 8998 };
        let transfer_id = "xfer-1".to_owned();
        let connector = MooncakeConnector { bootstrap: &bootstrap, engine_id: "e-1", transfer_id };
        let engine = LegEngine { facts: None, rank: 0, rank_count: 1 };
        let attempt = ConnectorAttempt {
            routed: &routed,
            number: 1,
            decision: None,
            prefill: engine,
            decode: Some(engine),
        };
        let decode = connector.main(&attempt, None).unwrap();
        assert_eq!(
            serde_json::from_slice::<Value>(&decode.body.to_vec()).unwrap(),
            json!({"prompt":"a","max_tokens":24,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,
                "remote_bootstrap_addr":"http://[::1]:8998","remote_engine_id":"e-1","transfer_id":"xfer-1"}})
        );
    }
}

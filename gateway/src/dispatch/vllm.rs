//! Wire format of vLLM's connectors: bodies and headers of each leg.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use moongate_discovery::BootstrapAddress;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::routed_request::RoutedRequest;
use crate::request_body::{BodyMember, InferenceApi, MemberEdit, SplicedBody};

/// `kv_transfer_params` for a NixlConnector prefill.
const NIXL_PREFILL: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// Headers of both legs: the data-parallel rank if there are several, and from the second attempt on a distinct request id. vLLM
/// derives its internal id from it, and an engine may still hold that of the previous attempt.
pub(super) fn headers(
    request_id: &HeaderValue,
    attempt: u32,
    (rank, dp_size): (u32, u32),
) -> Vec<(HeaderName, HeaderValue)> {
    let mut headers = Vec::with_capacity(2);
    if attempt > 1 {
        let id = [request_id.as_bytes(), format!("-{attempt}").as_bytes()].concat();
        headers.extend(
            HeaderValue::from_bytes(&id).ok().map(|id| (HeaderName::from_static("x-request-id"), id)),
        );
    }
    if dp_size > 1 {
        headers.push((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank)));
    }
    headers
}

/// The prefill's body for NixlConnector.
pub(super) fn nixl_prefill(routed: &RoutedRequest) -> SplicedBody {
    prefill(routed, Some(NIXL_PREFILL.to_owned()))
}

/// The decode's body for NixlConnector: the prefill's parameters verbatim. Without parameters (a prefill with no KV cache to hand
/// over), the decode computes the prompt itself.
pub(super) fn nixl_decode(routed: &RoutedRequest, params: Option<&str>) -> SplicedBody {
    with_params(routed, params.map(str::to_owned))
}

/// The prefill's body for MooncakeConnector.
pub(super) fn mooncake_prefill(routed: &RoutedRequest, transfer: &str) -> SplicedBody {
    let transfer =
        format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{transfer}"}}"#);
    prefill(routed, Some(transfer))
}

/// The decode's body for MooncakeConnector.
pub(super) fn mooncake_decode(
    routed: &RoutedRequest,
    transfer: &str,
    bootstrap: &BootstrapAddress,
    engine_id: &str,
) -> SplicedBody {
    let host =
        if bootstrap.host.contains(':') { format!("[{}]", bootstrap.host) } else { bootstrap.host.clone() };
    let address = serde_json::Value::from(format!("http://{host}:{}", bootstrap.port));
    let engine_id = serde_json::Value::from(engine_id);
    with_params(
        routed,
        Some(format!(
            r#"{{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{address},"remote_engine_id":{engine_id},"transfer_id":"{transfer}"}}"#
        )),
    )
}

/// The prefill's body with a shared store: only limited to one token.
pub(super) fn store_prefill(routed: &RoutedRequest) -> SplicedBody {
    prefill(routed, None)
}

/// The client's body limited to one token and one response, so that the prefill stops after the prompt. `min_tokens` keeps an
/// end-of-sequence token from ending it earlier: vLLM drops the blocks of a request that did not end by length.
fn prefill(routed: &RoutedRequest, params: Option<String>) -> SplicedBody {
    let edits = vec![
        MemberEdit::new(BodyMember::Stream, "false"),
        MemberEdit::new(BodyMember::StreamOptions, "null"),
        MemberEdit::new(BodyMember::MaxTokens, "1"),
        MemberEdit::new(BodyMember::MaxCompletionTokens, "1"),
        MemberEdit::new(BodyMember::MinTokens, "1"),
    ];
    let mut appended = Vec::with_capacity(3);
    if !routed.routing.has(BodyMember::MaxTokens) && !routed.routing.has(BodyMember::MaxCompletionTokens) {
        let key = if routed.api == InferenceApi::Chat {
            BodyMember::MaxCompletionTokens
        } else {
            BodyMember::MaxTokens
        };
        appended.push(format!("\"{}\":1", key.key()));
    }
    if !routed.routing.has(BodyMember::MinTokens) {
        appended.push(format!("\"{}\":1", BodyMember::MinTokens.key()));
    }
    appended.extend(params.map(transfer_params));
    SplicedBody::new(&routed.body, &routed.routing, &edits, Bytes::from(appended.join(",")))
}

fn with_params(routed: &RoutedRequest, params: Option<String>) -> SplicedBody {
    let appended = params.map(transfer_params).unwrap_or_default();
    SplicedBody::new(&routed.body, &routed.routing, &[], Bytes::from(appended))
}

/// The member `kv_transfer_params`. The client's body has none: ingress removes it.
fn transfer_params(params: String) -> String {
    format!("\"kv_transfer_params\":{params}")
}

/// `kv_transfer_params` of a prefill's response, byte for byte. `Ok(None)` if it is null or absent.
pub(super) fn parse_transfer_params(response: &[u8]) -> Result<Option<String>, serde_json::Error> {
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
    use std::sync::Arc;

    use http::{Method, Uri};
    use serde_json::{Value, json};

    use super::*;
    use crate::request_body::RoutingFields;

    fn routed_request(api: InferenceApi, body: &str) -> RoutedRequest {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let fields = RoutingFields::read(api, &body).unwrap().without_model();
        RoutedRequest {
            id: HeaderValue::from_static("a"),
            api,
            method: Method::POST,
            uri: Uri::from_static("/v1/completions"),
            headers: Arc::default(),
            body,
            routing: fields,
            request: None,
            prompt_prediction: None,
            model: None,
        }
    }

    fn parsed(body: &SplicedBody) -> Value {
        serde_json::from_slice(&body.to_vec()).unwrap()
    }

    #[test]
    fn prefill_is_one_token_without_stream() {
        let routed = routed_request(
            InferenceApi::Chat,
            r#"{"messages":[{}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":4,"x":1}"#,
        );
        let expected =
            json!({"messages":[{}],"stream":false,"stream_options":null,"max_tokens":1,"min_tokens":1,"x":1});
        assert_eq!(parsed(&store_prefill(&routed)), expected);
    }

    #[test]
    fn a_missing_limit_is_added() {
        let chat = parsed(&store_prefill(&routed_request(InferenceApi::Chat, r#"{"messages":[{}]}"#)));
        assert_eq!(chat, json!({"messages":[{}],"max_completion_tokens":1,"min_tokens":1}));
        let completion =
            parsed(&store_prefill(&routed_request(InferenceApi::Completions, r#"{"prompt":"a"}"#)));
        assert_eq!(completion, json!({"prompt":"a","max_tokens":1,"min_tokens":1}));
    }

    #[test]
    fn parameters_pass_verbatim() {
        let raw = r#"{"remote_block_ids": [[1,2]],  "future":1.50}"#;
        let response = format!(r#"{{"id":"x","kv_transfer_params":{raw},"usage":{{}}}}"#);
        assert_eq!(parse_transfer_params(response.as_bytes()).unwrap().as_deref(), Some(raw));
        assert_eq!(parse_transfer_params(br#"{"kv_transfer_params":null}"#).unwrap(), None);
        assert_eq!(parse_transfer_params(br#"{"id":1}"#).unwrap(), None);
        assert!(parse_transfer_params(b"<html>").is_err());
    }

    #[test]
    fn mooncake_names_transfer_and_bootstrap() {
        let routed = routed_request(InferenceApi::Completions, r#"{"prompt":"a","max_tokens":24}"#);
        let bootstrap = BootstrapAddress { host: "::1".into(), port: 8998 };
        assert_eq!(
            parsed(&mooncake_decode(&routed, "xfer-1", &bootstrap, "e-1")),
            json!({"prompt":"a","max_tokens":24,"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true,
                "remote_bootstrap_addr":"http://[::1]:8998","remote_engine_id":"e-1","transfer_id":"xfer-1"}})
        );
    }
}

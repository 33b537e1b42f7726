//! What vLLM's connectors have in common: the body and headers of each leg.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

use super::{ConnectorAttempt, LegEngine, LegOrder, PrefillLeg};
use crate::request_body::{BodyMember, InferenceApi, MemberEdit, SplicedBody};
use crate::routed_request::RoutedRequest;
use crate::upstream::PreparedRequest;

/// The prefill leg, with `params` as `kv_transfer_params`. `None` if the decode engine computes the prompt itself.
pub(super) fn prefill_leg(
    attempt: &ConnectorAttempt<'_>,
    params: Option<String>,
    order: LegOrder,
) -> Option<PrefillLeg> {
    let routed = attempt.routed;
    (!computes_alone(routed)).then(|| {
        let headers = headers(&routed.id, attempt.number, attempt.prefill);
        let request = routed.prepare(prefill_body(routed, params), headers);
        PrefillLeg { request, order }
    })
}

/// The decode leg's request, with `params` as `kv_transfer_params` unless there was no prefill leg.
pub(super) fn decode_request(attempt: &ConnectorAttempt<'_>, params: Option<String>) -> PreparedRequest {
    let routed = attempt.routed;
    let params = params.filter(|_| !computes_alone(routed));
    routed.prepare(with_params(routed, params), headers(&routed.id, attempt.number, attempt.main_engine()))
}

/// Whether the decode engine computes the prompt itself: one KV transfer serves one sequence, a request in the background outlives its
/// exchange, and only the engine that stored a response has the beginning of the prompt that continues it.
fn computes_alone(routed: &RoutedRequest) -> bool {
    let routing = &routed.routing;
    routing.sequences() > 1
        || (routed.api == InferenceApi::Responses
            && (routing.is_background || routing.previous_response_id.is_some()))
}

/// Headers of both legs: the data-parallel rank if there are several, and from the second attempt on a distinct request id. vLLM
/// derives its internal id from it, and an engine may still hold that of the previous attempt.
fn headers(request_id: &HeaderValue, attempt: u32, engine: LegEngine<'_>) -> Vec<(HeaderName, HeaderValue)> {
    let mut headers = Vec::with_capacity(2);
    if attempt > 1 {
        let id = [request_id.as_bytes(), format!("-{attempt}").as_bytes()].concat();
        headers.extend(
            HeaderValue::from_bytes(&id).ok().map(|id| (HeaderName::from_static("x-request-id"), id)),
        );
    }
    headers.extend(rank_header(engine));
    headers
}

/// The header by which vLLM's front end chooses the data-parallel rank, also when it balances the ranks itself.
pub(super) fn rank_header(engine: LegEngine<'_>) -> Option<(HeaderName, HeaderValue)> {
    let rank = engine.requested_rank()?;
    Some((HeaderName::from_static("x-data-parallel-rank"), HeaderValue::from(rank)))
}

/// Members that limit a response to one token, in the API's own terms, and keep it from ending earlier: vLLM drops the blocks of a request
/// that did not end by length. In Anthropic's API nothing does (vLLM ignores unknown members of it); without blocks, the decode engine
/// computes the prompt.
const fn prefill_limits(api: InferenceApi) -> &'static [(BodyMember, &'static str)] {
    match api {
        InferenceApi::Responses => &[
            (BodyMember::MaxOutputTokens, "1"),
            (BodyMember::IgnoreEos, "true"),
            (BodyMember::Store, "false"),
        ],
        InferenceApi::Messages => &[(BodyMember::MaxTokens, "1")],
        InferenceApi::Chat => &[(BodyMember::MaxCompletionTokens, "1"), (BodyMember::MinTokens, "1")],
        _ => &[(BodyMember::MaxTokens, "1"), (BodyMember::MinTokens, "1")],
    }
}

/// The client's body limited to one token and one response, so that the prefill stops after the prompt.
fn prefill_body(routed: &RoutedRequest, params: Option<String>) -> SplicedBody {
    let routing = &routed.routing;
    let mut edits = vec![
        MemberEdit::new(BodyMember::Stream, "false"),
        MemberEdit::new(BodyMember::StreamOptions, "null"),
    ];
    let mut appended = Vec::with_capacity(4);
    // Chats have two names for the limit.
    if routed.api == InferenceApi::Chat {
        edits.push(MemberEdit::new(BodyMember::MaxTokens, "1"));
    }
    for &(member, value) in prefill_limits(routed.api) {
        if routing.has(member) {
            edits.push(MemberEdit::new(member, value));
        } else if member != BodyMember::MaxCompletionTokens || !routing.has(BodyMember::MaxTokens) {
            appended.push(format!("\"{}\":{value}", member.key()));
        }
    }
    appended.extend(params.map(transfer_params));
    SplicedBody::new(&routed.body, routing, &edits, Bytes::from(appended.join(",")))
}

/// The client's body with `kv_transfer_params`, if there are any.
fn with_params(routed: &RoutedRequest, params: Option<String>) -> SplicedBody {
    let appended = params.map(transfer_params).unwrap_or_default();
    SplicedBody::new(&routed.body, &routed.routing, &[], Bytes::from(appended))
}

/// The member `kv_transfer_params`. The client's body has none: ingress removes it.
fn transfer_params(params: String) -> String {
    format!("\"kv_transfer_params\":{params}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parsed(body: &SplicedBody) -> Value {
        serde_json::from_slice(&body.to_vec()).unwrap()
    }

    #[test]
    fn prefill_is_one_token_without_stream() {
        let routed = RoutedRequest::of_body(
            InferenceApi::Chat,
            r#"{"messages":[{}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":4,"x":1}"#,
        );
        let expected =
            json!({"messages":[{}],"stream":false,"stream_options":null,"max_tokens":1,"min_tokens":1,"x":1});
        assert_eq!(parsed(&prefill_body(&routed, None)), expected);
    }

    #[test]
    fn a_missing_limit_is_added() {
        let body = |api, text| prefill_body(&RoutedRequest::of_body(api, text), None);
        let chat = parsed(&body(InferenceApi::Chat, r#"{"messages":[{}]}"#));
        assert_eq!(chat, json!({"messages":[{}],"max_completion_tokens":1,"min_tokens":1}));
        let completion = parsed(&body(InferenceApi::Completions, r#"{"prompt":"a"}"#));
        assert_eq!(completion, json!({"prompt":"a","max_tokens":1,"min_tokens":1}));
        let response = parsed(&body(InferenceApi::Responses, r#"{"input":"a","store":true}"#));
        assert_eq!(response, json!({"input":"a","store":false,"max_output_tokens":1,"ignore_eos":true}));
        let message =
            parsed(&body(InferenceApi::Messages, r#"{"messages":[{}],"max_tokens":9,"stream":true}"#));
        assert_eq!(message, json!({"messages":[{}],"max_tokens":1,"stream":false}));
    }

    #[test]
    fn responses_that_outlive_their_exchange_have_no_prefill() {
        let alone = |body| computes_alone(&RoutedRequest::of_body(InferenceApi::Responses, body));
        assert!(alone(r#"{"input":"a","background":true}"#));
        assert!(alone(r#"{"input":"a","previous_response_id":"resp_1"}"#));
        assert!(!alone(r#"{"input":"a","background":false,"previous_response_id":null}"#));
        let chat = r#"{"messages":[{}],"background":true}"#;
        assert!(!computes_alone(&RoutedRequest::of_body(InferenceApi::Chat, chat)));
    }
}

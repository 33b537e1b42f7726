//! Fields of responses in the APIs that agents use: OpenAI's Responses and Anthropic's Messages, whole or as events.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use smallvec::SmallVec;

use super::fields::{BorrowedText, CachedTokensDetails, ResponseSummary, TokenUsage};

/// A response, or an event with one.
#[derive(Deserialize)]
struct AgentResponse<'a> {
    #[serde(borrow)]
    id: Option<BorrowedText<'a>>,
    usage: Option<AgentUsage>,
    /// Responses API: `completed`, or why it has ended.
    #[serde(borrow)]
    status: Option<BorrowedText<'a>>,
    #[serde(borrow)]
    output: Option<Vec<OutputItem<'a>>>,
    /// Messages API.
    #[serde(borrow)]
    stop_reason: Option<BorrowedText<'a>>,
    #[serde(borrow)]
    delta: Option<MessageDelta<'a>>,
    /// In an event of the Responses API.
    #[serde(borrow)]
    response: Option<Box<AgentResponse<'a>>>,
    /// In the first event of the Messages API.
    #[serde(borrow)]
    message: Option<Box<AgentResponse<'a>>>,
}

#[derive(Deserialize)]
struct OutputItem<'a> {
    #[serde(borrow)]
    r#type: Option<BorrowedText<'a>>,
}

#[derive(Deserialize)]
struct MessageDelta<'a> {
    #[serde(borrow)]
    stop_reason: Option<BorrowedText<'a>>,
}

/// Only the counts, for responses with other fields of unexpected types.
#[derive(Deserialize)]
struct UsageOnly {
    usage: Option<AgentUsage>,
    response: Option<Box<UsageOnly>>,
}

#[derive(Deserialize)]
struct AgentUsage {
    /// SGLang reports them only in the first event of a message.
    #[serde(default)]
    input_tokens: u64,
    #[serde(default)]
    output_tokens: u64,
    input_tokens_details: Option<CachedTokensDetails>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

impl From<AgentUsage> for TokenUsage {
    /// In Anthropic's API `input_tokens` are only those that were neither read from a cache nor written to one.
    fn from(usage: AgentUsage) -> Self {
        let AgentUsage { input_tokens, output_tokens, input_tokens_details, .. } = usage;
        let read = usage.cache_read_input_tokens;
        let created = usage.cache_creation_input_tokens.unwrap_or(0);
        let details = input_tokens_details.and_then(|details| details.cached_tokens);
        Self {
            prompt_tokens: input_tokens.saturating_add(read.unwrap_or(0)).saturating_add(created),
            completion_tokens: output_tokens,
            cached_tokens: details.or(read),
        }
    }
}

/// The fields of such a response; `None` for one of another API, and for events without counts.
pub(super) fn summary(json: &[u8]) -> Option<ResponseSummary<'_>> {
    // Of the input or the output.
    static COUNTS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"put_tokens\""));
    COUNTS.find(json)?;
    let Ok(mut response) = serde_json::from_slice::<AgentResponse<'_>>(json) else {
        let UsageOnly { usage, response } = serde_json::from_slice(json).ok()?;
        let usage = usage.or_else(|| response?.usage)?;
        return Some(ResponseSummary { usage: Some(usage.into()), ..ResponseSummary::default() });
    };
    if let Some(inner) = response.response.take().or(response.message.take()) {
        response = *inner;
    }
    let usage = response.usage?;
    let is_call = |item: &OutputItem<'_>| {
        item.r#type
            .as_ref()
            .is_some_and(|kind| matches!(kind.0.as_ref(), "function_call" | "custom_tool_call"))
    };
    let calls = response.output.is_some_and(|items| items.iter().any(is_call));
    let mut finish_reasons = SmallVec::new();
    finish_reasons.extend(calls.then(|| "function_call".into()));
    finish_reasons.extend(response.status.map(|status| status.0));
    finish_reasons
        .extend(response.stop_reason.or(response.delta.and_then(|delta| delta.stop_reason)).map(|r| r.0));
    Some(ResponseSummary { usage: Some(usage.into()), id: response.id.map(|id| id.0), finish_reasons })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::response::ResponseFinish;

    fn read(json: &str) -> (Option<TokenUsage>, ResponseFinish) {
        let summary = ResponseSummary::of(json.as_bytes()).unwrap();
        let mut finish = ResponseFinish::default();
        finish.add(&summary);
        (summary.usage, finish)
    }

    #[test]
    fn responses_are_read_whole_and_in_their_last_event() {
        let response = r#"{"id":"resp_1","object":"response","status":"completed","error":null,
            "output":[{"type":"reasoning","content":[]},{"type":"function_call","name":"f"}],
            "usage":{"input_tokens":33,"input_tokens_details":{"cached_tokens":32},"output_tokens":24,"total_tokens":57}}"#;
        let usage = TokenUsage { prompt_tokens: 33, completion_tokens: 24, cached_tokens: Some(32) };
        let event = format!(r#"{{"response":{response},"sequence_number":9,"type":"response.completed"}}"#);
        for json in [response, &event] {
            let (found, finish) = read(json);
            assert_eq!(found, Some(usage));
            assert_eq!(finish.id.as_deref(), Some("resp_1"));
            assert_eq!(finish.finish_reasons, ["function_call", "completed"]);
            assert!(finish.requests_tools());
        }
    }

    #[test]
    fn messages_are_read_whole_and_in_their_delta() {
        let message = r#"{"id":"msg_1","type":"message","role":"assistant","content":[],"stop_reason":"tool_use",
            "usage":{"input_tokens":1,"output_tokens":24,"cache_read_input_tokens":32}}"#;
        let usage = TokenUsage { prompt_tokens: 33, completion_tokens: 24, cached_tokens: Some(32) };
        let (found, finish) = read(message);
        assert_eq!((found, finish.id.as_deref()), (Some(usage), Some("msg_1")));
        assert!(finish.requests_tools());
        let delta = r#"{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},
            "usage":{"input_tokens":30,"output_tokens":2,"cache_creation_input_tokens":3}}"#;
        let usage = TokenUsage { prompt_tokens: 33, completion_tokens: 2, cached_tokens: None };
        let (found, finish) = read(delta);
        assert_eq!((found, finish.finish_reasons), (Some(usage), vec!["end_turn".to_owned()]));
    }

    #[test]
    fn sglang_has_input_and_output_of_a_message_in_two_events() {
        let start = r#"{"type":"message_start","message":{"id":"msg_1","type":"message","content":[],
            "usage":{"input_tokens":1,"cache_read_input_tokens":32}}}"#;
        let (input, finish) = read(start);
        assert_eq!((finish.id.as_deref(), finish.finish_reasons.len()), (Some("msg_1"), 0));
        let delta =
            r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"output_tokens":24}}"#;
        let usage = TokenUsage { prompt_tokens: 33, completion_tokens: 24, cached_tokens: Some(32) };
        assert_eq!(read(delta).0.unwrap().with_input_of(input.unwrap()), usage);
        assert_eq!(usage.with_input_of(TokenUsage::default()), usage);
    }

    #[test]
    fn counts_are_read_whatever_the_other_fields() {
        for json in [
            r#"{"id":7,"usage":{"input_tokens":3,"output_tokens":2}}"#,
            r#"{"delta":"text","usage":{"input_tokens":3,"output_tokens":2}}"#,
            r#"{"response":{"output":"x","usage":{"input_tokens":3,"output_tokens":2}}}"#,
        ] {
            let usage = TokenUsage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: None };
            assert_eq!(read(json).0, Some(usage), "{json}");
        }
        assert_eq!(read(r#"{"input_tokens":33}"#).0, None, "count_tokens");
    }
}

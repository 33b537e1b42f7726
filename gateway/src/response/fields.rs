//! Fields of a response: its token counts, its id, and why each choice ended.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use smallvec::SmallVec;

use super::agent_fields;

/// Longest response id that is recorded in traces.
const MAX_ID_LEN: usize = 128;
/// Most finish reasons recorded in traces: the largest `n` that OpenAI allows.
const MAX_FINISH_REASONS: usize = 128;

/// Token counts of one response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TokenUsage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Prompt tokens that were not computed; `None` if the engine does not report them.
    pub(crate) cached_tokens: Option<u64>,
}

/// Fields of a JSON response, or of one event of a stream.
#[derive(Debug, Default)]
pub(crate) struct ResponseSummary<'a> {
    pub(crate) usage: Option<TokenUsage>,
    pub(super) id: Option<Cow<'a, str>>,
    /// One for each choice that has ended.
    pub(super) finish_reasons: SmallVec<[Cow<'a, str>; 1]>,
}

/// Id and finish reasons of a response, as far as it has them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ResponseFinish {
    pub(crate) id: Option<String>,
    /// One for each choice that has ended.
    pub(crate) finish_reasons: Vec<String>,
}

/// A response in OpenAI's format, or of SGLang's `/generate`. Nothing is flattened, and strings are borrowed: every response is
/// parsed like this, and few strings are used.
#[derive(Deserialize)]
struct ResponseFields<'a> {
    #[serde(borrow)]
    id: Option<BorrowedText<'a>>,
    #[serde(borrow, default)]
    choices: SmallVec<[ResponseChoice<'a>; 1]>,
    usage: Option<UsageFields>,
    #[serde(borrow)]
    meta_info: Option<MetaInfo<'a>>,
}

#[derive(Deserialize)]
struct ResponseChoice<'a> {
    #[serde(borrow)]
    finish_reason: Option<BorrowedText<'a>>,
}

#[derive(Deserialize)]
struct MetaInfo<'a> {
    #[serde(borrow)]
    id: Option<BorrowedText<'a>>,
    #[serde(borrow)]
    finish_reason: Option<FinishReason<'a>>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct FinishReason<'a> {
    #[serde(borrow)]
    r#type: BorrowedText<'a>,
}

/// Borrowed, unless the string contains escapes. (Serde does not borrow for an `Option<Cow>`.)
#[derive(Deserialize)]
pub(super) struct BorrowedText<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// Only the counts, for responses with other fields of unexpected types: tokens are counted in any case.
#[derive(Deserialize)]
struct UsageOnlyFields {
    usage: Option<UsageFields>,
    meta_info: Option<UsageFields>,
}

/// Counts in the names of OpenAI's first APIs.
#[derive(Deserialize)]
struct UsageFields {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    prompt_tokens_details: Option<CachedTokensDetails>,
}

#[derive(Deserialize)]
pub(super) struct CachedTokensDetails {
    pub(super) cached_tokens: Option<u64>,
}

impl From<UsageFields> for TokenUsage {
    fn from(usage_fields: UsageFields) -> Self {
        let details = usage_fields.prompt_tokens_details;
        Self {
            prompt_tokens: usage_fields.prompt_tokens.unwrap_or(0),
            completion_tokens: usage_fields.completion_tokens.unwrap_or(0),
            cached_tokens: details.and_then(|details| details.cached_tokens).or(usage_fields.cached_tokens),
        }
    }
}

impl ResponseFinish {
    /// Whether any choice ended to call tools: the client will send their results.
    pub(crate) fn requests_tools(&self) -> bool {
        self.finish_reasons
            .iter()
            .any(|reason| matches!(reason.as_str(), "tool_calls" | "function_call" | "tool_use"))
    }
}

impl<'a> ResponseSummary<'a> {
    /// Reads `usage` (OpenAI) or `meta_info` (SGLang's `/generate`), id and finish reasons. Values of unexpected types are ignored.
    pub(crate) fn read(json: &'a [u8]) -> Self {
        Self::of(json).unwrap_or_default()
    }

    /// As [`ResponseSummary::read`], but the input must be JSON.
    ///
    /// # Errors
    ///
    /// The input is not JSON.
    pub(crate) fn of(json: &'a [u8]) -> Result<Self, serde_json::Error> {
        if let Some(summary) = agent_fields::summary(json) {
            return Ok(summary);
        }
        let Ok(fields) = serde_json::from_slice::<ResponseFields<'_>>(json) else {
            let Ok(usage_only) = serde_json::from_slice::<UsageOnlyFields>(json) else {
                return serde_json::from_slice::<IgnoredAny>(json).map(|_| Self::default());
            };
            let usage = usage_only.usage.or(usage_only.meta_info);
            return Ok(Self { usage: usage.map(TokenUsage::from), ..Self::default() });
        };
        let mut usage = fields.usage.map(TokenUsage::from);
        let mut id = fields.id;
        let mut finish_reasons: SmallVec<_> =
            fields.choices.into_iter().filter_map(|choice| Some(choice.finish_reason?.0)).collect();
        if let Some(meta) = fields.meta_info {
            usage = usage.or(Some(TokenUsage {
                prompt_tokens: meta.prompt_tokens.unwrap_or(0),
                completion_tokens: meta.completion_tokens.unwrap_or(0),
                cached_tokens: meta.cached_tokens,
            }));
            id = id.or(meta.id);
            finish_reasons.extend(meta.finish_reason.map(|finish| finish.r#type.0));
        }
        Ok(Self { usage, id: id.map(|id| id.0), finish_reasons })
    }
}

impl TokenUsage {
    /// Only the counts of [`ResponseSummary::read`].
    pub(crate) fn read(json: &[u8]) -> Option<Self> {
        ResponseSummary::read(json).usage
    }

    /// The counts with those of the input that an earlier event of the stream has reported, if they are missing.
    pub(crate) fn with_input_of(self, earlier: Self) -> Self {
        if self.prompt_tokens > 0 {
            return self;
        }
        Self { completion_tokens: self.completion_tokens, ..earlier }
    }
}

impl ResponseFinish {
    /// Adds the fields of the response, or of its next event.
    pub(crate) fn add(&mut self, summary: &ResponseSummary<'_>) {
        if let Some(id) = summary.id.as_ref().filter(|id| id.len() <= MAX_ID_LEN) {
            self.id = Some(id.clone().into_owned());
        }
        let remaining = MAX_FINISH_REASONS.saturating_sub(self.finish_reasons.len());
        let reasons = summary.finish_reasons.iter().take(remaining);
        self.finish_reasons.extend(reasons.map(|reason| reason.clone().into_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_all_formats_is_read() {
        let openai = br#"{"id":"x","usage":{"prompt_tokens":33,"completion_tokens":24,"prompt_tokens_details":{"cached_tokens":32}}}"#;
        let expected = TokenUsage { prompt_tokens: 33, completion_tokens: 24, cached_tokens: Some(32) };
        assert_eq!(TokenUsage::read(openai), Some(expected));
        let generate =
            br#"{"text":"","meta_info":{"prompt_tokens":33,"completion_tokens":24,"cached_tokens":32}}"#;
        assert_eq!(TokenUsage::read(generate), Some(expected));
        let plain = br#"{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}"#;
        assert_eq!(
            TokenUsage::read(plain),
            Some(TokenUsage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: None })
        );
        assert_eq!(TokenUsage::read(br#"{"choices":[],"usage":null}"#), None);
        assert_eq!(TokenUsage::read(b"garbage"), None);
    }

    #[test]
    fn usage_is_read_whatever_the_other_fields() {
        let expected = TokenUsage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: None };
        for rest in [r#""id":7"#, r#""choices":null"#, r#""choices":[{"finish_reason":{"type":"stop"}}]"#] {
            let openai = format!(r#"{{{rest},"usage":{{"prompt_tokens":1,"completion_tokens":2}}}}"#);
            assert_eq!(TokenUsage::read(openai.as_bytes()), Some(expected), "{openai}");
            let generate = format!(r#"{{{rest},"meta_info":{{"prompt_tokens":1,"completion_tokens":2}}}}"#);
            assert_eq!(TokenUsage::read(generate.as_bytes()), Some(expected), "{generate}");
        }
        let text = br#"{"meta_info":{"finish_reason":"stop","prompt_tokens":1,"completion_tokens":2}}"#;
        assert_eq!(TokenUsage::read(text), Some(expected));
    }

    fn of(events: &[&str]) -> (Option<String>, Vec<String>) {
        let mut finish = ResponseFinish::default();
        events.iter().for_each(|event| finish.add(&ResponseSummary::read(event.as_bytes())));
        (finish.id, finish.finish_reasons)
    }

    #[test]
    fn last_events_of_every_format_give_id_and_reasons() {
        let last = r#"{"id":"c-1","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}"#;
        let usage = r#"{"id":"c-1","choices":[],"usage":{"prompt_tokens":1}}"#;
        let expected = (Some("c-1".to_owned()), vec!["length".to_owned()]);
        assert_eq!(of(&[last, usage]), expected);
        let chunk = r#"{"id":"c-1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#;
        assert_eq!(of(&[chunk, last]), expected);
        let two = r#"{"id":"c\u002d2","choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}"#;
        assert_eq!(of(&[two]), (Some("c-2".to_owned()), vec!["stop".to_owned(), "length".to_owned()]));
        let generate = r#"{"text":"","meta_info":{"id":"g","finish_reason":{"type":"stop","matched":2}}}"#;
        assert_eq!(of(&["", generate]), (Some("g".to_owned()), vec!["stop".to_owned()]));
    }

    #[test]
    fn finish_reasons_are_bounded() {
        let choices = vec![r#"{"finish_reason":"stop"}"#; MAX_FINISH_REASONS - 1].join(",");
        let event = format!(r#"{{"choices":[{choices}]}}"#);
        assert_eq!(of(&[&event]).1.len(), MAX_FINISH_REASONS - 1);
        assert_eq!(of(&[&event, &event]).1.len(), MAX_FINISH_REASONS);
    }

    #[test]
    fn unexpected_types_are_ignored() {
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(MAX_ID_LEN + 1));
        for text in ["", "[]", "{}", r#"{"id":1}"#, r#"{"choices":[{"finish_reason":1}]}"#, &long] {
            assert_eq!(of(&[text]), (None, Vec::new()), "{text:.40}");
            assert_eq!(ResponseSummary::of(text.as_bytes()).is_ok(), !text.is_empty(), "{text:.40}");
        }
    }

    #[test]
    fn valid_json_of_any_shape_is_accepted() {
        for json in
            ["[]", "7", "null", "[{\"usage\":1}]", r#"{"id":1,"id":2,"usage":3}"#, "{\"text\":\"\u{7f}\"} "]
        {
            assert!(ResponseSummary::of(json.as_bytes()).is_ok(), "{json}");
        }
        for text in
            ["", "garbage", r#"{"id":"x""#, r#"{"id":"x"} and more"#, r#"{"id":"x",}"#, "{\"id\":\"\n\"}"]
        {
            assert!(ResponseSummary::of(text.as_bytes()).is_err(), "{text}");
        }
    }
}

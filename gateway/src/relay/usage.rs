//! Token counts as engines report them.

use serde::Deserialize;

/// Token counts of one answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Prompt tokens that were not computed; `None` if the engine does not tell.
    pub(crate) cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Answer {
    usage: Option<OpenAi>,
    meta_info: Option<Counts>,
}

#[derive(Deserialize)]
struct OpenAi {
    #[serde(flatten)]
    counts: Counts,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Counts {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Usage {
    /// Reads `usage` (OpenAI) or `meta_info` (SGLang's `/generate`); `None` if there is neither.
    pub(crate) fn read(json: &[u8]) -> Option<Usage> {
        let answer: Answer = serde_json::from_slice(json).ok()?;
        let (counts, details) = match (answer.usage, answer.meta_info) {
            (Some(usage), _) => (usage.counts, usage.prompt_tokens_details),
            (None, Some(meta)) => (meta, None),
            (None, None) => return None,
        };
        Some(Usage {
            prompt_tokens: counts.prompt_tokens.unwrap_or(0),
            completion_tokens: counts.completion_tokens.unwrap_or(0),
            cached_tokens: details.and_then(|details| details.cached_tokens).or(counts.cached_tokens),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_three_shapes() {
        let openai = br#"{"id":"x","usage":{"prompt_tokens":33,"completion_tokens":24,"prompt_tokens_details":{"cached_tokens":32}}}"#;
        let expected = Usage { prompt_tokens: 33, completion_tokens: 24, cached_tokens: Some(32) };
        assert_eq!(Usage::read(openai), Some(expected));
        let generate =
            br#"{"text":"","meta_info":{"prompt_tokens":33,"completion_tokens":24,"cached_tokens":32}}"#;
        assert_eq!(Usage::read(generate), Some(expected));
        let plain = br#"{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}"#;
        assert_eq!(
            Usage::read(plain),
            Some(Usage { prompt_tokens: 1, completion_tokens: 2, cached_tokens: None })
        );
        assert_eq!(Usage::read(br#"{"choices":[],"usage":null}"#), None);
        assert_eq!(Usage::read(b"garbage"), None);
    }
}

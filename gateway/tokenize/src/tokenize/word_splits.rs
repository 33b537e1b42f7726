//! Finds positions in plain text at which it can be split so that its parts, tokenized separately, give the ids of the whole.
//!
//! The patterns below, of byte-level tokenizers, all end a word before a space, and begin the next one with it: `[a-z]| [A-Za-z]`, where the
//! bar is the split. They look ahead only within white space and never back, the models merge only within a word, and what normalizers in
//! Unicode's forms compose is on one side of the space.

use fastokens::tiktoken;
use memchr::memchr_iter;
use serde_json::Value;

use crate::files::{AddedToken, TokenizerPipeline};

/// Patterns of a single `Split`: those of GPT-4 and Llama 3, Qwen 2 and 3, Qwen 3.5, GPT-4o, Mistral and Kimi.
const PATTERNS: [&str; 6] = [
    tiktoken::CL100K_BASE_PATTERN,
    tiktoken::QWEN2_PATTERN,
    tiktoken::QWEN35_PATTERN,
    tiktoken::O200K_BASE_PATTERN,
    tiktoken::TEKKEN_PATTERN,
    tiktoken::KIMI_PATTERN,
];
/// DeepSeek's patterns, which are applied one after the other.
const DEEPSEEK_PATTERNS: [&str; 3] =
    [tiktoken::DEEPSEEK_SPLIT1_PATTERN, tiktoken::DEEPSEEK_SPLIT2_PATTERN, tiktoken::DEEPSEEK_SPLIT3_PATTERN];

/// Whether a tokenizer's texts can be split between words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WordSplits {
    is_supported: bool,
}

impl WordSplits {
    pub(crate) fn from_pipeline(pipeline: &TokenizerPipeline) -> Self {
        let TokenizerPipeline { added_tokens, normalizer, pre_tokenizer } = pipeline;
        let is_supported = normalizer.as_ref().is_none_or(is_unicode_form)
            && pre_tokenizer.as_ref().is_some_and(splits_before_words)
            && !added_tokens.iter().any(may_cross_words);
        Self { is_supported }
    }

    /// The first split of `text` at or after `from`.
    pub(crate) fn first(self, text: &str, from: usize) -> Option<usize> {
        let bytes = text.as_bytes();
        if !self.is_supported || from == 0 {
            return None;
        }
        memchr_iter(b' ', bytes.get(from..)?).map(|space| from + space).find(|&space| {
            bytes[space - 1].is_ascii_lowercase() && bytes.get(space + 1).is_some_and(u8::is_ascii_alphabetic)
        })
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

fn is_unicode_form(normalizer: &Value) -> bool {
    match kind(normalizer) {
        "NFC" | "NFD" | "NFKC" | "NFKD" => true,
        "Sequence" => {
            normalizer["normalizers"].as_array().is_some_and(|steps| steps.iter().all(is_unicode_form))
        }
        _ => normalizer.is_null(),
    }
}

fn splits_before_words(pre_tokenizer: &Value) -> bool {
    let one = [pre_tokenizer.clone()];
    let steps = match kind(pre_tokenizer) {
        "Sequence" => pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice),
        _ => &one,
    };
    let Some((last, splits)) = steps.split_last() else { return false };
    let is_byte_level = kind(last) == "ByteLevel" && last["add_prefix_space"] == Value::Bool(false);
    let has_own_pattern = last["use_regex"] != Value::Bool(false);
    let patterns: Option<Vec<&str>> = splits.iter().map(pattern).collect();
    match patterns.as_deref() {
        // GPT-2's pattern is part of its ByteLevel.
        Some([]) => is_byte_level && has_own_pattern,
        Some([one]) => is_byte_level && !has_own_pattern && PATTERNS.contains(one),
        Some(several) => is_byte_level && !has_own_pattern && *several == DEEPSEEK_PATTERNS,
        None => false,
    }
}

fn pattern(step: &Value) -> Option<&str> {
    let isolates = step["behavior"] == "Isolated" && step["invert"] != Value::Bool(true);
    step["pattern"]["Regex"].as_str().filter(|_| isolates && kind(step) == "Split")
}

/// Whether the token may match across a split, or take the space behind one.
fn may_cross_words(token: &AddedToken) -> bool {
    let starts_word = token.content.starts_with(|first: char| first.is_ascii_alphabetic());
    token.content.contains(' ')
        || (token.lstrip && starts_word)
        || (token.rstrip && ends_word(&token.content))
}

fn ends_word(text: &str) -> bool {
    text.ends_with(|last: char| last.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splits(json: &str) -> WordSplits {
        WordSplits::from_pipeline(&serde_json::from_str(json).unwrap())
    }

    fn qwen(more: &str) -> String {
        let pattern = serde_json::to_string(tiktoken::QWEN2_PATTERN).unwrap();
        format!(
            r#"{{"pre_tokenizer":{{"type":"Sequence","pretokenizers":[
                {{"type":"Split","pattern":{{"Regex":{pattern}}},"behavior":"Isolated","invert":false}},
                {{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}}]}}{more}}}"#
        )
    }

    #[test]
    fn texts_are_split_between_words() {
        let splits = splits(&qwen(""));
        let text = "A b, c  dE f1 g h";
        let mut found = Vec::new();
        let mut from = 1;
        while let Some(at) = splits.first(text, from) {
            found.push(at);
            from = at + 1;
        }
        assert_eq!(found, [15], "not after an upper-case letter, punctuation, a space or a digit");
        assert_eq!(splits.first("ab cd", 0), None);
        assert_eq!(splits.first("ab cd", 9), None);
        assert_eq!(splits.first("ab ", 1), None);
    }

    #[test]
    fn other_tokenizers_are_not_split() {
        assert!(splits(&qwen("")).is_supported);
        for (what, json) in [
            ("an unknown pattern", qwen("").replace("Isolated", "Removed")),
            ("a normalizer that replaces", qwen(r#","normalizer":{"type":"Replace"}"#)),
            ("a token across words", qwen(r#","added_tokens":[{"content":"a b"}]"#)),
            ("a token that takes spaces", qwen(r#","added_tokens":[{"content":"ab","rstrip":true}]"#)),
            ("no pattern", r#"{"pre_tokenizer":{"type":"Metaspace"}}"#.to_owned()),
            ("a prefix", r#"{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true}}"#.to_owned()),
        ] {
            assert!(!splits(&json).is_supported, "{what}");
        }
        let gpt2 =
            r#"{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"normalizer":{"type":"NFC"}}"#;
        assert!(splits(gpt2).is_supported);
    }
}

//! Finds positions at which a text can be split so that its parts, tokenized separately, give the ids of the whole.
//!
//! This holds only directly behind an added token. Tokenizers match added tokens before all other steps, and tokenize the text between
//! them separately. A *cut token* is an added token that matches wherever its text occurs, independent of the surrounding text; a cut
//! therefore depends only on the text before it.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use serde_json::Value;

use crate::files::{AddedToken, TokenizerPipeline};

/// Minimum length of a cut token in bytes; the search compares the last three first.
const MIN_BYTES: usize = 4;

/// The cut tokens of a tokenizer.
#[derive(Debug, Default)]
pub(crate) struct SplitPoints {
    /// Cut tokens by their last bytes.
    by_end: HashMap<[u8; 3], Vec<String>, RandomState>,
    /// The distinct last bytes of cut tokens.
    last_bytes: Vec<u8>,
}

impl SplitPoints {
    pub(crate) fn from_pipeline(shape: &TokenizerPipeline) -> SplitPoints {
        let mut cuts = SplitPoints::default();
        if !shape.pre_tokenizer.as_ref().is_none_or(keeps_no_context)
            || !shape.normalizer.as_ref().is_none_or(is_position_independent)
        {
            return cuts;
        }
        let identity = shape.normalizer.as_ref().is_none_or(is_empty_sequence);
        let tokens = &shape.added_tokens;
        let clean = tokens.iter().filter(|token| {
            (identity || !token.normalized)
                && is_plain(token)
                && tokens.iter().all(|other| !can_shadow(other, token))
        });
        for token in clean {
            let Some(&end) = token.content.as_bytes().last_chunk::<3>() else { continue };
            if !cuts.last_bytes.contains(&end[2]) {
                cuts.last_bytes.push(end[2]);
            }
            cuts.by_end.entry(end).or_default().push(token.content.clone());
        }
        cuts
    }

    /// The last cut in `text` at or before `end`.
    pub(crate) fn last(&self, text: &str, end: usize) -> Option<usize> {
        let bytes = text.as_bytes().get(..end)?;
        let mut end = end;
        while let Some(at) = self.last_candidate(&bytes[..end]) {
            let before = &bytes[..=at];
            let tokens = before.last_chunk::<3>().and_then(|last| self.by_end.get(last));
            if tokens.is_some_and(|tokens| tokens.iter().any(|token| before.ends_with(token.as_bytes()))) {
                return Some(at + 1);
            }
            end = at;
        }
        None
    }

    fn last_candidate(&self, bytes: &[u8]) -> Option<usize> {
        match self.last_bytes[..] {
            [] => None,
            [a] => memchr::memrchr(a, bytes),
            [a, b] => memchr::memrchr2(a, b, bytes),
            [a, b, c] => memchr::memrchr3(a, b, c, bytes),
            _ => bytes.iter().rposition(|byte| self.last_bytes.contains(byte)),
        }
    }
}

/// Whether the token matches its exact text: it strips no space around it, and needs no word boundary.
fn is_plain(token: &AddedToken) -> bool {
    let text = &token.content;
    !token.lstrip
        && !token.rstrip
        && !token.single_word
        && text.len() >= MIN_BYTES
        && text.trim().len() == text.len()
        && !overlaps(text, text)
}

/// Whether `other` could match at a position that overlaps `token`, so that `token` does not match.
fn can_shadow(other: &AddedToken, token: &AddedToken) -> bool {
    if other.content == token.content {
        // Two conflicting declarations: which one applies depends on the library.
        return !is_plain(other) || other.normalized != token.normalized;
    }
    let (other_text, text) = (&other.content, &token.content);
    other_text.contains(text.as_str())
        // Tokens that are not normalized are matched first.
        || (other.normalized != token.normalized && text.contains(other_text.as_str()))
        || overlaps(other_text, text)
        || overlaps(text, other_text)
}

/// Whether a proper suffix of `a` is a proper prefix of `b`.
fn overlaps(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    (1..a.len().min(b.len())).any(|length| a[a.len() - length..] == b[..length])
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

fn steps(sequence: &Value) -> impl Iterator<Item = &Value> {
    let steps = ["normalizers", "pretokenizers"].into_iter().find_map(|name| sequence[name].as_array());
    steps.into_iter().flatten()
}

fn is_empty_sequence(normalizer: &Value) -> bool {
    normalizer.is_null() || (kind(normalizer) == "Sequence" && steps(normalizer).next().is_none())
}

/// Whether a normalizer does nothing at the start of a text that it does not do elsewhere.
fn is_position_independent(normalizer: &Value) -> bool {
    match kind(normalizer) {
        "NFC" | "NFD" | "NFKC" | "NFKD" | "Replace" => true,
        "Sequence" => steps(normalizer).all(is_position_independent),
        _ => normalizer.is_null(),
    }
}

/// Whether a pre-tokenizer treats a text the same wherever it stands.
fn keeps_no_context(pre_tokenizer: &Value) -> bool {
    match kind(pre_tokenizer) {
        "Split" | "Digits" => true,
        "ByteLevel" => pre_tokenizer["add_prefix_space"] == Value::Bool(false),
        "Sequence" => steps(pre_tokenizer).all(keeps_no_context),
        _ => pre_tokenizer.is_null(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cuts(json: &str) -> SplitPoints {
        SplitPoints::from_pipeline(&serde_json::from_str(json).unwrap())
    }

    fn all(cuts: &SplitPoints, text: &str) -> Vec<usize> {
        let mut found = Vec::new();
        let mut end = text.len();
        while let Some(at) = cuts.last(text, end) {
            found.push(at);
            end = at - 1;
        }
        found
    }

    #[test]
    fn texts_are_cut_behind_tokens() {
        let cuts = cuts(r#"{"added_tokens":[{"content":"<|a|>"},{"content":"[/b]"}]}"#);
        assert_eq!(all(&cuts, "x<|a|>>y[/b]<|a|>|>"), [17, 12, 6]);
        assert!(all(&cuts, "<|a|").is_empty());
    }

    #[test]
    fn tokens_that_others_can_hide_are_no_place_to_cut() {
        for (tokens, why) in [
            (r#"{"content":"<|a|>"},{"content":"<|a|>\n"}"#, "a longer one"),
            (r#"{"content":"<|a|>"},{"content":"|>xx"}"#, "one that begins inside"),
            (r#"{"content":"<|a|>"},{"content":"xx<|"}"#, "one that ends inside"),
            (r#"{"content":"<|a|>","rstrip":true}"#, "takes spaces"),
            (r#"{"content":"abab"}"#, "itself"),
            (r#"{"content":"<a>"}"#, "too short"),
            (r#"{"content":"<|a|>"},{"content":"<|a|>","lstrip":true}"#, "declared twice"),
        ] {
            let cuts = cuts(&format!(r#"{{"added_tokens":[{tokens}]}}"#));
            let found: Vec<_> =
                cuts.by_end.values().flatten().filter(|token| *token != "xx<|" && *token != "|>xx").collect();
            assert!(found.iter().all(|token| token.ends_with('\n')), "{why}: {found:?}");
            assert!(cuts.last("xx<|a|>xx abab <a>", 7).is_none(), "{why}");
        }
    }

    #[test]
    fn tokenizers_that_look_at_the_start_are_never_cut() {
        let tokens = r#""added_tokens":[{"content":"<|a|>","normalized":true}]"#;
        for (shape, cut) in [
            (r#""normalizer":{"type":"Sequence","normalizers":[]}"#, true),
            (r#""normalizer":{"type":"NFC"}"#, false),
            (r#""normalizer":{"type":"Prepend","prepend":"▁"}"#, false),
            (r#""pre_tokenizer":{"type":"Metaspace","prepend_scheme":"first"}"#, false),
            (r#""pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true}"#, false),
            (
                r#""pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split"},{"type":"ByteLevel","add_prefix_space":false}]}"#,
                true,
            ),
        ] {
            assert_eq!(cuts(&format!("{{{tokens},{shape}}}")).last("<|a|>", 5).is_some(), cut, "{shape}");
        }
    }
}

//! Reads the byte-pair model of a tokenizer.json.

use std::borrow::Cow;
use std::collections::HashMap;

use fastokens::{AddedTokenConfig, NormalizerConfig, PostProcessorConfig};
use foldhash::fast::RandomState;
use serde::Deserialize;
use serde_json::Value;

use super::UnsupportedTokenizer;
use super::merge_table::Merge;

/// The members of tokenizer.json that determine tokens.
#[derive(Deserialize)]
pub(super) struct TokenizerFile<'a> {
    #[serde(borrow)]
    pub(super) model: ModelMember<'a>,
    #[serde(default)]
    pub(super) pre_tokenizer: Value,
    #[serde(flatten)]
    pub(super) steps: StepMembers,
}

/// The steps around the model.
#[derive(Deserialize)]
pub(super) struct StepMembers {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedTokenConfig>,
    pub(super) normalizer: Option<NormalizerConfig>,
    pub(super) post_processor: Option<PostProcessorConfig>,
}

#[derive(Deserialize)]
pub(super) struct ModelMember<'a> {
    r#type: Text<'a>,
    #[serde(borrow)]
    vocab: HashMap<Text<'a>, u32, RandomState>,
    #[serde(borrow)]
    merges: Vec<MergeMember<'a>>,
    #[serde(default)]
    pub(super) ignore_merges: bool,
    #[serde(default)]
    byte_fallback: bool,
    dropout: Option<f32>,
    unk_token: Option<Text<'a>>,
    continuing_subword_prefix: Option<Text<'a>>,
    end_of_word_suffix: Option<Text<'a>>,
}

/// A part of the file, copied only if it has escapes: there are several hundred thousand.
#[derive(Deserialize, PartialEq, Eq, Hash)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// A merge is a list of two tokens, or in older files their texts with a space between.
#[derive(Deserialize)]
#[serde(untagged)]
enum MergeMember<'a> {
    Pair(#[serde(borrow)] (Text<'a>, Text<'a>)),
    Line(#[serde(borrow)] Text<'a>),
}

/// The tokens of a byte-level model. There is one for each byte.
pub(super) struct ByteVocabulary {
    /// The bytes of all words, one after the other.
    bytes: Vec<u8>,
    /// Where each word ends in `bytes`, and its token.
    words: Vec<(usize, u32)>,
    pub(super) byte_tokens: [u32; 256],
    pub(super) merges: Vec<Merge>,
}

impl ByteVocabulary {
    /// The words and their tokens. Those that cannot be in a text, because they are not written in the alphabet of bytes, are absent.
    pub(super) fn words(&self) -> impl Iterator<Item = (&[u8], u32)> {
        let starts = std::iter::once(0).chain(self.words.iter().map(|&(end, _)| end));
        starts.zip(&self.words).map(|(start, &(end, token))| (&self.bytes[start..end], token))
    }
}

impl ModelMember<'_> {
    /// # Errors
    /// The model is of another kind, or incomplete.
    pub(super) fn byte_vocabulary(&self) -> Result<ByteVocabulary, UnsupportedTokenizer> {
        let is_empty = |text: &Option<Text<'_>>| text.as_ref().is_none_or(|text| text.0.is_empty());
        let is_plain = self.r#type.0 == "BPE"
            && !self.byte_fallback
            && self.dropout.is_none_or(|dropout| dropout == 0.0)
            && self.unk_token.is_none()
            && is_empty(&self.continuing_subword_prefix)
            && is_empty(&self.end_of_word_suffix);
        if !is_plain {
            return Err(UnsupportedTokenizer("its model"));
        }
        let byte_of: HashMap<char, u8, RandomState> = (0..=255).map(|byte| (character(byte), byte)).collect();
        let (mut bytes, mut words) = (Vec::new(), Vec::with_capacity(self.vocab.len()));
        let mut byte_tokens = [None; 256];
        for (text, &token) in &self.vocab {
            let start = bytes.len();
            bytes.extend(text.0.chars().map_while(|character| byte_of.get(&character)));
            if bytes.len() - start != text.0.chars().count() {
                bytes.truncate(start);
                continue;
            }
            if let [byte] = bytes[start..] {
                byte_tokens[usize::from(byte)] = Some(token);
            }
            words.push((bytes.len(), token));
        }
        let lacks_bytes = UnsupportedTokenizer("its model, which lacks bytes");
        let byte_tokens: Vec<u32> = byte_tokens.into_iter().collect::<Option<_>>().ok_or(lacks_bytes)?;
        let merges = self.merges.iter().map(|merge| self.merge(merge)).collect::<Option<_>>();
        Ok(ByteVocabulary {
            bytes,
            words,
            byte_tokens: byte_tokens.try_into().map_err(|_| lacks_bytes)?,
            merges: merges.ok_or(UnsupportedTokenizer("its merges"))?,
        })
    }

    fn merge(&self, merge: &MergeMember<'_>) -> Option<Merge> {
        let (left, right) = match merge {
            MergeMember::Pair((left, right)) => (&*left.0, &*right.0),
            MergeMember::Line(line) => line.0.split_once(' ')?,
        };
        let token = |text: Cow<'_, str>| self.vocab.get(&Text(text)).copied();
        Some(Merge {
            left: token(left.into())?,
            right: token(right.into())?,
            product: token([left, right].concat().into())?,
        })
    }
}

/// The character that stands for a byte in the files of byte-level models (`bytes_to_unicode` in GPT-2's encoder): printable characters of
/// Latin-1 stand for themselves; for the others it is, in order, U+0100 and those behind it.
fn character(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    if is_printable(byte) {
        return char::from(byte);
    }
    let others_before = (0..byte).filter(|&byte| !is_printable(byte)).count();
    char::from_u32(0x100 + others_before as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(json: &str) -> Result<ByteVocabulary, UnsupportedTokenizer> {
        serde_json::from_str::<ModelMember<'_>>(json).unwrap().byte_vocabulary()
    }

    fn with_all_bytes(members: &str) -> String {
        let bytes = (0..=255).map(|byte| (character(byte).to_string(), Value::from(byte)));
        let more = [("ab", 256), ("Ġab", 257), ("<｜end｜>", 258)];
        let vocab = bytes.chain(more.map(|(text, token)| (text.to_owned(), token.into())));
        let vocab = serde_json::to_string(&vocab.collect::<serde_json::Map<_, _>>()).unwrap();
        format!(r#"{{"type":"BPE","vocab":{vocab}{members}}}"#)
    }

    #[test]
    fn merges_have_two_notations() {
        for merges in [r#"[["a","b"],["Ġ","ab"]]"#, r#"["a b","Ġ ab"]"#] {
            let vocabulary = model(&with_all_bytes(&format!(r#","merges":{merges}"#))).unwrap();
            let merge = |left, right, product| Merge { left, right, product };
            assert_eq!(vocabulary.merges, [merge(97, 98, 256), merge(32, 256, 257)]);
            assert_eq!(vocabulary.byte_tokens[10], 10);
            let words: HashMap<&[u8], u32> = vocabulary.words().collect();
            assert_eq!(words[&b" ab"[..]], 257);
            assert_eq!(words.len(), 258, "a token that is not made of bytes cannot be in a text");
        }
    }

    #[test]
    fn other_models_are_not_supported() {
        let no_merges = r#","merges":[]"#;
        assert!(model(&with_all_bytes(no_merges)).is_ok());
        for members in [
            r#","byte_fallback":true"#,
            r#","dropout":0.1"#,
            r#","unk_token":"<unk>""#,
            r#","continuing_subword_prefix":"@@""#,
            r#","end_of_word_suffix":"</w>""#,
        ] {
            assert!(model(&with_all_bytes(&format!("{no_merges}{members}"))).is_err(), "{members}");
        }
        assert!(model(&with_all_bytes(r#","merges":[["a","none"]]"#)).is_err());
        assert!(model(r#"{"type":"BPE","vocab":{"a":0},"merges":[]}"#).is_err(), "bytes without tokens");
        assert!(model(r#"{"type":"WordLevel","vocab":{},"merges":[]}"#).is_err());
    }

    #[test]
    fn bytes_have_the_characters_of_gpt2() {
        assert_eq!([b'a', b' ', b'\n', 0x7f, 0xad].map(character), ['a', 'Ġ', 'Ċ', 'ġ', 'Ń']);
    }
}

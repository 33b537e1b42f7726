//! Tokenizers of byte-level byte-pair models, which are those of most large models, in tables of about ten megabytes.
//!
//! The libraries take 36 to 97 MB for a model of 150,000 tokens, and the fast ones up to 96 MB more for each thread that tokenizes. Here,
//! all tables are shared by all threads, and what a thread has of its own is small. Added tokens, normalizers and special tokens around a
//! text are the steps of the library [`fastokens`]; only splitting into words and merging bytes are done here.

mod byte_runs;
mod merge_table;
mod merging;
mod model_file;
mod steps;
mod word_cache;
mod word_pattern;
mod word_table;

use std::ops::Range;
use std::path::Path;

use fastokens::added_tokens::Segment;
use parking_lot::Mutex;
use serde_json::Value;

use merge_table::MergeTable;
use model_file::TokenizerFile;
use steps::ModelSteps;
use word_cache::WordCache;
use word_pattern::WordPattern;
use word_table::{MAX_KEY_BYTES, WordTable, word_key};

/// The pattern of `ByteLevel` itself, which is GPT-2's.
const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Which part of a tokenizer.json has no implementation here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct UnsupportedTokenizer(&'static str);

/// A tokenizer of a byte-level model.
pub(super) struct BytePairTokenizer {
    steps: ModelSteps,
    patterns: Vec<WordPattern>,
    /// The tokens that the merges give for their own bytes.
    words: WordTable,
    byte_tokens: [u32; 256],
    merges: MergeTable,
    /// Caches that no thread uses at present.
    caches: Mutex<Vec<WordCache>>,
}

impl BytePairTokenizer {
    /// Loads a tokenizer.json, and the added tokens of the tokenizer_config.json beside it.
    ///
    /// # Errors
    /// The tokenizer is of another kind, or invalid.
    pub(super) fn load(path: &Path) -> Result<Self, UnsupportedTokenizer> {
        let text = std::fs::read_to_string(path).map_err(|_| UnsupportedTokenizer("its file"))?;
        let file: TokenizerFile<'_> =
            serde_json::from_str(&text).map_err(|_| UnsupportedTokenizer("its model"))?;
        let patterns = patterns(&file.pre_tokenizer)?;
        let steps = ModelSteps::new(file.steps, path)?;
        let vocabulary = file.model.byte_vocabulary()?;
        let byte_tokens = vocabulary.byte_tokens;
        let merges = MergeTable::new(&vocabulary.merges).ok_or(UnsupportedTokenizer("its size"))?;
        let mut tokens = Vec::new();
        let is_whole = |&(word, token): &(&[u8], u32)| {
            tokens.clear();
            merge_bytes(&merges, &byte_tokens, word, &mut tokens);
            file.model.ignore_merges || tokens == [token]
        };
        let words = WordTable::new(vocabulary.words().filter(is_whole));
        Ok(Self { steps, patterns, words, byte_tokens, merges, caches: Mutex::default() })
    }

    /// The ids of `text`, with or without the special tokens that the tokenizer puts around a text.
    pub(super) fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        let mut cache = self.caches.lock().pop().unwrap_or_else(WordCache::new);
        let mut tokens = Vec::with_capacity(text.len() / 4 + 8);
        self.steps.split(text, |part| match part {
            Segment::Token(token) => tokens.push(token),
            Segment::Text(text) => self.encode_words(text, &mut cache, &mut tokens),
        });
        self.caches.lock().push(cache);
        if special { self.steps.with_special_tokens(tokens) } else { tokens }
    }

    fn encode_words(&self, text: &str, cache: &mut WordCache, tokens: &mut Vec<u32>) {
        split_words(&self.patterns, text, 0..text.len(), &mut |word| {
            let bytes = &text.as_bytes()[word.clone()];
            if bytes.len() > MAX_KEY_BYTES {
                return self.encode_word(self.words.get_long(bytes), bytes, tokens);
            }
            let key = word_key(text.as_bytes(), word.start, word.end);
            cache.tokens(key, tokens, |tokens| self.encode_word(self.words.get(key), bytes, tokens));
        });
    }

    fn encode_word(&self, whole: Option<u32>, bytes: &[u8], tokens: &mut Vec<u32>) {
        match whole {
            Some(token) => tokens.push(token),
            None => merge_bytes(&self.merges, &self.byte_tokens, bytes, tokens),
        }
    }
}

fn merge_bytes(merges: &MergeTable, byte_tokens: &[u32; 256], word: &[u8], tokens: &mut Vec<u32>) {
    merging::merge(merges, word.iter().map(|&byte| byte_tokens[usize::from(byte)]), tokens);
}

/// Splits by one pattern after the other.
fn split_words(
    patterns: &[WordPattern],
    text: &str,
    part: Range<usize>,
    word: &mut impl FnMut(Range<usize>),
) {
    match patterns {
        [] => word(part),
        [last] => last.split(text, part, word),
        [first, others @ ..] => first.split(text, part, |part| split_words(others, text, part, word)),
    }
}

/// The patterns of a pre-tokenizer whose last step maps bytes to characters.
fn patterns(pre_tokenizer: &Value) -> Result<Vec<WordPattern>, UnsupportedTokenizer> {
    let one = std::slice::from_ref(pre_tokenizer);
    let steps = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map_or(one, Vec::as_slice),
        _ => one,
    };
    let unsupported = UnsupportedTokenizer("its pre-tokenizer");
    let (last, splits) = steps.split_last().ok_or(unsupported)?;
    if last["type"] != "ByteLevel" || last["add_prefix_space"] != Value::Bool(false) {
        return Err(unsupported);
    }
    let mut patterns = splits
        .iter()
        .map(|step| WordPattern::compile(pattern(step).ok_or(unsupported)?))
        .collect::<Result<Vec<_>, _>>()?;
    if last["use_regex"] != Value::Bool(false) {
        patterns.push(WordPattern::compile(GPT2_PATTERN)?);
    }
    Ok(patterns)
}

/// The pattern whose matches, and the text between them, are the parts that a step gives.
fn pattern(step: &Value) -> Option<&str> {
    match step["type"].as_str()? {
        "Split" => {
            let isolates = step["behavior"] == "Isolated" && step["invert"] != Value::Bool(true);
            step["pattern"]["Regex"].as_str().filter(|_| isolates)
        }
        "Digits" if step["individual_digits"] == Value::Bool(true) => Some(r"\p{N}"),
        "Digits" => Some(r"\p{N}+"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Writes the small tokenizer with other members, and loads it here and with the engines' library.
    fn changed(
        members: &Value,
        config: &Value,
    ) -> (Result<BytePairTokenizer, UnsupportedTokenizer>, tokenizers::Tokenizer) {
        let folder = tempfile::tempdir().unwrap();
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small/tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(small).unwrap()).unwrap();
        for (name, value) in members.as_object().unwrap() {
            file[name] = value.clone();
        }
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, file.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        (BytePairTokenizer::load(&path), tokenizers::Tokenizer::from_file(path).unwrap())
    }

    fn added(id: u32, content: &str, normalized: bool) -> Value {
        json!({ "id": id, "content": content, "normalized": normalized, "special": false,
            "single_word": false, "lstrip": false, "rstrip": false })
    }

    #[test]
    fn steps_around_the_model_are_those_of_the_library() {
        let members = json!({
            "normalizer": { "type": "Lowercase" },
            "added_tokens": [added(512, "<Verbatim>", false), added(513, "Café", true), added(514, "<v", true)],
            "post_processor": { "type": "TemplateProcessing",
                "single": [{ "SpecialToken": { "id": "<Verbatim>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
                "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
                "special_tokens": { "<Verbatim>": { "id": "<Verbatim>", "ids": [512], "tokens": ["<Verbatim>"] } } },
        });
        let (own, library) = changed(&members, &json!({}));
        let own = own.unwrap();
        for text in
            ["a CAFÉ <Verbatim>x", "<verbatim> Café<Verbatim>", "<V", "", "LETTERS and é", "<Verbatim>"]
        {
            for special in [false, true] {
                let expected = library.encode_fast(text, special).unwrap();
                assert_eq!(own.encode(text, special), expected.get_ids(), "{text} {special}");
            }
        }
        assert!(own.encode("x café", false).contains(&513), "matched after the normalizer");
    }

    #[test]
    fn tokens_of_the_configuration_are_matched() {
        let declared = |id: &str, content| json!({ "added_tokens_decoder": { id: { "content": content } } });
        let (own, _) = changed(&json!({}), &declared("900", "<declared>"));
        assert_eq!(own.unwrap().encode("<declared>", false), [900]);
        let (own, _) = changed(&json!({}), &declared("900", "<|im_end|>"));
        assert!(own.is_err(), "two ids for a token");
    }

    #[test]
    fn tokens_that_merges_do_not_give_need_ignore_merges() {
        for ignore_merges in [false, true] {
            let mut model = json!({ "type": "BPE", "merges": [], "ignore_merges": ignore_merges });
            let (_, library) = changed(&json!({}), &json!({}));
            let bytes = library.get_vocab(false).into_iter().filter(|(text, _)| text.chars().count() == 1);
            model["vocab"] =
                bytes.map(|(text, id)| (text, json!(id))).collect::<serde_json::Map<_, _>>().into();
            model["vocab"]["word"] = json!(700);
            let (own, library) = changed(&json!({ "model": model }), &json!({}));
            let tokens = own.unwrap().encode("word", false);
            assert_eq!(tokens, library.encode_fast("word", false).unwrap().get_ids());
            assert_eq!(tokens == [700], ignore_merges);
        }
    }

    #[test]
    fn other_pre_tokenizers_are_not_supported() {
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true });
        assert!(changed(&json!({ "pre_tokenizer": byte_level }), &json!({})).0.is_ok());
        for pre_tokenizer in [
            json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true }),
            json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false }),
            json!({ "type": "Sequence", "pretokenizers": [{ "type": "Whitespace" }, byte_level] }),
            json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": "a" }, "behavior": "Removed", "invert": false }, byte_level] }),
        ] {
            assert!(
                changed(&json!({ "pre_tokenizer": pre_tokenizer }), &json!({})).0.is_err(),
                "{pre_tokenizer}"
            );
        }
    }
}

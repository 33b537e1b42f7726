//! Tokenizes text.

mod byte_pairs;
mod split_points;
mod threads;
mod word_splits;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use fastokens::AddedTokenPolicy;

use byte_pairs::BytePairTokenizer;
pub(crate) use split_points::SplitPoints;
pub(crate) use word_splits::WordSplits;

use crate::error::{ModelLoadError, PromptError, TokenizerLibraryError};
use crate::files::ModelFiles;

/// Text tokenized once at start: the first call builds tables, which takes tens of milliseconds.
const WARM_UP: &str = "The quick brown fox didn't jump over 12345 lazy dogs;\n\tfn main() { let x = [0xff]; }\r\n\
    Ein Ärgernis – мир, 世界 \u{1f30d} e\u{301}.  \n\n";
/// Repetitions that make the warm-up text take the code path of a long prompt.
const WARM_UP_REPEATS: usize = 1024;

/// A model's tokenizer.
pub(crate) struct Tokenizer {
    encoder: Encoder,
    cuts: SplitPoints,
    words: WordSplits,
    before: Vec<u32>,
    after: Vec<u32>,
}

enum Encoder {
    /// Byte-level models, in the least memory.
    BytePairs(Box<BytePairTokenizer>),
    /// The fast library, for most other models.
    Fast(Box<fastokens::Tokenizer>),
    /// The engines' own library, which supports every tokenizer and is 25 to 95 times slower.
    Reference(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// Loads and warms up the tokenizer, which takes about a second on one core.
    ///
    /// # Errors
    /// [`ModelLoadError::Tokenizer`] with the errors of both libraries, or [`ModelLoadError::Tokenize`].
    pub(crate) fn load(files: &ModelFiles) -> Result<Tokenizer, ModelLoadError> {
        let path = &files.tokenizer;
        let encoder = match BytePairTokenizer::load(path) {
            Ok(tokenizer) => Encoder::BytePairs(Box::new(tokenizer)),
            Err(unsupported) => {
                tracing::info!(
                    tokenizer = %path.display(), %unsupported,
                    "not a byte-level byte-pair tokenizer; it takes more memory"
                );
                Encoder::from_library(files)?
            }
        };
        Tokenizer::with_special_tokens(encoder, files)
            .map_err(|source| ModelLoadError::Tokenize { path: path.clone(), source })
    }

    fn with_special_tokens(encoder: Encoder, files: &ModelFiles) -> Result<Tokenizer, PromptError> {
        let (before, after) = special_tokens(&encoder)?;
        encoder.encode(&WARM_UP.repeat(WARM_UP_REPEATS), false)?;
        let cuts = SplitPoints::from_pipeline(&files.pipeline);
        Ok(Tokenizer { encoder, cuts, words: WordSplits::from_pipeline(&files.pipeline), before, after })
    }

    /// The ids of `text`, without special tokens around it.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        self.encoder.encode(text, false)
    }

    /// Special tokens that the tokenizer optionally adds before and behind a text.
    pub(crate) fn surrounding_special_tokens(&self) -> (&[u32], &[u32]) {
        (&self.before, &self.after)
    }

    /// See [`crate::PromptTokenizer::suits_every_thread`].
    pub(crate) fn suits_every_thread(&self) -> bool {
        matches!(self.encoder, Encoder::BytePairs(_))
    }

    /// Adds a token before texts, unless tokenizer.json already adds one.
    pub(crate) fn set_text_prefix(&mut self, token: &str) -> Result<(), PromptError> {
        if self.before.is_empty() {
            self.before = self.encoder.encode(token, false)?;
        }
        Ok(())
    }

    /// Positions between words at which a text may be split.
    pub(crate) fn words(&self) -> WordSplits {
        self.words
    }

    /// Positions behind added tokens at which a text may be split.
    pub(crate) fn cuts(&self) -> &SplitPoints {
        &self.cuts
    }
}

impl Encoder {
    fn from_library(files: &ModelFiles) -> Result<Encoder, ModelLoadError> {
        let path = &files.tokenizer;
        fast(path).or_else(|fast| {
            tracing::warn!(
                tokenizer = %path.display(), problem = %fast,
                "the fast tokenizer library does not support this file; using the slow one"
            );
            reference(path, files).map_err(|reference| ModelLoadError::Tokenizer {
                path: path.clone(),
                reference,
                fast,
            })
        })
    }

    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, PromptError> {
        // A panic in a library must not end the connection of the request.
        let encoded = catch_unwind(AssertUnwindSafe(|| match self {
            Encoder::BytePairs(tokenizer) => Ok(tokenizer.encode(text, special)),
            Encoder::Fast(library) => Ok(library.encode_with_policy(text, special, AddedTokenPolicy::All)?),
            Encoder::Reference(library) => Ok(library.encode_fast(text, special)?.get_ids().to_vec()),
        }));
        encoded
            .unwrap_or(Err(TokenizerLibraryError::Panic))
            .map_err(|error| PromptError::Tokenizer(error.to_string()))
    }
}

fn fast(path: &Path) -> Result<Encoder, TokenizerLibraryError> {
    threads::disable_thread_pool();
    let mut library = fastokens::Tokenizer::from_file(path)?;
    // The engines ignore both settings of the file.
    library.set_truncation(None);
    library.set_padding(None);
    Ok(Encoder::Fast(Box::new(library)))
}

fn reference(path: &Path, files: &ModelFiles) -> Result<Encoder, TokenizerLibraryError> {
    let mut library = tokenizers::Tokenizer::from_file(path)?;
    library.with_padding(None).with_truncation(None)?;
    for token in &files.pipeline.added_tokens {
        if library.token_to_id(&token.content).is_none() {
            return Err(TokenizerLibraryError::MissingToken(token.content.clone()));
        }
    }
    Ok(Encoder::Reference(Box::new(library)))
}

/// The ids that surround a text encoded with special tokens.
fn special_tokens(encoder: &Encoder) -> Result<(Vec<u32>, Vec<u32>), PromptError> {
    let (bare, whole) = (encoder.encode("a", false)?, encoder.encode("a", true)?);
    let start = whole.windows(bare.len().max(1)).position(|window| window == bare);
    let Some(start) = start else {
        return Err(PromptError::Tokenizer("special tokens change the text between them".to_owned()));
    };
    Ok((whole[..start].to_vec(), whole[start + bare.len()..].to_vec()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::sync::LazyLock;

    use super::*;

    fn small() -> ModelFiles {
        ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small")).unwrap()
    }

    #[test]
    fn no_pool_of_threads_is_started() {
        let library = fast(&small().tokenizer).unwrap();
        library.encode(&"Some words and\n".repeat(100_000), false).unwrap();
        if cfg!(target_os = "linux") {
            assert_eq!(fastokens::fanout::threads(), 1);
        }
    }

    #[test]
    fn the_slow_library_handles_what_the_fast_one_does_not_support() {
        let folder = tempfile::tempdir().unwrap();
        let words = r#"{"added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},
            "model":{"type":"WordLevel","vocab":{"a":0,"b":1,"?":2},"unk_token":"?"}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), words).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
        let tokenizer = Tokenizer::load(&ModelFiles::read(folder.path()).unwrap()).unwrap();
        assert!(matches!(tokenizer.encoder, Encoder::Reference(_)) && !tokenizer.suits_every_thread());
        assert_eq!(tokenizer.encode("b a x").unwrap(), [1, 0, 2]);
        std::fs::write(folder.path().join("tokenizer.json"), r#"{"model":{"type":"Unheard"}}"#).unwrap();
        let problem = Tokenizer::load(&ModelFiles::read(folder.path()).unwrap()).err().unwrap().to_string();
        assert!(problem.contains("tokenizer.json"), "{problem}");
    }

    proptest! {
        #[test]
        fn all_implementations_agree(
            text in any::<String>(),
            words in "([ A-Za-z0-9'\n]{0,9}|[a-z]{40,90}|<\\|im_end\\|>|<think>|é|\u{301}|世){0,40}",
        ) {
            static ALL: LazyLock<[Tokenizer; 3]> = LazyLock::new(|| {
                let own = Tokenizer::load(&small()).unwrap();
                assert!(matches!(own.encoder, Encoder::BytePairs(_)) && own.suits_every_thread());
                let other = |encoder| Tokenizer::with_special_tokens(encoder, &small()).unwrap();
                let path = small().tokenizer;
                [own, other(fast(&path).unwrap()), other(reference(&path, &small()).unwrap())]
            });
            let [own, fast, reference] = &*ALL;
            for text in [text, words] {
                prop_assert_eq!(own.encode(&text)?, reference.encode(&text)?);
                prop_assert_eq!(fast.encode(&text)?, reference.encode(&text)?);
            }
            prop_assert_eq!(own.surrounding_special_tokens(), reference.surrounding_special_tokens());
        }
    }
}

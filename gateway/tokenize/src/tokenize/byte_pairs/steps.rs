//! The steps of a tokenizer before and after its model: added tokens, normalizer, and special tokens around a text.

use std::borrow::Cow;
use std::path::Path;

use fastokens::added_tokens::{AddedTokens, Segment};
use fastokens::{AddedTokenConfig, Normalizer, PostProcessor, TokenizerConfig};

use super::UnsupportedTokenizer;
use super::model_file::StepMembers;

/// The library's implementation of the steps.
pub(super) struct ModelSteps {
    /// Tokens that are matched in the text as it is.
    verbatim: Option<AddedTokens>,
    normalizer: Option<Normalizer>,
    /// Tokens that are matched in the normalized text.
    normalized: Option<AddedTokens>,
    post_processor: Option<PostProcessor>,
}

impl ModelSteps {
    pub(super) fn new(members: StepMembers, path: &Path) -> Result<Self, UnsupportedTokenizer> {
        let mut tokens = members.added_tokens;
        add_declared_tokens(&mut tokens, path)?;
        let normalizer = members.normalizer.map(Normalizer::from_config).transpose();
        let normalizer = normalizer.map_err(|_| UnsupportedTokenizer("its normalizer"))?;
        let post_processor = members.post_processor.map(PostProcessor::from_config).transpose();
        let (mut normalized, verbatim): (Vec<_>, Vec<_>) =
            tokens.into_iter().partition(|token| token.normalized);
        if let Some(normalizer) = &normalizer {
            for token in &mut normalized {
                token.content = normalizer.normalize(&token.content).into_owned();
            }
            normalized.retain(|token| !token.content.is_empty());
        }
        let matcher = |tokens: &[_]| {
            AddedTokens::from_configs(tokens).map_err(|_| UnsupportedTokenizer("its added tokens"))
        };
        Ok(Self {
            verbatim: matcher(&verbatim)?,
            normalizer,
            normalized: matcher(&normalized)?,
            post_processor: post_processor.map_err(|_| UnsupportedTokenizer("its post-processor"))?,
        })
    }

    /// Passes the added tokens of `text`, and the normalized texts between them, to `part`, in order.
    pub(super) fn split(&self, text: &str, mut part: impl FnMut(Segment<'_>)) {
        for verbatim in segments(self.verbatim.as_ref(), text) {
            match verbatim {
                Segment::Token(token) => part(Segment::Token(token)),
                Segment::Text(text) => {
                    let text =
                        self.normalizer.as_ref().map_or(Cow::Borrowed(text), |step| step.normalize(text));
                    segments(self.normalized.as_ref(), &text).into_iter().for_each(&mut part);
                }
            }
        }
    }

    /// Adds the special tokens that the tokenizer puts around a text.
    pub(super) fn with_special_tokens(&self, tokens: Vec<u32>) -> Vec<u32> {
        match &self.post_processor {
            Some(step) => step.post_process_single(tokens, true),
            None => tokens,
        }
    }
}

fn segments<'a>(tokens: Option<&AddedTokens>, text: &'a str) -> Vec<Segment<'a>> {
    tokens.map_or_else(|| vec![Segment::Text(text)], |tokens| tokens.split(text))
}

/// The added tokens of the tokenizer_config.json beside a tokenizer.json are matched as well.
fn add_declared_tokens(tokens: &mut Vec<AddedTokenConfig>, path: &Path) -> Result<(), UnsupportedTokenizer> {
    let invalid = UnsupportedTokenizer("its tokenizer_config.json");
    let Ok(config) = std::fs::read(path.with_file_name("tokenizer_config.json")) else { return Ok(()) };
    let config: TokenizerConfig = serde_json::from_slice(&config).map_err(|_| invalid)?;
    for token in config.added_token_configs().map_err(|_| invalid)? {
        let same_id = tokens.iter().any(|listed| listed.id == token.id);
        let same_content = tokens.iter().any(|listed| listed.content == token.content);
        match (same_id, same_content) {
            (true, true) => {}
            (false, false) => tokens.push(token),
            _ => return Err(invalid),
        }
    }
    Ok(())
}

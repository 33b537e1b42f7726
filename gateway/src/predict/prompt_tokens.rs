//! From a request's body to its tokens, and from tokens to pages.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use moongate_block_hash::{BlockHashChain, HashScheme, HashedBlock};
use moongate_tokenize::{PromptError, TemplateTime, TextBody, TextPrompt, TokenizedPrompt};

use super::block_keyspace::BlockKeyspace;
use super::models::BlockTokenizer;
use super::tokenize::{EngineTokenizeError, EngineTokens};
use crate::feedback::TokenSource;
use crate::request_body::InferenceApi;

/// What is kept with a conversation: the pages of its last prompt.
pub(super) type SharedPromptBlocks = Arc<CachedPromptBlocks>;

/// Pages of one prompt under one keyspace.
#[derive(Debug)]
pub(super) struct CachedPromptBlocks {
    keyspace: BlockKeyspace,
    pages: Vec<HashedBlock>,
}

/// Why a request's cache hits are not predicted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PredictionError {
    /// Its engines tell too little of their caches.
    #[error(
        "the engines of this model tell too little of their caches; `moongate doctor` says what is missing"
    )]
    InsufficientCacheInfo,
    /// There is no tokenizer for the model.
    #[error("there is no tokenizer for this model; give one by --model NAME=DIR (it takes a second to load)")]
    NoTokenizer,
    /// There is none, and no engine told the tokens.
    #[error("there is no tokenizer for this model here, and {0}; give one by --model NAME=DIR")]
    EngineTokenize(EngineTokenizeError),
    /// Several prompts in one request, or none that is read.
    #[error("this request has not exactly one prompt")]
    NotSinglePrompt,
    /// Long prompts that are being read leave no memory for this one.
    #[error("long prompts that are being read leave no memory for this one; raise --prompt-memory")]
    PromptMemoryExhausted,
    /// What the prompt becomes is only known in the engine.
    #[error(transparent)]
    Prompt(PromptError),
}

impl PredictionError {
    /// Short name for metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            PredictionError::InsufficientCacheInfo => "engines",
            PredictionError::NoTokenizer => "no_tokenizer",
            PredictionError::EngineTokenize(why) => why.name(),
            PredictionError::NotSinglePrompt => "batch",
            PredictionError::PromptMemoryExhausted => "memory",
            PredictionError::Prompt(_) => "prompt",
        }
    }
}

/// Who makes tokens of a text.
#[derive(Debug, Clone)]
pub(super) enum TokenizerChoice {
    /// This gateway.
    Local(Arc<BlockTokenizer>),
    /// An engine has, of the request at hand.
    Engine(EngineTokens),
    /// Nobody, for this reason.
    Unavailable(PredictionError),
}

/// The tokens of one prompt.
pub(super) enum PromptTokens {
    /// Given as ids by the client.
    Client(Vec<u32>),
    /// Told by an engine.
    Engine(EngineTokens),
    /// Made here.
    Local(TokenizedPrompt<SharedPromptBlocks>, Arc<BlockTokenizer>),
}

impl PromptTokens {
    /// The tokens that an engine will make of this body. Takes milliseconds for a long new prompt.
    pub(super) fn of(
        api: InferenceApi,
        body: &[u8],
        tokenizer: TokenizerChoice,
    ) -> Result<Self, PredictionError> {
        match api {
            InferenceApi::Chat => {
                let model = match tokenizer {
                    TokenizerChoice::Local(model) => model,
                    TokenizerChoice::Engine(told) => return Ok(Self::Engine(told)),
                    TokenizerChoice::Unavailable(why) => return Err(why),
                };
                let chat = model.read_chat(body).map_err(PredictionError::Prompt)?;
                let prompt = model.tokenize_chat(&chat, now()).map_err(PredictionError::Prompt)?;
                Ok(Self::Local(prompt, model))
            }
            InferenceApi::Completions | InferenceApi::Generate => {
                let TextBody { mut prompts, add_special_tokens } =
                    TextBody::parse(body).map_err(PredictionError::Prompt)?;
                match (prompts.pop(), prompts.is_empty()) {
                    (Some(TextPrompt::Ids(ids)), true) => Ok(Self::Client(ids)),
                    (Some(text), true) => match tokenizer {
                        TokenizerChoice::Local(model) => {
                            let prompt = model.tokenize_text(&text, add_special_tokens);
                            Ok(Self::Local(prompt.map_err(PredictionError::Prompt)?, model))
                        }
                        TokenizerChoice::Engine(told) => Ok(Self::Engine(told)),
                        TokenizerChoice::Unavailable(why) => Err(why),
                    },
                    _ => Err(PredictionError::NotSinglePrompt),
                }
            }
            InferenceApi::Other => Err(PredictionError::NotSinglePrompt),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            PromptTokens::Client(ids) => ids.len(),
            PromptTokens::Engine(told) => told.ids.len(),
            PromptTokens::Local(prompt, _) => prompt.ids().len(),
        }
    }

    pub(super) fn to_vec(&self) -> Vec<u32> {
        match self {
            PromptTokens::Client(ids) => ids.clone(),
            PromptTokens::Engine(told) => told.ids.to_vec(),
            PromptTokens::Local(prompt, _) => prompt.ids().to_vec(),
        }
    }

    /// Where they come from.
    pub(super) fn tokenized_by(&self) -> TokenSource {
        match self {
            PromptTokens::Client(_) => TokenSource::Client,
            PromptTokens::Local(..) => TokenSource::Gateway,
            PromptTokens::Engine(EngineTokens { from_cache: true, .. }) => TokenSource::EngineCache,
            PromptTokens::Engine(_) => TokenSource::Engine,
        }
    }

    /// The prompt's full pages. Those that an earlier turn of the conversation had are not hashed again.
    pub(super) fn pages(
        &self,
        keyspace: &BlockKeyspace,
        scheme: HashScheme,
        plain: bool,
    ) -> SharedPromptBlocks {
        let (mut pages, rest) = match self {
            PromptTokens::Client(ids) => return CachedPromptBlocks::of(ids, keyspace, scheme),
            PromptTokens::Engine(told) => return CachedPromptBlocks::of(&told.ids, keyspace, scheme),
            // A salt changes all hashes, and what is kept was made without one.
            PromptTokens::Local(prompt, _) if plain => self.common(prompt, keyspace),
            PromptTokens::Local(prompt, _) => (Vec::new(), prompt.ids().to_vec()),
        };
        BlockHashChain::resume(scheme, &pages).extend(&rest, &mut pages);
        let kept = Arc::new(CachedPromptBlocks { keyspace: keyspace.clone(), pages });
        if let (PromptTokens::Local(prompt, model), true) = (self, plain) {
            model.cache_conversation(prompt, kept.clone());
        }
        kept
    }

    /// Pages that the prompt has in common with what is kept of its conversation, and the tokens behind them.
    fn common(
        &self,
        prompt: &TokenizedPrompt<SharedPromptBlocks>,
        keyspace: &BlockKeyspace,
    ) -> (Vec<HashedBlock>, Vec<u32>) {
        let page = keyspace.page_tokens() as usize;
        // A page that also depends on the token behind it (bigrams) is only common if that token is.
        let full = prompt.cached_prefix_tokens().saturating_sub(1) / page;
        let pages = match prompt.slot().filter(|kept| kept.keyspace == *keyspace) {
            Some(kept) => kept.pages[..full.min(kept.pages.len())].to_vec(),
            None => Vec::new(),
        };
        let mut rest = Vec::with_capacity(prompt.ids().len() - pages.len() * page);
        prompt.ids().slices_from(pages.len() * page).for_each(|ids| rest.extend_from_slice(ids));
        (pages, rest)
    }
}

impl CachedPromptBlocks {
    fn of(ids: &[u32], keyspace: &BlockKeyspace, scheme: HashScheme) -> SharedPromptBlocks {
        let mut pages = Vec::new();
        BlockHashChain::new(scheme).extend(ids, &mut pages);
        Arc::new(Self { keyspace: keyspace.clone(), pages })
    }

    /// The pages, in prompt order.
    pub(super) fn pages(&self) -> &[HashedBlock] {
        &self.pages
    }
}

/// The wall clock, for templates that print the date. Engines run in containers, whose clocks show UTC.
fn now() -> TemplateTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TemplateTime::utc(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

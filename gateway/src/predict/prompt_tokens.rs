//! Converts a request's body into tokens, and tokens into hashed blocks.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use moongate_block_hash::{BlockHashChain, HashScheme, HashedBlock};
use moongate_discovery::EngineKind;
use moongate_scheduler::ModelIndex;
use moongate_tokenize::{
    ConversationApi, PromptError, PromptText, PromptTokenizer, PromptTruncation, TemplateTime, TextBody,
    TextPrompt, TokenizedPrompt,
};

use super::hashed_prefixes::{HashUse, HashedPrefixes};
use super::media::{MediaCounts, MediaLookup, MediaPrompt};
use super::tokenize::{EngineTokenizeError, EngineTokens};
use crate::feedback::TokenSource;
use crate::fleet::EngineGroup;
use crate::request_body::{InferenceApi, RoutingFields};

/// Maximum number of prompts of a batch: each is looked up in the index of all engines.
const MAX_PROMPTS: usize = 1024;

/// The prompt of a request to be predicted or tokenized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestPrompt<'a> {
    pub(crate) api: InferenceApi,
    pub(crate) model: ModelIndex,
    /// Parsed members of the body.
    pub(crate) fields: &'a RoutingFields<'a>,
    pub(crate) body: &'a Bytes,
}

/// The full blocks of one prompt, in its order.
#[derive(Debug, Clone)]
pub(super) struct HashedTokens {
    blocks: Arc<[HashedBlock]>,
}

/// Why a request has no prediction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PredictionError {
    /// The engines report too little about their caches.
    #[error(
        "the engines of this model report too little about their caches; `moongate doctor` shows what is missing"
    )]
    InsufficientCacheInfo,
    /// The model has no tokenizer.
    #[error("no tokenizer for this model; add one with --model NAME=DIR (loading takes a second)")]
    NoTokenizer,
    /// The model has no local tokenizer, and no engine returned the tokens.
    #[error("no local tokenizer for this model, and {0}; add one with --model NAME=DIR")]
    EngineTokenize(EngineTokenizeError),
    /// The request has no prompt that is parsed, or more than are predicted.
    #[error("the request has no prompt, or too many")]
    NotSinglePrompt,
    /// Long prompts that are being tokenized leave no memory for this one.
    #[error("no memory left for tokenizing this prompt; raise --prompt-memory")]
    PromptMemoryExhausted,
    /// The prompt has waited too long for a thread, or has taken too long.
    #[error("the prompt was not tokenized in time; raise --prompt-threads or --prompt-timeout")]
    Late,
    /// The prompt's tokens can only be computed in the engine.
    #[error(transparent)]
    Prompt(PromptError),
}

impl PredictionError {
    /// Short name for metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            PredictionError::InsufficientCacheInfo => "no_cache_info",
            PredictionError::NoTokenizer => "no_tokenizer",
            PredictionError::EngineTokenize(error) => error.name(),
            PredictionError::NotSinglePrompt => "not_single_prompt",
            PredictionError::PromptMemoryExhausted => "prompt_memory",
            PredictionError::Late => "late",
            PredictionError::Prompt(_) => "unsupported_prompt",
        }
    }
}

/// How much of a prompt is tokenized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PromptExtent {
    Complete,
    /// Nothing yet of a text: only its beginning may be needed.
    AsNeeded,
}

/// Source of a text's tokens.
#[derive(Debug, Clone)]
pub(super) enum TokenizerChoice {
    /// A tokenizer in this gateway.
    Local(Arc<PromptTokenizer>),
    /// Tokens that an engine has returned for this request.
    Engine(EngineTokens),
    Unavailable(PredictionError),
}

/// The tokens of one prompt.
pub(super) enum PromptTokens {
    /// Sent as ids by the client.
    Client(Vec<u32>),
    Engine(EngineTokens),
    Local(TokenizedPrompt),
    /// A text that is tokenized as far as needed.
    Text(Box<PromptText>),
    /// A chat with images, recordings or videos.
    WithMedia(Box<MediaPrompt>),
}

impl PromptTokens {
    /// The prompts of a body as tokens that an engine of the group will compute. Takes milliseconds for a long new prompt.
    pub(super) fn of(
        (api, body): (InferenceApi, &[u8]),
        tokenizer: TokenizerChoice,
        group: &EngineGroup,
        media: Option<&MediaLookup>,
        extent: PromptExtent,
    ) -> Result<Vec<Self>, PredictionError> {
        match (api.conversation(), api) {
            (Some(api), _) => Ok(vec![Self::of_conversation((api, body), tokenizer, group, media, extent)?]),
            (None, InferenceApi::Other) => Err(PredictionError::NotSinglePrompt),
            (None, _) => Self::of_texts(body, &tokenizer, group, extent),
        }
    }

    fn of_conversation(
        (api, body): (ConversationApi, &[u8]),
        tokenizer: TokenizerChoice,
        group: &EngineGroup,
        media: Option<&MediaLookup>,
        extent: PromptExtent,
    ) -> Result<Self, PredictionError> {
        let model = match tokenizer {
            TokenizerChoice::Local(model) => model,
            TokenizerChoice::Engine(tokens) => return Ok(Self::Engine(tokens)),
            TokenizerChoice::Unavailable(error) => return Err(error),
        };
        let read = Self::of_local_conversation((api, body), model, group, media, extent);
        read.map_err(PredictionError::Prompt)
    }

    fn of_local_conversation(
        (api, body): (ConversationApi, &[u8]),
        model: Arc<PromptTokenizer>,
        group: &EngineGroup,
        media: Option<&MediaLookup>,
        extent: PromptExtent,
    ) -> Result<Self, PromptError> {
        let chat = model.read_conversation(api, body)?;
        let truncation = chat.truncation()?;
        if extent == PromptExtent::AsNeeded && truncation.is_none() && media.is_none() {
            let text = PromptText::of_chat(model.clone(), &chat, now())?;
            if let Some(text) = text {
                return Ok(Self::Text(Box::new(text)));
            }
        }
        match model.tokenize_chat(&chat, now()) {
            Ok(prompt) => Ok(Self::Local(truncated(prompt, truncation, group)?)),
            Err(PromptError::Multimodal(part)) if truncation.is_none() => {
                let media = media.ok_or(PromptError::Multimodal(part))?;
                let prompt = MediaPrompt::of_chat(&chat, body, &model, group.engine, media, now())?;
                Ok(Self::WithMedia(Box::new(prompt)))
            }
            Err(error) => Err(error),
        }
    }

    fn of_texts(
        body: &[u8],
        tokenizer: &TokenizerChoice,
        group: &EngineGroup,
        extent: PromptExtent,
    ) -> Result<Vec<Self>, PredictionError> {
        let mut text = TextBody::parse(body).map_err(PredictionError::Prompt)?;
        let prompts = std::mem::take(&mut text.prompts);
        if let (TokenizerChoice::Engine(tokens), [TextPrompt::Text(_)]) = (tokenizer, prompts.as_slice()) {
            return Ok(vec![Self::Engine(tokens.clone())]);
        }
        if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
            return Err(PredictionError::NotSinglePrompt);
        }
        let truncation = text.truncation().map_err(PredictionError::Prompt)?;
        let truncation = truncation.filter(|_| group.engine == EngineKind::Vllm);
        let extent = if prompts.len() == 1 && truncation.is_none() { extent } else { PromptExtent::Complete };
        let prompts = prompts.into_iter().map(|prompt| match (prompt, tokenizer) {
            (TextPrompt::Ids(ids), _) => {
                let ids = match truncation {
                    Some(truncation) => truncation.truncate_ids(ids, group.context_length),
                    None => Ok(ids),
                };
                ids.map(Self::Client).map_err(PredictionError::Prompt)
            }
            (TextPrompt::Text(prompt), TokenizerChoice::Local(model)) if extent == PromptExtent::AsNeeded => {
                let text = PromptText::new(model.clone(), prompt, text.add_special_tokens);
                Ok(Self::Text(Box::new(text)))
            }
            (prompt, TokenizerChoice::Local(model)) => {
                let prompt = model
                    .tokenize_text(&prompt, text.add_special_tokens)
                    .and_then(|prompt| truncated(prompt, truncation, group));
                Ok(Self::Local(prompt.map_err(PredictionError::Prompt)?))
            }
            (_, TokenizerChoice::Engine(_)) => Err(PredictionError::NotSinglePrompt),
            (_, TokenizerChoice::Unavailable(error)) => Err(error.clone()),
        });
        prompts.collect()
    }

    /// Number of tokens, as far as they are known.
    pub(super) fn len(&self) -> usize {
        match self {
            PromptTokens::Text(text) => text.tokens().len(),
            PromptTokens::Client(ids) => ids.len(),
            PromptTokens::Engine(tokens) => tokens.ids.len(),
            PromptTokens::Local(prompt) => prompt.ids().len(),
            PromptTokens::WithMedia(prompt) => prompt.ids().len(),
        }
    }

    /// Length of the complete prompt: an estimate if it is incomplete.
    pub(super) fn expected_len(&self) -> usize {
        match self {
            PromptTokens::WithMedia(prompt) => prompt.expected_len(),
            _ => self.len(),
        }
    }

    /// Images, recordings and videos, by what is known of their tokens.
    pub(super) fn media(&self) -> MediaCounts {
        match self {
            PromptTokens::WithMedia(prompt) => prompt.counts(),
            _ => MediaCounts::default(),
        }
    }

    /// Whether the prompt has further tokens, which are unknown.
    pub(super) fn is_incomplete(&self) -> bool {
        matches!(self, PromptTokens::WithMedia(prompt) if prompt.is_incomplete())
    }

    pub(super) fn to_vec(&self) -> Vec<u32> {
        match self {
            PromptTokens::Text(text) => text.tokens().to_vec(),
            PromptTokens::Client(ids) => ids.clone(),
            PromptTokens::Engine(tokens) => tokens.ids.to_vec(),
            PromptTokens::Local(prompt) => prompt.ids().to_vec(),
            PromptTokens::WithMedia(prompt) => prompt.ids().to_vec(),
        }
    }

    pub(super) fn tokenized_by(&self) -> TokenSource {
        match self {
            PromptTokens::Client(_) => TokenSource::Client,
            PromptTokens::Local(_) | PromptTokens::Text(_) | PromptTokens::WithMedia(_) => {
                TokenSource::Gateway
            }
            PromptTokens::Engine(EngineTokens { from_cache: true, .. }) => TokenSource::EngineCache,
            PromptTokens::Engine(_) => TokenSource::Engine,
        }
    }

    /// The prompt's full blocks. The beginnings of earlier prompts are not hashed again, if the request `is_plain`: without extra keys,
    /// which change all hashes.
    pub(super) fn blocks(
        &self,
        prefixes: &HashedPrefixes,
        hash_use: HashUse<'_>,
        scheme: HashScheme,
        is_plain: bool,
    ) -> HashedTokens {
        match self {
            PromptTokens::Text(text) if is_plain => prefixes.hash(text.tokens(), hash_use, scheme),
            PromptTokens::Text(text) => HashedTokens::of(&text.tokens().to_vec(), scheme),
            PromptTokens::Local(prompt) if is_plain => prefixes.hash(prompt.ids(), hash_use, scheme),
            PromptTokens::Local(prompt) => HashedTokens::of(&prompt.ids().to_vec(), scheme),
            PromptTokens::Client(ids) => HashedTokens::of(ids, scheme),
            PromptTokens::Engine(tokens) => HashedTokens::of(&tokens.ids, scheme),
            PromptTokens::WithMedia(prompt) => prompt.blocks(scheme),
        }
    }
}

impl HashedTokens {
    pub(super) fn new(blocks: Vec<HashedBlock>) -> Self {
        Self { blocks: blocks.into() }
    }

    pub(super) fn of(ids: &[u32], scheme: HashScheme) -> Self {
        let mut blocks = Vec::new();
        BlockHashChain::new(scheme).extend(ids, &mut blocks);
        Self::new(blocks)
    }

    /// The blocks in prompt order.
    pub(super) fn blocks(&self) -> &[HashedBlock] {
        &self.blocks
    }
}

/// The part of a prompt that an engine of the group computes. An engine that returned the tokens has already truncated them.
fn truncated(
    prompt: TokenizedPrompt,
    truncation: Option<PromptTruncation>,
    group: &EngineGroup,
) -> Result<TokenizedPrompt, PromptError> {
    match truncation {
        Some(truncation) if group.engine == EngineKind::Vllm => {
            prompt.truncated(truncation, group.context_length)
        }
        _ => Ok(prompt),
    }
}

/// The wall clock, for templates that print the date. Engines run in containers, whose clocks use UTC.
fn now() -> TemplateTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TemplateTime::utc(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

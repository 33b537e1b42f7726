//! From a request's body to its tokens, and from tokens to pages.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use moongate_pages::{Chain, Page, Scheme};
use moongate_prompt::{Now, Prompt, TextBody, TextPrompt, Unpredictable};

use super::keyspace::Keyspace;
use super::models::PromptModel;
use super::tokenize::{NotTold, Told};
use crate::feedback::TokenizedBy;
use crate::prompt::Api;

/// What is kept with a conversation: the pages of its last prompt.
pub(super) type Kept = Arc<KeptPages>;

/// Pages of one prompt under one keyspace.
#[derive(Debug)]
pub(super) struct KeptPages {
    keyspace: Keyspace,
    pages: Vec<Page>,
}

/// Why a request's cache hits are not predicted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unknown {
    /// Its engines tell too little of their caches.
    #[error(
        "the engines of this model tell too little of their caches; `moongate doctor` says what is missing"
    )]
    Engines,
    /// There is no tokenizer for the model.
    #[error("there is no tokenizer for this model; give one by --model NAME=DIR (it takes a second to load)")]
    NoTokenizer,
    /// There is none, and no engine told the tokens.
    #[error("there is no tokenizer for this model here, and {0}; give one by --model NAME=DIR")]
    NotTold(NotTold),
    /// Several prompts in one request, or none that is read.
    #[error("this request has not exactly one prompt")]
    Batch,
    /// Long prompts that are being read leave no memory for this one.
    #[error("long prompts that are being read leave no memory for this one; raise --prompt-memory")]
    Memory,
    /// What the prompt becomes is only known in the engine.
    #[error(transparent)]
    Prompt(Unpredictable),
}

impl Unknown {
    /// Short name for metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Unknown::Engines => "engines",
            Unknown::NoTokenizer => "no_tokenizer",
            Unknown::NotTold(why) => why.name(),
            Unknown::Batch => "batch",
            Unknown::Memory => "memory",
            Unknown::Prompt(_) => "prompt",
        }
    }
}

/// Who makes tokens of a text.
#[derive(Debug, Clone)]
pub(super) enum Tokenizer {
    /// This gateway.
    Here(Arc<PromptModel>),
    /// An engine has, of the request at hand.
    Told(Told),
    /// Nobody, for this reason.
    Nobody(Unknown),
}

/// The tokens of one prompt.
pub(super) enum Tokens {
    /// Given as ids by the client.
    Given(Vec<u32>),
    /// Told by an engine.
    Told(Told),
    /// Made here.
    Made(Prompt<Kept>, Arc<PromptModel>),
}

impl Tokens {
    /// The tokens that an engine will make of this body. Takes milliseconds for a long new prompt.
    pub(super) fn of(api: Api, body: &[u8], tokenizer: Tokenizer) -> Result<Self, Unknown> {
        match api {
            Api::Chat => {
                let model = match tokenizer {
                    Tokenizer::Here(model) => model,
                    Tokenizer::Told(told) => return Ok(Self::Told(told)),
                    Tokenizer::Nobody(why) => return Err(why),
                };
                let chat = model.read_chat(body).map_err(Unknown::Prompt)?;
                let prompt = model.tokens_of_chat(&chat, now()).map_err(Unknown::Prompt)?;
                Ok(Self::Made(prompt, model))
            }
            Api::Completions | Api::Generate => {
                let TextBody { mut prompts, add_special_tokens } =
                    TextBody::parse(body).map_err(Unknown::Prompt)?;
                match (prompts.pop(), prompts.is_empty()) {
                    (Some(TextPrompt::Ids(ids)), true) => Ok(Self::Given(ids)),
                    (Some(text), true) => match tokenizer {
                        Tokenizer::Here(model) => {
                            let prompt = model.tokens_of_text(&text, add_special_tokens);
                            Ok(Self::Made(prompt.map_err(Unknown::Prompt)?, model))
                        }
                        Tokenizer::Told(told) => Ok(Self::Told(told)),
                        Tokenizer::Nobody(why) => Err(why),
                    },
                    _ => Err(Unknown::Batch),
                }
            }
            Api::Other => Err(Unknown::Batch),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Tokens::Given(ids) => ids.len(),
            Tokens::Told(told) => told.ids.len(),
            Tokens::Made(prompt, _) => prompt.ids().len(),
        }
    }

    pub(super) fn to_vec(&self) -> Vec<u32> {
        match self {
            Tokens::Given(ids) => ids.clone(),
            Tokens::Told(told) => told.ids.to_vec(),
            Tokens::Made(prompt, _) => prompt.ids().to_vec(),
        }
    }

    /// Where they come from.
    pub(super) fn tokenized_by(&self) -> TokenizedBy {
        match self {
            Tokens::Given(_) => TokenizedBy::Client,
            Tokens::Made(..) => TokenizedBy::Gateway,
            Tokens::Told(Told { remembered: true, .. }) => TokenizedBy::Memory,
            Tokens::Told(_) => TokenizedBy::Engine,
        }
    }

    /// The prompt's full pages. Those that an earlier turn of the conversation had are not hashed again.
    pub(super) fn pages(&self, keyspace: &Keyspace, scheme: Scheme, plain: bool) -> Kept {
        let (mut pages, rest) = match self {
            Tokens::Given(ids) => return KeptPages::of(ids, keyspace, scheme),
            Tokens::Told(told) => return KeptPages::of(&told.ids, keyspace, scheme),
            // A salt changes all hashes, and what is kept was made without one.
            Tokens::Made(prompt, _) if plain => self.common(prompt, keyspace),
            Tokens::Made(prompt, _) => (Vec::new(), prompt.ids().to_vec()),
        };
        Chain::after(scheme, &pages).extend(&rest, &mut pages);
        let kept = Arc::new(KeptPages { keyspace: keyspace.clone(), pages });
        if let (Tokens::Made(prompt, model), true) = (self, plain) {
            model.remember(prompt, kept.clone());
        }
        kept
    }

    /// Pages that the prompt has in common with what is kept of its conversation, and the tokens behind them.
    fn common(&self, prompt: &Prompt<Kept>, keyspace: &Keyspace) -> (Vec<Page>, Vec<u32>) {
        let page = keyspace.page_tokens() as usize;
        // A page that also depends on the token behind it (bigrams) is only common if that token is.
        let full = prompt.common_with_cache().saturating_sub(1) / page;
        let pages = match prompt.slot().filter(|kept| kept.keyspace == *keyspace) {
            Some(kept) => kept.pages[..full.min(kept.pages.len())].to_vec(),
            None => Vec::new(),
        };
        let mut rest = Vec::with_capacity(prompt.ids().len() - pages.len() * page);
        prompt.ids().slices_from(pages.len() * page).for_each(|ids| rest.extend_from_slice(ids));
        (pages, rest)
    }
}

impl KeptPages {
    fn of(ids: &[u32], keyspace: &Keyspace, scheme: Scheme) -> Kept {
        let mut pages = Vec::new();
        Chain::new(scheme).extend(ids, &mut pages);
        Arc::new(Self { keyspace: keyspace.clone(), pages })
    }

    /// The pages, in prompt order.
    pub(super) fn pages(&self) -> &[Page] {
        &self.pages
    }
}

/// The wall clock, for templates that print the date. Engines run in containers, whose clocks show UTC.
fn now() -> Now {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now::utc(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

//! How much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_discovery::Engine;
use moongate_pages::Page;
use moongate_scheduler::index::{EngineSlot, Hits};
use moongate_scheduler::{ModelIx, Prediction, TierHits};

use super::feeds::{StoreSeen, StoreView};
use super::group::Group;
use super::index::KvIndex;
use super::keyspace::{Extras, Keyspace, SGLANG, VLLM};
use super::models::Models;
use super::reach::{Reach, StoredAt};
use super::tokenize::EngineTokenizer;
use super::tokens::{Kept, Tokenizer, Tokens, Unknown};
use crate::feedback::{Expected, TokenizedBy};
use crate::fleet::{Fleet, Member};
use crate::memory::MemoryBudget;
use crate::prompt::{Api, Head};

/// Bodies above this size are read on a thread for blocking work: tokenising 100 KiB takes about a millisecond.
const READ_INLINE: usize = 64 << 10;

/// Memory that a byte of a body takes until its tokens are made, and each value in it besides.
const BYTES_PER_BODY_BYTE: usize = 6;
const BYTES_PER_VALUE: usize = 200;

/// Predicts cache hits.
#[derive(Debug)]
pub(crate) struct Predictor {
    index: Arc<KvIndex>,
    models: Arc<Models>,
    engines: EngineTokenizer,
    store: Option<Arc<StoreView>>,
    /// For long prompts that are being read.
    memory: Arc<MemoryBudget>,
}

/// Cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Predicted {
    /// Prompt tokens, exactly.
    pub(crate) input_tokens: u32,
    pub(crate) tokenized_by: TokenizedBy,
    /// By the engine's slot in the index, with the number of its group.
    by_slot: Vec<(TierHits, usize)>,
    /// By group: where the store has the prompt's pages.
    stored: Vec<StoredAt>,
    /// The prompt's pages as the first group of engines names them, with their size in tokens.
    pages: (Arc<[u64]>, u32),
}

/// One question: the prompt of a body under the keyspaces of a fleet's engines.
struct Question {
    api: Api,
    body: Bytes,
    /// Each with who makes tokens of the body as its engines do.
    groups: Vec<(Arc<Group>, Tokenizer)>,
}

/// The pages of a prompt under one keyspace.
struct Hashed {
    group: Arc<Group>,
    own: Named,
    /// The same pages as the store names them, where that differs.
    stored: Option<Named>,
}

/// The pages that can be taken from a cache.
struct Named {
    pages: Kept,
    /// As the index knows them; there may be fewer than pages.
    keys: Vec<u64>,
}

impl Predictor {
    pub(crate) fn new(
        index: Arc<KvIndex>,
        models: Arc<Models>,
        engines: EngineTokenizer,
        store: Option<Arc<StoreView>>,
        memory: Arc<MemoryBudget>,
    ) -> Self {
        Self { index, models, engines, store, memory }
    }

    /// What is known of the store; `None` if the gateway knows none.
    pub(crate) fn store_seen(&self) -> Option<StoreSeen> {
        self.store.as_ref().map(|store| store.seen())
    }

    /// What each engine that serves `model` has of the prompt in `body`, which begins as `head` says.
    pub(crate) async fn predict(
        &self,
        fleet: &Fleet,
        api: Api,
        model: ModelIx,
        head: &Head<'_>,
        body: &Bytes,
    ) -> Result<Predicted, Unknown> {
        let groups = fleet.groups(model);
        if groups.is_empty() {
            return Err(Unknown::Engines);
        }
        let is_fed = self.is_fed(groups);
        let ask = |group: &Group| is_fed && group.keyspace.names(&Extras::read(body)).is_some();
        let groups = self.tokenizers(fleet, (api, body), model, head, ask).await;
        // Known before a long text is read for nothing.
        if let (0, Some(why)) = (head.prompt_ids, nobody(&groups)) {
            return Err(why);
        }
        let question = Question { api, body: body.clone(), groups };
        let (input_tokens, tokenized_by, hashed) = if body.len() <= READ_INLINE {
            question.hash()?
        } else {
            // It only fails at shutdown, when nobody wants the answer.
            let memory = self.memory.clone();
            let read = move || {
                let _reserved = memory.reserve(reading_bytes(&question.body)).map_err(|_| Unknown::Memory)?;
                question.hash()
            };
            tokio::task::spawn_blocking(read).await.unwrap_or(Err(Unknown::Engines))?
        };
        let mut predicted = Predicted { input_tokens, tokenized_by, ..Predicted::default() };
        if let Some(Hashed { group, own, .. }) = hashed.first() {
            predicted.pages = (own.keys.as_slice().into(), group.keyspace.page_tokens());
        }
        let (mut hits, mut in_store) = (Hits::default(), Hits::default());
        for (number, Hashed { group, own, stored }) in hashed.iter().enumerate() {
            if let (Some(store), Some(layout)) = (&self.store, &group.stored) {
                let Named { pages, keys } = stored.as_ref().unwrap_or(own);
                store.confirm(layout, &pages.pages()[..keys.len()], keys).await;
            }
            self.index.lookup(&own.keys, &mut hits);
            if let Some(stored) = stored {
                self.index.lookup(&stored.keys, &mut in_store);
            }
            for engine in &group.engines {
                let mut pages = hits.of(engine.slot);
                if stored.is_some() {
                    // Nobody has pages of that name, so the store's begin with the prompt.
                    pages.shared = in_store.of(engine.slot).shared.saturating_sub(pages.own);
                }
                predicted.put(engine.slot, engine.hits(pages, group.keyspace.page_tokens()), number);
            }
            let runs = if stored.is_some() { &in_store.shared } else { &hits.shared };
            let at = |store: &Arc<StoreView>| StoredAt::of(runs, group.keyspace.page_tokens(), fleet, store);
            predicted.stored.push(self.store.as_ref().map(at).unwrap_or_default());
        }
        Ok(predicted)
    }

    /// The tokens that each kind of engine makes of the prompt in `body`, by the engine's name.
    pub(crate) async fn tokens(
        &self,
        fleet: &Fleet,
        api: Api,
        model: ModelIx,
        head: &Head<'_>,
        body: &Bytes,
    ) -> Result<Vec<(&'static str, Vec<u32>)>, Unknown> {
        let groups = self.tokenizers(fleet, (api, body), model, head, |_| true).await;
        let (body, memory) = (body.clone(), self.memory.clone());
        let make = move || {
            let _reserved = memory.reserve(reading_bytes(&body)).map_err(|_| Unknown::Memory)?;
            let mut made: Vec<(&str, Vec<u32>)> = Vec::new();
            for (group, tokenizer) in groups {
                let name = match group.engine {
                    Engine::Sglang => SGLANG,
                    Engine::Vllm => VLLM,
                };
                if !made.iter().any(|(engine, _)| *engine == name) {
                    made.push((name, Tokens::of(api, &body, tokenizer)?.to_vec()));
                }
            }
            Ok(made)
        };
        // It only fails at shutdown, when nobody wants the answer.
        tokio::task::spawn_blocking(make).await.unwrap_or(Err(Unknown::Engines))
    }

    /// The groups of engines that serve `model`, each with who makes tokens of a body as they do. Where nobody can here, an engine is
    /// asked, if `ask` says that it is worth it.
    async fn tokenizers(
        &self,
        fleet: &Fleet,
        body: (Api, &Bytes),
        model: ModelIx,
        head: &Head<'_>,
        ask: impl Fn(&Group) -> bool,
    ) -> Vec<(Arc<Group>, Tokenizer)> {
        let name = fleet.model_name(model).map_or("", AsRef::as_ref);
        let deadline = self.engines.deadline();
        let mut with_tokenizer: Vec<(Arc<Group>, Tokenizer)> = Vec::new();
        for group in fleet.groups(model) {
            let same = with_tokenizer.iter().find(|(other, _)| other.engine == group.engine);
            let tokenizer = if let Some((_, tokenizer)) = same {
                tokenizer.clone()
            } else if let Some(model) = self.models.get(name, group.engine) {
                Tokenizer::Here(model)
            } else if head.prompt_ids > 0 {
                Tokenizer::Nobody(Unknown::NoTokenizer)
            } else if !ask(group) {
                Tokenizer::Nobody(Unknown::Engines)
            } else {
                match self.engines.tokens(fleet, model, group.engine, body, deadline).await {
                    Ok(told) => Tokenizer::Told(told),
                    Err(why) => Tokenizer::Nobody(why),
                }
            };
            with_tokenizer.push((group.clone(), tokenizer));
        }
        with_tokenizer
    }

    /// Whether anything can be known of what these engines cache: otherwise their tokens are worth no question.
    fn is_fed(&self, groups: &[Arc<Group>]) -> bool {
        groups.iter().any(|group| group.publishes || (group.stored.is_some() && self.store.is_some()))
    }
}

/// Memory to make tokens of a body, at most: its values, the rendered text, its pieces, and the tokens, about as long as the body each;
/// and what each value costs besides its text. Commas inside texts are counted too, which errs on the safe side.
fn reading_bytes(body: &[u8]) -> usize {
    let values = body.iter().filter(|byte| matches!(byte, b',' | b'{' | b'[')).count();
    BYTES_PER_BODY_BYTE * body.len() + BYTES_PER_VALUE * values
}

/// Why nobody makes tokens for any of the groups.
fn nobody(groups: &[(Arc<Group>, Tokenizer)]) -> Option<Unknown> {
    let mut reasons = groups.iter().map(|(_, tokenizer)| match tokenizer {
        Tokenizer::Nobody(why) => Some(why.clone()),
        Tokenizer::Here(_) | Tokenizer::Told(_) => None,
    });
    let first = reasons.next()??;
    reasons.all(|why| why.is_some()).then_some(first)
}

impl Question {
    /// The prompt's length in tokens, who has made them, and its pages under every keyspace.
    fn hash(self) -> Result<(u32, TokenizedBy, Vec<Hashed>), Unknown> {
        let extras = Extras::read(&self.body);
        let (mut input_tokens, mut tokenized_by) = (0, TokenizedBy::Client);
        let mut made: Vec<(Engine, Tokens)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, tokenizer) in self.groups {
            let Some(names) = group.keyspace.names(&extras) else { continue };
            if !made.iter().any(|(engine, _)| *engine == group.engine) {
                made.push((group.engine, Tokens::of(self.api, &self.body, tokenizer)?));
            }
            let Some((_, tokens)) = made.iter().find(|(engine, _)| *engine == group.engine) else { continue };
            input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            tokenized_by = tokens.tokenized_by();
            let name = |scheme| {
                let pages = tokens.pages(&group.keyspace, scheme, extras.is_empty());
                let usable = usable_pages(pages.pages(), tokens.len(), &group.keyspace);
                let keys = usable.iter().map(|page| group.keyspace.namespace().key(page.key)).collect();
                Named { pages, keys }
            };
            let (own, stored) = (name(names.own), names.stored.map(name));
            hashed.push(Hashed { group, own, stored });
        }
        if hashed.is_empty() { Err(Unknown::Engines) } else { Ok((input_tokens, tokenized_by, hashed)) }
    }
}

/// Pages that an engine can take from a cache: it always computes at least one token of the prompt.
fn usable_pages<'a>(pages: &'a [Page], tokens: usize, keyspace: &Keyspace) -> &'a [Page] {
    let most = tokens.saturating_sub(1) / keyspace.page_tokens().max(1) as usize;
    &pages[..most.min(pages.len())]
}

impl Predicted {
    fn put(&mut self, slot: EngineSlot, hits: TierHits, group: usize) {
        if self.by_slot.len() <= slot.at() {
            self.by_slot.resize(slot.at() + 1, Default::default());
        }
        self.by_slot[slot.at()] = (hits, group);
    }

    /// What one engine has of the prompt, and its group.
    fn of(&self, member: &Member) -> (TierHits, usize) {
        self.by_slot.get(member.endpoint.entry.slot().at()).copied().unwrap_or_default()
    }

    /// What an engine should report, if the request goes there.
    pub(crate) fn expected_of(&self, member: &Member) -> Expected {
        Expected { hits: self.of(member).0, input_tokens: self.input_tokens }
    }

    /// The hits in the order of a fleet's cluster.
    pub(crate) fn for_fleet(&self, fleet: &Fleet) -> Prediction {
        let of_members = || fleet.members.iter().map(|member| self.of(member));
        let farness = Reach::new(&self.stored, fleet).map(|mut reach| {
            of_members().enumerate().map(|(at, (hits, group))| reach.farness(at, group, hits)).collect()
        });
        Prediction {
            per_instance: of_members().map(|(hits, _)| hits).collect(),
            farness: farness.unwrap_or_default(),
            pages: self.pages.0.clone(),
            page_tokens: self.pages.1,
            ..Prediction::default()
        }
    }
}

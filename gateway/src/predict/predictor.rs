//! How much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_discovery::Engine;
use moongate_pages::Page;
use moongate_scheduler::index::{EngineSlot, Hits};
use moongate_scheduler::{ModelIx, Prediction, TierHits};

use super::feeds::StoreView;
use super::group::Group;
use super::index::KvIndex;
use super::keyspace::{Extras, Keyspace, SGLANG, VLLM};
use super::models::{Models, PromptModel};
use super::tokens::{Kept, Tokens, Unknown};
use crate::feedback::Expected;
use crate::fleet::{Fleet, Member};
use crate::prompt::{Api, Head};

/// Bodies above this size are read on a thread for blocking work: tokenising 100 KiB takes about a millisecond.
const READ_INLINE: usize = 64 << 10;

/// Predicts cache hits.
#[derive(Debug)]
pub(crate) struct Predictor {
    index: Arc<KvIndex>,
    models: Arc<Models>,
    store: Option<Arc<StoreView>>,
}

/// Cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Predicted {
    /// Prompt tokens, exactly.
    pub(crate) input_tokens: u32,
    /// By the engine's slot in the index.
    by_slot: Vec<TierHits>,
    /// The prompt's pages as the first group of engines names them, with their size in tokens.
    pages: (Arc<[u64]>, u32),
}

/// One question: the prompt of a body under the keyspaces of a fleet's engines.
struct Question {
    api: Api,
    body: Bytes,
    /// Each with the model that its engines make of the body, if it is loaded.
    groups: Vec<(Arc<Group>, Option<Arc<PromptModel>>)>,
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
    pub(crate) fn new(index: Arc<KvIndex>, models: Arc<Models>, store: Option<Arc<StoreView>>) -> Self {
        Self { index, models, store }
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
        let groups = self.groups(fleet, model);
        if groups.is_empty() {
            return Err(Unknown::Engines);
        }
        // Known before a long text is read for nothing.
        if head.prompt_ids == 0 && groups.iter().all(|(_, model)| model.is_none()) {
            return Err(Unknown::NoTokenizer);
        }
        let question = Question { api, body: body.clone(), groups };
        let (input_tokens, hashed) = if body.len() <= READ_INLINE {
            question.hash()?
        } else {
            // It only fails at shutdown, when nobody wants the answer.
            tokio::task::spawn_blocking(|| question.hash()).await.unwrap_or(Err(Unknown::Engines))?
        };
        let mut predicted = Predicted { input_tokens, ..Predicted::default() };
        if let Some(Hashed { group, own, .. }) = hashed.first() {
            predicted.pages = (own.keys.as_slice().into(), group.keyspace.page_tokens());
        }
        let (mut hits, mut in_store) = (Hits::default(), Hits::default());
        for Hashed { group, own, stored } in &hashed {
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
                predicted.put(engine.slot, engine.hits(pages, group.keyspace.page_tokens()));
            }
        }
        Ok(predicted)
    }

    /// The tokens that each kind of engine makes of the prompt in `body`, by the engine's name.
    pub(crate) async fn tokens(
        &self,
        fleet: &Fleet,
        api: Api,
        model: ModelIx,
        body: &Bytes,
    ) -> Result<Vec<(&'static str, Vec<u32>)>, Unknown> {
        let (groups, body) = (self.groups(fleet, model), body.clone());
        let make = move || {
            let mut made: Vec<(&str, Vec<u32>)> = Vec::new();
            for (group, model) in groups {
                let name = match group.engine {
                    Engine::Sglang => SGLANG,
                    Engine::Vllm => VLLM,
                };
                if !made.iter().any(|(engine, _)| *engine == name) {
                    made.push((name, Tokens::of(api, &body, model)?.to_vec()));
                }
            }
            Ok(made)
        };
        // It only fails at shutdown, when nobody wants the answer.
        tokio::task::spawn_blocking(make).await.unwrap_or(Err(Unknown::Engines))
    }

    /// The groups of engines that serve `model`, each with the model that they make of a body, if it is loaded.
    fn groups(&self, fleet: &Fleet, model: ModelIx) -> Vec<(Arc<Group>, Option<Arc<PromptModel>>)> {
        let name = fleet.model_name(model).map_or("", AsRef::as_ref);
        fleet.groups(model).iter().map(|group| (group.clone(), self.models.get(name, group.engine))).collect()
    }
}

impl Question {
    /// The prompt's length in tokens, and its pages under every keyspace.
    fn hash(self) -> Result<(u32, Vec<Hashed>), Unknown> {
        let extras = Extras::read(&self.body);
        let mut input_tokens = 0;
        let mut made: Vec<(Engine, Tokens)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for (group, model) in self.groups {
            let Some(names) = group.keyspace.names(&extras) else { continue };
            if !made.iter().any(|(engine, _)| *engine == group.engine) {
                made.push((group.engine, Tokens::of(self.api, &self.body, model)?));
            }
            let Some((_, tokens)) = made.iter().find(|(engine, _)| *engine == group.engine) else { continue };
            input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            let name = |scheme| {
                let pages = tokens.pages(&group.keyspace, scheme, extras.is_empty());
                let usable = usable_pages(pages.pages(), tokens.len(), &group.keyspace);
                let keys = usable.iter().map(|page| group.keyspace.namespace().key(page.key)).collect();
                Named { pages, keys }
            };
            let (own, stored) = (name(names.own), names.stored.map(name));
            hashed.push(Hashed { group, own, stored });
        }
        if hashed.is_empty() { Err(Unknown::Engines) } else { Ok((input_tokens, hashed)) }
    }
}

/// Pages that an engine can take from a cache: it always computes at least one token of the prompt.
fn usable_pages<'a>(pages: &'a [Page], tokens: usize, keyspace: &Keyspace) -> &'a [Page] {
    let most = tokens.saturating_sub(1) / keyspace.page_tokens().max(1) as usize;
    &pages[..most.min(pages.len())]
}

impl Predicted {
    fn put(&mut self, slot: EngineSlot, hits: TierHits) {
        if self.by_slot.len() <= slot.at() {
            self.by_slot.resize(slot.at() + 1, TierHits::default());
        }
        self.by_slot[slot.at()] = hits;
    }

    /// What one engine has of the prompt.
    fn of(&self, member: &Member) -> TierHits {
        self.by_slot.get(member.endpoint.entry.slot().at()).copied().unwrap_or_default()
    }

    /// What an engine should report, if the request goes there.
    pub(crate) fn expected_of(&self, member: &Member) -> Expected {
        Expected { hits: self.of(member), input_tokens: self.input_tokens }
    }

    /// The hits in the order of a fleet's cluster.
    pub(crate) fn for_fleet(&self, fleet: &Fleet) -> Prediction {
        Prediction {
            per_instance: fleet.members.iter().map(|member| self.of(member)).collect(),
            pages: self.pages.0.clone(),
            page_tokens: self.pages.1,
            ..Prediction::default()
        }
    }
}

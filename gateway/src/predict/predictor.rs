//! How much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_discovery::Engine;
use moongate_pages::Page;
use moongate_scheduler::index::{EngineHits, Hits};
use moongate_scheduler::{ModelIx, Prediction, TierHits};

use super::feeds::StoreView;
use super::index::KvIndex;
use super::keyspace::{Extras, Keyspace};
use super::models::Models;
use super::stored::StoredAs;
use super::tokens::{Kept, Tokens, Unknown};
use crate::feedback::Expected;
use crate::fleet::{Fleet, Member};
use crate::prompt::Api;

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
}

/// One question: the prompt of a body under the keyspaces of a fleet's engines.
struct Question {
    api: Api,
    body: Bytes,
    groups: Vec<Group>,
}

/// The pages of a prompt under one keyspace.
struct Hashed {
    group: Group,
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

/// Engines that name pages alike.
struct Group {
    keyspace: Keyspace,
    engine: Engine,
    stored: Option<StoredAs>,
    model: Option<Arc<super::models::PromptModel>>,
    members: Vec<Member>,
}

impl Predictor {
    pub(crate) fn new(index: Arc<KvIndex>, models: Arc<Models>, store: Option<Arc<StoreView>>) -> Self {
        Self { index, models, store }
    }

    /// What each engine that serves `model` has of the prompt in `body`.
    pub(crate) async fn predict(
        &self,
        fleet: &Fleet,
        api: Api,
        model: ModelIx,
        body: &Bytes,
    ) -> Result<Predicted, Unknown> {
        let groups = self.groups(fleet, model);
        if groups.is_empty() {
            return Err(Unknown::Engines);
        }
        let question = Question { api, body: body.clone(), groups };
        let (input_tokens, hashed) = if body.len() <= READ_INLINE {
            question.hash()?
        } else {
            // It only fails at shutdown, when nobody wants the answer.
            tokio::task::spawn_blocking(|| question.hash()).await.unwrap_or(Err(Unknown::Engines))?
        };
        let mut predicted = Predicted { input_tokens, by_slot: Vec::new() };
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
            for member in &group.members {
                let slot = member.endpoint.entry.slot();
                let mut pages = hits.of(slot);
                if stored.is_some() {
                    // Nobody has pages of that name, so the store's begin with the prompt.
                    pages.shared = in_store.of(slot).shared.saturating_sub(pages.own);
                }
                predicted.add(member, pages, group.keyspace.page_tokens());
            }
        }
        Ok(predicted)
    }

    fn groups(&self, fleet: &Fleet, model: ModelIx) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for (instance, member) in fleet.cluster.instances().iter().zip(&fleet.members) {
            let (Some(keyspace), Some(facts)) = (&member.keyspace, member.facts()) else { continue };
            if !instance.models.contains(&model) {
                continue;
            }
            let same = |group: &&mut Group| {
                group.keyspace == *keyspace && group.engine == facts.engine && group.stored == member.stored
            };
            match groups.iter_mut().find(same) {
                Some(group) => group.members.push(member.clone()),
                None => {
                    let name = fleet.model_name(model).map_or("", AsRef::as_ref);
                    groups.push(Group {
                        keyspace: keyspace.clone(),
                        engine: facts.engine,
                        stored: member.stored.clone(),
                        model: self.models.get(name, facts.engine),
                        members: vec![member.clone()],
                    });
                }
            }
        }
        groups
    }
}

impl Question {
    /// The prompt's length in tokens, and its pages under every keyspace.
    fn hash(self) -> Result<(u32, Vec<Hashed>), Unknown> {
        let extras = Extras::read(&self.body);
        let mut input_tokens = 0;
        let mut made: Vec<(Engine, Tokens)> = Vec::new();
        let mut hashed = Vec::with_capacity(self.groups.len());
        for group in self.groups {
            let Some(names) = group.keyspace.names(&extras) else { continue };
            if !made.iter().any(|(engine, _)| *engine == group.engine) {
                made.push((group.engine, Tokens::of(self.api, &self.body, group.model.clone())?));
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
    fn add(&mut self, member: &Member, pages: EngineHits, page_tokens: u32) {
        let slot = member.endpoint.entry.slot();
        let tokens = |pages: u32| pages.saturating_mul(page_tokens);
        if self.by_slot.len() <= slot.at() {
            self.by_slot.resize(slot.at() + 1, TierHits::default());
        }
        self.by_slot[slot.at()] = TierHits {
            l1_tokens: tokens(pages.l1),
            l2_tokens: tokens(pages.own.saturating_sub(pages.l1)),
            l3_tokens: loadable(member, tokens(pages.shared)),
        };
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
            shared: Vec::new(),
        }
    }
}

/// What an engine would load of `tokens` that the store has: nothing without a connection to it, and nothing below its threshold.
fn loadable(member: &Member, tokens: u32) -> u32 {
    let store = member.facts().and_then(|facts| facts.store.as_ref());
    match store {
        Some(store) if tokens >= store.prefetch_threshold.unwrap_or(0) => tokens,
        _ => 0,
    }
}

//! How much of a request's prompt each engine has.

use std::sync::Arc;

use bytes::Bytes;
use moongate_discovery::Engine;
use moongate_pages::Page;
use moongate_scheduler::index::Hits;
use moongate_scheduler::{ModelIx, Prediction, TierHits};

use super::index::KvIndex;
use super::keyspace::{Extras, Keyspace};
use super::models::Models;
use super::tokens::{Tokens, Unknown};
use crate::fleet::{Fleet, Member};
use crate::prompt::Api;

/// Bodies above this size are read on a thread for blocking work: tokenising 100 KiB takes about a millisecond.
const READ_INLINE: usize = 64 << 10;

/// Predicts cache hits.
#[derive(Debug)]
pub(crate) struct Predictor {
    index: Arc<KvIndex>,
    models: Arc<Models>,
}

/// Cache hits of one request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Predicted {
    /// Prompt tokens, exactly.
    pub(crate) input_tokens: u32,
    /// By the engine's slot in the index.
    by_slot: Vec<TierHits>,
}

/// One question: the prompts of a body under the keyspaces of a fleet's engines.
struct Question {
    api: Api,
    body: Bytes,
    groups: Vec<Group>,
    index: Arc<KvIndex>,
}

/// Engines that name pages alike.
struct Group {
    keyspace: Keyspace,
    engine: Engine,
    model: Option<Arc<super::models::PromptModel>>,
    members: Vec<Member>,
}

impl Predictor {
    pub(crate) fn new(index: Arc<KvIndex>, models: Arc<Models>) -> Self {
        Self { index, models }
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
        let question = Question { api, body: body.clone(), groups, index: self.index.clone() };
        if body.len() <= READ_INLINE {
            return question.answer();
        }
        // It only fails at shutdown, when nobody wants the answer.
        tokio::task::spawn_blocking(|| question.answer()).await.unwrap_or(Err(Unknown::Engines))
    }

    fn groups(&self, fleet: &Fleet, model: ModelIx) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for (instance, member) in fleet.cluster.instances().iter().zip(&fleet.members) {
            let (Some(keyspace), Some(facts)) = (&member.keyspace, member.facts()) else { continue };
            if !instance.models.contains(&model) {
                continue;
            }
            let same = |group: &&mut Group| group.keyspace == *keyspace && group.engine == facts.engine;
            match groups.iter_mut().find(same) {
                Some(group) => group.members.push(member.clone()),
                None => {
                    let name = fleet.model_name(model).map_or("", AsRef::as_ref);
                    groups.push(Group {
                        keyspace: keyspace.clone(),
                        engine: facts.engine,
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
    fn answer(self) -> Result<Predicted, Unknown> {
        let extras = Extras::read(&self.body);
        let mut predicted = Predicted::default();
        let mut made: Vec<(Engine, Tokens)> = Vec::new();
        let mut hits = Hits::default();
        let mut answered = false;
        for group in &self.groups {
            let Some(scheme) = group.keyspace.scheme(&extras) else { continue };
            if !made.iter().any(|(engine, _)| *engine == group.engine) {
                made.push((group.engine, Tokens::of(self.api, &self.body, group.model.clone())?));
            }
            let Some((_, tokens)) = made.iter().find(|(engine, _)| *engine == group.engine) else { continue };
            predicted.input_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            let kept = tokens.pages(&group.keyspace, scheme, extras.is_empty());
            let usable = usable_pages(kept.pages(), tokens.len(), &group.keyspace);
            let namespace = group.keyspace.namespace();
            let keys: Vec<u64> = usable.iter().map(|page| namespace.key(page.key)).collect();
            self.index.lookup(&keys, &mut hits);
            group.members.iter().for_each(|member| predicted.add(member, &hits, group.keyspace.page_tokens()));
            answered = true;
        }
        if answered { Ok(predicted) } else { Err(Unknown::Engines) }
    }
}

/// Pages that an engine can take from a cache: it always computes at least one token of the prompt.
fn usable_pages<'a>(pages: &'a [Page], tokens: usize, keyspace: &Keyspace) -> &'a [Page] {
    let most = tokens.saturating_sub(1) / keyspace.page_tokens().max(1) as usize;
    &pages[..most.min(pages.len())]
}

impl Predicted {
    fn add(&mut self, member: &Member, hits: &Hits, page_tokens: u32) {
        let slot = member.endpoint.entry.slot();
        let pages = hits.of(slot);
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
    pub(crate) fn of(&self, member: &Member) -> TierHits {
        self.by_slot.get(member.endpoint.entry.slot().at()).copied().unwrap_or_default()
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

//! Engines that name pages alike: one look-up answers for all of them.

use std::sync::Arc;

use moongate_discovery::Engine;
use moongate_scheduler::TierHits;
use moongate_scheduler::index::{EngineHits, EngineSlot};

use super::keyspace::Keyspace;
use super::stored::StoredAs;
use crate::fleet::Member;

/// Engines of one model that name pages alike. Made once for each change of the fleet.
#[derive(Debug)]
pub(crate) struct Group {
    pub(super) keyspace: Arc<Keyspace>,
    pub(super) engine: Engine,
    pub(super) stored: Option<Arc<StoredAs>>,
    pub(super) engines: Vec<GroupEngine>,
    /// Whether one of them publishes what it caches.
    pub(super) publishes: bool,
}

/// One of them.
#[derive(Debug)]
pub(super) struct GroupEngine {
    pub(super) slot: EngineSlot,
    /// Tokens below which it does not read from the store; `None` if it has no store.
    store_threshold: Option<u32>,
}

impl Group {
    /// Divides the engines of a model. Those whose names are not known are in no group.
    pub(crate) fn divide<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for member in members {
            let (Some(keyspace), Some(facts)) = (&member.keyspace, member.facts()) else { continue };
            let slot = member.endpoint.entry.slot();
            let store_threshold = facts.store.as_ref().map(|store| store.prefetch_threshold.unwrap_or(0));
            let engine = GroupEngine { slot, store_threshold };
            let publishes = facts.events.as_ref().is_some_and(|events| !events.is_empty());
            let same = |group: &&mut Self| {
                group.keyspace == *keyspace && group.engine == facts.engine && group.stored == member.stored
            };
            match groups.iter_mut().find(same) {
                Some(group) => {
                    group.engines.push(engine);
                    group.publishes |= publishes;
                }
                None => groups.push(Self {
                    keyspace: keyspace.clone(),
                    engine: facts.engine,
                    stored: member.stored.clone(),
                    engines: vec![engine],
                    publishes,
                }),
            }
        }
        groups
    }
}

impl GroupEngine {
    /// What the engine would use of pages that are there: nothing from the store without a connection to it, and nothing below its
    /// threshold.
    pub(super) fn hits(&self, pages: EngineHits, page_tokens: u32) -> TierHits {
        let tokens = |pages: u32| pages.saturating_mul(page_tokens);
        let shared = tokens(pages.shared);
        TierHits {
            l1_tokens: tokens(pages.l1),
            l2_tokens: tokens(pages.own.saturating_sub(pages.l1)),
            l3_tokens: if self.store_threshold.is_some_and(|least| shared >= least) { shared } else { 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{EngineEntry, KvIndex};

    #[test]
    fn the_store_counts_from_the_threshold_on_and_only_for_its_users() {
        let entry = EngineEntry::new(KvIndex::new(10));
        let engine = |store_threshold| GroupEngine { slot: entry.slot(), store_threshold };
        let pages = EngineHits { l1: 1, own: 3, shared: 4 };
        let hits = engine(Some(256)).hits(pages, 64);
        assert_eq!((hits.l1_tokens, hits.l2_tokens, hits.l3_tokens), (64, 128, 256));
        assert_eq!(engine(Some(257)).hits(pages, 64).l3_tokens, 0);
        assert_eq!(engine(None).hits(pages, 64).l3_tokens, 0);
    }
}

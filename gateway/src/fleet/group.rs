//! Groups of engines with equal block hashes: one lookup serves all of them.

use std::sync::Arc;

use moongate_discovery::EngineKind;
use moongate_scheduler::TierHits;
use moongate_scheduler::index::{EngineHits, EngineSlot};

use super::snapshot::FleetMember;
use crate::kv_index::{
    BlockKeyspace, ChunkHashRule, EngineCacheGroups, EngineChunkRule, HitHistory, StoreKeyNaming,
};

/// Chunk rules by which a prompt is hashed. Engines without a `PYTHONHASHSEED` have rules of their own.
const MAX_CHUNK_RULES: usize = 16;

/// Engines of one model with equal block hashes. Built once per fleet snapshot.
#[derive(Debug)]
pub(crate) struct EngineGroup {
    pub(crate) keyspace: Arc<BlockKeyspace>,
    pub(crate) engine: EngineKind,
    pub(crate) store_naming: Option<Arc<StoreKeyNaming>>,
    pub(crate) engines: Vec<EngineGroupMember>,
    /// Whether any of the engines publishes KV events.
    pub(crate) publishes: bool,
    /// Whether any of them reuses a prompt only where a request ended or branched off.
    pub(crate) has_checkpoints: bool,
    /// Largest number of tokens of a sequence; `None` if the engines differ or do not report it.
    pub(crate) context_length: Option<u32>,
}

/// One rank of an engine.
#[derive(Debug)]
pub(crate) struct EngineGroupMember {
    pub(crate) slot: EngineSlot,
    /// Groups of its KV cache.
    pub(crate) groups: Arc<EngineCacheGroups>,
    /// How its LMCache hashes chunks.
    pub(crate) chunk_rule: Arc<EngineChunkRule>,
    /// What its responses say about predictions.
    pub(crate) hit_history: Arc<HitHistory>,
    /// Smallest hit in tokens that the engine reads from the store; `None` if it has no store.
    store_threshold: Option<u32>,
}

impl EngineGroup {
    /// Groups the engines of a model. Engines with unknown hashes are in no group.
    pub(crate) fn group_by_keyspace<'a>(
        model: &str,
        members: impl Iterator<Item = &'a FleetMember>,
    ) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for member in members {
            let (Some(keyspace), Some(facts), Some(slot)) = (&member.keyspace, member.facts(), member.slot())
            else {
                continue;
            };
            let keyspace = keyspace.for_adapter(model, facts).map_or_else(|| keyspace.clone(), Arc::new);
            let store_threshold = facts.store.as_ref().map(|store| store.prefetch_threshold.unwrap_or(0));
            let engine = EngineGroupMember {
                slot: slot.slot(),
                groups: slot.groups().clone(),
                chunk_rule: slot.chunk_rule().clone(),
                hit_history: slot.hit_history().clone(),
                store_threshold,
            };
            let publishes = facts.events.as_ref().is_some_and(|events| !events.is_empty());
            let has_checkpoints = facts.checkpoints.is_some();
            let same = |group: &&mut Self| {
                group.keyspace == keyspace
                    && group.engine == facts.engine
                    && group.store_naming == member.store_naming
            };
            match groups.iter_mut().find(same) {
                Some(group) => {
                    group.engines.push(engine);
                    group.publishes |= publishes;
                    group.has_checkpoints |= has_checkpoints;
                    if group.context_length != facts.context_length {
                        group.context_length = None;
                    }
                }
                None => groups.push(Self {
                    keyspace,
                    engine: facts.engine,
                    store_naming: member.store_naming.clone(),
                    engines: vec![engine],
                    publishes,
                    has_checkpoints,
                    context_length: facts.context_length,
                }),
            }
        }
        groups
    }

    /// How the engines' LMCaches hash chunks: rules that differ. An adapter's chunks are not distinguished from those of other models, so
    /// they are not counted.
    pub(crate) fn chunk_rules(&self) -> Vec<ChunkHashRule> {
        let mut rules: Vec<ChunkHashRule> = Vec::new();
        if !self.keyspace.is_adapter() {
            for rule in self.engines.iter().filter_map(|engine| engine.chunk_rule.known()) {
                if rules.len() < MAX_CHUNK_RULES && !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
        }
        rules
    }
}

impl EngineGroupMember {
    /// Hits that the engine would use: none from the store without a connection to it, and none below its threshold.
    pub(crate) fn hits(&self, blocks: EngineHits, page_tokens: u32) -> TierHits {
        let tokens = |blocks: u32| blocks.saturating_mul(page_tokens);
        let shared = tokens(blocks.shared);
        TierHits {
            l1_tokens: tokens(blocks.l1),
            l2_tokens: tokens(blocks.local.saturating_sub(blocks.l1)),
            l3_tokens: if self.store_threshold.is_some_and(|threshold| shared >= threshold) {
                shared
            } else {
                0
            },
            pending_tokens: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_index::{EngineSlotGuard, KvIndex};

    #[test]
    fn store_hits_count_from_the_threshold_for_store_users() {
        let entry = EngineSlotGuard::new(KvIndex::new(10));
        let groups = entry.groups();
        let engine = |store_threshold| EngineGroupMember {
            slot: entry.slot(),
            groups: groups.clone(),
            chunk_rule: entry.chunk_rule().clone(),
            hit_history: entry.hit_history().clone(),
            store_threshold,
        };
        let blocks = EngineHits { l1: 1, local: 3, shared: 4 };
        let hits = engine(Some(256)).hits(blocks, 64);
        assert_eq!((hits.l1_tokens, hits.l2_tokens, hits.l3_tokens), (64, 128, 256));
        assert_eq!(engine(Some(257)).hits(blocks, 64).l3_tokens, 0);
        assert_eq!(engine(None).hits(blocks, 64).l3_tokens, 0);
    }
}

//! The index of KV caches: keys and names of blocks, and which engine and store has them.

mod block_keyspace;
mod cache_groups;
mod chunk_rule;
mod hash_rule;
mod hit_history;
mod index;
mod prompt_checkpoints;
mod rank_slots;
mod rehashed_blocks;
mod seen_adapters;
mod special_caches;
mod spin_rw_lock;
#[cfg(test)]
mod spin_rw_lock_tests;
mod store_keys;

pub(crate) use block_keyspace::{BlockExtraKeys, BlockKeyspace, BlockSchemes};
pub(crate) use cache_groups::{EngineCacheGroups, NumberedCacheGroup};
pub(crate) use chunk_rule::{ChunkHashRule, ChunkRuleStatus, EngineChunkRule};
pub(crate) use hash_rule::HashRuleStatus;
pub(crate) use hit_history::HitHistory;
pub(crate) use index::{EngineSlotGuard, KvIndex};
pub(crate) use prompt_checkpoints::{CachedPrefix, LastBlockKeys, PromptCheckpoints};
pub(crate) use rank_slots::{EngineSlots, RankSlots};
pub(crate) use rehashed_blocks::LeftOutBlocks;
pub use spin_rw_lock::SpinRwLock;
pub(crate) use store_keys::{StoreKeyNaming, StoredBlockPart};

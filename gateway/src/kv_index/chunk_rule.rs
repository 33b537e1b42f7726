//! LMCache inside an engine: its chunks in host memory, whose hashes follow a rule of its own.
//!
//! According to LMCache 0.5.6 (`v1/token_database.py`, `v1/cache_engine.py`): a chunk has the same number of tokens in the whole engine,
//! usually 256. Its hash depends on its tokens and on the chunk before it, but not on the request's adapter or salt. The engine
//! publishes an event for each stored chunk, and none for an evicted one.

use std::fmt;

use mooncake_wire::events::{BlockStored, StorageMedium};
use moongate_block_hash::{BlockHashChain, DEFAULT_VLLM_SEED, HashScheme};
use moongate_scheduler::index::BlockHashNamespace;
use parking_lot::Mutex;

use super::block_keyspace::{BlockExtraKeys, BlockKeyspace};
use super::special_caches::SpecialCaches;

/// First chunks of prompts after which a rule that has not been found counts as unknown.
const MAX_TRIALS: u32 = 16;
/// Chunks with which the rule is compared when it is known.
const CONFIRMING_CHECKS: u32 = 8;
/// Namespace of chunks in the index, distinct from those of cache groups, which are few.
const CHUNKS: u32 = u32::MAX;

/// How one engine's LMCache hashes chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkHashRule {
    pub(crate) chunk_tokens: u32,
    algorithm: ChunkAlgorithm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChunkAlgorithm {
    /// `pre_caching_hash_algorithm: sha256_cbor`.
    Sha256Cbor { root: u64 },
    /// LMCache's default. Without a `PYTHONHASHSEED` the root is random, and follows from the first chunk of a prompt.
    Builtin { root: i64 },
}

/// What is known of the chunks of one engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum ChunkRuleStatus {
    /// No event about a chunk.
    #[default]
    NoChunks,
    /// The engine has chunks, and their rule has not been found yet.
    Learning,
    Known(ChunkHashRule),
    /// The rule is none of the known ones: chunks are not predicted.
    Unknown,
}

/// The rule of one engine's chunks, learned from its events.
#[derive(Debug, Default)]
pub(crate) struct EngineChunkRule {
    learning: Mutex<Learning>,
    special: SpecialCaches,
}

#[derive(Debug, Default)]
struct Learning {
    status: ChunkRuleStatus,
    trials: u32,
    /// Root of the last first chunk, if the algorithm is `builtin`. Two equal ones are no coincidence.
    builtin_root: Option<i64>,
    /// Whether they are no chunks, but large blocks of a hybrid model in a Mooncake store: their hashes are the engine's own.
    are_own_blocks: bool,
}

/// Result of reading an event about stored blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadChunk {
    /// Whether the event is about a chunk.
    pub(crate) is_chunk: bool,
    /// The new status, if it has changed.
    pub(crate) status: Option<ChunkRuleStatus>,
}

impl fmt::Display for ChunkHashRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let algorithm = match self.algorithm {
            ChunkAlgorithm::Sha256Cbor { .. } => "sha256_cbor",
            ChunkAlgorithm::Builtin { .. } => "builtin",
        };
        write!(f, "chunks of {} tokens ({algorithm})", self.chunk_tokens)
    }
}

impl ChunkHashRule {
    /// The scheme to hash prompts with; `None` if the chunk size is out of bounds.
    pub(crate) fn scheme(&self) -> Option<HashScheme> {
        match self.algorithm {
            ChunkAlgorithm::Sha256Cbor { root } => HashScheme::lmcache_sha256_cbor(self.chunk_tokens, root),
            ChunkAlgorithm::Builtin { root } => HashScheme::lmcache_builtin_after(self.chunk_tokens, root),
        }
        .ok()
    }

    /// Namespace of chunks in the index.
    pub(crate) fn namespace(keyspace: &BlockKeyspace) -> BlockHashNamespace {
        keyspace.namespace().in_group(CHUNKS)
    }

    /// Keys of a prompt's full chunks in the index.
    pub(crate) fn keys(&self, keyspace: &BlockKeyspace, tokens: &[u32]) -> Vec<u64> {
        let Some(scheme) = self.scheme() else { return Vec::new() };
        let mut chunks = Vec::new();
        BlockHashChain::new(scheme).extend(tokens, &mut chunks);
        let namespace = Self::namespace(keyspace);
        chunks.iter().map(|chunk| namespace.key(chunk.event_hash)).collect()
    }
}

impl EngineChunkRule {
    pub(super) fn new(special: SpecialCaches) -> Self {
        Self { special, ..Self::default() }
    }

    pub(crate) fn status(&self) -> ChunkRuleStatus {
        self.learning.lock().status
    }

    pub(crate) fn known(&self) -> Option<ChunkHashRule> {
        match self.status() {
            ChunkRuleStatus::Known(rule) => Some(rule),
            ChunkRuleStatus::NoChunks | ChunkRuleStatus::Learning | ChunkRuleStatus::Unknown => None,
        }
    }

    /// Whether the engine has published an event about a chunk.
    pub(crate) fn has_chunks(&self) -> bool {
        self.status() != ChunkRuleStatus::NoChunks
    }

    /// Resets everything, when the engine has restarted.
    pub(crate) fn clear(&self) {
        *self.learning.lock() = Learning::default();
    }

    /// Reads an event, and learns from it if it is about a chunk.
    pub(crate) fn read(&self, keyspace: &BlockKeyspace, stored: &BlockStored<'_>) -> ReadChunk {
        if !is_chunk(keyspace, stored) {
            return ReadChunk { is_chunk: false, status: None };
        }
        let mut learning = self.learning.lock();
        let status = learning.next_status(keyspace, stored);
        if learning.are_own_blocks {
            learning.status = ChunkRuleStatus::NoChunks;
            return ReadChunk { is_chunk: false, status: None };
        }
        self.special.found();
        let changed = status != learning.status;
        learning.status = status;
        ReadChunk { is_chunk: true, status: changed.then_some(status) }
    }
}

/// LMCache names the medium in lower case, and its chunks are larger than the engine's blocks. Blocks of a Mooncake store are not.
fn is_chunk(keyspace: &BlockKeyspace, stored: &BlockStored<'_>) -> bool {
    let page = keyspace.page_tokens().max(1);
    stored.medium == Some(StorageMedium::StoreMemory)
        && stored.hashes.len() == 1
        && stored.block_size > page
        && stored.block_size.is_multiple_of(page)
}

impl Learning {
    fn next_status(&mut self, keyspace: &BlockKeyspace, stored: &BlockStored<'_>) -> ChunkRuleStatus {
        let is_settled = self.trials >= CONFIRMING_CHECKS && matches!(self.status, ChunkRuleStatus::Known(_));
        let is_first = stored.parent.is_none();
        let (Some(tokens), false, true) = (stored.tokens, is_settled || self.are_own_blocks, is_first) else {
            return self.waiting();
        };
        let Some(hash) = stored.hashes.iter().next().map(|hash| hash.low64()) else { return self.waiting() };
        // The event also has the first token of the next chunk, if there is one.
        let tokens: Vec<u32> = tokens.iter().take(stored.block_size as usize).collect();
        if tokens.len() < stored.block_size as usize {
            return self.waiting();
        }
        self.trials = self.trials.saturating_add(1);
        let chunk_tokens = stored.block_size;
        if own_hash(keyspace, &tokens) == Some(hash) {
            self.are_own_blocks = true;
            return ChunkRuleStatus::NoChunks;
        }
        if let Some(root) = cbor_root(keyspace, &tokens, hash) {
            return known(chunk_tokens, ChunkAlgorithm::Sha256Cbor { root });
        }
        let root = HashScheme::lmcache_builtin_parent(&tokens, hash);
        let previous = std::mem::replace(&mut self.builtin_root, root);
        match root {
            Some(root) if previous == Some(root) => known(chunk_tokens, ChunkAlgorithm::Builtin { root }),
            _ if self.trials >= MAX_TRIALS => ChunkRuleStatus::Unknown,
            _ => self.waiting(),
        }
    }

    /// The status after an event from which nothing could be learned.
    fn waiting(&self) -> ChunkRuleStatus {
        match self.status {
            ChunkRuleStatus::NoChunks => ChunkRuleStatus::Learning,
            status => status,
        }
    }
}

fn known(chunk_tokens: u32, algorithm: ChunkAlgorithm) -> ChunkRuleStatus {
    ChunkRuleStatus::Known(ChunkHashRule { chunk_tokens, algorithm })
}

/// Hash of the last block of a prompt by the engine's own rule.
fn own_hash(keyspace: &BlockKeyspace, tokens: &[u32]) -> Option<u64> {
    let mut blocks = Vec::new();
    BlockHashChain::new(keyspace.schemes(&BlockExtraKeys::default())?.events).extend(tokens, &mut blocks);
    blocks.last().map(|block| block.event_hash)
}

/// The root of `sha256_cbor` under which this first chunk has this hash.
fn cbor_root(keyspace: &BlockKeyspace, tokens: &[u32], hash: u64) -> Option<u64> {
    let seeds = keyspace.seed().into_iter().chain([DEFAULT_VLLM_SEED, "0", "1", "42"]);
    seeds.map(HashScheme::lmcache_root_of_vllm).chain([0]).find(|&root| {
        let mut chunks = Vec::new();
        let scheme = HashScheme::lmcache_sha256_cbor(u32::try_from(tokens.len()).unwrap_or(0), root);
        scheme.is_ok_and(|scheme| {
            BlockHashChain::new(scheme).extend(tokens, &mut chunks);
            chunks.first().is_some_and(|chunk| chunk.event_hash == hash)
        })
    })
}

#[cfg(test)]
#[path = "chunk_rule_tests.rs"]
mod tests;

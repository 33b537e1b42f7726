//! Blocks of an engine whose hashes follow another rule than predictions assume: hashed again from the tokens in its events.

use std::collections::HashMap;

use mooncake_wire::events::{BlockHashes, BlockStored, ExtraKey};
use moongate_block_hash::{BlockHashChain, HashedBlock};
use moongate_scheduler::index::EngineCacheTier;
use parking_lot::Mutex;

use super::block_keyspace::{BlockExtraKeys, BlockKeyspace};

/// Blocks per rank: 16 million tokens of the smallest blocks, in 80 MB. Further ones are not indexed.
const MAX_BLOCKS: usize = 1 << 20;

/// Groups and tiers are bits of one number.
const MAX_GROUPS: u32 = 32;

/// The blocks that one rank of an engine has, by the engine's own hashes.
#[derive(Debug)]
pub(crate) struct RehashedBlocks {
    blocks: Mutex<HashMap<u64, RehashedBlock>>,
    max_blocks: usize,
}

/// Stored blocks that were hashed again.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RehashedEvent {
    /// Hashes by the rule of predictions.
    pub(crate) hashes: Vec<u64>,
    /// The other blocks, which are not indexed.
    pub(crate) left_out: LeftOutBlocks,
}

/// Numbers of stored blocks that are not indexed, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LeftOutBlocks {
    /// The rank has too many.
    pub(crate) over_capacity: u64,
    /// They depend on more than tokens, or blocks before them are unknown.
    pub(crate) unknown: u64,
}

impl LeftOutBlocks {
    pub(crate) fn add(&mut self, other: Self) {
        self.over_capacity += other.over_capacity;
        self.unknown += other.unknown;
    }
}

#[derive(Debug)]
struct RehashedBlock {
    /// The hash that predictions compute.
    block: HashedBlock,
    /// In which groups and tiers the engine has it.
    places: BlockPlaces,
}

/// A set of groups and tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockPlaces(u64);

impl BlockPlaces {
    const NONE: Self = Self(0);

    fn one(group: u32, tier: EngineCacheTier) -> Option<Self> {
        (group < MAX_GROUPS).then(|| Self(1 << (2 * group + tier_bit(tier))))
    }

    fn all_of(tier: EngineCacheTier) -> Self {
        Self((0..MAX_GROUPS).fold(0, |bits, group| bits | 1 << (2 * group + tier_bit(tier))))
    }

    fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

fn tier_bit(tier: EngineCacheTier) -> u32 {
    match tier {
        EngineCacheTier::L1 => 0,
        EngineCacheTier::L2 => 1,
    }
}

impl Default for RehashedBlocks {
    fn default() -> Self {
        Self { blocks: Mutex::default(), max_blocks: MAX_BLOCKS }
    }
}

impl RehashedBlocks {
    /// Hashes the blocks of an event again. Blocks that depend on more than tokens, or whose parent is unknown, are left out.
    pub(crate) fn learn(&self, keyspace: &BlockKeyspace, stored: &BlockStored<'_>) {
        let mut blocks = self.blocks.lock();
        let parent = stored.parent.map(|parent| blocks.get(&parent.low64()).map(|known| known.block));
        if let Some(hashed) = parent_blocks(parent).and_then(|parent| rehash(keyspace, stored, &parent)) {
            for (hash, block) in stored.hashes.iter().zip(hashed) {
                if blocks.len() < self.max_blocks {
                    blocks.entry(hash.low64()).or_insert(RehashedBlock { block, places: BlockPlaces::NONE });
                }
            }
        }
    }

    /// Hashes of the stored blocks by the rule of predictions, as far as they are known.
    pub(crate) fn stored(&self, hashes: BlockHashes<'_>, group: u32, tier: EngineCacheTier) -> RehashedEvent {
        let Some(place) = BlockPlaces::one(group, tier) else { return RehashedEvent::default() };
        let mut event = RehashedEvent::default();
        let mut blocks = self.blocks.lock();
        let is_full = blocks.len() >= self.max_blocks;
        for hash in hashes.iter() {
            match blocks.get_mut(&hash.low64()) {
                Some(known) => {
                    known.places = known.places.with(place);
                    event.hashes.push(known.block.event_hash);
                }
                None if is_full => event.left_out.over_capacity += 1,
                None => event.left_out.unknown += 1,
            }
        }
        event
    }

    /// Hashes of the removed blocks by the rule of predictions.
    pub(crate) fn removed(&self, hashes: BlockHashes<'_>, group: u32, tier: EngineCacheTier) -> Vec<u64> {
        let Some(place) = BlockPlaces::one(group, tier) else { return Vec::new() };
        let mut blocks = self.blocks.lock();
        let own = hashes.iter().filter_map(|hash| {
            let known = blocks.get_mut(&hash.low64())?;
            let own = known.block.event_hash;
            known.places = known.places.without(place);
            if known.places == BlockPlaces::NONE {
                blocks.remove(&hash.low64());
            }
            Some(own)
        });
        own.collect()
    }

    /// Removes all blocks of a tier.
    pub(crate) fn clear(&self, tier: EngineCacheTier) {
        let places = BlockPlaces::all_of(tier);
        self.blocks.lock().retain(|_, known| {
            known.places = known.places.without(places);
            known.places != BlockPlaces::NONE
        });
    }
}

/// The blocks before the first one; `None` if they are unknown.
fn parent_blocks(parent: Option<Option<HashedBlock>>) -> Option<Vec<HashedBlock>> {
    match parent {
        None => Some(Vec::new()),
        Some(known) => known.map(|block| vec![block]),
    }
}

/// Hashes the blocks again, up to the first one that depends on more than tokens.
fn rehash(
    keyspace: &BlockKeyspace,
    stored: &BlockStored<'_>,
    parent: &[HashedBlock],
) -> Option<Vec<HashedBlock>> {
    if stored.lora.is_some() || stored.block_size != keyspace.page_tokens() {
        return None;
    }
    let block_tokens = stored.block_size as usize;
    let tokens = stored.tokens?.iter();
    // Groups with a sliding window keep some blocks only, and which of the tokens these are is not in the event.
    if tokens.len() != stored.hashes.len().checked_mul(block_tokens)? {
        return None;
    }
    let salt = if parent.is_empty() { salt(stored) } else { None };
    let plain = stored.extra_keys.map_or(usize::MAX, |keys| {
        let mut keys = keys.iter();
        let salted = usize::from(salt.is_some() && keys.next().is_some());
        salted + keys.take_while(|keys| keys.len() == 0).count()
    });
    let tokens: Vec<u32> = tokens.take(plain.saturating_mul(block_tokens)).collect();
    let scheme = keyspace.schemes(&BlockExtraKeys::of_salt(salt))?.events;
    let mut blocks = Vec::new();
    BlockHashChain::resume(scheme, parent).extend(&tokens, &mut blocks);
    Some(blocks)
}

/// The salt of a sequence, from the event about its first block. vLLM sends it as that block's only extra key; names of adapters
/// look the same, but are sent in a field of their own as well.
fn salt<'a>(stored: &BlockStored<'a>) -> Option<&'a str> {
    if stored.cache_salt.is_some() {
        return stored.cache_salt;
    }
    let mut first = stored.extra_keys?.iter().next()?;
    match (first.next(), first.next()) {
        (Some(ExtraKey::Text(salt)), None) => Some(salt),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use mooncake_wire::events::{
        BlockHash, EngineEvent, EngineEventBatch, EngineEventFormat, OutgoingBlocks, OutgoingEngineEvent,
        StorageMedium, encode_engine_batch,
    };
    use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind};

    use super::*;

    /// Stores blocks of two tokens with these hashes.
    fn store(known: &RehashedBlocks, parent: Option<i64>, hashes: &[i64]) -> RehashedEvent {
        let facts = EngineFacts {
            models: vec!["m".to_owned()],
            page_size: Some(2),
            hashing: Some(EngineBlockHashing::Opaque { name: "xxhash".to_owned() }),
            ..EngineFacts::unreported(EngineKind::Vllm)
        };
        let keyspace = BlockKeyspace::from_facts(&facts).unwrap();
        let hash = |hash: &i64| BlockHash::Int(hash.cast_unsigned());
        let (parent, hashes) = (parent.as_ref().map(hash), hashes.iter().map(hash).collect::<Vec<_>>());
        let tokens: Vec<u32> = (0..2).cycle().take(2 * hashes.len()).collect();
        let event = OutgoingEngineEvent::Stored(OutgoingBlocks {
            hashes: &hashes,
            parent,
            tokens: &tokens,
            block_size: 2,
            medium: StorageMedium::Gpu,
            cache_salt: None,
            extra_keys: None,
        });
        let mut payload = Vec::new();
        encode_engine_batch(EngineEventFormat::Vllm, 0.0, &[event], 0, &mut payload);
        let batch = EngineEventBatch::decode(&payload).unwrap();
        let Some(Ok(EngineEvent::Stored(stored))) = batch.events().next() else { panic!() };
        known.learn(&keyspace, &stored);
        known.stored(stored.hashes, 0, EngineCacheTier::L1)
    }

    #[test]
    fn blocks_that_are_left_out_are_counted_by_reason() {
        let known = RehashedBlocks { max_blocks: 4, ..RehashedBlocks::default() };
        let counts =
            |event: RehashedEvent| (event.hashes.len(), event.left_out.over_capacity, event.left_out.unknown);
        assert_eq!(counts(store(&known, None, &[11, 12])), (2, 0, 0));
        assert_eq!(counts(store(&known, Some(99), &[21])), (0, 0, 1), "an unknown parent");
        assert_eq!(counts(store(&known, Some(12), &[13, 14, 15])), (2, 1, 0));
        assert_eq!(counts(store(&known, Some(14), &[16])), (0, 1, 0));
        known.clear(EngineCacheTier::L1);
        assert_eq!(counts(store(&known, None, &[11])), (1, 0, 0));
    }
}

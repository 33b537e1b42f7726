//! Placements of blocks, deduplicated.
//!
//! Many blocks have the same placement, so a block's entry in the table is only the number of a placement. Placements
//! are reference counted; an unused one frees its number.

use super::hash_table::CompactHashTable;
use super::indices::PlacementIndex;
use super::store_blocks::StoredBlock;

const CHUNK: usize = 1 << CHUNK_BITS;
const CHUNK_BITS: u32 = 10;
/// Distinct placements for which the table of placements is sized.
const USUAL_PLACEMENTS: usize = 200_000;

/// Placement of one block, unpacked for a change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BlockPlacement {
    /// Columns that have the block in L1, as a bit set.
    pub(super) l1: Vec<u64>,
    /// Columns that have the block in L2, as a bit set.
    pub(super) l2: Vec<u64>,
    pub(super) stored: StoredBlock,
}

/// The sets of columns that have a block in L1 and in L2.
#[derive(Clone, Copy)]
pub(super) struct PlacementSets<'a> {
    pub(super) l1: &'a [u64],
    pub(super) l2: &'a [u64],
}

impl BlockPlacement {
    pub(super) fn clear(&mut self, words: usize) {
        for set in [&mut self.l1, &mut self.l2] {
            set.clear();
            set.resize(words, 0);
        }
        self.stored = StoredBlock::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.stored.is_none() && self.l1.iter().chain(&self.l2).all(|&word| word == 0)
    }

    /// Empty words do not contribute, so that a placement keeps its hash when sets get wider.
    fn hash(&self) -> u64 {
        let sets = self.l1.iter().enumerate().chain((1 << 20..).zip(&self.l2));
        let words = sets.filter(|&(_, &word)| word != 0);
        words.fold(self.stored.hash(), |hash, (position, &word)| hash ^ mix(word ^ mix(position as u64 + 1)))
    }
}

/// A bijection of 64-bit numbers in which every bit depends on every bit.
pub(super) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[derive(Debug, Clone, Copy, Default)]
struct PlacementRecord {
    key: u64,
    /// Blocks with this placement; 0 if the number is free.
    blocks: u32,
    shared: StoredBlock,
}

/// Stored in chunks, so that adding placements never copies all of them.
#[derive(Debug)]
struct PlacementChunk {
    records: Box<[PlacementRecord]>,
    /// L1 and L2 of each record, one after the other.
    sets: Box<[u64]>,
}

#[derive(Debug)]
pub(super) struct PlacementTable {
    words: usize,
    chunks: Vec<PlacementChunk>,
    free: Vec<PlacementIndex>,
    in_use: usize,
    by_content: CompactHashTable,
}

/// Where a placement is: its chunk, and its record there.
fn chunk_and_record(id: PlacementIndex) -> (usize, usize) {
    ((id.raw() >> CHUNK_BITS) as usize, id.raw() as usize % CHUNK)
}

impl PlacementTable {
    pub(super) fn new(words: usize) -> Self {
        Self {
            words,
            chunks: Vec::new(),
            free: Vec::new(),
            in_use: 0,
            by_content: CompactHashTable::new(USUAL_PLACEMENTS),
        }
    }

    pub(super) fn words(&self) -> usize {
        self.words
    }

    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    pub(super) fn bytes(&self) -> usize {
        let chunk = CHUNK * (size_of::<PlacementRecord>() + 16 * self.words);
        self.chunks.len() * chunk + self.free.capacity() * 4 + self.by_content.bytes()
    }

    /// Widens all sets. Takes time in proportion to the placements; happens when the number of engines exceeds a
    /// multiple of 64.
    pub(super) fn widen(&mut self, words: usize) {
        for chunk in &mut self.chunks {
            let mut sets = vec![0; CHUNK * 2 * words].into_boxed_slice();
            for (wide, narrow) in sets.chunks_mut(words).zip(chunk.sets.chunks(self.words)) {
                wide[..narrow.len()].copy_from_slice(narrow);
            }
            chunk.sets = sets;
        }
        self.words = words;
    }

    fn record(&self, id: PlacementIndex) -> &PlacementRecord {
        let (chunk, record) = chunk_and_record(id);
        &self.chunks[chunk].records[record]
    }

    fn record_mut(&mut self, id: PlacementIndex) -> &mut PlacementRecord {
        let (chunk, record) = chunk_and_record(id);
        &mut self.chunks[chunk].records[record]
    }

    #[inline]
    pub(super) fn sets(&self, id: PlacementIndex) -> PlacementSets<'_> {
        let (chunk, record) = chunk_and_record(id);
        let start = record * 2 * self.words;
        let sets = &self.chunks[chunk].sets[start..start + 2 * self.words];
        let (l1, l2) = sets.split_at(self.words);
        PlacementSets { l1, l2 }
    }

    #[inline]
    pub(super) fn shared(&self, id: PlacementIndex) -> StoredBlock {
        self.record(id).shared
    }

    pub(super) fn load(&self, id: PlacementIndex, into: &mut BlockPlacement) {
        let PlacementSets { l1, l2 } = self.sets(id);
        into.l1.clear();
        into.l1.extend_from_slice(l1);
        into.l2.clear();
        into.l2.extend_from_slice(l2);
        into.stored = self.shared(id);
    }

    fn matches(&self, id: PlacementIndex, placement: &BlockPlacement) -> bool {
        let PlacementSets { l1, l2 } = self.sets(id);
        l1 == placement.l1 && l2 == placement.l2 && self.shared(id) == placement.stored
    }

    /// Returns the number of a placement and counts one more block. `None` when all numbers are in use.
    pub(super) fn acquire(&mut self, placement: &BlockPlacement) -> Option<PlacementIndex> {
        let mut key = placement.hash();
        // Hash collisions are extremely unlikely; a colliding placement takes the next key.
        while let Some(id) = self.by_content.find(key).and_then(|position| self.by_content.value(position)) {
            if self.matches(id, placement) {
                self.record_mut(id).blocks += 1;
                return Some(id);
            }
            key = key.wrapping_add(1);
        }
        let id = self.allocate()?;
        *self.record_mut(id) = PlacementRecord { key, blocks: 1, shared: placement.stored };
        let (chunk, record) = chunk_and_record(id);
        let words = self.words;
        let start = record * 2 * words;
        let sets = &mut self.chunks[chunk].sets[start..start + 2 * words];
        sets[..words].copy_from_slice(&placement.l1);
        sets[words..].copy_from_slice(&placement.l2);
        self.by_content.insert(key, id);
        self.in_use += 1;
        Some(id)
    }

    /// Counts one block less for this placement.
    pub(super) fn release(&mut self, id: PlacementIndex) {
        let record = self.record_mut(id);
        record.blocks = record.blocks.saturating_sub(1);
        let (pages, key) = (record.blocks, record.key);
        if pages == 0 {
            if let Some(position) = self.by_content.find(key) {
                self.by_content.remove(position);
            }
            self.free.push(id);
            self.in_use -= 1;
        }
    }

    fn allocate(&mut self) -> Option<PlacementIndex> {
        if self.free.is_empty() {
            let first = u32::try_from(self.chunks.len() * CHUNK).ok()?;
            let last = first.checked_add(CHUNK as u32 - 1)?;
            if PlacementIndex::from_raw(last) > PlacementIndex::MAX {
                return None;
            }
            let records = vec![PlacementRecord::default(); CHUNK].into_boxed_slice();
            let sets = vec![0; CHUNK * 2 * self.words].into_boxed_slice();
            self.chunks.push(PlacementChunk { records, sets });
            self.free.extend((first..=last).rev().map(PlacementIndex::from_raw));
        }
        self.free.pop()
    }

    /// Block counts of every number in use.
    #[cfg(test)]
    pub(super) fn counts(&self) -> std::collections::BTreeMap<PlacementIndex, u32> {
        let records = self.chunks.iter().flat_map(|chunk| chunk.records.iter());
        let indices = (0..).map(PlacementIndex::from_raw);
        indices.zip(records.map(|record| record.blocks)).filter(|&(_, pages)| pages > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(l1: u64, l2: u64) -> BlockPlacement {
        BlockPlacement { l1: vec![l1], l2: vec![l2], stored: StoredBlock::default() }
    }

    #[test]
    fn equal_placements_share_a_number_while_in_use() {
        let mut all = PlacementTable::new(1);
        let one = all.acquire(&placement(1, 0)).unwrap();
        assert_eq!(all.acquire(&placement(1, 0)).unwrap(), one);
        let other = all.acquire(&placement(0, 1)).unwrap();
        assert_ne!(one, other, "the tiers are distinguished");
        all.release(one);
        assert_eq!(all.in_use(), 2);
        all.release(one);
        assert_eq!(all.in_use(), 1);
        assert_eq!(all.acquire(&placement(4, 4)).unwrap(), one, "numbers are used again");
    }

    #[test]
    fn wider_sets_are_still_found() {
        let mut all = PlacementTable::new(1);
        let sets = if cfg!(miri) { 50 } else { 3000 };
        let ids: Vec<PlacementIndex> =
            (1..sets).map(|set| all.acquire(&placement(set, !set)).unwrap()).collect();
        all.widen(3);
        for (set, id) in (1..sets).zip(ids) {
            let wide =
                BlockPlacement { l1: vec![set, 0, 0], l2: vec![!set, 0, 0], ..BlockPlacement::default() };
            assert_eq!(all.acquire(&wide), Some(id));
        }
    }
}

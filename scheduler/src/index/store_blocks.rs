//! Blocks in the shared store: which of a block's objects exist, and on which node.

use super::placement_table::mix;
use crate::prediction::StoreMedium;

/// Maximum number of objects per block: ranks times keys and values.
pub const MAX_PARTS: u8 = 64;

/// A store node's number in the index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreNodeSlot(pub(super) u16);

impl StoreNodeSlot {
    /// As an index: nodes are numbered from 0, and numbers of lost nodes are reused.
    #[must_use]
    pub fn as_usize(self) -> usize {
        usize::from(self.0)
    }
}

/// One object of a block, out of all that make the block complete: a rank's keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockPartIndex {
    index: u8,
    count: u8,
}

impl BlockPartIndex {
    /// Part `number` (from 0) out of `of`; `None` unless `number < of <= MAX_PARTS`.
    #[must_use]
    pub fn new(number: u8, of: u8) -> Option<Self> {
        (number < of && of <= MAX_PARTS).then_some(Self { index: number, count: of })
    }

    fn bit(self) -> u64 {
        1 << self.index
    }
}

/// Bit mask of `of` parts.
fn all_parts(of: u8) -> u64 {
    u64::MAX.checked_shr(64 - u32::from(of.min(64))).unwrap_or(0)
}

/// State of a block in the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StoredBlock {
    /// Parts that exist, as a bit set.
    parts: u64,
    /// Parts that existed before the current reconciliation and were not reported in it yet.
    unconfirmed: u64,
    /// Number of parts of a complete block.
    part_count: u8,
    /// The reconciliation in which `parts` were reported or retained.
    generation: u8,
    /// Node of the first part.
    node: StoreNodeSlot,
    nvme: bool,
    /// Whether some part is on another node than the first.
    spread: bool,
}

impl StoredBlock {
    pub(super) fn is_none(&self) -> bool {
        self.parts | self.unconfirmed == 0
    }

    pub(super) fn hash(&self) -> u64 {
        if self.is_none() {
            return 0;
        }
        let flags = u64::from(self.nvme) | u64::from(self.spread) << 1 | u64::from(self.part_count) << 8;
        let rest = flags | u64::from(self.generation) << 16 | u64::from(self.node.0) << 24;
        mix(self.parts ^ mix(self.unconfirmed ^ mix(rest ^ 1 << 63)))
    }

    /// Location of a block that can be loaded, that is, of which all parts exist.
    #[inline]
    pub(super) fn complete(&self) -> Option<StoredBlockLocation> {
        let medium = if self.nvme { StoreMedium::Nvme } else { StoreMedium::Dram };
        let location = StoredBlockLocation { node: self.node, medium, spread: self.spread };
        (self.part_count > 0 && self.parts | self.unconfirmed == all_parts(self.part_count))
            .then_some(location)
    }

    pub(super) fn add(&mut self, part: BlockPartIndex, node: StoreNodeSlot, medium: StoreMedium) {
        let nvme = medium == StoreMedium::Nvme;
        let existing = all_parts(part.count);
        self.parts &= existing;
        self.unconfirmed &= existing & !part.bit();
        self.part_count = part.count;
        if (self.parts & !part.bit()) | self.unconfirmed == 0 {
            (self.node, self.nvme, self.spread) = (node, nvme, false);
        } else if (self.node, self.nvme) != (node, nvme) {
            self.spread = true;
        }
        self.parts |= part.bit();
    }

    pub(super) fn remove(&mut self, part: BlockPartIndex) {
        self.parts &= !part.bit();
        self.unconfirmed &= !part.bit();
    }
}

/// Location of a block in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBlockLocation {
    /// Node of the block's first part.
    pub node: StoreNodeSlot,
    /// Medium of the first part on that node.
    pub medium: StoreMedium,
    /// Whether other parts are on other nodes.
    pub spread: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct StoreNodeState {
    pages: u64,
    alive: bool,
}

/// The store's nodes, and the progress of its reconciliation.
#[derive(Debug)]
pub(super) struct SharedStoreState {
    nodes: Vec<StoreNodeState>,
    generation: u8,
    /// The oldest generation that still counts: the last one before the current reconciliation started.
    oldest: u8,
    /// Number of blocks, indexed by generation.
    pages: Box<[u64]>,
    /// Number of blocks in all generations.
    total: u64,
    /// Number of blocks with unconfirmed parts.
    unconfirmed: u64,
    /// Blocks of lost nodes that are still in the table.
    orphans: u64,
}

impl SharedStoreState {
    pub(super) fn new() -> Self {
        let pages = vec![0; 256].into_boxed_slice();
        Self { nodes: Vec::new(), generation: 0, oldest: 0, pages, total: 0, unconfirmed: 0, orphans: 0 }
    }

    /// A number is reused only when no block refers to it any more.
    pub(super) fn add_node(&mut self) -> Option<StoreNodeSlot> {
        let fresh = StoreNodeState { pages: 0, alive: true };
        if let Some(at) = self.nodes.iter().position(|node| !node.alive && node.pages == 0) {
            self.nodes[at] = fresh;
            return Some(StoreNodeSlot(at as u16));
        }
        let node = StoreNodeSlot(u16::try_from(self.nodes.len()).ok()?);
        self.nodes.push(fresh);
        Some(node)
    }

    pub(super) fn remove_node(&mut self, node: StoreNodeSlot) {
        if let Some(node) = self.nodes.get_mut(usize::from(node.0)).filter(|node| node.alive) {
            node.alive = false;
            self.orphans += node.pages;
        }
    }

    pub(super) fn has_node(&self, node: StoreNodeSlot) -> bool {
        self.nodes.get(usize::from(node.0)).is_some_and(|node| node.alive)
    }

    /// Starts a reconciliation: all parts must be reported again. A second call before its end starts over.
    pub(super) fn begin(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }

    pub(super) fn end(&mut self) {
        self.oldest = self.generation;
    }

    fn reconciling(&self) -> bool {
        self.oldest != self.generation
    }

    fn age(&self, generation: u8) -> u8 {
        self.generation.wrapping_sub(generation)
    }

    /// Whether the next generation still has blocks of 256 reconciliations ago.
    pub(super) fn is_next_generation_used(&self) -> bool {
        self.pages[usize::from(self.generation.wrapping_add(1))] > 0
    }

    /// Blocks that must be changed or removed before the old generations can be dropped.
    pub(super) fn unswept(&self) -> u64 {
        // Rarely do more than two generations count.
        let counting = (0..=self.age(self.oldest)).map(|age| self.generation.wrapping_sub(age));
        let counting: u64 = counting.map(|generation| self.pages[usize::from(generation)]).sum();
        let forgotten = self.total.saturating_sub(counting);
        let unconfirmed = if self.reconciling() { 0 } else { self.unconfirmed };
        self.orphans + unconfirmed + forgotten
    }

    /// The parts of `page` that count now.
    #[inline]
    pub(super) fn current(&self, page: StoredBlock) -> StoredBlock {
        if page.is_none() || !self.has_node(page.node) {
            return StoredBlock::default();
        }
        let (parts, unconfirmed) = if page.generation == self.generation {
            (page.parts, if self.reconciling() { page.unconfirmed } else { 0 })
        } else if page.generation == self.oldest {
            (0, page.parts)
        } else if self.age(page.generation) < self.age(self.oldest) {
            (0, page.parts | page.unconfirmed)
        } else {
            (0, 0)
        };
        if parts | unconfirmed == 0 {
            return StoredBlock::default();
        }
        StoredBlock { parts, unconfirmed, generation: self.generation, ..page }
    }

    /// Initial state of a block, before its first part is added.
    pub(super) fn new_block(&self) -> StoredBlock {
        StoredBlock { generation: self.generation, ..StoredBlock::default() }
    }

    /// Counts a block that gained or lost these parts.
    pub(super) fn count(&mut self, page: StoredBlock, gained: bool) {
        if page.is_none() {
            return;
        }
        let step = |number: &mut u64| {
            *number = if gained { *number + 1 } else { number.saturating_sub(1) };
        };
        step(&mut self.pages[usize::from(page.generation)]);
        step(&mut self.total);
        if page.unconfirmed != 0 {
            step(&mut self.unconfirmed);
        }
        if let Some(node) = self.nodes.get_mut(usize::from(page.node.0)) {
            step(&mut node.pages);
            if !node.alive {
                step(&mut self.orphans);
            }
        }
    }

    /// Checks the counts against all blocks.
    #[cfg(test)]
    pub(super) fn check(&self, all: impl Iterator<Item = StoredBlock>) {
        let mut again = Self { nodes: self.nodes.clone(), ..Self::new() };
        again.nodes.iter_mut().for_each(|node| node.pages = 0);
        all.for_each(|page| again.count(page, true));
        assert_eq!(again.pages, self.pages);
        let counts = |store: &Self| (store.total, store.unconfirmed, store.orphans);
        assert_eq!(counts(&again), counts(self));
        let pages = |store: &Self| store.nodes.iter().map(|node| node.pages).collect::<Vec<_>>();
        assert_eq!(pages(&again), pages(self));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_bounded() {
        assert!(BlockPartIndex::new(0, 0).is_none());
        assert!(BlockPartIndex::new(2, 2).is_none());
        assert!(BlockPartIndex::new(0, 65).is_none());
        assert!(BlockPartIndex::new(63, 64).is_some());
    }

    #[test]
    fn a_page_is_complete_with_its_last_part() {
        let mut page = StoredBlock::default();
        let (a, b) = (StoreNodeSlot(1), StoreNodeSlot(2));
        page.add(BlockPartIndex::new(1, 2).unwrap(), a, StoreMedium::Dram);
        assert_eq!(page.complete(), None);
        page.add(BlockPartIndex::new(0, 2).unwrap(), b, StoreMedium::Dram);
        let location = StoredBlockLocation { node: a, medium: StoreMedium::Dram, spread: true };
        assert_eq!(page.complete(), Some(location));
        page.remove(BlockPartIndex::new(0, 2).unwrap());
        assert_eq!(page.complete(), None);
    }

    #[test]
    fn sixty_four_parts_fit() {
        let mut page = StoredBlock::default();
        for number in 0..64 {
            assert_eq!(page.complete(), None);
            page.add(BlockPartIndex::new(number, 64).unwrap(), StoreNodeSlot(0), StoreMedium::Nvme);
        }
        assert!(page.complete().is_some_and(|location| !location.spread));
    }
}

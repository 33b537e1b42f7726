//! Engines as bit positions (columns) in bit sets.
//!
//! An engine's blocks are bits in one column. Clearing an engine does not touch its blocks: the engine gets another
//! column, and the bits of the old one stop counting at once. A sweep removes them later. Reconciliation is similar:
//! blocks reported again get bits in the new column, and until it ends the old column counts too.

use super::indices::ColumnIndex;

/// Cache tier of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineCacheTier {
    L1,
    L2,
}

/// An engine's number in the index. Numbers of removed engines are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineSlot(pub(super) u32);

impl EngineSlot {
    /// As an index into [`IndexLookup::engines`](super::IndexLookup::engines).
    #[must_use]
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// Meaning of the bits in one tier of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ColumnState {
    /// Counts. In a column that its engine has left, a sweep moves the bit to the engine's current column.
    Live,
    /// Counts until a reconciliation ends.
    Unconfirmed,
    /// Does not count. A sweep removes it.
    Dead,
}

#[derive(Debug, Clone, Copy)]
struct EngineColumn {
    engine: EngineSlot,
    bits: [ColumnState; 2],
    /// Number of blocks, indexed by tier.
    pages: [u64; 2],
}

/// A column that its engine has left and whose bits still count.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnAlias {
    pub(super) from: ColumnIndex,
    pub(super) to: ColumnIndex,
    /// Whether the bits count, indexed by tier.
    pub(super) counts: [bool; 2],
}

#[derive(Debug, Default)]
pub(super) struct ColumnTable {
    columns: Vec<EngineColumn>,
    /// The current column of each engine.
    current: Vec<Option<ColumnIndex>>,
    /// Columns that their engines have left and that still contain bits.
    retired: Vec<ColumnIndex>,
    free: Vec<ColumnIndex>,
    /// Current columns, as a bit set.
    serving: Vec<u64>,
    /// Columns any of whose bits count, as a bit set.
    counting: Vec<u64>,
    aliases: Vec<ColumnAlias>,
    /// Incremented when anything changes that lookups depend on.
    revision: u64,
}

pub(super) fn contains(set: &[u64], column: ColumnIndex) -> bool {
    set.get(column.word()).is_some_and(|word| word & column.mask() != 0)
}

pub(super) fn set_bit(set: &mut [u64], column: ColumnIndex, value: bool) {
    if let Some(word) = set.get_mut(column.word()) {
        let bit = column.mask();
        *word = if value { *word | bit } else { *word & !bit };
    }
}

/// The columns in one word of a bit set; `word` is its position.
pub(super) fn members(mut bits: u64, word: usize) -> impl Iterator<Item = ColumnIndex> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(ColumnIndex::from_bit(word, bit))
    })
}

impl ColumnTable {
    pub(super) fn engines(&self) -> usize {
        self.current.len()
    }

    /// Words that a bit set needs, with room for retired columns: sets widen when engines are added, and rarely when
    /// engines are cleared.
    pub(super) fn words(&self) -> usize {
        let roomy = self.current.len() + self.current.len() / 4 + 8;
        roomy.max(self.columns.len()).div_ceil(64)
    }

    pub(super) fn serving(&self) -> &[u64] {
        &self.serving
    }

    pub(super) fn counting(&self) -> &[u64] {
        &self.counting
    }

    /// Changes whenever a column changes its meaning.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn aliases(&self) -> &[ColumnAlias] {
        &self.aliases
    }

    /// Columns that a sweep would free.
    pub(super) fn reclaimable(&self) -> usize {
        let columns = self.retired.iter().map(|&column| &self.columns[column.get()]);
        columns.filter(|column| !column.bits.contains(&ColumnState::Unconfirmed)).count()
    }

    /// Bits that a sweep has to remove or move.
    pub(super) fn unswept(&self) -> u64 {
        let columns = self.retired.iter().map(|&column| &self.columns[column.get()]);
        let bits = columns.flat_map(|column| column.bits.iter().zip(&column.pages));
        bits.filter(|(bits, _)| **bits != ColumnState::Unconfirmed).map(|(_, pages)| pages).sum()
    }

    /// Whether one of these bits has to be removed or moved.
    pub(super) fn is_unswept(&self, l1: &[u64], l2: &[u64]) -> bool {
        self.retired.iter().any(|&column| {
            let [first, second] = self.columns[column.get()].bits;
            (first != ColumnState::Unconfirmed && contains(l1, column))
                || (second != ColumnState::Unconfirmed && contains(l2, column))
        })
    }

    /// The column for an engine's new blocks.
    pub(super) fn current(&self, engine: EngineSlot) -> Option<ColumnIndex> {
        self.current.get(engine.as_usize()).copied().flatten()
    }

    pub(super) fn add_engine(&mut self) -> EngineSlot {
        let vacant = self.current.iter().position(Option::is_none);
        let engine = EngineSlot(vacant.unwrap_or(self.current.len()) as u32);
        if vacant.is_none() {
            self.current.push(None);
        }
        self.assign_column(engine);
        self.refresh();
        engine
    }

    pub(super) fn remove_engine(&mut self, engine: EngineSlot) {
        for tier in [EngineCacheTier::L1, EngineCacheTier::L2] {
            self.mark(engine, tier, ColumnState::Dead);
        }
        self.retire(engine);
        self.refresh();
    }

    /// Clears all blocks of one tier of an engine.
    pub(super) fn clear(&mut self, engine: EngineSlot, tier: EngineCacheTier) {
        self.replace_current(engine, tier, ColumnState::Dead);
    }

    /// Starts a reconciliation: the engine reports its blocks again.
    pub(super) fn begin(&mut self, engine: EngineSlot, tier: EngineCacheTier) {
        self.replace_current(engine, tier, ColumnState::Unconfirmed);
    }

    /// Ends a reconciliation: drops the blocks that were not reported again.
    pub(super) fn end(&mut self, engine: EngineSlot, tier: EngineCacheTier) {
        for column in &mut self.columns {
            if column.engine == engine && column.bits[tier as usize] == ColumnState::Unconfirmed {
                column.bits[tier as usize] = ColumnState::Dead;
            }
        }
        self.refresh();
    }

    fn replace_current(&mut self, engine: EngineSlot, tier: EngineCacheTier, bits: ColumnState) {
        let Some(present) = self.current(engine) else { return };
        self.mark(engine, tier, bits);
        let column = &mut self.columns[present.get()];
        if column.pages[tier as usize] == 0 {
            // The old column has no bits to leave behind.
            column.bits[tier as usize] = ColumnState::Live;
        } else {
            self.retire(engine);
            self.assign_column(engine);
        }
        self.refresh();
    }

    /// Dead bits stay dead.
    fn mark(&mut self, engine: EngineSlot, tier: EngineCacheTier, bits: ColumnState) {
        let columns = self.columns.iter_mut().filter(|column| column.engine == engine);
        for column in columns.filter(|column| column.bits[tier as usize] != ColumnState::Dead) {
            column.bits[tier as usize] = bits;
        }
    }

    fn retire(&mut self, engine: EngineSlot) {
        if let Some(column) = self.current.get_mut(engine.as_usize()).and_then(Option::take) {
            self.retired.push(column);
        }
    }

    fn assign_column(&mut self, engine: EngineSlot) {
        let fresh = EngineColumn { engine, bits: [ColumnState::Live; 2], pages: [0, 0] };
        let column = self.free.pop().unwrap_or(ColumnIndex::new(self.columns.len()));
        match self.columns.get_mut(column.get()) {
            Some(free) => *free = fresh,
            None => self.columns.push(fresh),
        }
        if let Some(present) = self.current.get_mut(engine.as_usize()) {
            *present = Some(column);
        }
    }

    /// Frees columns without bits, and recomputes the sets that lookups use.
    fn refresh(&mut self) {
        self.revision += 1;
        let columns = &mut self.columns;
        let free = &mut self.free;
        self.retired.retain(|&column| {
            let entry = &mut columns[column.get()];
            let empty = entry.pages == [0, 0];
            if empty {
                // A free column belongs to no engine: `mark` must not find it.
                *entry = EngineColumn {
                    engine: EngineSlot(u32::MAX),
                    bits: [ColumnState::Dead; 2],
                    pages: [0, 0],
                };
                free.push(column);
            }
            !empty
        });
        let words = self.words();
        for set in [&mut self.serving, &mut self.counting] {
            set.clear();
            set.resize(words, 0);
        }
        for &column in self.current.iter().flatten() {
            set_bit(&mut self.serving, column, true);
            set_bit(&mut self.counting, column, true);
        }
        self.aliases.clear();
        for &from in &self.retired {
            let EngineColumn { engine, bits, .. } = self.columns[from.get()];
            let counts = bits.map(|bits| bits != ColumnState::Dead);
            if let Some(to) =
                self.current.get(engine.as_usize()).copied().flatten().filter(|_| counts.contains(&true))
            {
                set_bit(&mut self.counting, from, true);
                self.aliases.push(ColumnAlias { from, to, counts });
            }
        }
    }

    /// Sets or clears an engine's bit. An engine has a block at most once.
    pub(super) fn assign(&self, engine: EngineSlot, set: &mut [u64], stored: bool) {
        let Some(present) = self.current(engine) else { return };
        self.aliases
            .iter()
            .filter(|alias| alias.to == present)
            .for_each(|alias| set_bit(set, alias.from, false));
        set_bit(set, present, stored);
    }

    /// Applies the moves and removals of a sweep to one set.
    pub(super) fn drop_stale(&self, set: &mut [u64], tier: EngineCacheTier) {
        for &from in &self.retired {
            let EngineColumn { engine, bits, .. } = self.columns[from.get()];
            let bits = bits[tier as usize];
            if bits == ColumnState::Unconfirmed || !contains(set, from) {
                continue;
            }
            set_bit(set, from, false);
            if let (ColumnState::Live, Some(present)) = (bits, self.current(engine)) {
                set_bit(set, present, true);
            }
        }
    }

    /// The engine that owns the column.
    pub(super) fn engine_of(&self, column: ColumnIndex) -> EngineSlot {
        self.columns[column.get()].engine
    }

    /// Counts the bits by which two sets of a tier differ. Returns whether a retired column became empty.
    pub(super) fn count(&mut self, tier: EngineCacheTier, before: &[u64], after: &[u64]) {
        let mut emptied = false;
        for (word, (&before, &after)) in before.iter().zip(after).enumerate() {
            for column in members(after & !before, word) {
                self.columns[column.get()].pages[tier as usize] += 1;
            }
            for column in members(before & !after, word) {
                let pages = &mut self.columns[column.get()].pages;
                pages[tier as usize] = pages[tier as usize].saturating_sub(1);
                emptied |= *pages == [0, 0];
            }
        }
        if emptied && !self.retired.is_empty() {
            self.refresh();
        }
    }

    /// Number of blocks in one tier of an engine.
    pub(super) fn pages(&self, engine: EngineSlot, tier: EngineCacheTier) -> u64 {
        let Some(present) = self.current(engine) else { return 0 };
        let aliases = self.aliases.iter().filter(|alias| alias.to == present && alias.counts[tier as usize]);
        let columns = aliases.map(|alias| alias.from).chain([present]);
        columns.map(|column| self.columns[column.get()].pages[tier as usize]).sum()
    }

    /// Checks the columns against the bits of all blocks.
    #[cfg(test)]
    pub(super) fn check(&self, bits: &std::collections::BTreeMap<(bool, ColumnIndex), u64>) {
        for (index, column) in self.columns.iter().enumerate() {
            let index = ColumnIndex::new(index);
            let counted = [false, true].map(|l2| bits.get(&(l2, index)).copied().unwrap_or(0));
            assert_eq!(column.pages, counted, "{index:?}");
            let roles = [
                self.current.contains(&Some(index)),
                self.retired.contains(&index),
                self.free.contains(&index),
            ];
            assert_eq!(roles.iter().filter(|&&role| role).count(), 1, "{index:?}: {roles:?}");
        }
        assert!(bits.keys().all(|&(_, column)| column.get() < self.columns.len()));
    }
}

//! Engines as positions in bit sets.
//!
//! An engine's pages are bits in one column. Clearing an engine does not touch its pages: the engine gets another
//! column, and the bits of the old one stop counting at once. A sweep removes them later. Reconciliation works alike:
//! pages named again get bits in the new column, and while it lasts the old column counts too.

/// Where an engine keeps a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Device memory.
    L1,
    /// Host memory.
    L2,
}

/// An engine, as numbered by the index. Numbers of removed engines are given again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineSlot(pub(super) u32);

impl EngineSlot {
    /// As an index into [`Hits::engines`](super::Hits::engines).
    #[must_use]
    pub fn at(self) -> usize {
        self.0 as usize
    }
}

/// What a bit in one tier of a column means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bits {
    /// It counts. In a column that its engine has left, a sweep moves it to the engine's present one.
    Live,
    /// It counts until a reconciliation ends.
    Unconfirmed,
    /// It does not count. A sweep removes it.
    Dead,
}

#[derive(Debug, Clone, Copy)]
struct Column {
    engine: EngineSlot,
    bits: [Bits; 2],
    /// Pages by tier.
    pages: [u64; 2],
}

/// A column that its engine has left and whose bits still count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alias {
    pub(super) from: u32,
    pub(super) to: u32,
    /// Whether bits count, by tier.
    pub(super) counts: [bool; 2],
}

/// All columns.
#[derive(Debug, Default)]
pub(super) struct Columns {
    columns: Vec<Column>,
    /// The present column of each engine.
    present: Vec<Option<u32>>,
    /// Columns that their engines have left, with bits left in them.
    left: Vec<u32>,
    free: Vec<u32>,
    /// Present columns, as a bit set.
    serving: Vec<u64>,
    /// Columns any of whose bits count, as a bit set.
    counting: Vec<u64>,
    aliases: Vec<Alias>,
    /// Changes when anything that lookups need does.
    revision: u64,
}

pub(super) fn has(set: &[u64], column: u32) -> bool {
    set.get(column as usize / 64).is_some_and(|word| word >> (column % 64) & 1 == 1)
}

pub(super) fn put(set: &mut [u64], column: u32, value: bool) {
    if let Some(word) = set.get_mut(column as usize / 64) {
        let bit = 1 << (column % 64);
        *word = if value { *word | bit } else { *word & !bit };
    }
}

/// The columns of a word of a bit set; `word` is its position.
pub(super) fn members(mut bits: u64, word: usize) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(word as u32 * 64 + bit)
    })
}

impl Columns {
    pub(super) fn engines(&self) -> usize {
        self.present.len()
    }

    /// Words that a bit set needs, with room for columns that are left: so sets get wider when engines are added, and
    /// hardly ever when engines are cleared.
    pub(super) fn words(&self) -> usize {
        let roomy = self.present.len() + self.present.len() / 4 + 8;
        roomy.max(self.columns.len()).div_ceil(64)
    }

    pub(super) fn serving(&self) -> &[u64] {
        &self.serving
    }

    pub(super) fn counting(&self) -> &[u64] {
        &self.counting
    }

    /// Another number whenever columns have got another meaning.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn aliases(&self) -> &[Alias] {
        &self.aliases
    }

    /// Columns that a sweep would set free.
    pub(super) fn reclaimable(&self) -> usize {
        let columns = self.left.iter().map(|&column| &self.columns[column as usize]);
        columns.filter(|column| !column.bits.contains(&Bits::Unconfirmed)).count()
    }

    /// Bits to be removed or moved.
    pub(super) fn unswept(&self) -> u64 {
        let columns = self.left.iter().map(|&column| &self.columns[column as usize]);
        let bits = columns.flat_map(|column| column.bits.iter().zip(&column.pages));
        bits.filter(|(bits, _)| **bits != Bits::Unconfirmed).map(|(_, pages)| pages).sum()
    }

    /// Whether one of these bits is to be removed or moved.
    pub(super) fn is_unswept(&self, l1: &[u64], l2: &[u64]) -> bool {
        self.left.iter().any(|&column| {
            let [first, second] = self.columns[column as usize].bits;
            (first != Bits::Unconfirmed && has(l1, column))
                || (second != Bits::Unconfirmed && has(l2, column))
        })
    }

    /// The column that holds an engine's new pages.
    pub(super) fn present(&self, engine: EngineSlot) -> Option<u32> {
        self.present.get(engine.at()).copied().flatten()
    }

    pub(super) fn add_engine(&mut self) -> EngineSlot {
        let vacant = self.present.iter().position(Option::is_none);
        let engine = EngineSlot(vacant.unwrap_or(self.present.len()) as u32);
        if vacant.is_none() {
            self.present.push(None);
        }
        self.enter(engine);
        self.refresh();
        engine
    }

    pub(super) fn remove_engine(&mut self, engine: EngineSlot) {
        for tier in [Tier::L1, Tier::L2] {
            self.mark(engine, tier, Bits::Dead);
        }
        self.leave(engine);
        self.refresh();
    }

    /// Forgets all pages of an engine's tier.
    pub(super) fn clear(&mut self, engine: EngineSlot, tier: Tier) {
        self.turn(engine, tier, Bits::Dead);
    }

    /// From now on the engine names its pages again.
    pub(super) fn begin(&mut self, engine: EngineSlot, tier: Tier) {
        self.turn(engine, tier, Bits::Unconfirmed);
    }

    /// Forgets the pages that were not named again.
    pub(super) fn end(&mut self, engine: EngineSlot, tier: Tier) {
        for column in &mut self.columns {
            if column.engine == engine && column.bits[tier as usize] == Bits::Unconfirmed {
                column.bits[tier as usize] = Bits::Dead;
            }
        }
        self.refresh();
    }

    fn turn(&mut self, engine: EngineSlot, tier: Tier, bits: Bits) {
        let Some(present) = self.present(engine) else { return };
        self.mark(engine, tier, bits);
        let column = &mut self.columns[present as usize];
        if column.pages[tier as usize] == 0 {
            // Nothing to leave behind.
            column.bits[tier as usize] = Bits::Live;
        } else {
            self.leave(engine);
            self.enter(engine);
        }
        self.refresh();
    }

    /// What is dead stays dead.
    fn mark(&mut self, engine: EngineSlot, tier: Tier, bits: Bits) {
        let columns = self.columns.iter_mut().filter(|column| column.engine == engine);
        for column in columns.filter(|column| column.bits[tier as usize] != Bits::Dead) {
            column.bits[tier as usize] = bits;
        }
    }

    fn leave(&mut self, engine: EngineSlot) {
        if let Some(column) = self.present.get_mut(engine.at()).and_then(Option::take) {
            self.left.push(column);
        }
    }

    fn enter(&mut self, engine: EngineSlot) {
        let fresh = Column { engine, bits: [Bits::Live; 2], pages: [0, 0] };
        let column = self.free.pop().unwrap_or(self.columns.len() as u32);
        match self.columns.get_mut(column as usize) {
            Some(free) => *free = fresh,
            None => self.columns.push(fresh),
        }
        if let Some(present) = self.present.get_mut(engine.at()) {
            *present = Some(column);
        }
    }

    /// Frees columns without bits, and computes what lookups need.
    fn refresh(&mut self) {
        self.revision += 1;
        let columns = &mut self.columns;
        let free = &mut self.free;
        self.left.retain(|&column| {
            let entry = &mut columns[column as usize];
            let empty = entry.pages == [0, 0];
            if empty {
                // A free column belongs to no engine: `mark` must not find it.
                *entry = Column { engine: EngineSlot(u32::MAX), bits: [Bits::Dead; 2], pages: [0, 0] };
                free.push(column);
            }
            !empty
        });
        let words = self.words();
        for set in [&mut self.serving, &mut self.counting] {
            set.clear();
            set.resize(words, 0);
        }
        for &column in self.present.iter().flatten() {
            put(&mut self.serving, column, true);
            put(&mut self.counting, column, true);
        }
        self.aliases.clear();
        for &from in &self.left {
            let Column { engine, bits, .. } = self.columns[from as usize];
            let counts = bits.map(|bits| bits != Bits::Dead);
            if let Some(to) =
                self.present.get(engine.at()).copied().flatten().filter(|_| counts.contains(&true))
            {
                put(&mut self.counting, from, true);
                self.aliases.push(Alias { from, to, counts });
            }
        }
    }

    /// Sets or clears an engine's bit. An engine has a page at most once.
    pub(super) fn assign(&self, engine: EngineSlot, set: &mut [u64], stored: bool) {
        let Some(present) = self.present(engine) else { return };
        self.aliases.iter().filter(|alias| alias.to == present).for_each(|alias| put(set, alias.from, false));
        put(set, present, stored);
    }

    /// Moves and removes what a sweep would.
    pub(super) fn tidy(&self, set: &mut [u64], tier: Tier) {
        for &from in &self.left {
            let Column { engine, bits, .. } = self.columns[from as usize];
            let bits = bits[tier as usize];
            if bits == Bits::Unconfirmed || !has(set, from) {
                continue;
            }
            put(set, from, false);
            if let (Bits::Live, Some(present)) = (bits, self.present(engine)) {
                put(set, present, true);
            }
        }
    }

    /// Whose column it is.
    pub(super) fn engine_of(&self, column: u32) -> EngineSlot {
        self.columns[column as usize].engine
    }

    /// Counts the bits by which two sets of a tier differ. Returns whether a column that was left became empty.
    pub(super) fn count(&mut self, tier: Tier, before: &[u64], after: &[u64]) {
        let mut emptied = false;
        for (word, (&before, &after)) in before.iter().zip(after).enumerate() {
            for column in members(after & !before, word) {
                self.columns[column as usize].pages[tier as usize] += 1;
            }
            for column in members(before & !after, word) {
                let pages = &mut self.columns[column as usize].pages;
                pages[tier as usize] = pages[tier as usize].saturating_sub(1);
                emptied |= *pages == [0, 0];
            }
        }
        if emptied && !self.left.is_empty() {
            self.refresh();
        }
    }

    /// Pages of an engine's tier.
    pub(super) fn pages(&self, engine: EngineSlot, tier: Tier) -> u64 {
        let Some(present) = self.present(engine) else { return 0 };
        let aliases = self.aliases.iter().filter(|alias| alias.to == present && alias.counts[tier as usize]);
        let columns = aliases.map(|alias| alias.from).chain([present]);
        columns.map(|column| self.columns[column as usize].pages[tier as usize]).sum()
    }

    /// Checks the columns against the bits of all pages.
    #[cfg(test)]
    pub(super) fn check(&self, bits: &std::collections::BTreeMap<(bool, u32), u64>) {
        for (at, column) in (0..).zip(&self.columns) {
            let counted = [false, true].map(|l2| bits.get(&(l2, at)).copied().unwrap_or(0));
            assert_eq!(column.pages, counted, "column {at}");
            let roles = [self.present.contains(&Some(at)), self.left.contains(&at), self.free.contains(&at)];
            assert_eq!(roles.iter().filter(|&&role| role).count(), 1, "column {at}: {roles:?}");
        }
        assert!(bits.keys().all(|&(_, column)| (column as usize) < self.columns.len()));
    }
}

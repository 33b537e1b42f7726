//! The index against a model of plain maps.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Whether something was reported again in the current reconciliation; the rest is dropped at its end.
type ConfirmedFlag = bool;

#[derive(Debug, Clone, Default)]
struct ReferenceBlock {
    engines: BTreeMap<(EngineSlot, bool), ConfirmedFlag>,
    parts: BTreeMap<u8, ConfirmedFlag>,
    part_count: u8,
    location: Option<StoredBlockLocation>,
}

impl ReferenceBlock {
    fn complete(&self) -> Option<StoredBlockLocation> {
        let complete = !self.parts.is_empty() && self.parts.len() == usize::from(self.part_count);
        self.location.filter(|_| complete)
    }
}

#[derive(Debug, Default)]
struct ReferenceIndex {
    pages: BTreeMap<u64, ReferenceBlock>,
}

impl ReferenceIndex {
    fn holds(&self, page: u64, engine: EngineSlot, l2_too: bool) -> bool {
        let held =
            |tier| self.pages.get(&page).is_some_and(|page| page.engines.contains_key(&(engine, tier)));
        held(false) || (l2_too && held(true))
    }

    fn complete(&self, page: u64) -> Option<StoredBlockLocation> {
        self.pages.get(&page)?.complete()
    }

    fn retain_engines(&mut self, keep: impl Fn(EngineSlot, bool, ConfirmedFlag) -> bool) {
        for page in self.pages.values_mut() {
            page.engines.retain(|&(engine, tier), &mut confirmed| keep(engine, tier, confirmed));
        }
    }

    fn part_stored(&mut self, page: u64, number: u8, of: u8, node: StoreNodeSlot, medium: StoreMedium) {
        let page = self.pages.entry(page).or_default();
        page.parts.retain(|&part, _| part < of);
        page.part_count = of;
        let alone = page.parts.keys().all(|&part| part == number);
        page.location = match page.location {
            Some(location) if !alone => {
                let elsewhere = (location.node, location.medium) != (node, medium);
                Some(StoredBlockLocation { spread: location.spread || elsewhere, ..location })
            }
            _ => Some(StoredBlockLocation { node, medium, spread: false }),
        };
        page.parts.insert(number, true);
    }

    /// The expected lookup result for these engines.
    fn lookup(&self, pages: &[u64], engines: &[EngineSlot]) -> (Vec<EngineHits>, Vec<StoreBlockRun>) {
        let prefix = |engine, l2_too| {
            pages.iter().take_while(|&&page| self.holds(page, engine, l2_too)).count() as u32
        };
        let hits: Vec<EngineHits> = engines
            .iter()
            .map(|&engine| {
                let own = prefix(engine, true);
                let following = pages[own as usize..].iter();
                let shared = following.take_while(|&&page| self.complete(page).is_some()).count() as u32;
                EngineHits { l1: prefix(engine, false), local: own, shared }
            })
            .collect();
        let longest = hits.iter().map(|hits| hits.local).max().unwrap_or(0);
        let mut runs: Vec<StoreBlockRun> = Vec::new();
        let mut since = None;
        for (position, &page) in (0..).zip(pages) {
            let Some(location) = self.complete(page) else {
                since = None;
                continue;
            };
            let adjacent = since.is_some();
            if *since.get_or_insert(position) > longest {
                break;
            }
            match runs.last_mut() {
                Some(run) if adjacent && run.location == location => run.blocks += 1,
                _ => runs.push(StoreBlockRun { first: position, blocks: 1, location }),
            }
        }
        (hits, runs)
    }
}

/// Numbers select among what exists at that time.
#[derive(Debug, Clone)]
enum IndexOperation {
    AddEngine,
    RemoveEngine(usize),
    Stored(usize, bool, Vec<u8>),
    Removed(usize, bool, Vec<u8>),
    Cleared(usize, bool),
    Begin(usize, bool),
    End(usize, bool),
    AddNode,
    NodeLost(usize),
    PartStored(u8, u8, u8, usize, bool),
    PartRemoved(u8, u8, u8),
    BeginStore,
    EndStore,
    Sweep(usize),
    Lookup(Vec<u8>),
}

const PAGES: u8 = 16;

fn pages() -> impl Strategy<Value = Vec<u8>> {
    // Ranges, because prompts are contiguous.
    (0..PAGES, 1..PAGES).prop_map(|(first, len)| (first..PAGES.min(first + len)).collect())
}

fn op() -> impl Strategy<Value = IndexOperation> {
    let tier = any::<bool>;
    let part = || (0..PAGES, 0u8..2, 1u8..3);
    prop_oneof![
        1 => Just(IndexOperation::AddEngine),
        1 => (0..9usize).prop_map(IndexOperation::RemoveEngine),
        8 => (0..9usize, tier(), pages()).prop_map(|(engine, tier, pages)| IndexOperation::Stored(engine, tier, pages)),
        4 => (0..9usize, tier(), pages()).prop_map(|(engine, tier, pages)| IndexOperation::Removed(engine, tier, pages)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| IndexOperation::Cleared(engine, tier)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| IndexOperation::Begin(engine, tier)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| IndexOperation::End(engine, tier)),
        1 => Just(IndexOperation::AddNode),
        1 => (0..4usize).prop_map(IndexOperation::NodeLost),
        12 => (part(), 0..4usize, tier()).prop_map(|((page, part, of), node, nvme)| {
            IndexOperation::PartStored(page, part % of, of, node, nvme)
        }),
        3 => part().prop_map(|(page, part, of)| IndexOperation::PartRemoved(page, part % of, of)),
        1 => Just(IndexOperation::BeginStore),
        1 => Just(IndexOperation::EndStore),
        2 => (1..40usize).prop_map(IndexOperation::Sweep),
        6 => pages().prop_map(IndexOperation::Lookup),
    ]
}

/// The index and its model.
struct IndexUnderTest {
    index: KvBlockIndex,
    model: ReferenceIndex,
    engines: Vec<EngineSlot>,
    nodes: Vec<StoreNodeSlot>,
    hits: IndexLookup,
}

fn key(page: u8) -> u64 {
    BlockHashNamespace::new(&["model"]).key(u64::from(page))
}

fn keys(pages: &[u8]) -> Vec<u64> {
    pages.iter().copied().map(key).collect()
}

fn tier(l2: bool) -> EngineCacheTier {
    if l2 { EngineCacheTier::L2 } else { EngineCacheTier::L1 }
}

impl IndexUnderTest {
    fn new(max_pages: usize) -> Self {
        let (model, hits) = Default::default();
        let mut pair =
            Self { index: KvBlockIndex::new(max_pages), model, engines: Vec::new(), nodes: Vec::new(), hits };
        [
            IndexOperation::AddEngine,
            IndexOperation::AddEngine,
            IndexOperation::AddNode,
            IndexOperation::AddNode,
        ]
        .iter()
        .for_each(|op| pair.apply(op));
        pair
    }

    fn engine(&self, choice: usize) -> EngineSlot {
        // The number of a removed engine can still arrive.
        self.engines.get(choice).copied().unwrap_or(EngineSlot(1000))
    }

    fn apply(&mut self, op: &IndexOperation) {
        let (index, model) = (&mut self.index, &mut self.model);
        match *op {
            IndexOperation::AddEngine => {
                if self.engines.len() < 8 {
                    let engine = index.add_engine();
                    assert!(!self.engines.contains(&engine));
                    self.engines.push(engine);
                }
            }
            IndexOperation::RemoveEngine(choice) => {
                if choice < self.engines.len() {
                    let removed = self.engines.swap_remove(choice);
                    index.remove_engine(removed);
                    model.retain_engines(|engine, _, _| engine != removed);
                }
            }
            IndexOperation::Stored(choice, l2, ref pages) => {
                let engine = self.engine(choice);
                self.index.add_engine_blocks(engine, tier(l2), &keys(pages));
                if self.engines.contains(&engine) {
                    for key in keys(pages) {
                        self.model.pages.entry(key).or_default().engines.insert((engine, l2), true);
                    }
                }
            }
            IndexOperation::Removed(choice, l2, ref pages) => {
                let engine = self.engine(choice);
                self.index.remove_engine_blocks(engine, tier(l2), &keys(pages));
                for key in keys(pages) {
                    if let Some(page) = self.model.pages.get_mut(&key) {
                        page.engines.remove(&(engine, l2));
                    }
                }
            }
            IndexOperation::Cleared(choice, l2) => {
                let cleared = self.engine(choice);
                self.index.clear_engine_tier(cleared, tier(l2));
                self.model.retain_engines(|engine, tier, _| engine != cleared || tier != l2);
            }
            IndexOperation::Begin(choice, l2) => {
                let engine = self.engine(choice);
                self.index.begin_reconcile(ReconcileSource::Engine(engine, tier(l2)));
                for page in self.model.pages.values_mut() {
                    page.engines.entry((engine, l2)).and_modify(|confirmed| *confirmed = false);
                }
            }
            IndexOperation::End(choice, l2) => {
                let ended = self.engine(choice);
                self.index.end_reconcile(ReconcileSource::Engine(ended, tier(l2)));
                self.model
                    .retain_engines(|engine, tier, confirmed| engine != ended || tier != l2 || confirmed);
            }
            IndexOperation::AddNode => {
                if self.nodes.len() < 3 {
                    let node = index.add_store_node().unwrap();
                    assert!(!self.nodes.contains(&node));
                    self.nodes.push(node);
                }
            }
            IndexOperation::NodeLost(choice) => {
                if choice < self.nodes.len() {
                    let lost = self.nodes.swap_remove(choice);
                    index.remove_store_node(lost);
                    let pages = model.pages.values_mut();
                    pages
                        .filter(|page| page.location.is_some_and(|location| location.node == lost))
                        .for_each(|page| page.parts.clear());
                }
            }
            IndexOperation::PartStored(page, number, of, node, nvme) => {
                let medium = if nvme { StoreMedium::Nvme } else { StoreMedium::Dram };
                let part = BlockPartIndex::new(number, of).unwrap();
                if let Some(&node) = self.nodes.get(node) {
                    index.add_store_part(key(page), part, node, medium);
                    model.part_stored(key(page), number, of, node, medium);
                } else {
                    index.add_store_part(key(page), part, StoreNodeSlot(999), medium);
                }
            }
            IndexOperation::PartRemoved(page, number, of) => {
                index.remove_store_part(key(page), BlockPartIndex::new(number, of).unwrap());
                if let Some(page) = model.pages.get_mut(&key(page)) {
                    page.parts.remove(&number);
                }
            }
            IndexOperation::BeginStore => {
                index.begin_reconcile(ReconcileSource::Store);
                model.pages.values_mut().flat_map(|page| page.parts.values_mut()).for_each(|c| *c = false);
            }
            IndexOperation::EndStore => {
                index.end_reconcile(ReconcileSource::Store);
                model.pages.values_mut().for_each(|page| page.parts.retain(|_, confirmed| *confirmed));
            }
            IndexOperation::Sweep(slots) => {
                index.sweep(slots);
            }
            IndexOperation::Lookup(ref pages) => self.index.lookup(&keys(pages), &mut self.hits),
        }
    }

    fn assert_equal(&mut self, pages: &[u8]) {
        self.index.lookup(&keys(pages), &mut self.hits);
        let (engines, shared) = self.model.lookup(&keys(pages), &self.engines);
        let actual: Vec<EngineHits> = self.engines.iter().map(|&engine| self.hits.engine(engine)).collect();
        assert_eq!((actual, &self.hits.shared), (engines, &shared), "{pages:?}");
        let present: BTreeSet<usize> = self.engines.iter().map(|engine| engine.as_usize()).collect();
        for (position, hits) in
            self.hits.engines.iter().enumerate().filter(|(position, _)| !present.contains(position))
        {
            assert_eq!((hits.l1, hits.local), (0, 0), "engine {position} is removed");
        }
        for (&engine, l2) in self.engines.iter().flat_map(|engine| [(engine, false), (engine, true)]) {
            let held = self.model.pages.values().filter(|page| page.engines.contains_key(&(engine, l2)));
            assert_eq!(self.index.engine_blocks(engine, tier(l2)), held.count() as u64);
        }
    }
}

proptest! {
    #[test]
    fn lookup_matches_the_model(ops in prop::collection::vec(op(), 0..80)) {
        let mut pair = IndexUnderTest::new(5_000);
        for op in &ops {
            pair.apply(op);
            pair.index.check();
            if let IndexOperation::Lookup(pages) = op {
                pair.assert_equal(pages);
            }
        }
        // A sweep changes no lookup result.
        for _ in 0..2 {
            for first in 0..PAGES {
                pair.assert_equal(&(first..PAGES).collect::<Vec<_>>());
            }
            while pair.index.sweep(7) {}
            pair.index.check();
        }
        let existing = pair.model.pages.values().filter(|page| !page.engines.is_empty() || !page.parts.is_empty());
        let reconciling = ops.iter().rev().find(|op| matches!(op, IndexOperation::BeginStore | IndexOperation::EndStore));
        if !matches!(reconciling, Some(IndexOperation::BeginStore)) {
            prop_assert_eq!(pair.index.size().blocks, existing.count(), "no stale blocks remain");
        }
    }

    /// A full index evicts blocks, but never reports blocks that do not exist.
    #[test]
    fn eviction_never_adds_blocks(ops in prop::collection::vec(op(), 0..50)) {
        let mut pair = IndexUnderTest::new(5);
        for op in &ops {
            pair.apply(op);
            pair.index.check();
            for first in 0..PAGES {
                let pages = keys(&(first..PAGES).collect::<Vec<_>>());
                pair.index.lookup(&pages, &mut pair.hits);
                let (engines, _) = pair.model.lookup(&pages, &pair.engines);
                for (&engine, upper) in pair.engines.iter().zip(engines) {
                    let hits = pair.hits.engine(engine);
                    prop_assert!(hits.l1 <= upper.l1 && hits.local <= upper.local);
                }
                for run in &pair.hits.shared {
                    let pages = &pages[run.first as usize..][..run.blocks as usize];
                    prop_assert!(pages.iter().all(|&page| pair.model.complete(page).is_some()));
                }
            }
        }
    }
}

#[test]
fn more_than_a_word_of_engines() {
    let mut index = KvBlockIndex::new(1000);
    let prompt: Vec<u64> = keys(&(0..100).collect::<Vec<_>>());
    let engines: Vec<EngineSlot> = (0..200)
        .map(|number| {
            let engine = index.add_engine();
            index.add_engine_blocks(engine, EngineCacheTier::L1, &prompt[..number % 50]);
            index.add_engine_blocks(engine, EngineCacheTier::L2, &prompt[..number % 100]);
            engine
        })
        .collect();
    let mut hits = IndexLookup::default();
    index.lookup(&prompt, &mut hits);
    for (number, &engine) in engines.iter().enumerate() {
        let expected = EngineHits { l1: (number % 50) as u32, local: (number % 100) as u32, shared: 0 };
        assert_eq!(hits.engine(engine), expected);
    }
    index.check();
}

#[test]
fn repeated_clearing_does_not_widen_sets() {
    let mut index = KvBlockIndex::new(10_000);
    let engine = index.add_engine();
    let mut page = 0;
    for _ in 0..if cfg!(miri) { 50 } else { 5_000 } {
        page += 1;
        index.add_engine_blocks(engine, EngineCacheTier::L1, &[BlockHashNamespace::new(&[]).key(page)]);
        index.clear_engine_tier(engine, EngineCacheTier::L1);
    }
    assert!(index.placements.words() <= 4, "{}", index.placements.words());
    index.check();
}

#[test]
fn full_index_evicts_blocks_without_lookups() {
    let mut index = KvBlockIndex::new(8);
    let (engine, node) = (index.add_engine(), index.add_store_node().unwrap());
    let part = BlockPartIndex::new(0, 1).unwrap();
    let mut hits = IndexLookup::default();
    index.add_engine_blocks(engine, EngineCacheTier::L1, &keys(&[0, 1, 2]));
    for page in 3..8 {
        index.add_store_part(key(page), part, node, StoreMedium::Dram);
    }
    index.lookup(&keys(&[3, 4]), &mut hits);
    assert_eq!(hits.engine(engine).shared, 2);
    for page in 10..13 {
        index.add_engine_blocks(engine, EngineCacheTier::L1, &[key(page)]);
    }
    // The three blocks that only the store has and that were not looked up are evicted.
    index.lookup(&keys(&[0, 1, 2, 3, 4]), &mut hits);
    assert_eq!(hits.engine(engine), EngineHits { l1: 3, local: 3, shared: 2 });
    for page in 5..8 {
        index.lookup(&keys(&[page]), &mut hits);
        assert_eq!(hits.engine(engine).shared, 0);
    }
    assert_eq!(index.size().blocks, 8);
    assert!(index.has_capacity_for(key(0)) && !index.has_capacity_for(key(99)));
}

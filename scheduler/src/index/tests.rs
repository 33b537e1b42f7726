//! The index against a model of plain maps.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Whether something was named again in the reconciliation in progress; what was not is dropped at its end.
type Confirmed = bool;

#[derive(Debug, Clone, Default)]
struct ModelPage {
    held: BTreeMap<(EngineSlot, bool), Confirmed>,
    parts: BTreeMap<u8, Confirmed>,
    of: u8,
    place: Option<SharedPlace>,
}

impl ModelPage {
    fn complete(&self) -> Option<SharedPlace> {
        let complete = !self.parts.is_empty() && self.parts.len() == usize::from(self.of);
        self.place.filter(|_| complete)
    }
}

#[derive(Debug, Default)]
struct Model {
    pages: BTreeMap<u64, ModelPage>,
}

impl Model {
    fn held(&self, page: u64, engine: EngineSlot, l2_too: bool) -> bool {
        let held = |tier| self.pages.get(&page).is_some_and(|page| page.held.contains_key(&(engine, tier)));
        held(false) || (l2_too && held(true))
    }

    fn complete(&self, page: u64) -> Option<SharedPlace> {
        self.pages.get(&page)?.complete()
    }

    fn retain_held(&mut self, keep: impl Fn(EngineSlot, bool, Confirmed) -> bool) {
        for page in self.pages.values_mut() {
            page.held.retain(|&(engine, tier), &mut confirmed| keep(engine, tier, confirmed));
        }
    }

    fn part_stored(&mut self, page: u64, number: u8, of: u8, node: StoreNode, medium: Medium) {
        let page = self.pages.entry(page).or_default();
        page.parts.retain(|&part, _| part < of);
        page.of = of;
        let alone = page.parts.keys().all(|&part| part == number);
        page.place = match page.place {
            Some(place) if !alone => {
                let elsewhere = (place.node, place.medium) != (node, medium);
                Some(SharedPlace { spread: place.spread || elsewhere, ..place })
            }
            _ => Some(SharedPlace { node, medium, spread: false }),
        };
        page.parts.insert(number, true);
    }

    /// What a lookup must answer for these engines.
    fn lookup(&self, pages: &[u64], engines: &[EngineSlot]) -> (Vec<EngineHits>, Vec<SharedRun>) {
        let prefix =
            |engine, l2_too| pages.iter().take_while(|&&page| self.held(page, engine, l2_too)).count() as u32;
        let hits: Vec<EngineHits> = engines
            .iter()
            .map(|&engine| {
                let own = prefix(engine, true);
                let behind = pages[own as usize..].iter();
                let shared = behind.take_while(|&&page| self.complete(page).is_some()).count() as u32;
                EngineHits { l1: prefix(engine, false), own, shared }
            })
            .collect();
        let longest = hits.iter().map(|hits| hits.own).max().unwrap_or(0);
        let mut runs: Vec<SharedRun> = Vec::new();
        let mut since = None;
        for (at, &page) in (0..).zip(pages) {
            let Some(place) = self.complete(page) else {
                since = None;
                continue;
            };
            let adjacent = since.is_some();
            if *since.get_or_insert(at) > longest {
                break;
            }
            match runs.last_mut() {
                Some(run) if adjacent && run.place == place => run.pages += 1,
                _ => runs.push(SharedRun { first: at, pages: 1, place }),
            }
        }
        (hits, runs)
    }
}

/// Numbers choose among what exists at that moment.
#[derive(Debug, Clone)]
enum Op {
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
    // Ranges, as prompts are.
    (0..PAGES, 1..PAGES).prop_map(|(first, len)| (first..PAGES.min(first + len)).collect())
}

fn op() -> impl Strategy<Value = Op> {
    let tier = any::<bool>;
    let part = || (0..PAGES, 0u8..2, 1u8..3);
    prop_oneof![
        1 => Just(Op::AddEngine),
        1 => (0..9usize).prop_map(Op::RemoveEngine),
        8 => (0..9usize, tier(), pages()).prop_map(|(engine, tier, pages)| Op::Stored(engine, tier, pages)),
        4 => (0..9usize, tier(), pages()).prop_map(|(engine, tier, pages)| Op::Removed(engine, tier, pages)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| Op::Cleared(engine, tier)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| Op::Begin(engine, tier)),
        2 => (0..9usize, tier()).prop_map(|(engine, tier)| Op::End(engine, tier)),
        1 => Just(Op::AddNode),
        1 => (0..4usize).prop_map(Op::NodeLost),
        12 => (part(), 0..4usize, tier()).prop_map(|((page, part, of), node, nvme)| {
            Op::PartStored(page, part % of, of, node, nvme)
        }),
        3 => part().prop_map(|(page, part, of)| Op::PartRemoved(page, part % of, of)),
        1 => Just(Op::BeginStore),
        1 => Just(Op::EndStore),
        2 => (1..40usize).prop_map(Op::Sweep),
        6 => pages().prop_map(Op::Lookup),
    ]
}

/// The index and the model beside it.
struct Pair {
    index: PageIndex,
    model: Model,
    engines: Vec<EngineSlot>,
    nodes: Vec<StoreNode>,
    hits: Hits,
}

fn key(page: u8) -> u64 {
    Namespace::new(&["model"]).key(u64::from(page))
}

fn keys(pages: &[u8]) -> Vec<u64> {
    pages.iter().copied().map(key).collect()
}

fn tier(l2: bool) -> Tier {
    if l2 { Tier::L2 } else { Tier::L1 }
}

impl Pair {
    fn new(max_pages: usize) -> Self {
        let (model, hits) = Default::default();
        let mut pair =
            Self { index: PageIndex::new(max_pages), model, engines: Vec::new(), nodes: Vec::new(), hits };
        [Op::AddEngine, Op::AddEngine, Op::AddNode, Op::AddNode].iter().for_each(|op| pair.apply(op));
        pair
    }

    fn engine(&self, choice: usize) -> EngineSlot {
        // A removed engine's number can still arrive.
        self.engines.get(choice).copied().unwrap_or(EngineSlot(1000))
    }

    fn apply(&mut self, op: &Op) {
        let (index, model) = (&mut self.index, &mut self.model);
        match *op {
            Op::AddEngine => {
                if self.engines.len() < 8 {
                    let engine = index.add_engine();
                    assert!(!self.engines.contains(&engine));
                    self.engines.push(engine);
                }
            }
            Op::RemoveEngine(choice) => {
                if choice < self.engines.len() {
                    let gone = self.engines.swap_remove(choice);
                    index.remove_engine(gone);
                    model.retain_held(|engine, _, _| engine != gone);
                }
            }
            Op::Stored(choice, l2, ref pages) => {
                let engine = self.engine(choice);
                self.index.stored(engine, tier(l2), &keys(pages));
                if self.engines.contains(&engine) {
                    for key in keys(pages) {
                        self.model.pages.entry(key).or_default().held.insert((engine, l2), true);
                    }
                }
            }
            Op::Removed(choice, l2, ref pages) => {
                let engine = self.engine(choice);
                self.index.removed(engine, tier(l2), &keys(pages));
                for key in keys(pages) {
                    if let Some(page) = self.model.pages.get_mut(&key) {
                        page.held.remove(&(engine, l2));
                    }
                }
            }
            Op::Cleared(choice, l2) => {
                let cleared = self.engine(choice);
                self.index.cleared(cleared, tier(l2));
                self.model.retain_held(|engine, tier, _| engine != cleared || tier != l2);
            }
            Op::Begin(choice, l2) => {
                let engine = self.engine(choice);
                self.index.begin_epoch(Source::Engine(engine, tier(l2)));
                for page in self.model.pages.values_mut() {
                    page.held.entry((engine, l2)).and_modify(|confirmed| *confirmed = false);
                }
            }
            Op::End(choice, l2) => {
                let ended = self.engine(choice);
                self.index.end_epoch(Source::Engine(ended, tier(l2)));
                self.model.retain_held(|engine, tier, confirmed| engine != ended || tier != l2 || confirmed);
            }
            Op::AddNode => {
                if self.nodes.len() < 3 {
                    let node = index.add_store_node().unwrap();
                    assert!(!self.nodes.contains(&node));
                    self.nodes.push(node);
                }
            }
            Op::NodeLost(choice) => {
                if choice < self.nodes.len() {
                    let lost = self.nodes.swap_remove(choice);
                    index.store_node_lost(lost);
                    let pages = model.pages.values_mut();
                    pages
                        .filter(|page| page.place.is_some_and(|place| place.node == lost))
                        .for_each(|page| page.parts.clear());
                }
            }
            Op::PartStored(page, number, of, node, nvme) => {
                let medium = if nvme { Medium::Nvme } else { Medium::Dram };
                let part = Part::new(number, of).unwrap();
                if let Some(&node) = self.nodes.get(node) {
                    index.part_stored(key(page), part, node, medium);
                    model.part_stored(key(page), number, of, node, medium);
                } else {
                    index.part_stored(key(page), part, StoreNode(999), medium);
                }
            }
            Op::PartRemoved(page, number, of) => {
                index.part_removed(key(page), Part::new(number, of).unwrap());
                if let Some(page) = model.pages.get_mut(&key(page)) {
                    page.parts.remove(&number);
                }
            }
            Op::BeginStore => {
                index.begin_epoch(Source::Store);
                model.pages.values_mut().flat_map(|page| page.parts.values_mut()).for_each(|c| *c = false);
            }
            Op::EndStore => {
                index.end_epoch(Source::Store);
                model.pages.values_mut().for_each(|page| page.parts.retain(|_, confirmed| *confirmed));
            }
            Op::Sweep(slots) => {
                index.sweep(slots);
            }
            Op::Lookup(ref pages) => self.index.lookup(&keys(pages), &mut self.hits),
        }
    }

    fn assert_equal(&mut self, pages: &[u8]) {
        self.index.lookup(&keys(pages), &mut self.hits);
        let (engines, shared) = self.model.lookup(&keys(pages), &self.engines);
        let found: Vec<EngineHits> = self.engines.iter().map(|&engine| self.hits.of(engine)).collect();
        assert_eq!((found, &self.hits.shared), (engines, &shared), "{pages:?}");
        let present: BTreeSet<usize> = self.engines.iter().map(|engine| engine.at()).collect();
        for (at, hits) in self.hits.engines.iter().enumerate().filter(|(at, _)| !present.contains(at)) {
            assert_eq!((hits.l1, hits.own), (0, 0), "engine {at} is removed");
        }
        for (&engine, l2) in self.engines.iter().flat_map(|engine| [(engine, false), (engine, true)]) {
            let held = self.model.pages.values().filter(|page| page.held.contains_key(&(engine, l2)));
            assert_eq!(self.index.engine_pages(engine, tier(l2)), held.count() as u64);
        }
    }
}

proptest! {
    #[test]
    fn answers_as_the_model_does(ops in prop::collection::vec(op(), 0..80)) {
        let mut pair = Pair::new(5_000);
        for op in &ops {
            pair.apply(op);
            pair.index.check();
            if let Op::Lookup(pages) = op {
                pair.assert_equal(pages);
            }
        }
        // A sweep changes no answer.
        for _ in 0..2 {
            for first in 0..PAGES {
                pair.assert_equal(&(first..PAGES).collect::<Vec<_>>());
            }
            while pair.index.sweep(7) {}
            pair.index.check();
        }
        let known = pair.model.pages.values().filter(|page| !page.held.is_empty() || !page.parts.is_empty());
        let reconciling = ops.iter().rev().find(|op| matches!(op, Op::BeginStore | Op::EndStore));
        if !matches!(reconciling, Some(Op::BeginStore)) {
            prop_assert_eq!(pair.index.size().pages, known.count(), "nothing is left behind");
        }
    }

    /// A full index forgets pages, but never invents any.
    #[test]
    fn displacing_never_invents(ops in prop::collection::vec(op(), 0..50)) {
        let mut pair = Pair::new(5);
        for op in &ops {
            pair.apply(op);
            pair.index.check();
            for first in 0..PAGES {
                let pages = keys(&(first..PAGES).collect::<Vec<_>>());
                pair.index.lookup(&pages, &mut pair.hits);
                let (engines, _) = pair.model.lookup(&pages, &pair.engines);
                for (&engine, most) in pair.engines.iter().zip(engines) {
                    let hits = pair.hits.of(engine);
                    prop_assert!(hits.l1 <= most.l1 && hits.own <= most.own);
                }
                for run in &pair.hits.shared {
                    let pages = &pages[run.first as usize..][..run.pages as usize];
                    prop_assert!(pages.iter().all(|&page| pair.model.complete(page).is_some()));
                }
            }
        }
    }
}

#[test]
fn more_than_a_word_of_engines() {
    let mut index = PageIndex::new(1000);
    let prompt: Vec<u64> = keys(&(0..100).collect::<Vec<_>>());
    let engines: Vec<EngineSlot> = (0..200)
        .map(|number| {
            let engine = index.add_engine();
            index.stored(engine, Tier::L1, &prompt[..number % 50]);
            index.stored(engine, Tier::L2, &prompt[..number % 100]);
            engine
        })
        .collect();
    let mut hits = Hits::default();
    index.lookup(&prompt, &mut hits);
    for (number, &engine) in engines.iter().enumerate() {
        let expected = EngineHits { l1: (number % 50) as u32, own: (number % 100) as u32, shared: 0 };
        assert_eq!(hits.of(engine), expected);
    }
    index.check();
}

#[test]
fn clearing_over_and_over_does_not_widen_sets() {
    let mut index = PageIndex::new(10_000);
    let engine = index.add_engine();
    let mut page = 0;
    for _ in 0..if cfg!(miri) { 50 } else { 5_000 } {
        page += 1;
        index.stored(engine, Tier::L1, &[Namespace::new(&[]).key(page)]);
        index.cleared(engine, Tier::L1);
    }
    assert!(index.placements.words() <= 4, "{}", index.placements.words());
    index.check();
}

#[test]
fn a_full_index_gives_up_what_nobody_asked_for() {
    let mut index = PageIndex::new(8);
    let (engine, node) = (index.add_engine(), index.add_store_node().unwrap());
    let part = Part::new(0, 1).unwrap();
    let mut hits = Hits::default();
    index.stored(engine, Tier::L1, &keys(&[0, 1, 2]));
    for page in 3..8 {
        index.part_stored(key(page), part, node, Medium::Dram);
    }
    index.lookup(&keys(&[3, 4]), &mut hits);
    assert_eq!(hits.of(engine).shared, 2);
    for page in 10..13 {
        index.stored(engine, Tier::L1, &[key(page)]);
    }
    // The three pages that only the store has and nobody asked for are gone.
    index.lookup(&keys(&[0, 1, 2, 3, 4]), &mut hits);
    assert_eq!(hits.of(engine), EngineHits { l1: 3, own: 3, shared: 2 });
    for page in 5..8 {
        index.lookup(&keys(&[page]), &mut hits);
        assert_eq!(hits.of(engine).shared, 0);
    }
    assert_eq!(index.size().pages, 8);
    assert!(index.has_room_for(key(0)) && !index.has_room_for(key(99)));
}

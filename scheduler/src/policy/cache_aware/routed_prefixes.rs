//! Prefixes sent to each engine: an estimate of engines' caches that needs no data from the engines.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

pub(super) type EngineNameHash = u64;

/// The prefixes that were sent to each engine. A block's key covers all blocks before it, so that a prefix tree needs
/// no edges: it is a table of blocks.
#[derive(Debug, Default)]
pub(super) struct RoutedPrefixes {
    /// Hashed without a random seed, so that the same input gives the same decisions.
    pages: HashMap<u64, RoutedBlock, BuildHasherDefault<DefaultHasher>>,
    engines: BTreeMap<EngineNameHash, RoutedEngineSize>,
    /// Number of prompts so far; orders the visits.
    prompts: u64,
    records: usize,
}

#[derive(Debug)]
struct RoutedBlock {
    /// Number of blocks before it in its prompt.
    depth: u32,
    tokens: u32,
    records: Vec<RouteRecord>,
}

/// The last time that a block was sent to an engine.
#[derive(Debug, Clone, Copy)]
struct RouteRecord {
    engine: EngineNameHash,
    prompt: u64,
}

/// Recorded blocks of one engine.
#[derive(Debug, Clone, Copy, Default)]
struct RoutedEngineSize {
    pages: usize,
    tokens: u64,
}

/// Limit for one engine's records.
#[derive(Debug, Clone, Copy)]
pub(super) enum TrimTarget {
    Tokens(u64),
    Pages(usize),
    Zero,
}

impl RoutedPrefixes {
    /// The number of leading blocks that some engine was sent, and the engine that was sent the last of them most
    /// recently.
    pub(super) fn longest(&self, prompt: &[u64]) -> Option<(EngineNameHash, usize)> {
        // An engine with a block was sent all before it, and least recently used blocks are dropped from the end.
        let known = prompt.partition_point(|key| self.pages.contains_key(key));
        let last = self.pages.get(prompt.get(known.checked_sub(1)?)?)?;
        last.records.iter().max_by_key(|visit| visit.prompt).map(|visit| (visit.engine, known))
    }

    /// Records that `engine` was sent `prompt`.
    pub(super) fn insert(&mut self, prompt: &[u64], page_tokens: u32, engine: EngineNameHash) {
        self.prompts += 1;
        let visit = RouteRecord { engine, prompt: self.prompts };
        for (depth, &key) in (0..).zip(prompt) {
            let page = self.pages.entry(key).or_insert_with(|| RoutedBlock {
                depth,
                tokens: page_tokens,
                records: Vec::with_capacity(1),
            });
            if let Some(known) = page.records.iter_mut().find(|known| known.engine == engine) {
                known.prompt = visit.prompt;
                continue;
            }
            page.records.push(visit);
            self.records += 1;
            let size = self.engines.entry(engine).or_default();
            size.pages += 1;
            size.tokens += u64::from(page.tokens);
        }
    }

    /// Engines with at least one record.
    pub(super) fn engines(&self) -> impl Iterator<Item = EngineNameHash> {
        self.engines.keys().copied()
    }

    /// Blocks recorded, counted once per engine; determines memory use.
    pub(super) fn record_count(&self) -> usize {
        self.records
    }

    /// Drops an engine's least recently used blocks, ends of prompts first, until at most `keep` is left.
    pub(super) fn trim(&mut self, engine: EngineNameHash, target: TrimTarget) {
        let Some(size) = self.engines.get(&engine).copied() else { return };
        let fits = |size: RoutedEngineSize| match target {
            TrimTarget::Tokens(tokens) => size.tokens <= tokens,
            TrimTarget::Pages(pages) => size.pages <= pages,
            TrimTarget::Zero => size.pages == 0,
        };
        if fits(size) {
            return;
        }
        let mut left = size;
        for (_, _, key) in self.oldest_first(engine) {
            if fits(left) {
                break;
            }
            let Some(page) = self.pages.get_mut(&key) else { continue };
            page.records.retain(|visit| visit.engine != engine);
            left = RoutedEngineSize { pages: left.pages - 1, tokens: left.tokens - u64::from(page.tokens) };
            if page.records.is_empty() {
                self.pages.remove(&key);
            }
        }
        self.records -= size.pages - left.pages;
        if left.pages == 0 {
            self.engines.remove(&engine);
        } else {
            self.engines.insert(engine, left);
        }
    }

    /// An engine's blocks as (prompt that used it last, position from the prompt's end, key). The key makes the order
    /// total, because the table has none.
    fn oldest_first(&self, engine: EngineNameHash) -> Vec<(u64, Reverse<u32>, u64)> {
        let of_engine =
            |page: &RoutedBlock| page.records.iter().find(|visit| visit.engine == engine).copied();
        let mut pages: Vec<_> = self
            .pages
            .iter()
            .filter_map(|(&key, page)| of_engine(page).map(|visit| (visit.prompt, Reverse(page.depth), key)))
            .collect();
        pages.sort_unstable();
        pages
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn longest_prefix_returns_its_latest_engine() {
        let mut routed = RoutedPrefixes::default();
        assert_eq!(routed.longest(&[1, 2]), None);
        routed.insert(&[1, 2, 3], 16, 7);
        routed.insert(&[1, 2], 16, 8);
        assert_eq!(routed.longest(&[1, 2, 3, 4]), Some((7, 3)));
        assert_eq!(routed.longest(&[1, 2, 9]), Some((8, 2)));
        assert_eq!(routed.longest(&[9]), None);
        assert_eq!(routed.longest(&[]), None);
    }

    #[test]
    fn least_recently_used_end_is_dropped_first() {
        let mut routed = RoutedPrefixes::default();
        routed.insert(&[1, 2, 3], 10, 7);
        routed.insert(&[1, 4], 10, 7);
        routed.trim(7, TrimTarget::Tokens(30));
        assert_eq!(routed.longest(&[1, 2, 3]), Some((7, 2)));
        assert_eq!(routed.longest(&[1, 4]), Some((7, 2)));
        routed.trim(7, TrimTarget::Pages(2));
        assert_eq!(routed.longest(&[1, 2, 3]), Some((7, 1)));
        routed.trim(7, TrimTarget::Zero);
        assert_eq!((routed.longest(&[1, 4]), routed.record_count(), routed.pages.len()), (None, 0, 0));
        assert_eq!(routed.engines().count(), 0);
    }

    proptest! {
        /// After any sequence of insertions and trims, the counts match the table, every limit holds, and an engine's
        /// records are prefixes.
        #[test]
        fn counts_agree_with_the_table(
            steps in prop::collection::vec((0_u64..3, 1_u64..4, 1_u64..6, prop::option::of(0_usize..8)), 1..60),
        ) {
            let mut routed = RoutedPrefixes::default();
            for (engine, branch, length, trim) in steps {
                // Prompts share their first block; the others differ by branch.
                let prompt: Vec<u64> = (0..length).map(|index| if index == 0 { 0 } else { branch * 100 + index }).collect();
                routed.insert(&prompt, 16, engine);
                prop_assert_eq!(routed.longest(&prompt), Some((engine, prompt.len())));
                if let Some(pages) = trim {
                    routed.trim(engine, TrimTarget::Pages(pages));
                    prop_assert!(routed.engines.get(&engine).map_or(0, |size| size.pages) <= pages);
                }
                let visits = || routed.pages.iter().flat_map(|(key, page)| page.records.iter().map(move |v| (*key, v.engine)));
                prop_assert_eq!(visits().count(), routed.record_count());
                for (&engine, size) in &routed.engines {
                    let keys: BTreeSet<u64> = visits().filter(|visit| visit.1 == engine).map(|visit| visit.0).collect();
                    prop_assert_eq!((keys.len(), keys.len() as u64 * 16), (size.pages, size.tokens));
                    for key in &keys {
                        let before = if key % 100 == 1 { 0 } else { key.saturating_sub(1) };
                        prop_assert!(keys.contains(&before), "{} without {}", key, before);
                    }
                }
            }
        }
    }
}

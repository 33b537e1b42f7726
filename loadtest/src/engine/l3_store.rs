//! The store shared by all engines of a fleet.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::object_store::MooncakePageStore;
use crate::prefix_lru::{LruChange, PrefixLru};

/// A page written to the store: its id, and the first 64 bits of its hash, if the engine publishes hashes.
pub(crate) type WrittenPage = (u128, Option<u64>);

/// An LRU of pages. A lookup counts as use: Mooncake's master renews the page's lease, and evicts by lease.
#[derive(Debug, Default)]
pub(crate) struct SimPageStore {
    pages: PrefixLru<u128>,
    /// Pages by the first 64 bits of their hash, and the reverse mapping.
    page_by_hash: HashMap<u64, u128>,
    hash_by_page: HashMap<u128, u64>,
}

pub(crate) type LockedPageStore = Mutex<SimPageStore>;

/// The store that an engine uses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum L3Backend<'a> {
    /// Pages are ids in this process.
    Simulated(&'a LockedPageStore),
    /// Pages are objects of a real store.
    Objects(&'a MooncakePageStore),
}

impl SimPageStore {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { pages: PrefixLru::new(capacity), ..Self::default() }
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.pages.capacity()
    }

    pub(crate) fn used(&self) -> u64 {
        self.pages.used()
    }

    pub(crate) fn clear(&mut self) {
        self.pages.clear(|_| {});
        self.page_by_hash.clear();
        self.hash_by_page.clear();
    }

    /// Number of leading `pages` that an engine can read without a gap.
    pub(crate) fn lookup(&mut self, pages: &[u128]) -> usize {
        let found = self.pages.leading(pages);
        self.pages.touch(&pages[..found]);
        found
    }

    /// Writes pages of a prefix.
    pub(crate) fn put(&mut self, written: &[WrittenPage], page_tokens: usize) {
        let pages: Vec<u128> = written.iter().map(|(page, _)| *page).collect();
        let (by_name, names) = (&mut self.page_by_hash, &mut self.hash_by_page);
        self.pages.put(
            &pages,
            |_| page_tokens as u64,
            |change| {
                if let LruChange::Evicted(page) = change
                    && let Some(name) = names.remove(&page)
                {
                    by_name.remove(&name);
                }
            },
        );
        for &(page, name) in written {
            if let Some(name) = name.filter(|_| self.pages.contains(page)) {
                self.page_by_hash.insert(name, page);
                self.hash_by_page.insert(page, name);
            }
        }
    }

    /// Whether it has the page whose hash starts with these bits. Does not count as use.
    pub(crate) fn contains_hash(&self, name: u64) -> bool {
        self.page_by_hash.contains_key(&name)
    }

    /// The first 64 bits of all known page hashes.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = u64> {
        self.page_by_hash.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_removed_with_their_pages() {
        let mut store = SimPageStore::new(30);
        store.put(&[(1, Some(11)), (2, Some(12)), (3, None)], 10);
        assert!(store.contains_hash(12) && store.hashes().count() == 2);
        // The end of the oldest prefix is evicted first.
        assert_eq!(store.lookup(&[1]), 1);
        store.put(&[(4, Some(14)), (5, Some(15))], 10);
        assert_eq!(
            (store.lookup(&[1, 2]), store.contains_hash(12), store.contains_hash(14)),
            (1, false, true)
        );
        assert_eq!(store.hashes().count(), 3);
    }
}

//! The store that all engines of a fleet share.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::cache::{PageChange, PageLru};
use super::object_store::MooncakePageStore;

/// A page that goes to the store: its id, and its name's first 64 bits, if the engine that has it tells names.
pub(crate) type WrittenPage = (u128, Option<u64>);

/// Its pages, least recently used first out. Asking for a page counts as use: Mooncake's master renews its lease, and evicts by lease.
#[derive(Debug, Default)]
pub(crate) struct SimPageStore {
    pages: PageLru,
    /// Pages by the first 64 bits of their real names, and the other way round.
    page_by_hash: HashMap<u64, u128>,
    hash_by_page: HashMap<u128, u64>,
}

/// The store behind its lock.
pub(crate) type LockedPageStore = Mutex<SimPageStore>;

/// The store that an engine uses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum L3Backend<'a> {
    /// Pages are numbers in this process.
    Simulated(&'a LockedPageStore),
    /// Pages are objects of a real store.
    Objects(&'a MooncakePageStore),
}

impl SimPageStore {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { pages: PageLru::new(capacity), ..Self::default() }
    }

    /// Capacity in tokens.
    pub(crate) fn capacity(&self) -> usize {
        self.pages.capacity()
    }

    /// Tokens held.
    pub(crate) fn used(&self) -> usize {
        self.pages.used()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.capacity());
    }

    /// How many of `pages` an engine can read, without a gap from the first one on.
    pub(crate) fn lookup(&mut self, pages: &[u128]) -> usize {
        let there = self.pages.leading(pages);
        self.pages.touch(&pages[..there]);
        there
    }

    /// Writes pages of a prefix.
    pub(crate) fn put(&mut self, written: &[WrittenPage], page_tokens: usize) {
        let pages: Vec<u128> = written.iter().map(|(page, _)| *page).collect();
        let (by_name, names) = (&mut self.page_by_hash, &mut self.hash_by_page);
        self.pages.put_prefix(&pages, page_tokens, |change| {
            if let PageChange::Evicted(page) = change
                && let Some(name) = names.remove(&page)
            {
                by_name.remove(&name);
            }
        });
        for &(page, name) in written {
            if let Some(name) = name.filter(|_| self.pages.contains(page)) {
                self.page_by_hash.insert(name, page);
                self.hash_by_page.insert(page, name);
            }
        }
    }

    /// Whether it has the page whose name begins with these bits. Does not count as use.
    pub(crate) fn contains_hash(&self, name: u64) -> bool {
        self.page_by_hash.contains_key(&name)
    }

    /// The first 64 bits of the names of all pages whose names are known.
    pub(crate) fn hashes(&self) -> impl Iterator<Item = u64> {
        self.page_by_hash.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_with_their_pages() {
        let mut store = SimPageStore::new(30);
        store.put(&[(1, Some(11)), (2, Some(12)), (3, None)], 10);
        assert!(store.contains_hash(12) && store.hashes().count() == 2);
        // The end of the oldest prefix goes first.
        assert_eq!(store.lookup(&[1]), 1);
        store.put(&[(4, Some(14)), (5, Some(15))], 10);
        assert_eq!(
            (store.lookup(&[1, 2]), store.contains_hash(12), store.contains_hash(14)),
            (1, false, true)
        );
        assert_eq!(store.hashes().count(), 3);
    }
}

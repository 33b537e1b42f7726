//! Prefix caches: page-granular, least recently used first out, keyed by the chained page hash.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

const NO_SLOT: u32 = u32::MAX;

/// What an insertion did to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageChange {
    Added(u128),
    Evicted(u128),
}

/// A bounded set of pages in order of use.
#[derive(Debug, Default)]
pub(crate) struct PageLru {
    /// Capacity in tokens; a page counts its tokens.
    capacity: usize,
    used: usize,
    slots: HashMap<u128, u32>,
    nodes: Vec<PageLruNode>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
}

#[derive(Debug)]
struct PageLruNode {
    page: u128,
    tokens: usize,
    newer: u32,
    older: u32,
}

impl PageLru {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, newest: NO_SLOT, oldest: NO_SLOT, ..Self::default() }
    }

    /// Capacity in tokens.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens held.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    pub(crate) fn contains(&self, page: u128) -> bool {
        self.slots.contains_key(&page)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }

    /// How many of `pages` are held without a gap, from the first one on.
    pub(crate) fn leading(&self, pages: &[u128]) -> usize {
        pages.iter().take_while(|page| self.contains(**page)).count()
    }

    /// Makes those of `pages` that are held the most recently used, the first one last.
    pub(crate) fn touch(&mut self, pages: &[u128]) {
        for page in pages.iter().rev() {
            if let Some(&slot) = self.slots.get(page) {
                self.unlink(slot);
                self.link_newest(slot);
            }
        }
    }

    /// Makes every page of a prefix the most recently used, adding what is missing. The first page is touched
    /// last, so a prefix loses its end first. Tells what it changes, in that order.
    pub(crate) fn put_prefix(
        &mut self,
        pages: &[u128],
        page_tokens: usize,
        mut tell: impl FnMut(PageChange),
    ) {
        // Pages beyond the capacity would only push each other out.
        let fitting = self.capacity.checked_div(page_tokens).unwrap_or(0).min(pages.len());
        if self.used + fitting * page_tokens > self.capacity {
            // Room is made at the expense of other prefixes.
            self.touch(&pages[..fitting]);
        }
        for page in pages[..fitting].iter().rev() {
            self.put(*page, page_tokens, &mut tell);
        }
    }

    fn put(&mut self, page: u128, tokens: usize, tell: &mut impl FnMut(PageChange)) {
        if tokens > self.capacity {
            return;
        }
        if let Some(&slot) = self.slots.get(&page) {
            self.unlink(slot);
            self.link_newest(slot);
            return;
        }
        while self.used + tokens > self.capacity {
            let Some(evicted) = self.evict_oldest() else { return };
            tell(PageChange::Evicted(evicted));
        }
        let node = PageLruNode { page, tokens, newer: NO_SLOT, older: NO_SLOT };
        let slot = if let Some(slot) = self.free.pop() {
            self.nodes[slot as usize] = node;
            slot
        } else {
            let Ok(slot) = u32::try_from(self.nodes.len()) else { return };
            self.nodes.push(node);
            slot
        };
        self.slots.insert(page, slot);
        tell(PageChange::Added(page));
        self.used += tokens;
        self.link_newest(slot);
    }

    fn evict_oldest(&mut self) -> Option<u128> {
        let slot = self.oldest;
        if slot == NO_SLOT {
            return None;
        }
        self.unlink(slot);
        let PageLruNode { page, tokens, .. } = self.nodes[slot as usize];
        self.slots.remove(&page);
        self.used -= tokens;
        self.free.push(slot);
        Some(page)
    }

    fn unlink(&mut self, slot: u32) {
        let PageLruNode { newer, older, .. } = self.nodes[slot as usize];
        match newer {
            NO_SLOT => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NO_SLOT => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, slot: u32) {
        let older = self.newest;
        self.nodes[slot as usize].newer = NO_SLOT;
        self.nodes[slot as usize].older = older;
        match older {
            NO_SLOT => self.oldest = slot,
            older => self.nodes[older as usize].newer = slot,
        }
        self.newest = slot;
    }
}

/// Where the reused tokens of a prompt came from, as SGLang's `cached_tokens_details` splits them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedTokens {
    /// In the engine's own device memory (L1).
    pub device: usize,
    /// In the engine's host memory (L2).
    pub host: usize,
    /// In the store shared by all engines (L3).
    pub storage: usize,
}

impl CachedTokens {
    /// All of them.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.device + self.host + self.storage
    }
}

/// Which of an engine's own levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocalCacheLevel {
    Device,
    Host,
}

/// How an engine came by pages of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageOrigin {
    /// All are on the device.
    Computed,
    /// These came from the shared store, into host memory.
    Fetched(Range<usize>),
}

/// One engine rank's own two levels.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    device: PageLru,
    host: PageLru,
    page_size: usize,
}

impl PrefixCache {
    pub(crate) fn new(device_tokens: usize, host_tokens: usize, page_size: usize) -> Self {
        Self {
            device: PageLru::new(device_tokens),
            host: PageLru::new(host_tokens),
            page_size: page_size.max(1),
        }
    }

    /// Pages of a prompt of `length` tokens that can be reused: at least one token is left to compute.
    pub(crate) fn usable<'a>(&self, pages: &'a [u128], length: usize) -> &'a [u128] {
        &pages[..(length.saturating_sub(1) / self.page_size).min(pages.len())]
    }

    /// What of a prompt of `length` tokens can be reused, contiguous from its start. It counts as use.
    pub(crate) fn look_up(&mut self, pages: &[u128], length: usize) -> CachedTokens {
        let pages = self.usable(pages, length);
        let device = self.device.leading(pages);
        let host = pages[device..].iter().take_while(|page| self.holds(**page)).count();
        self.device.touch(&pages[..device + host]);
        self.host.touch(&pages[..device + host]);
        CachedTokens { device: device * self.page_size, host: host * self.page_size, storage: 0 }
    }

    /// What was `found` of a prompt for which so many tokens came from the shared store: they are in the host level, if there is one.
    pub(crate) fn attribute_fetched(
        &self,
        found: CachedTokens,
        pages: &[u128],
        length: usize,
        fetched: usize,
    ) -> CachedTokens {
        if self.has_host() {
            let storage = fetched.min(found.host);
            CachedTokens { host: found.host - storage, storage, ..found }
        } else {
            let rest = self.usable(pages, length).len() * self.page_size - found.total();
            CachedTokens { storage: fetched.min(rest), ..found }
        }
    }

    /// Keeps pages of a prefix, telling what it changes.
    pub(crate) fn insert(
        &mut self,
        pages: &[u128],
        how: &PageOrigin,
        mut tell: impl FnMut(LocalCacheLevel, PageChange),
    ) {
        let mut on_host = pages;
        match how {
            // The host level holds what the device level holds.
            PageOrigin::Computed => {
                self.device.put_prefix(pages, self.page_size, |change| tell(LocalCacheLevel::Device, change));
            }
            PageOrigin::Fetched(part) => on_host = pages.get(part.clone()).unwrap_or_default(),
        }
        self.host.put_prefix(on_host, self.page_size, |change| tell(LocalCacheLevel::Host, change));
    }

    /// Whether there is a host level.
    pub(crate) fn has_host(&self) -> bool {
        self.host.capacity() > 0
    }

    /// Whether some level holds a page.
    pub(crate) fn holds(&self, page: u128) -> bool {
        self.device.contains(page) || self.host.contains(page)
    }

    pub(crate) fn clear(&mut self) {
        self.device.clear();
        self.host.clear();
    }

    /// Tokens in the device level and its capacity.
    pub(crate) fn device_usage(&self) -> (usize, usize) {
        (self.device.used(), self.device.capacity())
    }

    /// Tokens in the host level and its capacity.
    pub(crate) fn host_usage(&self) -> (usize, usize) {
        (self.host.used(), self.host.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_prefix_loses_its_end_first() {
        let mut lru = PageLru::new(40);
        lru.put_prefix(&[1, 2, 3, 4], 10, |_| {});
        lru.put_prefix(&[9], 10, |_| {});
        assert_eq!(lru.leading(&[1, 2, 3, 4]), 3);
    }

    #[test]
    fn what_was_used_last_stays() {
        let mut lru = PageLru::new(30);
        lru.put_prefix(&[1], 10, |_| {});
        lru.put_prefix(&[2], 10, |_| {});
        lru.put_prefix(&[3], 10, |_| {});
        lru.put_prefix(&[1], 10, |_| {});
        lru.put_prefix(&[4], 10, |_| {});
        assert!(lru.contains(1) && !lru.contains(2) && lru.contains(3) && lru.contains(4));
    }

    #[test]
    fn a_prefix_does_not_evict_itself() {
        let mut lru = PageLru::new(40);
        lru.put_prefix(&[1, 2, 3], 10, |_| {});
        lru.put_prefix(&[9], 10, |_| {});
        // 1, 2 and 3 are the oldest; making room for 4 must cost 9.
        lru.put_prefix(&[1, 2, 3, 4], 10, |_| {});
        assert_eq!(lru.leading(&[1, 2, 3, 4]), 4);
        assert!(!lru.contains(9));
    }

    #[test]
    fn levels_are_read_in_order_and_one_token_is_always_computed() {
        let mut cache = PrefixCache::new(32, 96, 16);
        cache.insert(&[1, 2, 3, 4], &PageOrigin::Computed, |_, _| {});
        let hit = cache.look_up(&[1, 2, 3, 4, 5, 6], 97);
        assert_eq!(hit, CachedTokens { device: 32, host: 32, storage: 0 });
        cache.insert(&[1, 2, 3, 4, 5, 6], &PageOrigin::Fetched(4..6), |level, _| {
            assert_eq!(level, LocalCacheLevel::Host);
        });
        assert_eq!(cache.look_up(&[1, 2, 3, 4, 5, 6], 97).host, 64);
        assert_eq!(cache.look_up(&[1, 2], 32).total(), 16);
    }

    proptest! {
        #[test]
        fn the_capacity_is_never_exceeded(capacity in 0_usize..200, page in 1_usize..40,
            prefixes in prop::collection::vec(prop::collection::vec(0_u128..30, 0..20), 0..40)) {
            let mut lru = PageLru::new(capacity);
            // What the changes amount to is what is held.
            let mut told = std::collections::BTreeSet::new();
            for pages in prefixes {
                lru.put_prefix(&pages, page, |change| assert!(match change {
                    PageChange::Added(page) => told.insert(page),
                    PageChange::Evicted(page) => told.remove(&page),
                }));
                prop_assert!(told.iter().all(|page| lru.contains(*page)) && told.len() == lru.slots.len());
                prop_assert!(lru.used() <= capacity);
                prop_assert_eq!(lru.slots.len() * page, lru.used());
                prop_assert!(lru.nodes.len() * page <= capacity);
            }
        }
    }
}

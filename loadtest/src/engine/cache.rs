//! Prefix caches: page-granular LRU, keyed by the chained page hash.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

const NO_SLOT: u32 = u32::MAX;

/// Effect of an insertion on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageChange {
    Added(u128),
    Evicted(u128),
}

/// A bounded set of pages in LRU order.
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

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn used(&self) -> usize {
        self.used
    }

    pub(crate) fn contains(&self, page: u128) -> bool {
        self.slots.contains_key(&page)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }

    /// Number of leading `pages` that are cached without a gap.
    pub(crate) fn leading(&self, pages: &[u128]) -> usize {
        pages.iter().take_while(|page| self.contains(**page)).count()
    }

    /// Marks cached `pages` as most recently used, the first one last.
    pub(crate) fn touch(&mut self, pages: &[u128]) {
        for page in pages.iter().rev() {
            if let Some(&slot) = self.slots.get(page) {
                self.unlink(slot);
                self.link_newest(slot);
            }
        }
    }

    /// Marks every page of a prefix as most recently used and adds missing ones. The first page is touched last, so a
    /// prefix loses its end first. Reports changes in that order.
    pub(crate) fn put_prefix(
        &mut self,
        pages: &[u128],
        page_tokens: usize,
        mut on_change: impl FnMut(PageChange),
    ) {
        // Pages beyond the capacity would only evict each other.
        let fitting = self.capacity.checked_div(page_tokens).unwrap_or(0).min(pages.len());
        if self.used + fitting * page_tokens > self.capacity {
            // Touch first, so that other prefixes are evicted.
            self.touch(&pages[..fitting]);
        }
        for page in pages[..fitting].iter().rev() {
            self.put(*page, page_tokens, &mut on_change);
        }
    }

    fn put(&mut self, page: u128, tokens: usize, on_change: &mut impl FnMut(PageChange)) {
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
            on_change(PageChange::Evicted(evicted));
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
        on_change(PageChange::Added(page));
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

/// Sources of the reused tokens of a prompt, in the split of SGLang's `cached_tokens_details`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedTokens {
    /// Tokens in the engine's own device memory (L1).
    pub device: usize,
    /// Tokens in the engine's host memory (L2).
    pub host: usize,
    /// Tokens in the store shared by all engines (L3).
    pub storage: usize,
}

impl CachedTokens {
    #[must_use]
    pub const fn total(&self) -> usize {
        self.device + self.host + self.storage
    }
}

/// One of an engine's own cache levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocalCacheLevel {
    Device,
    Host,
}

/// Where the pages of a prefix came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PageOrigin {
    /// Computed: all are on the device.
    Computed,
    /// Pages in this range were fetched from the shared store into host memory.
    Fetched(Range<usize>),
}

/// The two cache levels of one engine rank.
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

    /// Pages of a prompt of `length` tokens that can be reused: at least one token must be computed.
    pub(crate) fn usable<'a>(&self, pages: &'a [u128], length: usize) -> &'a [u128] {
        &pages[..(length.saturating_sub(1) / self.page_size).min(pages.len())]
    }

    /// Looks up the reusable prefix of a prompt of `length` tokens and marks it as used.
    pub(crate) fn look_up(&mut self, pages: &[u128], length: usize) -> CachedTokens {
        let pages = self.usable(pages, length);
        let device = self.device.leading(pages);
        let host = pages[device..].iter().take_while(|page| self.holds(**page)).count();
        self.device.touch(&pages[..device + host]);
        self.host.touch(&pages[..device + host]);
        CachedTokens { device: device * self.page_size, host: host * self.page_size, storage: 0 }
    }

    /// Splits the hits in `found` for a prompt of which this many tokens were fetched: those are in the host level, if
    /// there is one.
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

    /// Inserts pages of a prefix and reports the changes.
    pub(crate) fn insert(
        &mut self,
        pages: &[u128],
        how: &PageOrigin,
        mut on_change: impl FnMut(LocalCacheLevel, PageChange),
    ) {
        let mut on_host = pages;
        match how {
            // The host level includes everything in the device level.
            PageOrigin::Computed => {
                self.device
                    .put_prefix(pages, self.page_size, |change| on_change(LocalCacheLevel::Device, change));
            }
            PageOrigin::Fetched(part) => on_host = pages.get(part.clone()).unwrap_or_default(),
        }
        self.host.put_prefix(on_host, self.page_size, |change| on_change(LocalCacheLevel::Host, change));
    }

    pub(crate) fn has_host(&self) -> bool {
        self.host.capacity() > 0
    }

    /// Whether any level contains the page.
    pub(crate) fn holds(&self, page: u128) -> bool {
        self.device.contains(page) || self.host.contains(page)
    }

    pub(crate) fn clear(&mut self) {
        self.device.clear();
        self.host.clear();
    }

    /// Used tokens and capacity of the device level.
    pub(crate) fn device_usage(&self) -> (usize, usize) {
        (self.device.used(), self.device.capacity())
    }

    /// Used tokens and capacity of the host level.
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
    fn most_recently_used_page_stays() {
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
        // 1, 2 and 3 are the oldest; inserting 4 must evict 9.
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
            // The reported changes add up to the content.
            let mut content = std::collections::BTreeSet::new();
            for pages in prefixes {
                lru.put_prefix(&pages, page, |change| assert!(match change {
                    PageChange::Added(page) => content.insert(page),
                    PageChange::Evicted(page) => content.remove(&page),
                }));
                prop_assert!(content.iter().all(|page| lru.contains(*page)) && content.len() == lru.slots.len());
                prop_assert!(lru.used() <= capacity);
                prop_assert_eq!(lru.slots.len() * page, lru.used());
                prop_assert!(lru.nodes.len() * page <= capacity);
            }
        }
    }
}

//! Prefix caches: page-granular LRU, keyed by the chained page hash.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::prefix_lru::{LruChange, PrefixLru};

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
    device: PrefixLru<u128>,
    host: PrefixLru<u128>,
    page_size: usize,
}

impl PrefixCache {
    pub(crate) fn new(device_tokens: usize, host_tokens: usize, page_size: usize) -> Self {
        Self {
            device: PrefixLru::new(device_tokens as u64),
            host: PrefixLru::new(host_tokens as u64),
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
        mut on_change: impl FnMut(LocalCacheLevel, LruChange<u128>),
    ) {
        let page_tokens = |_| self.page_size as u64;
        let mut on_host = pages;
        match how {
            // The host level includes everything in the device level.
            PageOrigin::Computed => {
                self.device.put(pages, page_tokens, |change| on_change(LocalCacheLevel::Device, change));
            }
            PageOrigin::Fetched(part) => on_host = pages.get(part.clone()).unwrap_or_default(),
        }
        self.host.put(on_host, page_tokens, |change| on_change(LocalCacheLevel::Host, change));
    }

    pub(crate) fn has_host(&self) -> bool {
        self.host.capacity() > 0
    }

    /// Whether any level contains the page.
    pub(crate) fn holds(&self, page: u128) -> bool {
        self.device.contains(page) || self.host.contains(page)
    }

    pub(crate) fn clear(&mut self) {
        self.device.clear(|_| {});
        self.host.clear(|_| {});
    }

    /// Used tokens and capacity of the device level.
    pub(crate) fn device_usage(&self) -> (u64, u64) {
        (self.device.used(), self.device.capacity())
    }

    /// Used tokens and capacity of the host level.
    pub(crate) fn host_usage(&self) -> (u64, u64) {
        (self.host.used(), self.host.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

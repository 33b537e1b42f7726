//! Converts changes of a cache to events.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mooncake_wire::events::{BlockHash, OutgoingBlocks, OutgoingEngineEvent, StorageMedium};
use moongate_block_hash::{BlockHashChain, HashedBlock};

use super::KvEventChannel;
use crate::engine::SimProtocol;
use crate::engine::cache::{LocalCacheLevel, PageOrigin, PrefixCache};
use crate::engine::namespace::PromptNamespace;
use crate::engine::tokens::PageHashChain;
use crate::prefix_lru::LruChange;

/// A prefix to cache: the simulator's page ids, and the inputs of the protocol's page hashes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptPrefix<'a> {
    pub(crate) chain: &'a PageHashChain,
    /// Tokens of `chain`; may be empty for engines without a reporter.
    pub(crate) tokens: &'a [u32],
    pub(crate) namespace: &'a PromptNamespace,
}

/// Publishes the content of one rank's cache.
#[derive(Debug)]
pub(crate) struct KvEventReporter {
    protocol: SimProtocol,
    page_tokens: u32,
    channel: Arc<KvEventChannel>,
    /// Protocol hashes of the cached pages.
    page_hashes: HashMap<u128, HashedBlock>,
}

/// Changes of one level by one insertion.
#[derive(Debug, Default)]
struct LevelChanges {
    added: HashSet<u128>,
    evicted: Vec<u128>,
}

impl KvEventReporter {
    pub(crate) fn new(protocol: SimProtocol, page_tokens: u32, channel: Arc<KvEventChannel>) -> Self {
        let reporter = Self { protocol, page_tokens, channel, page_hashes: HashMap::new() };
        reporter.publish_startup_clear();
        reporter
    }

    /// SGLang flushes its cache once at start and publishes that.
    fn publish_startup_clear(&self) {
        if self.protocol == SimProtocol::Sglang {
            self.channel.publish(&[OutgoingEngineEvent::Cleared]);
        }
    }

    /// Inserts a prefix into the cache and publishes the changes: one message for the device and one for the host.
    /// Returns the hashes of the prefix's pages, and appends the pages that were new to the host to `to_host`.
    pub(crate) fn insert_and_publish(
        &mut self,
        cache: &mut PrefixCache,
        prefix: &PromptPrefix<'_>,
        how: &PageOrigin,
        to_host: &mut HashSet<u128>,
    ) -> Vec<HashedBlock> {
        let (mut device, mut host) = (LevelChanges::default(), LevelChanges::default());
        cache.insert(prefix.chain.pages(), how, |level, change| {
            let changes = if level == LocalCacheLevel::Device { &mut device } else { &mut host };
            match change {
                LruChange::Added(page) => {
                    changes.added.insert(page);
                }
                LruChange::Evicted(page) => changes.evicted.push(page),
            }
        });
        let names = self.hash_pages(prefix);
        if device.is_empty() && host.is_empty() {
            return names;
        }
        for (page, name) in prefix.chain.pages().iter().zip(&names) {
            if cache.holds(*page) {
                self.page_hashes.insert(*page, *name);
            }
        }
        self.publish_changes(&device, StorageMedium::Gpu, prefix, &names);
        let host_medium =
            if self.protocol == SimProtocol::Sglang { StorageMedium::CpuPinned } else { StorageMedium::Cpu };
        self.publish_changes(&host, host_medium, prefix, &names);
        for page in device.evicted.iter().chain(&host.evicted) {
            if !cache.holds(*page) {
                self.page_hashes.remove(page);
            }
        }
        *to_host = host.added;
        names
    }

    /// Publishes that all pages were removed.
    pub(crate) fn clear(&mut self) {
        self.page_hashes.clear();
        self.channel.publish(&[OutgoingEngineEvent::Cleared]);
    }

    pub(crate) fn set_drop_every(&self, every: u64) {
        self.channel.set_drop_every(every);
    }

    /// Drops all pages without events, as a process restart does.
    pub(crate) fn restart(&mut self) {
        self.page_hashes.clear();
        self.channel.restart();
        self.publish_startup_clear();
    }

    /// Hashes of a prefix's pages, computed only for pages without a known hash. Empty for a namespace that cannot be
    /// hashed.
    fn hash_pages(&self, prefix: &PromptPrefix<'_>) -> Vec<HashedBlock> {
        let Ok(scheme) = prefix.namespace.event_hash_scheme(self.protocol, self.page_tokens) else {
            return Vec::new();
        };
        let pages = prefix.chain.pages();
        let mut names: Vec<HashedBlock> =
            pages.iter().map_while(|page| self.page_hashes.get(page).copied()).collect();
        let mut chain = BlockHashChain::resume(scheme, &names);
        chain.extend(prefix.tokens.get(chain.covered_tokens()..).unwrap_or_default(), &mut names);
        names
    }

    fn publish_changes(
        &self,
        changes: &LevelChanges,
        medium: StorageMedium<'_>,
        prefix: &PromptPrefix<'_>,
        names: &[HashedBlock],
    ) {
        let evicted: Vec<BlockHash<'_>> =
            changes.evicted.iter().filter_map(|page| self.page_hashes.get(page)).map(hash).collect();
        let hashes: Vec<BlockHash<'_>> = names.iter().map(hash).collect();
        let mut salted = vec![None; names.len()];
        if let Some(first) = salted.first_mut() {
            *first = prefix.namespace.cache_salt();
        }
        let mut events = Vec::new();
        if !evicted.is_empty() {
            events.push(OutgoingEngineEvent::Removed { hashes: &evicted, medium });
        }
        let pages = prefix.chain.pages();
        let page_tokens = self.page_tokens as usize;
        let mut start = 0;
        while start < names.len() {
            let added = pages[start..].iter().zip(&names[start..]);
            let length = added.take_while(|(page, _)| changes.added.contains(page)).count();
            let end = start + length;
            if length > 0 {
                events.push(OutgoingEngineEvent::Stored(OutgoingBlocks {
                    hashes: &hashes[start..end],
                    parent: start.checked_sub(1).and_then(|before| hashes.get(before)).copied(),
                    tokens: prefix.tokens.get(start * page_tokens..end * page_tokens).unwrap_or_default(),
                    block_size: self.page_tokens,
                    medium,
                    cache_salt: prefix.namespace.cache_salt(),
                    extra_keys: Some(&salted[start..end]),
                }));
            }
            start = end + 1;
        }
        if !events.is_empty() {
            self.channel.publish(&events);
        }
    }
}

impl LevelChanges {
    fn is_empty(&self) -> bool {
        self.added.is_empty() && self.evicted.is_empty()
    }
}

fn hash(page: &HashedBlock) -> BlockHash<'static> {
    BlockHash::Int(page.event_hash)
}

//! From changes of a cache to events.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mooncake_wire::events::{BlockHash, Medium, NewBlocks, NewEvent};
use moongate_pages::{Chain, Page};

use super::Channel;
use crate::engine::Face;
use crate::engine::cache::{Change, Kept, Level, PrefixCache};
use crate::engine::namespace::Namespace;
use crate::engine::tokens::PageChain;

/// What a cache is to keep: pages by the simulator's ids, and what their real names depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefix<'a> {
    pub(crate) chain: &'a PageChain,
    /// The tokens of `chain`; engines without a reporter may leave them away.
    pub(crate) tokens: &'a [u32],
    pub(crate) namespace: &'a Namespace,
}

/// Tells what one rank's cache holds.
#[derive(Debug)]
pub(crate) struct Reporter {
    face: Face,
    page_tokens: u32,
    channel: Arc<Channel>,
    /// Real names of the pages that the cache holds.
    names: HashMap<u128, Page>,
}

/// Changes of one level by one insertion.
#[derive(Debug, Default)]
struct Changes {
    added: HashSet<u128>,
    evicted: Vec<u128>,
}

impl Reporter {
    pub(crate) fn new(face: Face, page_tokens: u32, channel: Arc<Channel>) -> Self {
        let reporter = Self { face, page_tokens, channel, names: HashMap::new() };
        reporter.begin();
        reporter
    }

    /// SGLang flushes its cache once at its start, and says so.
    fn begin(&self) {
        if self.face == Face::Sglang {
            self.channel.publish(&[NewEvent::Cleared]);
        }
    }

    /// Puts a prefix into the cache and tells what has changed: a message for the device, and one for the host. Answers the names of
    /// the prefix's pages, and puts the pages that were new to the host into `to_host`.
    pub(crate) fn keep(
        &mut self,
        cache: &mut PrefixCache,
        prefix: &Prefix<'_>,
        how: &Kept,
        to_host: &mut HashSet<u128>,
    ) -> Vec<Page> {
        let (mut device, mut host) = (Changes::default(), Changes::default());
        cache.keep(prefix.chain.pages(), how, |level, change| {
            let changes = if level == Level::Device { &mut device } else { &mut host };
            match change {
                Change::Added(page) => {
                    changes.added.insert(page);
                }
                Change::Evicted(page) => changes.evicted.push(page),
            }
        });
        let names = self.name(prefix);
        if device.is_empty() && host.is_empty() {
            return names;
        }
        for (page, name) in prefix.chain.pages().iter().zip(&names) {
            if cache.holds(*page) {
                self.names.insert(*page, *name);
            }
        }
        self.tell(&device, Medium::Gpu, prefix, &names);
        let host_medium = if self.face == Face::Sglang { Medium::CpuPinned } else { Medium::Cpu };
        self.tell(&host, host_medium, prefix, &names);
        for page in device.evicted.iter().chain(&host.evicted) {
            if !cache.holds(*page) {
                self.names.remove(page);
            }
        }
        *to_host = host.added;
        names
    }

    /// All pages are gone, and subscribers are told.
    pub(crate) fn clear(&mut self) {
        self.names.clear();
        self.channel.publish(&[NewEvent::Cleared]);
    }

    /// See [`Channel::lose`].
    pub(crate) fn lose(&self, every: u64) {
        self.channel.lose(every);
    }

    /// All pages are gone with the process.
    pub(crate) fn restart(&mut self) {
        self.names.clear();
        self.channel.restart();
        self.begin();
    }

    /// Names of a prefix's pages. What is known is not hashed again. A namespace that cannot be hashed has none.
    fn name(&self, prefix: &Prefix<'_>) -> Vec<Page> {
        let Ok(scheme) = prefix.namespace.scheme(self.face, self.page_tokens) else { return Vec::new() };
        let pages = prefix.chain.pages();
        let mut names: Vec<Page> = pages.iter().map_while(|page| self.names.get(page).copied()).collect();
        let mut chain = Chain::after(scheme, &names);
        chain.extend(prefix.tokens.get(chain.tokens()..).unwrap_or_default(), &mut names);
        names
    }

    fn tell(&self, changes: &Changes, medium: Medium<'_>, prefix: &Prefix<'_>, names: &[Page]) {
        let evicted: Vec<BlockHash<'_>> =
            changes.evicted.iter().filter_map(|page| self.names.get(page)).map(hash).collect();
        let hashes: Vec<BlockHash<'_>> = names.iter().map(hash).collect();
        let mut salted = vec![None; names.len()];
        if let Some(first) = salted.first_mut() {
            *first = prefix.namespace.cache_salt();
        }
        let mut events = Vec::new();
        if !evicted.is_empty() {
            events.push(NewEvent::Removed { hashes: &evicted, medium });
        }
        let pages = prefix.chain.pages();
        let page_tokens = self.page_tokens as usize;
        let mut start = 0;
        while start < names.len() {
            let added = pages[start..].iter().zip(&names[start..]);
            let length = added.take_while(|(page, _)| changes.added.contains(page)).count();
            let end = start + length;
            if length > 0 {
                events.push(NewEvent::Stored(NewBlocks {
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

impl Changes {
    fn is_empty(&self) -> bool {
        self.added.is_empty() && self.evicted.is_empty()
    }
}

fn hash(page: &Page) -> BlockHash<'static> {
    BlockHash::Int(page.key)
}

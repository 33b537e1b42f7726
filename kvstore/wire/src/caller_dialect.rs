//! Detects the Mooncake release of clients.
//!
//! The argument layout identifies the release of most requests. Some reads have the same layout in several releases whose replies
//! differ. Their release is then taken from earlier requests of the same connection, else of the same client on other connections,
//! else of the same host, else from the default.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use foldhash::fast::RandomState;
use parking_lot::Mutex;

use crate::dialect::{Dialect, DialectSet};
use crate::rpc::RpcMethod;
use crate::types::Uuid;

/// Maximum number of clients, and of hosts, in each of two generations.
const GENERATION_CAPACITY: usize = 32_768;

/// A map that evicts by age: when the young generation is full, it replaces the old one.
#[derive(Debug)]
struct DialectCache<K> {
    young: HashMap<K, DialectSet, RandomState>,
    old: HashMap<K, DialectSet, RandomState>,
    generation: usize,
}

impl<K: Hash + Eq + Copy> DialectCache<K> {
    fn new(generation: usize) -> Self {
        Self { young: HashMap::default(), old: HashMap::default(), generation }
    }

    fn get(&mut self, key: K) -> DialectSet {
        if let Some(cached) = self.young.get(&key) {
            return *cached;
        }
        let Some(cached) = self.old.remove(&key) else { return DialectSet::EMPTY };
        self.put(key, cached);
        cached
    }

    fn put(&mut self, key: K, cached: DialectSet) {
        if self.young.len() >= self.generation {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, cached);
    }

    /// Narrows the set of a key, or replaces it if the two are disjoint. Returns whether it changed.
    fn merge(&mut self, key: K, observed: DialectSet) -> bool {
        let cached = self.get(key);
        let narrowed = narrow(cached, observed);
        if narrowed != cached {
            self.put(key, narrowed);
        }
        narrowed != cached
    }
}

fn narrow(cached: DialectSet, observed: DialectSet) -> DialectSet {
    let common = cached.intersection(observed);
    if common.is_empty() { observed } else { common }
}

/// Detected dialects of clients and hosts, with bounded size.
#[derive(Debug)]
pub struct DialectRegistry {
    clients: Mutex<DialectCache<Uuid>>,
    hosts: Mutex<DialectCache<IpAddr>>,
    /// Incremented with every change, so that connections can cache their lookups.
    version: AtomicU64,
    fallback: DialectSet,
    /// By method: whether some releases have the same request layout but different replies.
    ambiguous: Box<[bool]>,
}

impl DialectRegistry {
    /// An empty registry. `fallback` is the dialect of clients that were not detected.
    pub fn new(fallback: Dialect) -> Self {
        Self {
            clients: Mutex::new(DialectCache::new(GENERATION_CAPACITY)),
            hosts: Mutex::new(DialectCache::new(GENERATION_CAPACITY)),
            version: AtomicU64::new(1),
            fallback: [fallback].into_iter().collect(),
            ambiguous: RpcMethod::ALL.iter().map(|method| is_ambiguous(*method)).collect(),
        }
    }

    fn is_ambiguous(&self, method: RpcMethod) -> bool {
        self.ambiguous.get(method as usize).copied().unwrap_or(true)
    }
}

fn is_ambiguous(method: RpcMethod) -> bool {
    let form = |dialect| {
        let signature = method.arguments_signature(dialect);
        (signature.hash(), signature.has_compatible())
    };
    let same_layout = |one: Dialect| method.dialects().iter().filter(move |other| form(*other) == form(one));
    method.dialects().iter().any(|one| !same_reply(method, same_layout(one).collect()))
}

fn same_reply(method: RpcMethod, dialects: DialectSet) -> bool {
    let signature = |dialect| method.reply_signature(dialect);
    let mut forms =
        dialects.iter().map(|dialect| (signature(dialect).hash(), signature(dialect).has_compatible()));
    let first = forms.next();
    forms.all(|form| Some(form) == first)
}

/// Detected dialect of one connection.
#[derive(Debug)]
pub struct ConnectionDialect {
    host: IpAddr,
    /// Dialects that fit all requests of this connection; empty if there was none.
    observed: DialectSet,
    client: Option<Uuid>,
    /// The sets last looked up for the client and the host, and the registry's version then.
    cached: (u64, [DialectSet; 2]),
}

impl ConnectionDialect {
    pub fn new(host: IpAddr) -> Self {
        Self { host, observed: DialectSet::EMPTY, client: None, cached: (0, [DialectSet::EMPTY; 2]) }
    }

    /// Records a request: the dialects that its layout fits, and the client that it names.
    pub fn observe(&mut self, possible: DialectSet, client: Option<Uuid>, dialects: &DialectRegistry) {
        let is_new_client = client.is_some() && client != self.client;
        if is_new_client {
            self.client = client;
            self.cached.0 = 0;
        }
        let observed = narrow(self.observed, possible);
        if observed == self.observed && !is_new_client {
            return;
        }
        self.observed = observed;
        if observed == DialectSet::all() {
            return;
        }
        let host = dialects.hosts.lock().merge(self.host, observed);
        let client = self.client.is_some_and(|client| dialects.clients.lock().merge(client, observed));
        if host || client {
            dialects.version.fetch_add(1, Relaxed);
        }
    }

    /// The dialect in which to reply to a request whose layout fits all of `possible`, which is not empty.
    pub fn reply_dialect(
        &mut self,
        method: RpcMethod,
        possible: DialectSet,
        dialects: &DialectRegistry,
    ) -> Dialect {
        let newest = |set: DialectSet| set.newest().unwrap_or(Dialect::NEWEST);
        if !dialects.is_ambiguous(method) || same_reply(method, possible) {
            return newest(possible);
        }
        let [client, host] = self.look_up(dialects);
        let mut candidates = possible;
        for cached in [self.observed, client, host, dialects.fallback] {
            let common = candidates.intersection(cached);
            if common.is_empty() {
                continue;
            }
            candidates = common;
            if same_reply(method, candidates) {
                break;
            }
        }
        newest(candidates)
    }

    fn look_up(&mut self, dialects: &DialectRegistry) -> [DialectSet; 2] {
        let version = dialects.version.load(Relaxed);
        if self.cached.0 != version {
            let client = self.client.map(|client| dialects.clients.lock().get(client));
            let host = dialects.hosts.lock().get(self.host);
            self.cached = (version, [client.unwrap_or_default(), host]);
        }
        self.cached.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    fn set(dialects: &[Dialect]) -> DialectSet {
        dialects.iter().copied().collect()
    }

    /// The dialects that have the same argument layout as `dialect`.
    fn forms(method: RpcMethod, dialect: Dialect) -> DialectSet {
        let form = |dialect| {
            let signature = method.arguments_signature(dialect);
            (signature.hash(), signature.has_compatible())
        };
        method.dialects().iter().filter(|other| form(*other) == form(dialect)).collect()
    }

    #[test]
    fn only_replies_that_differ_are_ambiguous() {
        let dialects = DialectRegistry::new(Dialect::NEWEST);
        for method in [RpcMethod::GetReplicaList, RpcMethod::BatchGetReplicaList, RpcMethod::FetchTasks] {
            assert!(dialects.is_ambiguous(method), "{method:?}");
        }
        for method in [
            RpcMethod::ExistKey,
            RpcMethod::PutStart,
            RpcMethod::PutEnd,
            RpcMethod::Ping,
            RpcMethod::RemoveAll,
        ] {
            assert!(!dialects.is_ambiguous(method), "{method:?}");
        }
    }

    #[test]
    fn dialects_come_from_connection_client_host_default() {
        let dialects = DialectRegistry::new(Dialect::V0_3_12);
        let (method, possible) =
            (RpcMethod::GetReplicaList, forms(RpcMethod::GetReplicaList, Dialect::V0_3_13));
        assert_eq!(possible, set(&[Dialect::V0_3_12, Dialect::V0_3_13, Dialect::V0_3_14]));
        let client = Some(Uuid { first: 1, second: 2 });

        let mut reader = ConnectionDialect::new(HOST);
        reader.observe(possible, None, &dialects);
        assert_eq!(reader.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);

        let mut writer = ConnectionDialect::new(HOST);
        writer.observe(forms(RpcMethod::PutStart, Dialect::V0_3_13), client, &dialects);
        assert_eq!(writer.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        // The host's dialect was detected, so it is assumed for the other connection too.
        assert_eq!(reader.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        let mut other = ConnectionDialect::new(OTHER);
        assert_eq!(other.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);

        // Another client of that host uses an older dialect; the first one is identified by its id on every connection.
        let mut older = ConnectionDialect::new(HOST);
        older.observe(forms(RpcMethod::PutStart, Dialect::V0_3_12), None, &dialects);
        assert_eq!(reader.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);
        for host in [HOST, OTHER] {
            let mut second = ConnectionDialect::new(host);
            second.observe(forms(RpcMethod::FetchTasks, Dialect::V0_3_13), client, &dialects);
            assert_eq!(second.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        }
    }

    #[test]
    fn dialects_narrow_until_a_request_contradicts() {
        let dialects = DialectRegistry::new(Dialect::NEWEST);
        let mut connection = ConnectionDialect::new(HOST);
        connection.observe(set(&[Dialect::V0_3_9, Dialect::V0_3_11]), None, &dialects);
        connection.observe(set(&[Dialect::V0_3_11, Dialect::V0_3_12]), None, &dialects);
        assert_eq!(connection.observed, set(&[Dialect::V0_3_11]));
        connection.observe(set(&[Dialect::V0_3_13]), None, &dialects);
        assert_eq!(connection.observed, set(&[Dialect::V0_3_13]));
    }

    #[test]
    fn used_entries_survive_and_the_cache_is_bounded() {
        let mut recent = DialectCache::new(10);
        let observed = set(&[Dialect::V0_3_9]);
        recent.merge(0, observed);
        for other in 1..1000 {
            recent.merge(other, observed);
            assert_eq!(recent.get(0), observed);
            assert!(recent.young.len() + recent.old.len() <= 20);
        }
        assert_eq!(recent.get(500), DialectSet::EMPTY);
    }
}

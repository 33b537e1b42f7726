//! Who speaks which release of Mooncake.
//!
//! Most requests tell by the form of their arguments. Some reads do not: they look the same in several releases, and
//! only their replies differ. Then it counts what the same connection has told, else what the same client has told on
//! other connections, else what the same host has told, else the default.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use foldhash::fast::RandomState;
use mooncake_wire::rpc::RpcMethod;
use mooncake_wire::types::Uuid;
use mooncake_wire::{Dialect, DialectSet};
use parking_lot::Mutex;

/// Clients, and hosts, that are remembered in each of two generations.
const GENERATION_CAPACITY: usize = 32_768;

/// A map that forgets what has not been used for long: when the young generation is full, it becomes the old one.
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
        if let Some(known) = self.young.get(&key) {
            return *known;
        }
        let Some(known) = self.old.remove(&key) else { return DialectSet::EMPTY };
        self.put(key, known);
        known
    }

    fn put(&mut self, key: K, known: DialectSet) {
        if self.young.len() >= self.generation {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, known);
    }

    /// Narrows what is known, or replaces it if it is contradicted. Returns whether it changed.
    fn merge(&mut self, key: K, told: DialectSet) -> bool {
        let known = self.get(key);
        let narrowed = narrow(known, told);
        if narrowed != known {
            self.put(key, narrowed);
        }
        narrowed != known
    }
}

fn narrow(known: DialectSet, told: DialectSet) -> DialectSet {
    let both = known.intersection(told);
    if both.is_empty() { told } else { both }
}

/// What is known of all who ever called, within bounds.
#[derive(Debug)]
pub(crate) struct DialectRegistry {
    clients: Mutex<DialectCache<Uuid>>,
    hosts: Mutex<DialectCache<IpAddr>>,
    /// Grows whenever something was learnt, so that a connection can keep what it has looked up.
    version: AtomicU64,
    fallback: DialectSet,
    /// By method: whether there are releases whose requests are the same and whose replies differ.
    ambiguous: Box<[bool]>,
}

impl DialectRegistry {
    /// Nothing is known yet. `fallback` is what those speak who tell nothing.
    pub(crate) fn new(fallback: Dialect) -> Self {
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
    let form = |dialect| method.arguments_signature(dialect).hash();
    let same_form = |one: Dialect| method.dialects().iter().filter(move |other| form(*other) == form(one));
    method.dialects().iter().any(|one| !same_reply(method, same_form(one).collect()))
}

fn same_reply(method: RpcMethod, dialects: DialectSet) -> bool {
    let mut hashes = dialects.iter().map(|dialect| method.reply_signature(dialect).hash());
    let first = hashes.next();
    hashes.all(|hash| Some(hash) == first)
}

/// What is known of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionDialect {
    host: IpAddr,
    /// What the connection itself has told; empty if nothing.
    observed: DialectSet,
    client: Option<Uuid>,
    /// What was last looked up of the client and of the host, and when.
    cached: (u64, [DialectSet; 2]),
}

impl ConnectionDialect {
    pub(crate) fn new(host: IpAddr) -> Self {
        Self { host, observed: DialectSet::EMPTY, client: None, cached: (0, [DialectSet::EMPTY; 2]) }
    }

    /// Takes note of a request: in which dialects it can be meant, and whose it is if it says.
    pub(crate) fn observe(&mut self, possible: DialectSet, client: Option<Uuid>, dialects: &DialectRegistry) {
        let is_new_client = client.is_some() && client != self.client;
        if is_new_client {
            self.client = client;
            self.cached.0 = 0;
        }
        let told = narrow(self.observed, possible);
        if told == self.observed && !is_new_client {
            return;
        }
        self.observed = told;
        if told == DialectSet::all() {
            return;
        }
        let host = dialects.hosts.lock().merge(self.host, told);
        let client = self.client.is_some_and(|client| dialects.clients.lock().merge(client, told));
        if host || client {
            dialects.version.fetch_add(1, Relaxed);
        }
    }

    /// The dialect in which to reply to a request that can be meant in any of `possible`, of which there is at least
    /// one.
    pub(crate) fn reply_dialect(
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
        let mut left = possible;
        for known in [self.observed, client, host, dialects.fallback] {
            let both = left.intersection(known);
            if both.is_empty() {
                continue;
            }
            left = both;
            if same_reply(method, left) {
                break;
            }
        }
        newest(left)
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

    /// In which dialects a request is meant whose arguments are of the form that `dialect` has.
    fn forms(method: RpcMethod, dialect: Dialect) -> DialectSet {
        let hash = |dialect| method.arguments_signature(dialect).hash();
        method.dialects().iter().filter(|other| hash(*other) == hash(dialect)).collect()
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
    fn dialect_is_by_connection_then_client_host_default() {
        let dialects = DialectRegistry::new(Dialect::V0_3_12);
        let (method, possible) =
            (RpcMethod::GetReplicaList, forms(RpcMethod::GetReplicaList, Dialect::V0_3_13));
        assert_eq!(possible, set(&[Dialect::V0_3_12, Dialect::V0_3_13]));
        let client = Some(Uuid { first: 1, second: 2 });

        let mut silent = ConnectionDialect::new(HOST);
        silent.observe(possible, None, &dialects);
        assert_eq!(silent.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);

        let mut writer = ConnectionDialect::new(HOST);
        writer.observe(forms(RpcMethod::PutStart, Dialect::V0_3_13), client, &dialects);
        assert_eq!(writer.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        // The host has told, so the other connection is thought to speak the same.
        assert_eq!(silent.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        let mut other = ConnectionDialect::new(OTHER);
        assert_eq!(other.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);

        // Another client of that host speaks otherwise; the first one is known by its id wherever it comes from.
        let mut older = ConnectionDialect::new(HOST);
        older.observe(forms(RpcMethod::PutStart, Dialect::V0_3_12), None, &dialects);
        assert_eq!(silent.reply_dialect(method, possible, &dialects), Dialect::V0_3_12);
        for host in [HOST, OTHER] {
            let mut second = ConnectionDialect::new(host);
            second.observe(forms(RpcMethod::FetchTasks, Dialect::V0_3_13), client, &dialects);
            assert_eq!(second.reply_dialect(method, possible, &dialects), Dialect::V0_3_13);
        }
    }

    #[test]
    fn what_is_known_narrows_until_it_is_contradicted() {
        let dialects = DialectRegistry::new(Dialect::NEWEST);
        let mut speaker = ConnectionDialect::new(HOST);
        speaker.observe(set(&[Dialect::V0_3_9, Dialect::V0_3_11]), None, &dialects);
        speaker.observe(set(&[Dialect::V0_3_11, Dialect::V0_3_12]), None, &dialects);
        assert_eq!(speaker.observed, set(&[Dialect::V0_3_11]));
        speaker.observe(set(&[Dialect::V0_3_13]), None, &dialects);
        assert_eq!(speaker.observed, set(&[Dialect::V0_3_13]));
    }

    #[test]
    fn what_is_used_is_remembered_and_memory_is_bounded() {
        let mut recent = DialectCache::new(10);
        let told = set(&[Dialect::V0_3_9]);
        recent.merge(0, told);
        for other in 1..1000 {
            recent.merge(other, told);
            assert_eq!(recent.get(0), told);
            assert!(recent.young.len() + recent.old.len() <= 20);
        }
        assert_eq!(recent.get(500), DialectSet::EMPTY);
    }
}

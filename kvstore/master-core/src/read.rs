//! Whether objects exist and where they are.

use std::hint::black_box;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ReplicaDescriptor, ReplicaList};
use regex::Regex;

use crate::locked_shard::{KeyLocation, LockedShard};
use crate::master::MasterCore;
use crate::slab::NIL;

/// A replica as clients are told of it.
pub type SharedReplicaDescriptor = ReplicaDescriptor<Arc<str>>;
/// Replicas as clients are told of them.
pub type ReplicaDescriptors = Vec<SharedReplicaDescriptor>;

/// Keys of one batch that are looked up in one lock.
const KEYS_PER_LOCK: usize = 64;

/// A key of a batch.
#[derive(Clone, Copy)]
struct BatchedKey {
    location: KeyLocation,
    index: usize,
}

impl LockedShard<'_> {
    /// Where an object is that readers can have.
    fn readable(&self, spot: KeyLocation, key: &str) -> Result<u32, ErrorCode> {
        let at = self.lookup(spot, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &self.entries[at];
        if !entry.is_complete() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if self.is_readable(entry) { Ok(at) } else { Err(ErrorCode::OBJECT_NOT_FOUND) }
    }

    fn lease_replicas(&mut self, at: u32, now_ms: u64) -> ReplicaList<Arc<str>> {
        self.lease(at, now_ms);
        let (size, object_checksum) = (self.entries[at].size, self.entries[at].checksum());
        if self.entries[at].replicas().any(|it| self.can_be_read(it)) {
            self.read_bytes = self.read_bytes.saturating_add(size);
        } else {
            let (reads, bytes) = self.disk_reads;
            self.disk_reads = (reads + 1, bytes.saturating_add(size));
        }
        ReplicaList {
            replicas: self.readable_replicas(at),
            lease_ttl_ms: self.master.settings.lease_ttl_ms,
            object_checksum,
        }
    }
}

impl MasterCore {
    /// Whether an object can be read. If so it is leased.
    pub fn exist(&self, now_ms: u64, tenant: &str, key: &str) -> bool {
        let Ok(spot) = self.locate_reader_key(tenant, key) else { return false };
        let mut shard = self.lock(spot.shard);
        let Ok(at) = shard.readable(spot, key) else { return false };
        shard.lease(at, now_ms);
        true
    }

    /// [`Self::exist`] for many keys, for much less than the same number of calls. `found` is filled in their order.
    pub fn batch_exist<S: AsRef<str>>(&self, now_ms: u64, tenant: &str, keys: &[S], found: &mut Vec<bool>) {
        found.clear();
        found.resize(keys.len(), false);
        self.for_each_shard(tenant, keys, |shard, asked| {
            let mut places = [NIL; KEYS_PER_LOCK];
            let places = &mut places[..asked.len().min(KEYS_PER_LOCK)];
            shard.lookup_batch(asked, keys, places);
            for (place, asked) in places.iter().zip(asked) {
                if *place != NIL && shard.is_readable(&shard.entries[*place]) {
                    shard.lease(*place, now_ms);
                    found[asked.index] = true;
                }
            }
        });
    }

    /// Sorts keys by shard and hands each shard's keys over in pieces, each under one lock.
    fn for_each_shard<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
        mut work: impl FnMut(&mut LockedShard<'_>, &[BatchedKey]),
    ) {
        let Some(tenant) = self.tenants.index_of(tenant) else { return };
        let asked = self.sorted(tenant, keys);
        for same in asked.chunk_by(|a, b| a.location.shard == b.location.shard) {
            for piece in same.chunks(KEYS_PER_LOCK) {
                let Some(first) = piece.first() else { continue };
                work(&mut self.lock(first.location.shard), piece);
            }
        }
    }

    /// Keys by shard and in their order: counted first, then put where they belong.
    fn sorted<S: AsRef<str>>(&self, tenant: u16, keys: &[S]) -> Vec<BatchedKey> {
        let mut ends = vec![0_usize; self.shards.len()];
        let spots =
            |(index, key): (usize, &S)| BatchedKey { location: self.locate_key(tenant, key.as_ref()), index };
        let asked: Vec<BatchedKey> = keys.iter().enumerate().map(spots).collect();
        asked.iter().for_each(|it| ends[it.location.shard] += 1);
        let mut sum = 0;
        for end in &mut ends {
            sum += std::mem::replace(end, sum);
        }
        let mut sorted = asked.clone();
        for it in asked {
            let at = &mut ends[it.location.shard];
            sorted[*at] = it;
            *at += 1;
        }
        sorted
    }

    /// Where an object is. It is leased.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY` while it is being written.
    pub fn replicas(&self, now_ms: u64, tenant: &str, key: &str) -> Result<ReplicaList<Arc<str>>, ErrorCode> {
        let spot = self.locate_reader_key(tenant, key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.readable(spot, key)?;
        let list = shard.lease_replicas(at, now_ms);
        drop(shard);
        self.record_read(now_ms, spot, tenant, key, &list);
        self.record_disk_read(now_ms, spot, key, &list);
        Ok(list)
    }

    /// [`Self::replicas`] for many keys, in their order.
    pub fn batch_replicas<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        keys: &[S],
    ) -> Vec<Result<ReplicaList<Arc<str>>, ErrorCode>> {
        let mut found: Vec<_> = keys.iter().map(|_| Err(ErrorCode::OBJECT_NOT_FOUND)).collect();
        self.for_each_shard(tenant, keys, |shard, asked| {
            shard.lookup_batch(asked, keys, &mut [NIL; KEYS_PER_LOCK][..asked.len().min(KEYS_PER_LOCK)]);
            for asked in asked {
                let at = shard.readable(asked.location, keys[asked.index].as_ref());
                found[asked.index] = at.map(|at| shard.lease_replicas(at, now_ms));
            }
        });
        if self.is_counting_reads() || self.is_promotion_enabled() {
            for (key, list) in keys.iter().zip(&found) {
                if let (Ok(list), Ok(spot)) = (list, self.locate_reader_key(tenant, key.as_ref())) {
                    self.record_read(now_ms, spot, tenant, key.as_ref(), list);
                    self.record_disk_read(now_ms, spot, key.as_ref(), list);
                }
            }
        }
        found
    }

    /// Where the objects are whose keys match an expression. They are leased.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an expression that is none.
    pub fn replicas_by_regex(
        &self,
        now_ms: u64,
        tenant: &str,
        expression: &str,
    ) -> Result<Vec<(Box<str>, ReplicaDescriptors)>, ErrorCode> {
        let expression = Regex::new(expression).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        let mut found = Vec::new();
        let Some(tenant) = self.tenants.index_of(tenant) else { return Ok(found) };
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            let matching: Vec<u32> = shard.entries_matching(tenant, &expression).collect();
            for at in matching {
                if shard.is_readable(&shard.entries[at]) {
                    shard.lease(at, now_ms);
                    found.push((shard.entries[at].key.clone(), shard.readable_replicas(at)));
                }
            }
        }
        Ok(found)
    }

    /// Where objects are, without leasing them and without counting as use, in the keys' order.
    pub fn peek<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        let mut found: Vec<_> = keys.iter().map(|_| Err(ErrorCode::OBJECT_NOT_FOUND)).collect();
        self.for_each_shard(tenant, keys, |shard, asked| {
            shard.lookup_batch(asked, keys, &mut [NIL; KEYS_PER_LOCK][..asked.len().min(KEYS_PER_LOCK)]);
            for asked in asked {
                let at = shard.readable(asked.location, keys[asked.index].as_ref());
                found[asked.index] = at.map(|at| shard.readable_replicas(at));
            }
        });
        found
    }
}

impl LockedShard<'_> {
    /// Finds many keys. Memory is slow but serves many loads at a time, so each kind of load is made for all keys
    /// before the next kind, which needs its result: slots, entries, keys, and the neighbours in the list.
    fn lookup_batch<S: AsRef<str>>(&self, asked: &[BatchedKey], keys: &[S], places: &mut [u32]) {
        let at_all = |places: &[u32], touch: &dyn Fn(u32) -> u32| {
            let there = places.iter().filter(|place| **place != NIL);
            black_box(there.fold(0, |sum: u32, place| sum.wrapping_add(touch(*place))));
        };
        for (place, asked) in places.iter_mut().zip(asked) {
            *place = self.candidate(asked.location.tag);
        }
        at_all(places, &|at| self.entries[at].previous);
        at_all(places, &|at| self.entries[at].key.bytes().next().map_or(0, u32::from));
        for (place, asked) in places.iter_mut().zip(asked) {
            *place = self.verify_candidate(*place, asked.location, keys[asked.index].as_ref());
        }
        at_all(places, &|at| self.prefetch_neighbours(at));
    }

    /// A place if the key is there, or where the key is instead.
    fn verify_candidate(&self, place: u32, spot: KeyLocation, key: &str) -> u32 {
        if place == NIL {
            return NIL;
        }
        let entry = &self.entries[place];
        if *entry.key == *key && entry.tenant == spot.tenant {
            return place;
        }
        self.lookup(spot, key).unwrap_or(NIL)
    }

    /// The places of a tenant's keys that match an expression.
    pub(crate) fn entries_matching<'a>(
        &'a self,
        tenant: u16,
        expression: &'a Regex,
    ) -> impl Iterator<Item = u32> + 'a {
        let (places, _) = self.occupied(0, NIL);
        places.filter(move |at| {
            let entry = &self.entries[*at];
            entry.tenant == tenant && expression.is_match(&entry.key)
        })
    }
}

//! Queries: existence and replicas of objects.

use std::hint::black_box;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::ReplicaList;
use regex::Regex;

use crate::indices::{EntryIndex, SlabIndex, TenantIndex};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object_table::KeyLocation;
use crate::retention::KeyUse;
use crate::segment::ReplicaDescriptors;

/// Number of keys of a batch that are looked up under one lock.
pub(crate) const KEYS_PER_LOCK: usize = 64;

/// A key of a batch, with its position in the request.
#[derive(Clone, Copy)]
pub(crate) struct BatchedKey {
    pub(crate) location: KeyLocation,
    pub(crate) index: usize,
}

impl LockedShard<'_> {
    /// Index of the entry of a readable object.
    pub(crate) fn readable(&self, key_location: KeyLocation, key: &str) -> Result<EntryIndex, ErrorCode> {
        let index = self.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &self.entries[index];
        if !entry.is_complete() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if self.is_readable(entry) { Ok(index) } else { Err(ErrorCode::OBJECT_NOT_FOUND) }
    }

    fn lease_replicas(
        &mut self,
        index: EntryIndex,
        location: KeyLocation,
        read: KeyUse,
    ) -> ReplicaList<Arc<str>> {
        self.lease(index, location, read);
        let size = self.entries[index].size;
        if self.entries[index].replicas().any(|replica| self.can_be_read(replica)) {
            self.read_bytes = self.read_bytes.saturating_add(size);
        } else {
            self.disk_reads.reads += 1;
            self.disk_reads.bytes = self.disk_reads.bytes.saturating_add(size);
        }
        let tenant = self.objects.tenants.get(location.tenant);
        ReplicaList {
            resolved_tenant_id: tenant.map(|tenant| Arc::clone(&tenant.name)),
            ..self.replica_list(index)
        }
    }

    pub(crate) fn replica_list(&self, index: EntryIndex) -> ReplicaList<Arc<str>> {
        ReplicaList {
            replicas: self.readable_replicas(index),
            lease_ttl_ms: self.objects.settings.lease_ttl_ms,
            object_checksum: self.entries[index].checksum(),
            resolved_tenant_id: None,
        }
    }
}

impl MasterCore {
    /// Whether an object is readable. If so, its lease is extended.
    pub fn exist(&self, now_ms: u64, tenant: &str, key: &str) -> bool {
        let Ok(key_location) = self.objects.locate_reader_key(tenant, key) else { return false };
        let mut shard = self.objects.lock(key_location.shard);
        let Ok(index) = shard.readable(key_location, key) else {
            self.objects.retention.record_miss(now_ms, key_location);
            return false;
        };
        shard.lease(index, key_location, KeyUse::single(now_ms));
        true
    }

    /// [`Self::exist`] for many keys, cheaper than single calls. `found` is filled in the keys' order.
    pub fn batch_exist<S: AsRef<str>>(&self, now_ms: u64, tenant: &str, keys: &[S], found: &mut Vec<bool>) {
        found.clear();
        found.resize(keys.len(), false);
        self.for_each_shard(tenant, keys, |shard, batch| {
            let mut indices = [EntryIndex::NONE; KEYS_PER_LOCK];
            let indices = &mut indices[..batch.len().min(KEYS_PER_LOCK)];
            shard.lookup_batch(batch, keys, indices);
            for (index, key) in indices.iter().zip(batch) {
                if *index != EntryIndex::NONE && shard.is_readable(&shard.entries[*index]) {
                    let read = KeyUse::of_batch(now_ms, key.index, keys.len());
                    shard.lease(*index, key.location, read);
                    found[key.index] = true;
                } else {
                    self.objects.retention.record_miss(now_ms, key.location);
                }
            }
        });
    }

    /// Sorts keys by shard and calls `work` with up to 64 keys of one shard under one lock.
    pub(crate) fn for_each_shard<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
        mut work: impl FnMut(&mut LockedShard<'_>, &[BatchedKey]),
    ) {
        let Some(tenant) = self.objects.tenants.index_of(tenant) else { return };
        let sorted = self.sorted(tenant, keys);
        for same_shard in sorted.chunk_by(|a, b| a.location.shard == b.location.shard) {
            for batch in same_shard.chunks(KEYS_PER_LOCK) {
                let Some(first) = batch.first() else { continue };
                work(&mut self.objects.lock(first.location.shard), batch);
            }
        }
    }

    /// Counting sort of keys by shard, the last ones of a shard first: a prefix is leased after what follows it.
    fn sorted<S: AsRef<str>>(&self, tenant: TenantIndex, keys: &[S]) -> Vec<BatchedKey> {
        let mut ends = vec![0_usize; self.objects.shards.len()];
        let locate = |(index, key): (usize, &S)| BatchedKey {
            location: self.objects.locate_key(tenant, key.as_ref()),
            index,
        };
        let unsorted: Vec<BatchedKey> = keys.iter().enumerate().map(locate).collect();
        unsorted.iter().for_each(|key| ends[key.location.shard.get()] += 1);
        let mut sum = 0;
        for end in &mut ends {
            sum += std::mem::replace(end, sum);
        }
        let mut sorted = unsorted.clone();
        for key in unsorted.into_iter().rev() {
            let position = &mut ends[key.location.shard.get()];
            sorted[*position] = key;
            *position += 1;
        }
        sorted
    }

    /// Replicas of an object. Extends its lease.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, or `REPLICA_IS_NOT_READY` while it is being written.
    pub fn replicas(&self, now_ms: u64, tenant: &str, key: &str) -> Result<ReplicaList<Arc<str>>, ErrorCode> {
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.readable(key_location, key)?;
        let list = shard.lease_replicas(index, key_location, KeyUse::single(now_ms));
        drop(shard);
        self.record_read(now_ms, key_location, tenant, key, &list);
        self.record_disk_read(now_ms, key_location, key, &list);
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
        self.for_each_shard(tenant, keys, |shard, batch| {
            shard.lookup_batch(
                batch,
                keys,
                &mut [EntryIndex::NONE; KEYS_PER_LOCK][..batch.len().min(KEYS_PER_LOCK)],
            );
            for key in batch {
                let index = shard.readable(key.location, keys[key.index].as_ref());
                let read = KeyUse::of_batch(now_ms, key.index, keys.len());
                found[key.index] = index.map(|index| shard.lease_replicas(index, key.location, read));
            }
        });
        if self.is_counting_reads() || self.is_promotion_enabled() {
            for (key, list) in keys.iter().zip(&found) {
                if let (Ok(list), Ok(key_location)) =
                    (list, self.objects.locate_reader_key(tenant, key.as_ref()))
                {
                    self.record_read(now_ms, key_location, tenant, key.as_ref(), list);
                    self.record_disk_read(now_ms, key_location, key.as_ref(), list);
                }
            }
        }
        found
    }

    /// Replicas of the objects whose keys match a regular expression. Extends their leases.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an invalid regular expression.
    pub fn replicas_by_regex(
        &self,
        now_ms: u64,
        tenant: &str,
        expression: &str,
    ) -> Result<Vec<(Box<str>, ReplicaDescriptors)>, ErrorCode> {
        let expression = Regex::new(expression).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        let mut found = Vec::new();
        let Some(tenant) = self.objects.tenants.index_of(tenant) else { return Ok(found) };
        for shard in self.objects.shard_indices() {
            let mut shard = self.objects.lock(shard);
            let matching: Vec<EntryIndex> = shard.entries_matching(tenant, &expression).collect();
            for index in matching {
                if shard.is_readable(&shard.entries[index]) {
                    let location = self.objects.locate_key(tenant, shard.key(index));
                    shard.lease(index, location, KeyUse::single(now_ms));
                    found.push((shard.key(index).into(), shard.readable_replicas(index)));
                }
            }
        }
        Ok(found)
    }

    /// Replicas of objects in the keys' order, without extending leases and without counting reads.
    pub fn peek<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
    ) -> Vec<Result<ReplicaDescriptors, ErrorCode>> {
        let mut found: Vec<_> = keys.iter().map(|_| Err(ErrorCode::OBJECT_NOT_FOUND)).collect();
        self.for_each_shard(tenant, keys, |shard, batch| {
            shard.lookup_batch(
                batch,
                keys,
                &mut [EntryIndex::NONE; KEYS_PER_LOCK][..batch.len().min(KEYS_PER_LOCK)],
            );
            for key in batch {
                let index = shard.readable(key.location, keys[key.index].as_ref());
                found[key.index] = index.map(|index| shard.readable_replicas(index));
            }
        });
        found
    }
}

impl LockedShard<'_> {
    /// Looks up many keys. To overlap cache misses, each kind of load is issued for all keys before the next kind, which depends
    /// on it: slots, entries, keys, and the neighbours in the queue.
    pub(crate) fn lookup_batch<S: AsRef<str>>(
        &self,
        batch: &[BatchedKey],
        keys: &[S],
        indices: &mut [EntryIndex],
    ) {
        let prefetch_all = |indices: &[EntryIndex], touch: &dyn Fn(EntryIndex) -> u32| {
            let present = indices.iter().filter(|index| **index != EntryIndex::NONE);
            black_box(present.fold(0, |sum: u32, index| sum.wrapping_add(touch(*index))));
        };
        for (index, key) in indices.iter_mut().zip(batch) {
            *index = self.candidate(key.location.tag);
        }
        prefetch_all(indices, &|index| self.entries[index].previous.slot());
        prefetch_all(indices, &|index| self.key_bytes(index).first().map_or(0, |byte| u32::from(*byte)));
        for (index, key) in indices.iter_mut().zip(batch) {
            *index = self.verify_candidate(*index, key.location, keys[key.index].as_ref());
        }
        prefetch_all(indices, &|index| self.prefetch_neighbours(index));
    }

    /// Returns the candidate's index if its key matches, otherwise the result of a full lookup.
    fn verify_candidate(&self, index: EntryIndex, key_location: KeyLocation, key: &str) -> EntryIndex {
        if index == EntryIndex::NONE {
            return EntryIndex::NONE;
        }
        if self.has_key(index, key) && self.entries[index].tenant == key_location.tenant {
            return index;
        }
        self.lookup(key_location, key).unwrap_or(EntryIndex::NONE)
    }

    /// Indices of a tenant's entries whose keys match a regular expression.
    pub(crate) fn entries_matching<'a>(
        &'a self,
        tenant: TenantIndex,
        expression: &'a Regex,
    ) -> impl Iterator<Item = EntryIndex> + 'a {
        let indices = self.all_occupied();
        indices.filter(move |index| {
            self.entries[*index].tenant == tenant && expression.is_match(self.key(*index))
        })
    }
}

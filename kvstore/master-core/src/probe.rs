//! Look-ups that neither lease objects nor count as reads.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{GrantLeasePolicy, ProbePolicy, ReplicaList};

use crate::indices::EntryIndex;
use crate::master::MasterCore;
use crate::read::KEYS_PER_LOCK;

impl MasterCore {
    /// Whether an object is readable.
    pub fn probe(&self, tenant: &str, key: &str) -> bool {
        self.objects.locate_reader_key(tenant, key).is_ok_and(|key_location| {
            self.objects.lock(key_location.shard).readable(key_location, key).is_ok()
        })
    }

    /// Whether objects are readable, in the keys' order. Leases those that `grant` selects.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an unknown policy, or if the keys cannot be divided into groups.
    pub fn batch_probe<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        keys: &[S],
        grant: GrantLeasePolicy,
    ) -> Result<Vec<bool>, ErrorCode> {
        let mut found = vec![false; keys.len()];
        self.for_each_shard(tenant, keys, |shard, batch| {
            for key in batch {
                found[key.index] = shard.readable(key.location, keys[key.index].as_ref()).is_ok();
            }
        });
        let group = match grant.policy {
            ProbePolicy::NONE => return Ok(found),
            ProbePolicy::LAST_HIT_ONLY => usize::try_from(grant.candidate_size).unwrap_or(usize::MAX),
            _ => return Err(ErrorCode::INVALID_PARAMS),
        };
        if group == 0 || !keys.len().is_multiple_of(group) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        // An object may be evicted before its lease; then an earlier group is leased.
        for (keys, found) in keys.chunks(group).zip(found.chunks_mut(group)).rev() {
            if !found.iter().all(|found| *found) {
                continue;
            }
            let mut leased = Vec::new();
            self.batch_exist(now_ms, tenant, keys, &mut leased);
            found.copy_from_slice(&leased);
            if leased.iter().all(|leased| *leased) {
                break;
            }
        }
        Ok(found)
    }

    /// Replicas of objects in the keys' order.
    pub fn probe_replicas<S: AsRef<str>>(
        &self,
        tenant: &str,
        keys: &[S],
    ) -> Vec<Result<ReplicaList<Arc<str>>, ErrorCode>> {
        let mut found: Vec<_> = keys.iter().map(|_| Err(ErrorCode::OBJECT_NOT_FOUND)).collect();
        self.for_each_shard(tenant, keys, |shard, batch| {
            let mut indices = [EntryIndex::NONE; KEYS_PER_LOCK];
            shard.lookup_batch(batch, keys, &mut indices[..batch.len().min(KEYS_PER_LOCK)]);
            for key in batch {
                let index = shard.readable(key.location, keys[key.index].as_ref());
                found[key.index] = index.map(|index| shard.replica_list(index));
            }
        });
        found
    }
}

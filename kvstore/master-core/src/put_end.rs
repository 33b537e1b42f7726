//! The end of writing objects.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::master::MasterCore;
use crate::upsert::SpaceDisposition;

impl MasterCore {
    /// Ends the writing of an object. Doing so again is no error.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client writes it, `INVALID_PARAMS` for replicas of a kind that
    /// the object cannot have.
    pub fn put_end<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        object: &ObjectMeta<S>,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let key = object.key.as_ref();
        let spot = self.locate_reader_key(tenant, key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &mut shard.entries[at];
        let pending = entry.pending().map(|it| it.client);
        if pending.unwrap_or(entry.client) != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if !is_in_memory(replica_type) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if pending.is_some() {
            shard.commit_pending(at, object.object_checksum, now_ms, fx);
        } else {
            if entry.is_complete() {
                return Ok(());
            }
            if object.object_checksum.is_some() {
                entry.extra_mut().checksum = object.object_checksum;
            }
            shard.complete(at, now_ms);
            shard.emit_state(at, StoreCause::Written, fx);
        }
        if self.settings.disks.is_some_and(|it| !it.on_evict) {
            // If no node wants it, it stays in memory alone.
            let _ = shard.offload(at, now_ms);
        }
        Ok(())
    }

    /// [`Self::put_end`] for several objects, in their order. Upserts end in the same way.
    pub fn batch_put_end<S: AsRef<str>>(
        &self,
        now_ms: u64,
        client: Uuid,
        tenant: &str,
        objects: &[ObjectMeta<S>],
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        objects.iter().map(|it| self.put_end(now_ms, client, tenant, it, replica_type, fx)).collect()
    }

    /// Gives up the writing of an object and its space. Upserts are given up in the same way; a version that could be read before
    /// stays.
    ///
    /// # Errors
    /// As [`Self::put_end`], and `INVALID_WRITE` if it can be read already.
    pub fn put_revoke(
        &self,
        client: Uuid,
        tenant: &str,
        key: &str,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let spot = self.locate_reader_key(tenant, key)?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[at];
        let pending = entry.pending().map(|it| (it.client, it.since_ms));
        if pending.map_or(entry.client, |(client, _)| client) != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if !is_in_memory(replica_type) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if let Some((_, since_ms)) = pending {
            shard.abandon_pending(at, SpaceDisposition::Free, since_ms, fx);
            return Ok(());
        }
        if entry.is_complete() {
            return Err(ErrorCode::INVALID_WRITE);
        }
        shard.remove_and_free(at, RemoveCause::Revoked, fx);
        Ok(())
    }

    /// [`Self::put_revoke`] for several objects, in the keys' order.
    pub fn batch_put_revoke<K: AsRef<str>>(
        &self,
        client: Uuid,
        tenant: &str,
        keys: &[K],
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        keys.iter().map(|key| self.put_revoke(client, tenant, key.as_ref(), replica_type, fx)).collect()
    }
}

fn is_in_memory(replica_type: ReplicaType) -> bool {
    matches!(replica_type, ReplicaType::ALL | ReplicaType::MEMORY)
}

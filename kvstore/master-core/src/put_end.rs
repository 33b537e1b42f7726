//! Ending and revoking puts: PutEnd and PutRevoke.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ObjectMeta, ReplicaType};

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::master::MasterCore;
use crate::requests::CallContext;
use crate::retention::KeyUse;
use crate::upsert::SpaceDisposition;

impl MasterCore {
    /// Ends the put of an object. Repeating the call is not an error.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `ILLEGAL_CLIENT` if another client writes it, `INVALID_PARAMS` for replica types other than memory.
    pub fn put_end<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        object: &ObjectMeta<S>,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        self.end_put(context, object, replica_type, KeyUse::single(context.now_ms), fx)
    }

    fn end_put<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        object: &ObjectMeta<S>,
        replica_type: ReplicaType,
        write: KeyUse,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let CallContext { now_ms, client, tenant } = context;
        let key = object.key.as_ref();
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let pending = shard.entries[index].pending().map(|version| version.client);
        if pending.unwrap_or_else(|| shard.writer(index)) != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if !is_in_memory(replica_type) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if pending.is_some() {
            shard.commit_pending(index, object.object_checksum, now_ms, fx);
        } else {
            let entry = &mut shard.entries[index];
            if entry.is_complete() {
                return Ok(());
            }
            if object.object_checksum.is_some() {
                entry.extra_mut().checksum = object.object_checksum;
            }
            shard.complete(index, key_location, write);
            shard.emit_state(index, StoreCause::Written, fx);
        }
        if self.objects.settings.disks.is_some_and(|tier| !tier.on_evict) {
            // If no node accepts it, it stays in memory only.
            let _ = shard.offload(index, now_ms);
        }
        Ok(())
    }

    /// [`Self::put_end`] for several objects, in their order; also for upserts.
    pub fn batch_put_end<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        objects: &[ObjectMeta<S>],
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        let write = |position| KeyUse::of_batch(context.now_ms, position, objects.len());
        let objects = objects.iter().enumerate();
        objects
            .map(|(position, object)| self.end_put(context, object, replica_type, write(position), fx))
            .collect()
    }

    /// Revokes the put or upsert of an object and frees its space. After an upsert, a previously readable version stays.
    ///
    /// # Errors
    /// As [`Self::put_end`], and `INVALID_WRITE` if the put has ended already.
    pub fn put_revoke(
        &self,
        context: CallContext<'_>,
        key: &str,
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let CallContext { client, tenant, .. } = context;
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[index];
        let pending = entry.pending().map(|version| (version.client, version.since_ms));
        if pending.map_or_else(|| shard.writer(index), |(client, _)| client) != client {
            return Err(ErrorCode::ILLEGAL_CLIENT);
        }
        if !is_in_memory(replica_type) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        if let Some((_, since_ms)) = pending {
            shard.abandon_pending(index, SpaceDisposition::Free, since_ms, fx);
            return Ok(());
        }
        if entry.is_complete() {
            return Err(ErrorCode::INVALID_WRITE);
        }
        shard.remove_and_free(index, RemoveCause::Revoked, fx);
        Ok(())
    }

    /// [`Self::put_revoke`] for several objects, in the keys' order.
    pub fn batch_put_revoke<K: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        keys: &[K],
        replica_type: ReplicaType,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        keys.iter().map(|key| self.put_revoke(context, key.as_ref(), replica_type, fx)).collect()
    }
}

fn is_in_memory(replica_type: ReplicaType) -> bool {
    matches!(replica_type, ReplicaType::ALL | ReplicaType::MEMORY)
}

//! Soft pins of existing objects: they are evicted after unpinned ones.

use mooncake_wire::ErrorCode;

use crate::change::{StateChangeSink, StoreCause};
use crate::master::MasterCore;

impl MasterCore {
    /// Pins an object for `ttl_ms`, in place of its present pin, or unpins it. Its lease does not change.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an empty key or more than the maximum duration, `OBJECT_NOT_FOUND`, `REPLICA_IS_NOT_READY`.
    pub fn set_soft_pin(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        ttl_ms: Option<u64>,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        if key.is_empty() || ttl_ms.is_some_and(|ttl| ttl > self.objects.settings.max_soft_pin_ttl_ms) {
            return Err(ErrorCode::INVALID_PARAMS);
        }
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        if !shard.entries[index].is_complete() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        let until_ms = ttl_ms.map(|ttl| now_ms.saturating_add(ttl));
        if shard.entries[index].soft_pin_until_ms() == until_ms {
            return Ok(());
        }
        shard.entries[index].extra_mut().soft_pin_until_ms = until_ms;
        shard.entries[index].drop_empty_extras();
        let queue = shard.entries[index].target_queue(now_ms);
        shard.enqueue(index, queue);
        shard.emit_state(index, StoreCause::Replicas, fx);
        Ok(())
    }
}

//! Removing objects and replicas.

use mooncake_wire::ErrorCode;
use regex::Regex;

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::indices::{EntryIndex, GroupIndex};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::requests::{CallContext, RemoveContext};

/// Number of entries scanned under one lock by bulk removals.
const ENTRIES_PER_LOCK: u32 = 1024;

impl LockedShard<'_> {
    /// Checks that an object may be removed: not while it is leased (unless `force`), written or copied.
    fn check_removable(&self, index: EntryIndex, now_ms: u64, force: bool) -> Result<(), ErrorCode> {
        let entry = &self.entries[index];
        // An object with only unreachable replicas has no readers.
        if !force && entry.is_leased(now_ms) && self.is_readable(entry) {
            return Err(ErrorCode::OBJECT_HAS_LEASE);
        }
        if !entry.is_complete() || entry.pending().is_some() || !entry.replicas().all(|replica| replica.ready)
        {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if entry.transfer().is_some() {
            return Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK);
        }
        Ok(())
    }
}

impl MasterCore {
    /// Removes an object.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `OBJECT_HAS_LEASE`, `REPLICA_IS_NOT_READY` while it or a copy of it is being written,
    /// `OBJECT_HAS_REPLICATION_TASK` while a transfer without new replicas is active.
    pub fn remove(
        &self,
        context: RemoveContext<'_>,
        key: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let RemoveContext { now_ms, tenant, force } = context;
        let key_location = self.objects.locate_reader_key(tenant, key)?;
        if !force && self.group_is_leased(now_ms, tenant, key) {
            return Err(ErrorCode::OBJECT_HAS_LEASE);
        }
        let mut shard = self.objects.lock(key_location.shard);
        let Some(index) = shard.lookup(key_location, key) else {
            shard.record_absent(key_location, key);
            return Err(ErrorCode::OBJECT_NOT_FOUND);
        };
        shard.check_removable(index, now_ms, force)?;
        shard.remove_and_free(index, RemoveCause::Removed, fx);
        Ok(())
    }

    /// Whether another object of a key's group is leased.
    fn group_is_leased(&self, now_ms: u64, tenant: &str, key: &str) -> bool {
        let Ok(key_location) = self.objects.locate_reader_key(tenant, key) else { return false };
        let (group, members) = {
            let shard = self.objects.lock(key_location.shard);
            let group =
                shard.lookup(key_location, key).map_or(GroupIndex::NONE, |index| shard.entries[index].group);
            if group == GroupIndex::NONE {
                return false;
            }
            (group, self.objects.groups.members(group))
        };
        members.iter().any(|member| {
            let shard = self.objects.lock(member.shard);
            shard.is_member(*member, group) && shard.entries[member.index].is_leased(now_ms)
        })
    }

    /// [`Self::remove`] for several objects, in the keys' order.
    pub fn batch_remove<S: AsRef<str>>(
        &self,
        context: RemoveContext<'_>,
        keys: &[S],
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        keys.iter().map(|key| self.remove(context, key.as_ref(), fx)).collect()
    }

    /// Removes the objects whose keys match a regular expression and returns their number. Leased or busy objects are skipped.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an invalid regular expression.
    pub fn remove_by_regex(
        &self,
        context: RemoveContext<'_>,
        expression: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Result<i64, ErrorCode> {
        let RemoveContext { now_ms, tenant, force } = context;
        let expression = Regex::new(expression).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        let Some(tenant) = self.objects.tenants.index_of(tenant) else { return Ok(0) };
        Ok(self.remove_where(
            now_ms,
            force,
            |shard, index| shard.entries[index].tenant == tenant && shard.key_matches(index, &expression),
            fx,
        ))
    }

    /// Removes all objects of a tenant, or of all tenants, and returns their number. Leased or busy objects are skipped.
    pub fn remove_all(
        &self,
        now_ms: u64,
        tenant: Option<&str>,
        force: bool,
        fx: &mut dyn StateChangeSink,
    ) -> i64 {
        let count = match tenant.map(|name| self.objects.tenants.index_of(name)) {
            Some(None) => return 0,
            None => self.remove_where(now_ms, force, |_, _| true, fx),
            Some(Some(tenant)) => {
                self.remove_where(now_ms, force, |shard, index| shard.entries[index].tenant == tenant, fx)
            }
        };
        self.objects.disks.load().values().for_each(|disk| disk.request_remove_all());
        count
    }

    fn remove_where(
        &self,
        now_ms: u64,
        force: bool,
        matches: impl Fn(&LockedShard<'_>, EntryIndex) -> bool,
        fx: &mut dyn StateChangeSink,
    ) -> i64 {
        // Objects in inventories not received yet may match too, so restoring must stop here.
        self.close_rebuild();
        let mut count = 0;
        for shard in self.objects.shard_indices() {
            let mut from = Some(0);
            while let Some(start) = from {
                let mut shard = self.objects.lock(shard);
                let (indices, next) = shard.occupied(start, ENTRIES_PER_LOCK);
                let indices: Vec<EntryIndex> = indices.collect();
                from = next;
                for index in indices {
                    if matches(&shard, index) && shard.check_removable(index, now_ms, force).is_ok() {
                        shard.remove_and_free(index, RemoveCause::Cleared, fx);
                        count += 1;
                    }
                }
            }
        }
        count
    }

    /// Removes the replicas of objects in a segment, or all of them if `segment` is empty. Returns the keys that were cleared:
    /// not those that are leased, being written or copied, or that another client wrote.
    pub fn replica_clear<S: AsRef<str>>(
        &self,
        context: CallContext<'_>,
        keys: &[S],
        segment: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<String> {
        let is_cleared = |key: &&S| self.clear_replicas(context, key.as_ref(), segment, fx).is_some();
        let mut is_cleared = is_cleared;
        keys.iter().filter(|key| is_cleared(key)).map(|key| key.as_ref().to_owned()).collect()
    }

    fn clear_replicas(
        &self,
        context: CallContext<'_>,
        key: &str,
        segment: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Option<()> {
        let CallContext { now_ms, client, tenant } = context;
        let key_location = self.objects.locate_reader_key(tenant, key).ok()?;
        let mut shard = self.objects.lock(key_location.shard);
        let index = shard.lookup(key_location, key)?;
        let entry = &shard.entries[index];
        if shard.writer(index) != client || shard.check_removable(index, now_ms, false).is_err() {
            return None;
        }
        let in_segment = |replica: &MemoryReplica| {
            shard.segments.get(replica.segment).is_some_and(|mounted| *mounted.descriptor.name == *segment)
        };
        let (removed, remaining): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|replica| segment.is_empty() || in_segment(replica));
        if remaining.is_empty() && (segment.is_empty() || entry.copy().is_none()) {
            shard.remove_and_free(index, RemoveCause::Removed, fx);
            return Some(());
        }
        if removed.is_empty() {
            return None;
        }
        shard.abandon_work(index);
        if remaining.is_empty() {
            shard.drop_memory_replicas(index, fx);
            return Some(());
        }
        let entry = &shard.entries[index];
        self.objects.tenants.discharge(entry.tenant, entry.size * removed.len() as u64);
        shard.report_vacated(removed.iter(), fx);
        shard.entries[index].set_replicas(&remaining);
        shard.requeue_idle(index, now_ms);
        shard.emit_state(index, StoreCause::Replicas, fx);
        removed.iter().for_each(|replica| shard.free(replica));
        Some(())
    }
}

impl LockedShard<'_> {
    fn key_matches(&self, index: EntryIndex, expression: &Regex) -> bool {
        expression.is_match(self.key(index))
    }
}

//! Removing objects.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;
use regex::Regex;

use crate::change::{RemoveCause, StateChangeSink, StoreCause};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::MemoryReplica;
use crate::slab::NIL;

/// Entries that are removed under one lock when everything is.
const ENTRIES_PER_LOCK: u32 = 1024;

impl LockedShard<'_> {
    /// Whether an object may be removed: not while it is written, copied or read, and with its group.
    fn check_removable(&self, at: u32, now_ms: u64, force: bool) -> Result<(), ErrorCode> {
        let entry = &self.entries[at];
        // Nobody can be reading what has only silent replicas.
        if !force && entry.is_leased(now_ms) && self.is_readable(entry) {
            return Err(ErrorCode::OBJECT_HAS_LEASE);
        }
        if !entry.is_complete() || entry.pending().is_some() || !entry.replicas().all(|it| it.ready) {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        if entry.transfer().is_some() {
            return Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK);
        }
        Ok(())
    }
}

impl MasterCore {
    /// Removes an object; with `force`, although somebody may be reading it.
    ///
    /// # Errors
    /// `OBJECT_NOT_FOUND`, `OBJECT_HAS_LEASE`, `REPLICA_IS_NOT_READY` while it or a copy of it is written,
    /// `OBJECT_HAS_REPLICATION_TASK` while it is copied to where it is already.
    pub fn remove(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        force: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<(), ErrorCode> {
        let spot = self.locate_reader_key(tenant, key)?;
        if !force && self.group_is_leased(now_ms, tenant, key) {
            return Err(ErrorCode::OBJECT_HAS_LEASE);
        }
        let mut shard = self.lock(spot.shard);
        let Some(at) = shard.lookup(spot, key) else {
            shard.record_absent(spot, key);
            return Err(ErrorCode::OBJECT_NOT_FOUND);
        };
        shard.check_removable(at, now_ms, force)?;
        shard.remove_and_free(at, RemoveCause::Removed, fx);
        Ok(())
    }

    /// Whether another object of a key's group is leased.
    fn group_is_leased(&self, now_ms: u64, tenant: &str, key: &str) -> bool {
        let Ok(spot) = self.locate_reader_key(tenant, key) else { return false };
        let (group, members) = {
            let shard = self.lock(spot.shard);
            let group = shard.lookup(spot, key).map_or(NIL, |at| shard.entries[at].group);
            if group == NIL {
                return false;
            }
            (group, self.groups.members(group))
        };
        members.iter().any(|member| {
            let shard = self.lock(member.shard as usize);
            shard.is_member(*member, group) && shard.entries[member.index].is_leased(now_ms)
        })
    }

    /// [`Self::remove`] for several objects, in the keys' order.
    pub fn batch_remove<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        keys: &[S],
        force: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<Result<(), ErrorCode>> {
        keys.iter().map(|key| self.remove(now_ms, tenant, key.as_ref(), force, fx)).collect()
    }

    /// Removes the objects whose keys match an expression and returns how many. Those that cannot be removed stay.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an expression that is none.
    pub fn remove_by_regex(
        &self,
        now_ms: u64,
        tenant: &str,
        expression: &str,
        force: bool,
        fx: &mut dyn StateChangeSink,
    ) -> Result<i64, ErrorCode> {
        let expression = Regex::new(expression).map_err(|_| ErrorCode::INVALID_PARAMS)?;
        let Some(tenant) = self.tenants.index_of(tenant) else { return Ok(0) };
        Ok(self.remove_where(
            now_ms,
            force,
            |it, at| it.entries[at].tenant == tenant && it.key_matches(at, &expression),
            fx,
        ))
    }

    /// Removes all objects of a tenant, or of all tenants, and returns how many. Those that cannot be removed stay.
    pub fn remove_all(
        &self,
        now_ms: u64,
        tenant: Option<&str>,
        force: bool,
        fx: &mut dyn StateChangeSink,
    ) -> i64 {
        let count = match tenant.map(|name| self.tenants.index_of(name)) {
            Some(None) => return 0,
            None => self.remove_where(now_ms, force, |_, _| true, fx),
            Some(Some(tenant)) => {
                self.remove_where(now_ms, force, |it, at| it.entries[at].tenant == tenant, fx)
            }
        };
        self.disks.load().values().for_each(|disk| disk.request_remove_all());
        count
    }

    fn remove_where(
        &self,
        now_ms: u64,
        force: bool,
        is_meant: impl Fn(&LockedShard<'_>, u32) -> bool,
        fx: &mut dyn StateChangeSink,
    ) -> i64 {
        // Objects that nodes have not offered yet may match too, so nothing is restored from here on.
        self.close_rebuild();
        let mut count = 0;
        for shard in 0..self.shards.len() {
            let mut from = Some(0);
            while let Some(start) = from {
                let mut shard = self.lock(shard);
                let (places, next) = shard.occupied(start, ENTRIES_PER_LOCK);
                let places: Vec<u32> = places.collect();
                from = next;
                for at in places {
                    if is_meant(&shard, at) && shard.check_removable(at, now_ms, force).is_ok() {
                        shard.remove_and_free(at, RemoveCause::Cleared, fx);
                        count += 1;
                    }
                }
            }
        }
        count
    }

    /// Removes the replicas of objects that a client has on a segment, or all of them if no segment is named. Returns
    /// the keys for which that was done: not those that are leased, written or copied, or that another client wrote.
    pub fn replica_clear<S: AsRef<str>>(
        &self,
        now_ms: u64,
        tenant: &str,
        keys: &[S],
        client: Uuid,
        segment: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Vec<String> {
        let is_cleared =
            |key: &&S| self.clear_replicas(now_ms, tenant, key.as_ref(), client, segment, fx).is_some();
        let mut is_cleared = is_cleared;
        keys.iter().filter(|key| is_cleared(key)).map(|key| key.as_ref().to_owned()).collect()
    }

    fn clear_replicas(
        &self,
        now_ms: u64,
        tenant: &str,
        key: &str,
        client: Uuid,
        segment: &str,
        fx: &mut dyn StateChangeSink,
    ) -> Option<()> {
        let spot = self.locate_reader_key(tenant, key).ok()?;
        let mut shard = self.lock(spot.shard);
        let at = shard.lookup(spot, key)?;
        let entry = &shard.entries[at];
        if entry.client != client || shard.check_removable(at, now_ms, false).is_err() {
            return None;
        }
        let is_there = |it: &MemoryReplica| {
            shard.segments.get(it.segment).is_some_and(|it| *it.descriptor.name == *segment)
        };
        let (gone, left): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|it| segment.is_empty() || is_there(it));
        if left.is_empty() && (segment.is_empty() || entry.copy().is_none()) {
            shard.remove_and_free(at, RemoveCause::Removed, fx);
            return Some(());
        }
        if gone.is_empty() {
            return None;
        }
        shard.abandon_work(at);
        if left.is_empty() {
            shard.drop_memory_replicas(at, fx);
            return Some(());
        }
        let entry = &shard.entries[at];
        self.tenants.discharge(entry.tenant, entry.size * gone.len() as u64);
        shard.report_vacated(gone.iter(), fx);
        shard.entries[at].set_replicas(&left);
        shard.requeue_idle(at, now_ms);
        shard.emit_state(at, StoreCause::Replicas, fx);
        gone.iter().for_each(|it| shard.free(it));
        Some(())
    }
}

impl LockedShard<'_> {
    fn key_matches(&self, at: u32, expression: &Regex) -> bool {
        expression.is_match(&self.entries[at].key)
    }
}

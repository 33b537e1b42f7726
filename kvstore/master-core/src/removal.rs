//! Removing entries from the object table.

use std::borrow::Cow;

use crate::change::{RemoveCause, StateChange, StateChangeSink};
use crate::group::GroupMember;
use crate::indices::{EntryIndex, GroupIndex};
use crate::locked_shard::{LockedShard, storage_tiers};
use crate::object::ObjectEntry;
use crate::object_table::KeyLocation;

impl LockedShard<'_> {
    /// Removes an object, emits its removal and frees its space. Returns the bytes of all replicas.
    pub(crate) fn remove_and_free(
        &mut self,
        index: EntryIndex,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) -> u64 {
        let entry = self.remove_entry(index, cause, fx);
        entry.replicas().for_each(|replica| self.free(replica));
        self.quarantine_pending(&entry, fx);
        entry.size * entry.replicas().count() as u64
    }

    /// Removes an object, emits its removal and quarantines its space until a time.
    pub(crate) fn remove_and_quarantine(
        &mut self,
        index: EntryIndex,
        until_ms: u64,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) {
        let entry = self.remove_entry(index, cause, fx);
        for replica in entry.replicas() {
            self.quarantine(replica, entry.size, until_ms, fx);
        }
        self.quarantine_pending(&entry, fx);
    }

    pub(crate) fn remove_entry(
        &mut self,
        index: EntryIndex,
        cause: RemoveCause,
        fx: &mut dyn StateChangeSink,
    ) -> ObjectEntry {
        let entry = &self.entries[index];
        let key_location = self.objects.locate_key(entry.tenant, self.key(index));
        let tenant = self.objects.tenants.get(entry.tenant);
        let group = self.objects.groups.name(entry.group);
        fx.record(StateChange::Removed {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |entry| &*entry.name)),
            key: Cow::Borrowed(self.key(index)),
            group: group.as_deref().map(Cow::Borrowed),
            tiers: storage_tiers(entry),
            cause,
        });
        if entry.group != GroupIndex::NONE {
            self.objects.groups.leave(entry.group, GroupMember { shard: self.shard_index, index });
        }
        if entry.transfer().is_some() || entry.work().is_some() {
            for location in self.locations(entry.replicas().copied().filter(|replica| !replica.ready)) {
                fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
            }
            self.transfers.retain(|other| *other != index);
        }
        self.abandon_work(index);
        self.detach_copy(index);
        self.report_vacated(self.entries[index].replicas(), fx);
        self.record_departure(index, cause);
        let entry = self.remove(key_location.tag, index);
        let mut bytes = entry.size.saturating_mul(entry.replicas().count() as u64);
        if let Some(pending) = entry.pending() {
            self.pending.remove(&(pending.since_ms, index));
            bytes = bytes.saturating_add(pending.bytes());
        }
        self.objects.tenants.discharge(entry.tenant, bytes);
        let tally = self.tally(entry.prefix);
        (tally.keys, tally.bytes) = (tally.keys - 1, tally.bytes - entry.size);
        entry
    }

    /// Quarantines the space of a removed object's new version, since its writer may still write.
    fn quarantine_pending(&mut self, removed: &ObjectEntry, fx: &mut dyn StateChangeSink) {
        let Some(pending) = removed.pending() else { return };
        let until_ms = pending.since_ms.saturating_add(self.objects.settings.put_release_ms);
        for replica in &pending.replicas {
            self.quarantine(replica, pending.size, until_ms, fx);
        }
    }

    /// An object is removed from the table: inventory records of its key are older from here on.
    fn record_departure(&mut self, index: EntryIndex, cause: RemoveCause) {
        if self.rebuild.is_none() {
            return;
        }
        let hash = self.objects.hash(self.entries[index].tenant, self.key(index));
        self.record_removed_key(hash, cause);
    }

    fn record_removed_key(&mut self, hash: u64, cause: RemoveCause) {
        if self.rebuild.as_mut().is_some_and(|rebuild| !rebuild.record_removed(hash, cause)) {
            self.rebuild = None;
        }
    }

    /// Records that an object is overwritten in place.
    pub(crate) fn record_rewritten(&mut self, index: EntryIndex) {
        if self.rebuild.is_none() {
            return;
        }
        let hash = self.objects.hash(self.entries[index].tenant, self.key(index));
        if let Some(rebuild) = &mut self.rebuild {
            rebuild.record_rewritten(hash);
        }
    }

    /// Records the removal of an absent key, so that it is not restored later.
    pub(crate) fn record_absent(&mut self, key_location: KeyLocation, key: &str) {
        if self.rebuild.is_some() {
            let hash = self.objects.hash(key_location.tenant, key);
            self.record_removed_key(hash, RemoveCause::Removed);
        }
    }
}

//! Upserts of readable objects: the present version stays until the put of the new one has ended.
//!
//! The new version has its own space. When its put ends, it replaces the present one; when it is revoked, replaced by another upsert
//! or times out, the present version stays. In state changes, a new version is a [`StateChange::ObjectStarted`] of a stored object,
//! and its end is a [`StateChange::ObjectStored`], either of the new version or of the present one.

use mooncake_wire::types::Uuid;

use crate::change::{StateChangeSink, StoreCause};
use crate::group::{GroupId, GroupMember};
use crate::indices::{EntryIndex, GroupIndex};
use crate::locked_shard::LockedShard;
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, PendingVersion};
use crate::segment::ReplicaDescriptors;

/// Client id of an object whose writer's late calls must be rejected, since they would be ambiguous.
const NO_WRITER: Uuid = Uuid { first: 0, second: 0 };

/// How to release the space of an abandoned version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceDisposition {
    /// Free it: the writer has stopped.
    Free,
    /// Quarantine it: the writer may still write until the put times out.
    Quarantine,
}

impl LockedShard<'_> {
    /// Starts a new version of an object. Its space and quota are allocated already.
    pub(crate) fn begin_pending(
        &mut self,
        index: EntryIndex,
        pending: PendingVersion,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> ReplicaDescriptors {
        self.abandon_pending(index, SpaceDisposition::Quarantine, now_ms, fx);
        self.abandon_work(index);
        self.attach_pending(index, pending);
        self.emit_pending(index, fx);
        let pending = self.entries[index].pending();
        let replicas = pending
            .into_iter()
            .flat_map(|version| version.replicas.iter().map(|replica| (replica, version.size)));
        replicas.filter_map(|(replica, size)| self.to_descriptor(replica, size)).collect()
    }

    /// Attaches a new version. It protects the present one from eviction.
    pub(crate) fn attach_pending(&mut self, index: EntryIndex, pending: PendingVersion) {
        self.pending.insert((pending.since_ms, index));
        self.entries[index].extra_mut().pending = Some(Box::new(pending));
        self.enqueue(index, EvictionQueue::Unlisted);
    }

    /// Detaches a new version, which stays charged to the tenant.
    pub(crate) fn detach_pending(&mut self, index: EntryIndex) -> Option<PendingVersion> {
        let pending = *self.entries[index].extra.as_mut()?.pending.take()?;
        self.pending.remove(&(pending.since_ms, index));
        Some(pending)
    }

    /// Abandons a new version, if there is one. The present version stays.
    pub(crate) fn abandon_pending(
        &mut self,
        index: EntryIndex,
        space: SpaceDisposition,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(pending) = self.detach_pending(index) else { return };
        // A late PutEnd of the new version must not match the present one, which would return success.
        if space == SpaceDisposition::Quarantine && self.writer(index) == pending.client {
            self.set_writer(index, NO_WRITER);
        }
        let tenant = self.entries[index].tenant;
        self.objects.tenants.discharge(tenant, pending.bytes());
        self.requeue_idle(index, now_ms);
        self.emit_state(index, StoreCause::Replicas, fx);
        let until_ms = pending.since_ms.saturating_add(self.objects.settings.put_release_ms);
        for replica in &pending.replicas {
            match space {
                SpaceDisposition::Quarantine if until_ms > now_ms => {
                    self.quarantine(replica, pending.size, until_ms, fx);
                }
                _ => self.free(replica),
            }
        }
    }

    /// Replaces the present version by the new one. Readers of the present one are safe until their lease expires.
    pub(crate) fn commit_pending(
        &mut self,
        index: EntryIndex,
        checksum: Option<u64>,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(pending) = self.detach_pending(index) else { return };
        self.abandon_work(index);
        let copy = self.detach_copy(index);
        self.report_vacated(self.entries[index].replicas(), fx);
        self.record_rewritten(index);
        let entry = &mut self.entries[index];
        let old: Vec<MemoryReplica> = entry.replicas().copied().collect();
        let (old_size, tenant, prefix) = (entry.size, entry.tenant, entry.prefix);
        let leased_until_ms = Some(entry.stamp).filter(|_| entry.is_leased(now_ms));
        (entry.size, entry.stamp) = (pending.size, now_ms);
        let new: Vec<MemoryReplica> =
            pending.replicas.iter().map(|replica| MemoryReplica { ready: true, ..*replica }).collect();
        entry.set_replicas(&new);
        let extra = entry.extra_mut();
        (extra.checksum, extra.soft_pin_until_ms) = (checksum, pending.soft_pin_until_ms);
        entry.drop_empty_extras();
        entry.flags = EntryFlags::new(EvictionQueue::Unlisted, pending.hard_pin);
        self.set_writer(index, pending.client);
        self.change_group(index, pending.group);
        let queue = self.entries[index].target_queue(now_ms);
        self.enqueue(index, queue);
        self.objects.recent_writes.add(now_ms, pending.size.saturating_mul(new.len() as u64));
        self.objects.tenants.discharge(tenant, old_size.saturating_mul(old.len() as u64));
        let tally = self.tally(prefix);
        tally.bytes = tally.bytes - old_size + pending.size;
        self.emit_state(index, StoreCause::Written, fx);
        if copy.is_some() {
            self.emit_state(index, StoreCause::DiskCopyLost, fx);
        }
        for replica in &old {
            match leased_until_ms {
                Some(until_ms) => self.quarantine(replica, old_size, until_ms, fx),
                None => self.free(replica),
            }
        }
    }

    /// Moves an object to the group of the new version; without one it stays in its group.
    fn change_group(&mut self, index: EntryIndex, group: Option<(GroupId, Box<str>)>) {
        let Some((id, name)) = group else { return };
        let member = GroupMember { shard: self.shard_index, index };
        let before = self.entries[index].group;
        if before != GroupIndex::NONE {
            self.objects.groups.leave(before, member);
        }
        self.entries[index].group = self.objects.groups.join(id, &name, member);
    }

    /// Removes lost replicas from new versions, and abandons versions without remaining replicas.
    pub(crate) fn drop_pending_replicas(
        &mut self,
        is_lost: impl Fn(&MemoryReplica, u64) -> bool,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let pending: Vec<EntryIndex> = self.pending.iter().map(|(_, index)| *index).collect();
        for index in pending {
            let entry = &mut self.entries[index];
            let tenant = entry.tenant;
            let Some(pending) = entry.extra.as_mut().and_then(|extra| extra.pending.as_mut()) else {
                continue;
            };
            let size = pending.size;
            let (removed, remaining): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                pending.replicas.iter().partition(|replica| is_lost(replica, size));
            if removed.is_empty() {
                continue;
            }
            pending.replicas = remaining;
            let is_empty = pending.replicas.is_empty();
            self.objects.tenants.discharge(tenant, size.saturating_mul(removed.len() as u64));
            if is_empty {
                self.abandon_pending(index, SpaceDisposition::Quarantine, now_ms, fx);
            } else {
                self.emit_pending(index, fx);
            }
            removed.iter().for_each(|replica| self.free(replica));
        }
    }
}

//! Upserts of objects that can be read: the present version stays until the new one has been written to its end.
//!
//! The new version has space of its own. When it is ended it takes the place of the present one; when it is revoked, replaced by
//! another upsert or not ended in time, the present version is as it was. In facts a new version is a [`StateChange::ObjectStarted`] of an object
//! that is stored, and its end is a [`StateChange::Stored`], either of the new version or of the present one.

use std::borrow::Cow;

use mooncake_wire::types::Uuid;

use crate::change::{ObjectState, StateChange, StateChangeSink, StoreCause};
use crate::group::{GroupId, GroupMember};
use crate::locked_shard::LockedShard;
use crate::object::{EntryFlags, EvictionQueue, MemoryReplica, ObjectEntry, PendingVersion};
use crate::read::ReplicaDescriptors;
use crate::slab::NIL;

/// Nobody: who wrote an object of which it is not certain any more what a late call of its writer means.
const NO_WRITER: Uuid = Uuid { first: 0, second: 0 };

/// What becomes of the space of a new version that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpaceDisposition {
    /// Nobody writes to it any more.
    Free,
    /// Its writer may still be writing, until its time is over.
    Quarantine,
}

impl LockedShard<'_> {
    /// Begins to write a new version of an object. Its space and its quota have been taken already.
    pub(crate) fn begin_pending(
        &mut self,
        at: u32,
        pending: PendingVersion,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) -> ReplicaDescriptors {
        self.abandon_pending(at, SpaceDisposition::Quarantine, now_ms, fx);
        self.abandon_work(at);
        self.attach_pending(at, pending);
        self.emit_pending(at, fx);
        let pending = self.entries[at].pending();
        let replicas =
            pending.into_iter().flat_map(|it| it.replicas.iter().map(|replica| (replica, it.size)));
        replicas.filter_map(|(replica, size)| self.to_descriptor(replica, size)).collect()
    }

    /// Notes a new version. It keeps the present one from being evicted.
    pub(crate) fn attach_pending(&mut self, at: u32, pending: PendingVersion) {
        self.pending.insert((pending.since_ms, at));
        self.entries[at].extra_mut().pending = Some(Box::new(pending));
        self.enqueue(at, EvictionQueue::Unlisted);
    }

    /// Takes a new version off its object, which stays charged to the tenant.
    pub(crate) fn detach_pending(&mut self, at: u32) -> Option<PendingVersion> {
        let pending = *self.entries[at].extra.as_mut()?.pending.take()?;
        self.pending.remove(&(pending.since_ms, at));
        Some(pending)
    }

    /// Gives up a new version, if there is one. The present version stays.
    pub(crate) fn abandon_pending(
        &mut self,
        at: u32,
        space: SpaceDisposition,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(pending) = self.detach_pending(at) else { return };
        let entry = &mut self.entries[at];
        // A late end of the new version must not match the present one, which would be answered with success.
        if space == SpaceDisposition::Quarantine && entry.client == pending.client {
            entry.client = NO_WRITER;
        }
        let tenant = entry.tenant;
        self.master.tenants.discharge(tenant, pending.bytes());
        self.requeue_idle(at, now_ms);
        self.emit_state(at, StoreCause::Replicas, fx);
        let until_ms = pending.since_ms.saturating_add(self.master.settings.put_release_ms);
        for replica in &pending.replicas {
            match space {
                SpaceDisposition::Quarantine if until_ms > now_ms => {
                    self.quarantine(replica, pending.size, until_ms, fx);
                }
                _ => self.free(replica),
            }
        }
    }

    /// Puts the new version in the place of the present one. Whoever reads the present one may do so until the lease ends.
    pub(crate) fn commit_pending(
        &mut self,
        at: u32,
        checksum: Option<u64>,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(pending) = self.detach_pending(at) else { return };
        self.abandon_work(at);
        let copy = self.detach_copy(at);
        self.report_vacated(self.entries[at].replicas(), fx);
        self.record_rewritten(at);
        let entry = &mut self.entries[at];
        let old: Vec<MemoryReplica> = entry.replicas().copied().collect();
        let (old_size, tenant, prefix) = (entry.size, entry.tenant, entry.prefix);
        let leased_until_ms = Some(entry.stamp).filter(|_| entry.is_leased(now_ms));
        (entry.client, entry.size, entry.stamp) = (pending.client, pending.size, now_ms);
        let new: Vec<MemoryReplica> =
            pending.replicas.iter().map(|it| MemoryReplica { ready: true, ..*it }).collect();
        entry.set_replicas(&new);
        let extra = entry.extra_mut();
        (extra.checksum, extra.soft_pin_until_ms) = (checksum, pending.soft_pin_until_ms);
        entry.drop_empty_extras();
        entry.flags = EntryFlags::new(EvictionQueue::Unlisted, pending.hard_pin);
        self.change_group(at, pending.group);
        let queue = self.entries[at].target_queue(now_ms);
        self.enqueue(at, queue);
        self.master.recent_writes.add(now_ms, pending.size.saturating_mul(new.len() as u64));
        self.master.tenants.discharge(tenant, old_size.saturating_mul(old.len() as u64));
        let tally = self.tally(prefix);
        tally.bytes = tally.bytes - old_size + pending.size;
        self.emit_state(at, StoreCause::Written, fx);
        if copy.is_some() {
            self.emit_state(at, StoreCause::DiskCopyLost, fx);
        }
        for replica in &old {
            match leased_until_ms {
                Some(until_ms) => self.quarantine(replica, old_size, until_ms, fx),
                None => self.free(replica),
            }
        }
    }

    /// An object stays in its group unless it is written with another.
    fn change_group(&mut self, at: u32, group: Option<(GroupId, Box<str>)>) {
        let Some((id, name)) = group else { return };
        let member = GroupMember { shard: self.shard_index as u32, index: at };
        let before = self.entries[at].group;
        if before != NIL {
            self.master.groups.leave(before, member);
        }
        self.entries[at].group = self.master.groups.join(id, &name, member);
    }

    /// Takes replicas out of new versions, and gives up those of which nothing is left.
    pub(crate) fn drop_pending_replicas(
        &mut self,
        is_lost: impl Fn(&MemoryReplica, u64) -> bool,
        now_ms: u64,
        fx: &mut dyn StateChangeSink,
    ) {
        let pending: Vec<u32> = self.pending.iter().map(|(_, at)| *at).collect();
        for at in pending {
            let entry = &mut self.entries[at];
            let tenant = entry.tenant;
            let Some(pending) = entry.extra.as_mut().and_then(|it| it.pending.as_mut()) else { continue };
            let size = pending.size;
            let (gone, left): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
                pending.replicas.iter().partition(|it| is_lost(it, size));
            if gone.is_empty() {
                continue;
            }
            pending.replicas = left;
            let is_over = pending.replicas.is_empty();
            self.master.tenants.discharge(tenant, size.saturating_mul(gone.len() as u64));
            if is_over {
                self.abandon_pending(at, SpaceDisposition::Quarantine, now_ms, fx);
            } else {
                self.emit_pending(at, fx);
            }
            gone.iter().for_each(|it| self.free(it));
        }
    }

    /// Keeps the space of the new version of an object that was removed for its writer.
    pub(crate) fn quarantine_pending(&mut self, removed: &ObjectEntry, fx: &mut dyn StateChangeSink) {
        let Some(pending) = removed.pending() else { return };
        let until_ms = pending.since_ms.saturating_add(self.master.settings.put_release_ms);
        for replica in &pending.replicas {
            self.quarantine(replica, pending.size, until_ms, fx);
        }
    }

    /// Records the new version of an object as a fact, if there is one.
    pub(crate) fn emit_pending(&self, at: u32, fx: &mut dyn StateChangeSink) {
        let entry = &self.entries[at];
        let Some(pending) = entry.pending() else { return };
        let tenant = self.master.tenants.get(entry.tenant);
        fx.record(StateChange::ObjectStarted(ObjectState {
            tenant: Cow::Borrowed(tenant.as_ref().map_or("", |it| &*it.name)),
            key: Cow::Borrowed(&entry.key),
            size: pending.size,
            client: pending.client,
            locations: Cow::Owned(self.locations(pending.replicas.iter().copied())),
            disk_copy: None,
            checksum: None,
            hard_pin: pending.hard_pin,
            soft_pin_until_ms: pending.soft_pin_until_ms,
            group: pending.group.as_ref().map(|(_, name)| Cow::Borrowed(&**name)),
            since_ms: pending.since_ms,
        }));
    }
}

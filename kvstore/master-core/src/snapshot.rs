//! The whole state as facts, in pieces.

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::mount::to_borrowed;
use crate::object::EvictionQueue;
use crate::query::ObjectCursor;

/// Where a snapshot goes on. The default is its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCursor(Option<ObjectCursor>);

impl MasterCore {
    /// Tells a part of the state as facts and returns where to go on, nothing at the end. At most `limit` places of the
    /// table are looked at under one lock. All parts, and after them all facts that the master has told since the
    /// first part was begun, are its state.
    pub fn snapshot(
        &self,
        from: SnapshotCursor,
        limit: u32,
        fx: &mut dyn StateChangeSink,
    ) -> Option<SnapshotCursor> {
        let Some(cursor) = from.0 else {
            self.emit_tenants(fx);
            self.emit_nodes(fx);
            self.emit_pending_transfers(fx);
            let tasks = self.tasks.lock();
            tasks.emit_state(fx);
            tasks.jobs.emit_state(fx);
            return Some(SnapshotCursor(Some(ObjectCursor::default())));
        };
        if cursor.index == 0 {
            self.lock(cursor.shard).emit_quarantined(fx);
        }
        let next = self.scan(cursor, limit, |shard, at| shard.emit_object(at, fx));
        next.map(|cursor| SnapshotCursor(Some(cursor)))
    }

    fn emit_tenants(&self, fx: &mut dyn StateChangeSink) {
        for quota in self.tenants.quotas() {
            let requested = Some(quota.requested_quota_bytes);
            fx.record(StateChange::TenantQuota { tenant: quota.tenant_id.into(), requested });
        }
    }

    /// Clients with their segments: first what a silent client cannot be asked for, so that applying its silence meets
    /// just these segments.
    fn emit_nodes(&self, fx: &mut dyn StateChangeSink) {
        let registry = self.registry.lock();
        let segments = self.segments.load();
        let tell_segments = |readable: bool, fx: &mut dyn StateChangeSink| {
            for (_, mounted) in segments.iter().filter(|(_, it)| it.is_readable() == readable) {
                let (segment, client) = (to_borrowed(&mounted.descriptor), mounted.client);
                let id = segment.id;
                fx.record(StateChange::SegmentMounted { segment, client, at_ms: mounted.mounted_at_ms });
                let (status, until_ms) = (mounted.status(), mounted.unmount_at_ms());
                fx.record(StateChange::SegmentStatus { segment: id, status, until_ms });
            }
        };
        let disks = self.disks.load();
        let tell_disks = |heard: bool, fx: &mut dyn StateChangeSink| {
            for disk in disks.values().filter(|it| it.is_responsive() == heard) {
                fx.record(StateChange::DiskMounted { client: disk.client });
            }
        };
        tell_segments(false, fx);
        tell_disks(false, fx);
        for (client, known) in &registry.clients {
            let (client, at_ms) = (*client, known.last_seen_ms);
            let silent_at_ms = at_ms.saturating_add(self.settings.client_ttl_ms);
            fx.record(match known.silent {
                true => StateChange::ClientSilent { client, at_ms: silent_at_ms },
                false => StateChange::ClientRecovered { client, at_ms },
            });
        }
        tell_segments(true, fx);
        tell_disks(true, fx);
    }

    /// Puts the lists of eviction into the order of the facts' times, which the order of a snapshot is not.
    pub(crate) fn sort_lists(&self) {
        for shard in 0..self.shards.len() {
            let mut shard = self.lock(shard);
            let (places, _) = shard.occupied(0, u32::MAX);
            let in_list = |at: &u32| {
                !matches!(shard.entries[*at].queue(), EvictionQueue::Unlisted | EvictionQueue::Vacant)
            };
            let mut places: Vec<u32> = places.filter(in_list).collect();
            places.sort_by_key(|at| shard.entries[*at].stamp);
            for at in places {
                let queue = shard.entries[at].queue();
                shard.enqueue(at, queue);
            }
        }
    }
}

impl LockedShard<'_> {
    fn emit_object(&self, at: u32, fx: &mut dyn StateChangeSink) {
        self.emit_state(at, StoreCause::Snapshot, fx);
        self.emit_transfer(at, fx);
        let entry = &self.entries[at];
        let Some(since_ms) = entry.work().map(|it| it.since_ms) else { return };
        if entry.transfer().is_some() {
            return;
        }
        let until_ms = since_ms.saturating_add(self.master.settings.put_release_ms);
        for place in self.locations(entry.replicas().copied().filter(|it| !it.ready)) {
            fx.record(StateChange::RangeQuarantined {
                segment: place.segment,
                offset: place.offset,
                size: entry.size,
                until_ms,
            });
        }
    }

    fn emit_quarantined(&self, fx: &mut dyn StateChangeSink) {
        for held in &self.quarantined {
            if let Some(segment) = self.segments.get(held.segment).map(|it| it.descriptor.id) {
                let (offset, size, until_ms) = (held.offset, held.size, held.until_ms);
                fx.record(StateChange::RangeQuarantined { segment, offset, size, until_ms });
            }
        }
    }
}

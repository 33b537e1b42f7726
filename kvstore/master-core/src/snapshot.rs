//! Snapshots: the whole state as state changes, in parts.

use crate::change::{StateChange, StateChangeSink, StoreCause};
use crate::indices::EntryIndex;
use crate::locked_shard::LockedShard;
use crate::locked_shard::ObjectCursor;
use crate::master::MasterCore;
use crate::mount::to_borrowed;

/// Position in a snapshot. The default is its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCursor(Option<ObjectCursor>);

impl MasterCore {
    /// Emits one part of the state and returns the position of the next one, `None` at the end. Scans at most `limit` entries under
    /// one lock. All parts, followed by all state changes since the first part was started, add up to the master's state.
    pub fn snapshot(
        &self,
        from: SnapshotCursor,
        limit: u32,
        fx: &mut dyn StateChangeSink,
    ) -> Option<SnapshotCursor> {
        let Some(cursor) = from.0 else {
            self.emit_tenants(fx);
            self.objects.retention.emit_state(fx);
            self.emit_nodes(fx);
            self.pending_transfers.lock().emit_state(fx);
            let planner = self.planner.lock();
            planner.tasks.emit_state(fx);
            planner.drain_jobs.emit_state(fx);
            return Some(SnapshotCursor(Some(ObjectCursor::default())));
        };
        if cursor.slot == 0 {
            self.objects.lock(cursor.shard).emit_quarantined(fx);
        }
        let next = self.objects.scan(cursor, limit, |shard, index| shard.emit_object(index, fx));
        next.map(|cursor| SnapshotCursor(Some(cursor)))
    }

    fn emit_tenants(&self, fx: &mut dyn StateChangeSink) {
        for quota in self.objects.tenants.quotas() {
            let requested = Some(quota.requested_quota_bytes);
            fx.record(StateChange::TenantQuota { tenant: quota.tenant_id.into(), requested });
        }
    }

    /// Emits clients with their segments. Unreadable segments come before the clients' liveness, so that applying `ClientSilent`
    /// affects exactly these segments.
    fn emit_nodes(&self, fx: &mut dyn StateChangeSink) {
        let registry = self.registry.lock();
        let segments = self.objects.segments.load();
        let emit_segments = |readable: bool, fx: &mut dyn StateChangeSink| {
            for (_, mounted) in segments.iter().filter(|(_, segment)| segment.is_readable() == readable) {
                let (segment, client) = (to_borrowed(&mounted.descriptor), mounted.client);
                let id = segment.id;
                fx.record(StateChange::SegmentMounted { segment, client, at_ms: mounted.mounted_at_ms });
                let (status, until_ms) = (mounted.status(), mounted.unmount_at_ms());
                fx.record(StateChange::SegmentStatus { segment: id, status, until_ms });
            }
        };
        let disks = self.objects.disks.load();
        let emit_disks = |responsive: bool, fx: &mut dyn StateChangeSink| {
            for disk in disks.values().filter(|disk| disk.is_responsive() == responsive) {
                fx.record(StateChange::DiskMounted { client: disk.client });
            }
        };
        emit_segments(false, fx);
        emit_disks(false, fx);
        for (client, known) in &registry.clients {
            let (client, at_ms) = (*client, known.last_seen_ms);
            let silent_at_ms = at_ms.saturating_add(self.objects.settings.client_ttl_ms);
            fx.record(match known.silent {
                true => StateChange::ClientSilent { client, at_ms: silent_at_ms },
                false => StateChange::ClientRecovered { client, at_ms },
            });
        }
        emit_segments(true, fx);
        emit_disks(true, fx);
    }
}

impl LockedShard<'_> {
    fn emit_object(&self, index: EntryIndex, fx: &mut dyn StateChangeSink) {
        self.emit_state(index, StoreCause::Snapshot, fx);
        self.emit_transfer(index, fx);
        let entry = &self.entries[index];
        let Some(since_ms) = entry.work().map(|work| work.since_ms) else { return };
        if entry.transfer().is_some() {
            return;
        }
        let until_ms = since_ms.saturating_add(self.objects.settings.put_release_ms);
        for location in self.locations(entry.replicas().copied().filter(|replica| !replica.ready)) {
            fx.record(StateChange::RangeQuarantined {
                segment: location.segment,
                offset: location.offset,
                size: entry.size,
                until_ms,
            });
        }
    }

    fn emit_quarantined(&self, fx: &mut dyn StateChangeSink) {
        for range in &self.quarantined {
            if let Some(segment) = self.segments.get(range.segment).map(|mounted| mounted.descriptor.id) {
                let (offset, size, until_ms) = (range.offset, range.size, range.until_ms);
                fx.record(StateChange::RangeQuarantined { segment, offset, size, until_ms });
            }
        }
    }
}

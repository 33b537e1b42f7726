//! Snapshots: the whole state as state changes, in parts.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_wire::types::Uuid;

use crate::change::{ObjectState, ReplicaLocation, StateChange, StateChangeSink, StoreCause};
use crate::indices::{EntryIndex, GroupIndex, TenantIndex};
use crate::locked_shard::LockedShard;
use crate::locked_shard::ObjectCursor;
use crate::master::MasterCore;
use crate::mount::to_borrowed;
use crate::object::MemoryReplica;
use crate::segment::SegmentTable;

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
        let mut copies = EntryCopies::new(limit);
        let next = self.objects.scan(cursor, limit, |shard, index| {
            if !copies.add(shard, index) {
                shard.emit_object(index, fx);
            }
        });
        copies.emit(self, fx);
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

/// An entry without [`ObjectExtras`](crate::object::ObjectExtras) and group.
struct EntryCopy {
    /// End of its key in [`EntryCopies::keys`].
    key_end: usize,
    tenant: TenantIndex,
    client: Uuid,
    size: u64,
    stamp: u64,
    replica: MemoryReplica,
    is_complete: bool,
    hard_pin: bool,
}

/// Copies of entries. Copying takes a fraction of the time of emitting, and readers wait for the lock: above all when the system
/// interrupts the thread that has it.
struct EntryCopies {
    keys: Vec<u8>,
    entries: Vec<EntryCopy>,
    segments: Arc<SegmentTable>,
}

/// Size for which a key's memory is reserved, in bytes.
const USUAL_KEY: usize = 80;
/// Maximum number of entries for which memory is reserved.
const MAX_RESERVED: usize = 4096;

impl EntryCopies {
    fn new(limit: u32) -> Self {
        let count = MAX_RESERVED.min(limit as usize);
        Self {
            keys: Vec::with_capacity(count * USUAL_KEY),
            entries: Vec::with_capacity(count),
            segments: Arc::default(),
        }
    }

    /// Copies an entry, if it has no other fields. Otherwise returns false.
    fn add(&mut self, shard: &LockedShard<'_>, index: EntryIndex) -> bool {
        let entry = &shard.entries[index];
        if entry.extra.is_some() || entry.group != GroupIndex::NONE || !entry.has_memory() {
            return false;
        }
        if self.entries.is_empty() {
            self.segments = Arc::clone(&shard.segments);
        }
        self.keys.extend_from_slice(shard.key_bytes(index));
        self.entries.push(EntryCopy {
            key_end: self.keys.len(),
            tenant: entry.tenant,
            client: shard.writer(index),
            size: entry.size,
            stamp: entry.stamp,
            replica: entry.first,
            is_complete: entry.is_complete(),
            hard_pin: entry.hard_pin(),
        });
        true
    }

    fn emit(&self, master: &MasterCore, fx: &mut dyn StateChangeSink) {
        let mut begin = 0;
        for entry in &self.entries {
            let key = self.keys.get(begin..entry.key_end).unwrap_or_default();
            begin = entry.key_end;
            let tenant = master.objects.tenants.get(entry.tenant);
            let MemoryReplica { id, offset, segment, ready, .. } = entry.replica;
            let segment = self.segments.get(segment).filter(|_| ready || !entry.is_complete);
            let location = segment.map(|mounted| ReplicaLocation {
                replica: id,
                segment: mounted.descriptor.id,
                offset,
            });
            let object = ObjectState {
                tenant: Cow::Borrowed(tenant.as_ref().map_or("", |tenant| &*tenant.name)),
                key: Cow::Borrowed(std::str::from_utf8(key).unwrap_or_default()),
                size: entry.size,
                client: entry.client,
                locations: Cow::Borrowed(location.as_slice()),
                disk_copy: None,
                checksum: None,
                hard_pin: entry.hard_pin,
                soft_pin_until_ms: None,
                group: None,
                since_ms: entry.stamp,
            };
            fx.record(if entry.is_complete {
                StateChange::ObjectStored { object, cause: StoreCause::Snapshot }
            } else {
                StateChange::ObjectStarted(object)
            });
        }
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

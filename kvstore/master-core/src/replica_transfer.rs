//! Copies and moves of an object's replicas, as part of its entry.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;

use crate::change::{StateChange, StateChangeSink, StoreCause, TransferState};
use crate::indices::EntryIndex;
use crate::locked_shard::LockedShard;
use crate::object::{MemoryReplica, ReplicaTransfer};
use crate::object_table::ObjectTable;

/// Source of a transfer: the segment of a readable replica, and its client.
pub(crate) struct TransferSource {
    pub(crate) name: String,
    pub(crate) client: Uuid,
    /// Names of all segments with a replica.
    pub(crate) holders: Vec<Arc<str>>,
}

impl ObjectTable {
    /// Returns `error` unless all of these segments are mounted.
    pub(crate) fn check_segments(&self, names: &[&str], error: ErrorCode) -> Result<(), ErrorCode> {
        let segments = self.segments.load();
        let all_mounted = names.iter().all(|name| !segments.indices_by_name(name).is_empty());
        if all_mounted { Ok(()) } else { Err(error) }
    }

    /// A readable replica of an object, on the named segment if one is given.
    pub(crate) fn source_of(
        &self,
        tenant: &str,
        key: &str,
        segment: Option<&str>,
    ) -> Result<TransferSource, ErrorCode> {
        let key_location = self.locate_reader_key(tenant, key)?;
        let shard = self.lock(key_location.shard);
        let index = shard.lookup(key_location, key).ok_or(ErrorCode::OBJECT_NOT_FOUND)?;
        let entry = &shard.entries[index];
        if !entry.is_complete() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        let readable = entry.replicas().filter(|replica| shard.can_be_read(replica));
        let mut mounted = readable.filter_map(|replica| shard.segments.get(replica.segment));
        let fits = |name: &str| segment.is_none_or(|segment| segment == name);
        let found =
            mounted.find(|segment| fits(&segment.descriptor.name)).ok_or(ErrorCode::REPLICA_NOT_FOUND)?;
        let mounted = entry.replicas().filter_map(|replica| shard.segments.get(replica.segment));
        let holders = mounted.map(|segment| Arc::clone(&segment.descriptor.name)).collect();
        Ok(TransferSource { name: found.descriptor.name.to_string(), client: found.client, holders })
    }
}

impl LockedShard<'_> {
    /// The source replica of a transfer.
    pub(crate) fn source(
        &self,
        index: EntryIndex,
        segment: &str,
        is_move: bool,
    ) -> Result<MemoryReplica, ErrorCode> {
        let entry = &self.entries[index];
        if !entry.is_complete() || entry.pending().is_some() {
            return Err(ErrorCode::REPLICA_IS_NOT_READY);
        }
        // A node that offloads the object reads the replica that a move would remove.
        if entry.transfer().is_some() || is_move && entry.work().is_some() {
            return Err(ErrorCode::OBJECT_HAS_REPLICATION_TASK);
        }
        let is_source = |replica: &&MemoryReplica| {
            self.can_be_read(replica)
                && self
                    .segments
                    .get(replica.segment)
                    .is_some_and(|mounted| *mounted.descriptor.name == *segment)
        };
        entry.replicas().find(is_source).copied().ok_or(ErrorCode::REPLICA_NOT_FOUND)
    }

    /// Allocates space on each of the named segments without a replica: all or nothing.
    pub(crate) fn allocate_targets(
        &self,
        index: EntryIndex,
        names: &[&str],
    ) -> Result<Vec<MemoryReplica>, ErrorCode> {
        let entry = &self.entries[index];
        let mut new: Vec<MemoryReplica> = Vec::new();
        for name in names {
            let has_replica =
                |replica: &MemoryReplica| self.segments.indices_by_name(name).contains(&replica.segment);
            if entry.replicas().any(has_replica) || new.iter().any(has_replica) {
                continue;
            }
            match self.allocate_on(name, entry.size) {
                Ok(replica) => new.push(replica),
                Err(error) => {
                    new.iter().for_each(|replica| self.free(replica));
                    return Err(error);
                }
            }
        }
        Ok(new)
    }

    fn allocate_on(&self, name: &str, size: u64) -> Result<MemoryReplica, ErrorCode> {
        let indices = self.segments.indices_by_name(name);
        if indices.is_empty() {
            return Err(ErrorCode::SEGMENT_NOT_FOUND);
        }
        let mounted = indices.iter().filter_map(|index| Some((*index, self.segments.get(*index)?)));
        let mut replicas = mounted.filter(|(_, mounted_segment)| mounted_segment.is_writable()).filter_map(
            |(segment, mounted_segment)| {
                let range = mounted_segment.allocate(size)?;
                Some(MemoryReplica { id: 0, offset: range.offset, block: range.block, segment, ready: false })
            },
        );
        replicas.next().ok_or(ErrorCode::NO_AVAILABLE_HANDLE)
    }

    /// Makes the new replicas readable, and removes the source of a move.
    pub(crate) fn finish_transfer(&mut self, index: EntryIndex, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let Some(transfer) = self.clear_transfer(index) else { return };
        let entry = &mut self.entries[index];
        let mut replicas: Vec<MemoryReplica> = entry.replicas().copied().collect();
        let new: Vec<MemoryReplica> = replicas.iter().filter(|replica| !replica.ready).copied().collect();
        replicas.iter_mut().for_each(|replica| replica.ready = true);
        let source = replicas.iter().position(|replica| replica.id == transfer.source);
        let old =
            source.filter(|_| transfer.is_move && replicas.len() > 1).map(|index| replicas.remove(index));
        entry.set_replicas(&replicas);
        let (size, tenant, stamp, is_leased) =
            (entry.size, entry.tenant, entry.stamp, entry.is_leased(now_ms));
        for location in self.locations(new.into_iter()) {
            fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
        }
        self.emit_transfer_ended(index, fx);
        self.requeue(index, now_ms);
        self.emit_state(index, StoreCause::Replicas, fx);
        let Some(old) = old else { return };
        self.objects.tenants.discharge(tenant, size);
        self.report_vacated([old].iter(), fx);
        if is_leased {
            self.quarantine(&old, size, stamp, fx);
        } else {
            self.free(&old);
        }
    }

    /// Abandons a copy or move, if there is one, and frees its space.
    pub(crate) fn end_transfer(&mut self, index: EntryIndex, now_ms: u64, fx: &mut dyn StateChangeSink) {
        if self.clear_transfer(index).is_none() {
            return;
        }
        let entry = &mut self.entries[index];
        let (ready, new): (Vec<MemoryReplica>, Vec<MemoryReplica>) =
            entry.replicas().partition(|replica| replica.ready);
        entry.set_replicas(&ready);
        let (tenant, bytes) = (entry.tenant, entry.size * new.len() as u64);
        self.objects.tenants.discharge(tenant, bytes);
        for location in self.locations(new.iter().copied()) {
            fx.record(StateChange::RangeReleased { segment: location.segment, offset: location.offset });
        }
        self.emit_transfer_ended(index, fx);
        new.iter().for_each(|replica| self.free(replica));
        self.requeue(index, now_ms);
    }

    fn clear_transfer(&mut self, index: EntryIndex) -> Option<ReplicaTransfer> {
        let transfer = self.entries[index].extra.as_mut()?.transfer.take()?;
        self.transfers.retain(|other| *other != index);
        Some(transfer)
    }

    fn requeue(&mut self, index: EntryIndex, now_ms: u64) {
        let queue = self.entries[index].target_queue(now_ms);
        self.enqueue(index, queue);
    }

    /// Attaches a transfer to an object, with the replicas that are being written.
    pub(crate) fn set_transfer(
        &mut self,
        index: EntryIndex,
        transfer: ReplicaTransfer,
        new: &[MemoryReplica],
    ) {
        let since_ms = transfer.since_ms;
        let entry = &mut self.entries[index];
        let (tenant, size) = (entry.tenant, entry.size);
        let extra = entry.extra_mut();
        extra.transfer = Some(transfer);
        extra.more.extend(new);
        let queue = entry.target_queue(since_ms);
        self.enqueue(index, queue);
        self.transfers.push(index);
        self.objects.tenants.count(tenant, size * new.len() as u64);
    }

    /// Emits an object's transfer, if it has one, and the quarantined ranges of its targets.
    pub(crate) fn emit_transfer(&self, index: EntryIndex, fx: &mut dyn StateChangeSink) {
        let entry = &self.entries[index];
        let Some(transfer) = entry.transfer() else { return };
        let ReplicaTransfer { client, source, is_move, since_ms, lease } = transfer.clone();
        let locations = self.locations(entry.replicas().copied().filter(|replica| !replica.ready));
        let until_ms = since_ms.saturating_add(self.objects.settings.put_release_ms);
        for location in &locations {
            fx.record(StateChange::RangeQuarantined {
                segment: location.segment,
                offset: location.offset,
                size: entry.size,
                until_ms,
            });
        }
        self.with_name(index, |tenant, key| {
            let (tenant, key, locations) = (Cow::Borrowed(tenant), Cow::Borrowed(key), Cow::Owned(locations));
            let state = TransferState { tenant, key, client, source, is_move, since_ms, lease, locations };
            fx.record(StateChange::TransferStarted(state));
        });
    }

    /// Emits the end of an object's transfer.
    pub(crate) fn emit_transfer_ended(&self, index: EntryIndex, fx: &mut dyn StateChangeSink) {
        self.with_name(index, |tenant, key| {
            fx.record(StateChange::TransferEnded { tenant: Cow::Borrowed(tenant), key: Cow::Borrowed(key) });
        });
    }

    fn with_name(&self, index: EntryIndex, emit: impl FnOnce(&str, &str)) {
        let tenant = self.objects.tenants.get(self.entries[index].tenant);
        emit(tenant.as_ref().map_or("", |entry| &*entry.name), self.key(index));
    }
}

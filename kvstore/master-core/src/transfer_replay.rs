//! State changes of copies and moves.
//!
//! While state changes are replayed, a transfer is only recorded and its target ranges are quarantined. When the replay is finished,
//! the transfer resumes and takes its ranges out of quarantine.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::change::{ReplicaLocation, StateChange, StateChangeSink, TransferState};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::{MemoryReplica, ReplicaTransfer};
use crate::shard::QuarantinedRange;

/// Transfers found during replay, by tenant and key.
pub(crate) type PendingTransfers = BTreeMap<(String, String), TransferState<'static>>;

impl MasterCore {
    /// Records a transfer to resume after the replay.
    pub(crate) fn record_transfer(&self, state: &TransferState<'_>) {
        let name = (state.tenant.to_string(), state.key.to_string());
        self.pending_transfers.lock().insert(name, state.clone().into_owned());
    }

    /// Removes a transfer that ended during the replay.
    pub(crate) fn remove_transfer(&self, tenant: &str, key: &str) {
        let mut pending = self.pending_transfers.lock();
        // Mostly there is none: avoids two allocations.
        if !pending.is_empty() {
            pending.remove(&(tenant.to_owned(), key.to_owned()));
        }
    }

    /// Emits the transfers that are recorded but not resumed.
    pub(crate) fn emit_pending_transfers(&self, fx: &mut dyn StateChangeSink) {
        for state in self.pending_transfers.lock().values() {
            fx.record(StateChange::TransferStarted(state.clone()));
        }
    }

    /// Resumes the recorded transfers whose objects are unchanged.
    pub(crate) fn resume_transfers(&self) {
        let pending = std::mem::take(&mut *self.pending_transfers.lock());
        for state in pending.into_values() {
            let Some(ranges) = self.take_quarantined(&state.locations) else { continue };
            if !self.resume_transfer(&state, &ranges) {
                for (location, range) in state.locations.iter().zip(ranges) {
                    self.lock(self.quarantine_shard(location.segment, location.offset))
                        .quarantined
                        .push(range);
                }
            }
        }
    }

    /// Takes the quarantined ranges of all these replicas, or none of them.
    fn take_quarantined(&self, locations: &[ReplicaLocation]) -> Option<Vec<QuarantinedRange>> {
        let mut taken: Vec<QuarantinedRange> = Vec::with_capacity(locations.len());
        for (count, location) in locations.iter().enumerate() {
            let mut shard = self.lock(self.quarantine_shard(location.segment, location.offset));
            let segment_index = shard.segments.index_of(location.segment);
            let matches = |range: &QuarantinedRange| {
                Some(range.segment) == segment_index && range.offset == location.offset
            };
            if let Some(index) = shard.quarantined.iter().position(matches) {
                taken.push(shard.quarantined.swap_remove(index));
                continue;
            }
            drop(shard);
            for (location, range) in locations.iter().zip(taken.drain(..count)) {
                self.lock(self.quarantine_shard(location.segment, location.offset)).quarantined.push(range);
            }
            return None;
        }
        Some(taken)
    }

    fn resume_transfer(&self, state: &TransferState<'_>, ranges: &[QuarantinedRange]) -> bool {
        let Ok(key_location) = self.locate_reader_key(&state.tenant, &state.key) else { return false };
        let mut shard = self.lock(key_location.shard);
        let Some(index) = shard.lookup(key_location, &state.key) else { return false };
        let entry = &shard.entries[index];
        let fits = entry.is_complete()
            && entry.pending().is_none()
            && entry.transfer().is_none()
            && entry.replicas().any(|replica| replica.id == state.source)
            && ranges.iter().all(|range| range.size == entry.size);
        if !fits {
            return false;
        }
        let replica = |(location, range): (&ReplicaLocation, &QuarantinedRange)| {
            let QuarantinedRange { segment, block, offset, .. } = *range;
            MemoryReplica { id: location.replica, offset, block, segment, ready: false }
        };
        let new: Vec<MemoryReplica> = state.locations.iter().zip(ranges).map(replica).collect();
        new.iter().for_each(|replica| self.reserve_replica_id(replica.id));
        let TransferState { client, source, is_move, since_ms, lease, .. } = *state;
        shard.set_transfer(index, ReplicaTransfer { client, source, is_move, since_ms, lease }, &new);
        true
    }
}

impl LockedShard<'_> {
    /// Attaches a transfer to an object, with the replicas that are being written.
    pub(crate) fn set_transfer(&mut self, index: u32, transfer: ReplicaTransfer, new: &[MemoryReplica]) {
        let since_ms = transfer.since_ms;
        let entry = &mut self.entries[index];
        let (tenant, size) = (entry.tenant, entry.size);
        let extra = entry.extra_mut();
        extra.transfer = Some(transfer);
        extra.more.extend(new);
        let queue = entry.target_queue(since_ms);
        self.enqueue(index, queue);
        self.transfers.push(index);
        self.master.tenants.count(tenant, size * new.len() as u64);
    }

    /// Emits an object's transfer, if it has one, and the quarantined ranges of its targets.
    pub(crate) fn emit_transfer(&self, index: u32, fx: &mut dyn StateChangeSink) {
        let entry = &self.entries[index];
        let Some(transfer) = entry.transfer() else { return };
        let ReplicaTransfer { client, source, is_move, since_ms, lease } = transfer.clone();
        let locations = self.locations(entry.replicas().copied().filter(|replica| !replica.ready));
        let until_ms = since_ms.saturating_add(self.master.settings.put_release_ms);
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
    pub(crate) fn emit_transfer_ended(&self, index: u32, fx: &mut dyn StateChangeSink) {
        self.with_name(index, |tenant, key| {
            fx.record(StateChange::TransferEnded { tenant: Cow::Borrowed(tenant), key: Cow::Borrowed(key) });
        });
    }

    fn with_name(&self, index: u32, emit: impl FnOnce(&str, &str)) {
        let entry = &self.entries[index];
        let tenant = self.master.tenants.get(entry.tenant);
        emit(tenant.as_ref().map_or("", |entry| &*entry.name), &entry.key);
    }
}

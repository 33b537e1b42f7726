//! State changes of copies and moves.
//!
//! While state changes are replayed, a transfer is only recorded and its target ranges are quarantined. When the replay is finished,
//! the transfer resumes and takes its ranges out of quarantine.

use std::collections::BTreeMap;

use crate::change::{ReplicaLocation, StateChange, StateChangeSink, TransferState};
use crate::object::{MemoryReplica, ObjectName, ReplicaTransfer};
use crate::object_table::ObjectTable;
use crate::shard::QuarantinedRange;

/// Transfers found during replay, by tenant and key.
#[derive(Debug, Default)]
pub(crate) struct PendingTransfers(BTreeMap<ObjectName, TransferState<'static>>);

impl PendingTransfers {
    /// Records a transfer to resume after the replay.
    pub(crate) fn record(&mut self, state: &TransferState<'_>) {
        self.0.insert(ObjectName::new(&state.tenant, &state.key), state.clone().into_owned());
    }

    /// Removes a transfer that ended during the replay.
    pub(crate) fn remove(&mut self, tenant: &str, key: &str) {
        // Mostly there is none: avoids two allocations.
        if !self.0.is_empty() {
            self.0.remove(&ObjectName::new(tenant, key));
        }
    }

    /// Emits the transfers that are recorded but not resumed.
    pub(crate) fn emit_state(&self, fx: &mut dyn StateChangeSink) {
        for state in self.0.values() {
            fx.record(StateChange::TransferStarted(state.clone()));
        }
    }
}

impl ObjectTable {
    /// Resumes the recorded transfers whose objects are unchanged.
    pub(crate) fn resume_transfers(&self, pending: PendingTransfers) {
        for state in pending.0.into_values() {
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
        let Ok(key_location) = self.locate_reader_key(&state.tenant, &state.key) else {
            return false;
        };
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

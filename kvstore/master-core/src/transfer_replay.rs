//! Copies and moves as facts.
//!
//! While facts are applied, a transfer is only noted: its space is held as that of nobody, and belongs to it again when the replay is
//! finished.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::change::{ReplicaLocation, StateChange, StateChangeSink, TransferState};
use crate::locked_shard::LockedShard;
use crate::master::MasterCore;
use crate::object::{MemoryReplica, ReplicaTransfer};
use crate::shard::QuarantinedRange;

/// Transfers by tenant and key, of facts that were applied.
pub(crate) type PendingTransfers = BTreeMap<(String, String), TransferState<'static>>;

impl MasterCore {
    /// Notes a transfer.
    pub(crate) fn record_transfer(&self, state: &TransferState<'_>) {
        let name = (state.tenant.to_string(), state.key.to_string());
        self.pending_transfers.lock().insert(name, state.clone().into_owned());
    }

    /// A transfer does not go on.
    pub(crate) fn remove_transfer(&self, tenant: &str, key: &str) {
        let mut noted = self.pending_transfers.lock();
        // Nearly always there is none, and a name need not be made.
        if !noted.is_empty() {
            noted.remove(&(tenant.to_owned(), key.to_owned()));
        }
    }

    /// Tells transfers that are only noted.
    pub(crate) fn emit_pending_transfers(&self, fx: &mut dyn StateChangeSink) {
        for state in self.pending_transfers.lock().values() {
            fx.record(StateChange::TransferStarted(state.clone()));
        }
    }

    /// Goes on with the transfers that were noted, of objects that are as they were.
    pub(crate) fn resume_transfers(&self) {
        let noted = std::mem::take(&mut *self.pending_transfers.lock());
        for state in noted.into_values() {
            let Some(held) = self.take_quarantined(&state.locations) else { continue };
            if !self.resume_transfer(&state, &held) {
                for (place, held) in state.locations.iter().zip(held) {
                    self.lock(self.quarantine_shard(place.segment, place.offset)).quarantined.push(held);
                }
            }
        }
    }

    /// The held space of all these replicas, or none of it.
    fn take_quarantined(&self, places: &[ReplicaLocation]) -> Option<Vec<QuarantinedRange>> {
        let mut taken: Vec<QuarantinedRange> = Vec::with_capacity(places.len());
        for (count, place) in places.iter().enumerate() {
            let mut shard = self.lock(self.quarantine_shard(place.segment, place.offset));
            let at = shard.segments.index_of(place.segment);
            let is_it = |it: &QuarantinedRange| Some(it.segment) == at && it.offset == place.offset;
            if let Some(index) = shard.quarantined.iter().position(is_it) {
                taken.push(shard.quarantined.swap_remove(index));
                continue;
            }
            drop(shard);
            for (place, held) in places.iter().zip(taken.drain(..count)) {
                self.lock(self.quarantine_shard(place.segment, place.offset)).quarantined.push(held);
            }
            return None;
        }
        Some(taken)
    }

    fn resume_transfer(&self, state: &TransferState<'_>, held: &[QuarantinedRange]) -> bool {
        let Ok(spot) = self.locate_reader_key(&state.tenant, &state.key) else { return false };
        let mut shard = self.lock(spot.shard);
        let Some(at) = shard.lookup(spot, &state.key) else { return false };
        let entry = &shard.entries[at];
        let fits = entry.is_complete()
            && entry.pending().is_none()
            && entry.transfer().is_none()
            && entry.replicas().any(|it| it.id == state.source)
            && held.iter().all(|it| it.size == entry.size);
        if !fits {
            return false;
        }
        let replica = |(place, held): (&ReplicaLocation, &QuarantinedRange)| {
            let QuarantinedRange { segment, block, offset, .. } = *held;
            MemoryReplica { id: place.replica, offset, block, segment, ready: false }
        };
        let new: Vec<MemoryReplica> = state.locations.iter().zip(held).map(replica).collect();
        new.iter().for_each(|it| self.reserve_replica_id(it.id));
        let TransferState { client, source, is_move: moves, since_ms, lease: plan, .. } = *state;
        shard.set_transfer(
            at,
            ReplicaTransfer { client, source, is_move: moves, since_ms, lease: plan },
            &new,
        );
        true
    }
}

impl LockedShard<'_> {
    /// A transfer of an object goes on, to these replicas.
    pub(crate) fn set_transfer(&mut self, at: u32, transfer: ReplicaTransfer, new: &[MemoryReplica]) {
        let since_ms = transfer.since_ms;
        let entry = &mut self.entries[at];
        let (tenant, size) = (entry.tenant, entry.size);
        let extra = entry.extra_mut();
        extra.transfer = Some(transfer);
        extra.more.extend(new);
        let queue = entry.target_queue(since_ms);
        self.enqueue(at, queue);
        self.transfers.push(at);
        self.master.tenants.count(tenant, size * new.len() as u64);
    }

    /// Tells an object's transfer and the space that is held for it, if there is one.
    pub(crate) fn emit_transfer(&self, at: u32, fx: &mut dyn StateChangeSink) {
        let entry = &self.entries[at];
        let Some(transfer) = entry.transfer() else { return };
        let ReplicaTransfer { client, source, is_move: moves, since_ms, lease: plan } = transfer.clone();
        let places = self.locations(entry.replicas().copied().filter(|it| !it.ready));
        let until_ms = since_ms.saturating_add(self.master.settings.put_release_ms);
        for place in &places {
            fx.record(StateChange::RangeQuarantined {
                segment: place.segment,
                offset: place.offset,
                size: entry.size,
                until_ms,
            });
        }
        self.with_name(at, |tenant, key| {
            let (tenant, key, places) = (Cow::Borrowed(tenant), Cow::Borrowed(key), Cow::Owned(places));
            let state = TransferState {
                tenant,
                key,
                client,
                source,
                is_move: moves,
                since_ms,
                lease: plan,
                locations: places,
            };
            fx.record(StateChange::TransferStarted(state));
        });
    }

    /// Tells that an object's transfer is over.
    pub(crate) fn emit_transfer_ended(&self, at: u32, fx: &mut dyn StateChangeSink) {
        self.with_name(at, |tenant, key| {
            fx.record(StateChange::TransferEnded { tenant: Cow::Borrowed(tenant), key: Cow::Borrowed(key) });
        });
    }

    fn with_name(&self, at: u32, tell: impl FnOnce(&str, &str)) {
        let entry = &self.entries[at];
        let tenant = self.master.tenants.get(entry.tenant);
        tell(tenant.as_ref().map_or("", |it| &*it.name), &entry.key);
    }
}

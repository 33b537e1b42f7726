//! Copies and moves as facts.
//!
//! While facts are applied, a transfer is only noted: its space is held as that of nobody, and belongs to it again when the replay is
//! finished.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::fact::{Effects, Fact, Place, TransferState};
use crate::locked::Locked;
use crate::master::Master;
use crate::object::{Replica, Transfer};
use crate::shard::Held;

/// Transfers by tenant and key, of facts that were applied.
pub(crate) type Noted = BTreeMap<(String, String), TransferState<'static>>;

impl Master {
    /// Notes a transfer.
    pub(crate) fn note_transfer(&self, state: &TransferState<'_>) {
        let name = (state.tenant.to_string(), state.key.to_string());
        self.noted.lock().insert(name, state.clone().into_owned());
    }

    /// A transfer does not go on.
    pub(crate) fn forget_transfer(&self, tenant: &str, key: &str) {
        let mut noted = self.noted.lock();
        // Nearly always there is none, and a name need not be made.
        if !noted.is_empty() {
            noted.remove(&(tenant.to_owned(), key.to_owned()));
        }
    }

    /// Tells transfers that are only noted.
    pub(crate) fn tell_noted(&self, fx: &mut dyn Effects) {
        for state in self.noted.lock().values() {
            fx.fact(Fact::Transferring(state.clone()));
        }
    }

    /// Goes on with the transfers that were noted, of objects that are as they were.
    pub(crate) fn resume_transfers(&self) {
        let noted = std::mem::take(&mut *self.noted.lock());
        for state in noted.into_values() {
            let Some(held) = self.take_held(&state.places) else { continue };
            if !self.resume_transfer(&state, &held) {
                for (place, held) in state.places.iter().zip(held) {
                    self.lock(self.holder(place.segment, place.offset)).held.push(held);
                }
            }
        }
    }

    /// The held space of all these replicas, or none of it.
    fn take_held(&self, places: &[Place]) -> Option<Vec<Held>> {
        let mut taken: Vec<Held> = Vec::with_capacity(places.len());
        for (count, place) in places.iter().enumerate() {
            let mut shard = self.lock(self.holder(place.segment, place.offset));
            let at = shard.segments.place_of(place.segment);
            let is_it = |it: &Held| Some(it.segment) == at && it.offset == place.offset;
            if let Some(index) = shard.held.iter().position(is_it) {
                taken.push(shard.held.swap_remove(index));
                continue;
            }
            drop(shard);
            for (place, held) in places.iter().zip(taken.drain(..count)) {
                self.lock(self.holder(place.segment, place.offset)).held.push(held);
            }
            return None;
        }
        Some(taken)
    }

    fn resume_transfer(&self, state: &TransferState<'_>, held: &[Held]) -> bool {
        let Ok(spot) = self.spot_of(&state.tenant, &state.key) else { return false };
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
        let replica = |(place, held): (&Place, &Held)| {
            let Held { segment, block, offset, .. } = *held;
            Replica { id: place.replica, offset, block, segment, ready: false }
        };
        let new: Vec<Replica> = state.places.iter().zip(held).map(replica).collect();
        new.iter().for_each(|it| self.saw_replica_id(it.id));
        let TransferState { client, source, moves, since_ms, plan, .. } = *state;
        shard.set_transfer(at, Transfer { client, source, moves, since_ms, plan }, &new);
        true
    }
}

impl Locked<'_> {
    /// A transfer of an object goes on, to these replicas.
    pub(crate) fn set_transfer(&mut self, at: u32, transfer: Transfer, new: &[Replica]) {
        let since_ms = transfer.since_ms;
        let entry = &mut self.entries[at];
        let (tenant, size) = (entry.tenant, entry.size);
        let extra = entry.extra_mut();
        extra.transfer = Some(transfer);
        extra.more.extend(new);
        let queue = entry.fitting_queue(since_ms);
        self.enqueue(at, queue);
        self.transfers.push(at);
        self.master.tenants.count(tenant, size * new.len() as u64);
    }

    /// Tells an object's transfer and the space that is held for it, if there is one.
    pub(crate) fn tell_transfer(&self, at: u32, fx: &mut dyn Effects) {
        let entry = &self.entries[at];
        let Some(transfer) = entry.transfer() else { return };
        let Transfer { client, source, moves, since_ms, plan } = transfer.clone();
        let places = self.places(entry.replicas().copied().filter(|it| !it.ready));
        let until_ms = since_ms.saturating_add(self.master.settings.put_release_ms);
        for place in &places {
            fx.fact(Fact::Held { segment: place.segment, offset: place.offset, size: entry.size, until_ms });
        }
        self.with_name(at, |tenant, key| {
            let (tenant, key, places) = (Cow::Borrowed(tenant), Cow::Borrowed(key), Cow::Owned(places));
            let state = TransferState { tenant, key, client, source, moves, since_ms, plan, places };
            fx.fact(Fact::Transferring(state));
        });
    }

    /// Tells that an object's transfer is over.
    pub(crate) fn tell_transfer_over(&self, at: u32, fx: &mut dyn Effects) {
        self.with_name(at, |tenant, key| {
            fx.fact(Fact::TransferOver { tenant: Cow::Borrowed(tenant), key: Cow::Borrowed(key) });
        });
    }

    fn with_name(&self, at: u32, tell: impl FnOnce(&str, &str)) {
        let entry = &self.entries[at];
        let tenant = self.master.tenants.get(entry.tenant);
        tell(tenant.as_ref().map_or("", |it| &*it.name), &entry.key);
    }
}

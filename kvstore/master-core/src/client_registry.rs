//! The clients of a master, and when each was last heard of.
//!
//! A client without heartbeats becomes silent: its replicas are not returned to readers, but stay in the table. If it
//! mounts the same memory again within the grace period, all its objects are readable again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mooncake_wire::types::{ClientStatus, Uuid};

use crate::change::{StateChange, StateChangeSink, UnmountCause};
use crate::object_table::ObjectTable;
use crate::segment::SegmentEntry;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientLiveness {
    pub(crate) last_seen_ms: u64,
    pub(crate) silent: bool,
    /// Whether it sent no heartbeat since its last connection closed, while a holder preserves its memory.
    pub(crate) restarting: bool,
}

impl ClientLiveness {
    /// A client whose heartbeat has just arrived.
    pub(crate) fn alive(last_seen_ms: u64) -> Self {
        Self { last_seen_ms, silent: false, restarting: false }
    }
}

/// Number of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounts {
    pub active: usize,
    /// Clients without a recent heartbeat.
    pub silent: usize,
}

/// All clients with mounted segments or disks. Its lock is taken before all others.
#[derive(Debug, Default)]
pub(crate) struct ClientRegistry {
    pub(crate) clients: HashMap<Uuid, ClientLiveness>,
}

impl ClientRegistry {
    /// Records a client's heartbeat. `NEED_REMOUNT` requests that the client mounts all of its segments again.
    pub(crate) fn record_heartbeat(
        &mut self,
        objects: &ObjectTable,
        now_ms: u64,
        client: Uuid,
    ) -> ClientStatus {
        let Some(liveness) = self.clients.get_mut(&client) else { return ClientStatus::NEED_REMOUNT };
        liveness.last_seen_ms = liveness.last_seen_ms.max(now_ms);
        if std::mem::take(&mut liveness.restarting) {
            set_restarting(objects, client, false);
        }
        if liveness.silent { ClientStatus::NEED_REMOUNT } else { ClientStatus::OK }
    }

    /// Records that a client mounted a segment or a disk.
    pub(crate) fn record_mount(
        &mut self,
        objects: &ObjectTable,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        match self.clients.get_mut(&client) {
            // Its other segments are not mounted again yet: the next heartbeat response requests that.
            Some(known) if known.silent => known.last_seen_ms = now_ms,
            _ => self.mark_alive(objects, now_ms, client, fx),
        }
    }

    /// Marks a client as alive: it has mounted all of its segments.
    pub(crate) fn mark_alive(
        &mut self,
        objects: &ObjectTable,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let before = self.clients.insert(client, ClientLiveness::alive(now_ms));
        if before.is_some_and(|liveness| liveness.restarting) {
            set_restarting(objects, client, false);
        }
        if before.is_none_or(|liveness| liveness.silent) {
            fx.record(StateChange::ClientRecovered { client, at_ms: now_ms });
        }
        if let Some(disk) = objects.disk(client) {
            disk.set_silent(false);
        }
    }

    /// Marks a client as restarting while a holder preserves its memory.
    pub(crate) fn mark_restarting(&mut self, objects: &ObjectTable, client: Uuid) {
        if let Some(liveness) = self.clients.get_mut(&client) {
            liveness.restarting = true;
            set_restarting(objects, client, true);
        }
    }

    /// Marks a client as silent: its replicas are not returned to readers.
    pub(crate) fn mark_silent(
        &mut self,
        objects: &ObjectTable,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(liveness) = self.clients.get_mut(&client) else { return };
        let segments = objects.segments.load();
        let is_reachable = |segment: &SegmentEntry| segment.client == client && segment.is_readable();
        let reachable: Vec<&Arc<SegmentEntry>> =
            segments.iter().map(|(_, segment)| segment).filter(|segment| is_reachable(segment)).collect();
        let disk = objects.disk(client).filter(|disk| disk.is_responsive());
        // A silent client may have mounted some of its segments again.
        if liveness.silent && reachable.is_empty() && disk.is_none() {
            return;
        }
        // The grace period starts now, even if the TTL has not expired.
        (liveness.silent, liveness.last_seen_ms) =
            (true, now_ms.saturating_sub(objects.settings.client_ttl_ms));
        reachable.iter().for_each(|segment| segment.set_silent(true));
        if let Some(disk) = disk {
            disk.set_silent(true);
        }
        fx.record(StateChange::ClientSilent { client, at_ms: now_ms });
    }

    /// Marks clients without heartbeats as silent, and removes those silent for longer than the grace period.
    pub(crate) fn expire(&mut self, objects: &ObjectTable, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let ttl = objects.settings.client_ttl_ms;
        let is_late = |liveness: &ClientLiveness, by: u64| liveness.last_seen_ms.saturating_add(by) <= now_ms;
        let silent: BTreeMap<Uuid, ClientLiveness> = self
            .clients
            .iter()
            .filter(|(_, liveness)| is_late(liveness, ttl))
            .map(|(id, liveness)| (*id, *liveness))
            .collect();
        for (client, liveness) in silent {
            if liveness.silent && is_late(&liveness, ttl.saturating_add(objects.settings.client_grace_ms)) {
                self.remove(objects, client, fx);
            } else {
                self.mark_silent(objects, now_ms, client, fx);
            }
        }
    }

    fn remove(&mut self, objects: &ObjectTable, client: Uuid, fx: &mut dyn StateChangeSink) {
        let segments = Arc::clone(&objects.segments.load());
        for (_, segment) in segments.iter().filter(|(_, mounted)| mounted.client == client) {
            objects.drop_segment(segment.descriptor.id, UnmountCause::ClientExpired, 0, fx);
        }
        objects.drop_disk(client, 0, fx);
        self.clients.remove(&client);
        fx.record(StateChange::ClientExpired { client });
    }

    /// Gives every client that is not silent a full TTL for its next heartbeat.
    pub(crate) fn restart_timers(&mut self, now_ms: u64) {
        for liveness in self.clients.values_mut().filter(|liveness| !liveness.silent) {
            liveness.last_seen_ms = now_ms;
        }
    }

    pub(crate) fn counts(&self) -> ClientCounts {
        let silent = self.clients.values().filter(|liveness| liveness.silent).count();
        ClientCounts { active: self.clients.len() - silent, silent }
    }
}

fn set_restarting(objects: &ObjectTable, client: Uuid, restarting: bool) {
    let segments = objects.segments.load();
    segments
        .iter()
        .filter(|(_, segment)| segment.client == client)
        .for_each(|(_, segment)| segment.set_restarting(restarting));
}

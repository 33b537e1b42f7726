//! Liveness of clients, and expiry of their segments.
//!
//! A client without heartbeats becomes silent: its replicas are not returned to readers, but stay in the table. If it
//! mounts the same memory again within the grace period, all its objects are readable again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::types::{ClientStatus, PingReply, SegmentStatus, Uuid};
use parking_lot::MutexGuard;

use crate::change::{StateChange, StateChangeSink, UnmountCause};
use crate::master::MasterCore;
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

/// All clients with mounted segments or disks. Its lock is taken before all others.
#[derive(Debug, Default)]
pub(crate) struct ClientRegistry {
    pub(crate) clients: HashMap<Uuid, ClientLiveness>,
}

impl MasterCore {
    /// Handles a client's heartbeat. On `NEED_REMOUNT` the client must mount all of its segments again.
    pub fn ping(&self, now_ms: u64, client: Uuid) -> PingReply {
        let mut registry = self.registry.lock();
        let client_status = match registry.clients.get_mut(&client) {
            Some(liveness) => {
                liveness.last_seen_ms = liveness.last_seen_ms.max(now_ms);
                if std::mem::take(&mut liveness.restarting) {
                    self.set_restarting(client, false);
                }
                if liveness.silent { ClientStatus::NEED_REMOUNT } else { ClientStatus::OK }
            }
            None => ClientStatus::NEED_REMOUNT,
        };
        PingReply { view_version_id: self.view_version.load(Relaxed), client_status }
    }

    /// Handles a closed connection: the client's replicas are not returned to readers until it mounts its segments again.
    pub fn client_disconnected(&self, now_ms: u64, client: Uuid, fx: &mut dyn StateChangeSink) {
        self.mark_silent(&mut self.registry.lock(), now_ms, client, fx);
    }

    /// Handles a client restart during which a holder preserves its memory. Until its next heartbeat, its replicas are returned only
    /// for objects without another one, and it gets no new objects. Without a heartbeat it becomes silent after `client_ttl_ms`, as
    /// any other client.
    pub fn client_restarting(&self, client: Uuid) {
        if let Some(liveness) = self.registry.lock().clients.get_mut(&client) {
            liveness.restarting = true;
            self.set_restarting(client, true);
        }
    }

    /// The caller must hold the registry lock.
    fn set_restarting(&self, client: Uuid, restarting: bool) {
        let segments = self.objects.segments.load();
        segments
            .iter()
            .filter(|(_, segment)| segment.client == client)
            .for_each(|(_, segment)| segment.set_restarting(restarting));
    }

    fn mark_silent(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(liveness) = registry.clients.get_mut(&client) else { return };
        let segments = self.objects.segments.load();
        let is_reachable = |segment: &SegmentEntry| segment.client == client && segment.is_readable();
        let reachable: Vec<&Arc<SegmentEntry>> =
            segments.iter().map(|(_, segment)| segment).filter(|segment| is_reachable(segment)).collect();
        let disk = self.objects.disk(client).filter(|disk| disk.is_responsive());
        // A silent client may have mounted some of its segments again.
        if liveness.silent && reachable.is_empty() && disk.is_none() {
            return;
        }
        // The grace period starts now, even if the TTL has not expired.
        (liveness.silent, liveness.last_seen_ms) =
            (true, now_ms.saturating_sub(self.objects.settings.client_ttl_ms));
        reachable.iter().for_each(|segment| segment.set_silent(true));
        if let Some(disk) = disk {
            disk.set_silent(true);
        }
        fx.record(StateChange::ClientSilent { client, at_ms: now_ms });
    }

    /// Marks a client as alive: it has mounted all of its segments.
    pub(crate) fn mark_alive(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let before = registry.clients.insert(client, ClientLiveness::alive(now_ms));
        if before.is_some_and(|liveness| liveness.restarting) {
            self.set_restarting(client, false);
        }
        if before.is_none_or(|liveness| liveness.silent) {
            fx.record(StateChange::ClientRecovered { client, at_ms: now_ms });
        }
        if let Some(disk) = self.objects.disk(client) {
            disk.set_silent(false);
        }
    }

    /// Marks clients without heartbeats as silent, removes those silent for longer than the grace period, and unmounts segments
    /// whose unmount time has passed.
    pub(crate) fn expire_clients(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let mut registry = self.registry.lock();
        let ttl = self.objects.settings.client_ttl_ms;
        let is_late = |liveness: &ClientLiveness, by: u64| liveness.last_seen_ms.saturating_add(by) <= now_ms;
        let silent: BTreeMap<Uuid, ClientLiveness> = registry
            .clients
            .iter()
            .filter(|(_, liveness)| is_late(liveness, ttl))
            .map(|(id, liveness)| (*id, *liveness))
            .collect();
        for (client, liveness) in silent {
            if liveness.silent
                && is_late(&liveness, ttl.saturating_add(self.objects.settings.client_grace_ms))
            {
                self.remove_client(&mut registry, client, fx);
            } else {
                self.mark_silent(&mut registry, now_ms, client, fx);
            }
        }
        let segments = Arc::clone(&self.objects.segments.load());
        for (_, segment) in segments.iter() {
            if segment.unmount_at_ms().is_some_and(|unmount_ms| unmount_ms <= now_ms) {
                self.objects.drop_segment(segment.descriptor.id, UnmountCause::Unmounted, now_ms, fx);
            }
        }
    }

    fn remove_client(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = Arc::clone(&self.objects.segments.load());
        for (_, segment) in segments.iter().filter(|(_, mounted)| mounted.client == client) {
            self.objects.drop_segment(segment.descriptor.id, UnmountCause::ClientExpired, 0, fx);
        }
        self.objects.drop_disk(client, 0, fx);
        registry.clients.remove(&client);
        fx.record(StateChange::ClientExpired { client });
    }

    /// Ends the replay of state changes, before requests are served. Every client that is not silent gets a full TTL for its next
    /// heartbeat.
    pub fn finish_replay(&self, now_ms: u64) {
        for liveness in self.registry.lock().clients.values_mut().filter(|liveness| !liveness.silent) {
            liveness.last_seen_ms = now_ms;
        }
        self.resume_transfers();
        self.sort_lists();
        for (_, segment) in self.objects.segments.load().iter() {
            segment.with_allocator(crate::allocator::SegmentAllocator::drop_offset_index);
        }
    }

    /// Number of active and of silent clients.
    pub fn client_counts(&self) -> (usize, usize) {
        let registry = self.registry.lock();
        let silent = registry.clients.values().filter(|liveness| liveness.silent).count();
        (registry.clients.len() - silent, silent)
    }

    /// Hosts of clients' segments, without ports. Unknown clients are omitted.
    pub fn query_ip(&self, clients: &[Uuid]) -> BTreeMap<Uuid, Vec<String>> {
        let segments = self.objects.segments.load();
        let mut found = BTreeMap::new();
        for client in clients {
            let own = segments.iter().filter(|(_, segment)| segment.client == *client);
            let mut hosts: Vec<String> =
                own.map(|(_, segment)| host(&segment.descriptor.te_endpoint).to_owned()).collect();
            hosts.sort_unstable();
            hosts.dedup();
            if !hosts.is_empty() {
                found.insert(*client, hosts);
            }
        }
        found
    }

    /// Status of the segment with this name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status(&self, name: &str) -> Result<SegmentStatus, mooncake_wire::ErrorCode> {
        let segments = self.objects.segments.load();
        let first = segments.indices_by_name(name).first().and_then(|index| segments.get(*index));
        first.map(|segment| segment.status()).ok_or(mooncake_wire::ErrorCode::SEGMENT_NOT_FOUND)
    }

    /// Status of the segment with this id.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status_by_id(&self, id: Uuid) -> Result<SegmentStatus, mooncake_wire::ErrorCode> {
        let segments = self.objects.segments.load();
        let segment = segments.index_of(id).and_then(|index| segments.get(index));
        segment.map(|mounted| mounted.status()).ok_or(mooncake_wire::ErrorCode::SEGMENT_NOT_FOUND)
    }
}

fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

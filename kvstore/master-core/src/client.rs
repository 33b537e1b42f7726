//! Clients: whether they are heard of, and what becomes of their segments if not.
//!
//! A client that falls silent loses nothing at first: its replicas are only not handed out. If it comes back within the
//! grace period and mounts the same memory, all its objects are there again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::types::{ClientStatus, PingReply, SegmentStatus, Uuid};
use parking_lot::MutexGuard;

use crate::change::{StateChange, StateChangeSink, UnmountCause};
use crate::master::MasterCore;
use crate::segment::SegmentEntry;

/// What is known about a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientLiveness {
    pub(crate) last_seen_ms: u64,
    pub(crate) silent: bool,
    /// Whether it was not heard of since its last connection broke, and its memory is kept.
    pub(crate) restarting: bool,
}

impl ClientLiveness {
    /// One that was heard of.
    pub(crate) fn alive(last_seen_ms: u64) -> Self {
        Self { last_seen_ms, silent: false, restarting: false }
    }
}

/// All clients that have mounted something. Its lock comes before all others.
#[derive(Debug, Default)]
pub(crate) struct ClientRegistry {
    pub(crate) clients: HashMap<Uuid, ClientLiveness>,
}

impl MasterCore {
    /// A client's heartbeat. Whoever is told to mount again shall do so with all of its segments.
    pub fn ping(&self, now_ms: u64, client: Uuid) -> PingReply {
        let mut registry = self.registry.lock();
        let client_status = match registry.clients.get_mut(&client) {
            Some(known) => {
                known.last_seen_ms = known.last_seen_ms.max(now_ms);
                if std::mem::take(&mut known.restarting) {
                    self.set_restarting(client, false);
                }
                if known.silent { ClientStatus::NEED_REMOUNT } else { ClientStatus::OK }
            }
            None => ClientStatus::NEED_REMOUNT,
        };
        PingReply { view_version_id: self.view_version.load(Relaxed), client_status }
    }

    /// A client's connection has broken: its replicas are not handed out until it mounts them again.
    pub fn client_disconnected(&self, now_ms: u64, client: Uuid, fx: &mut dyn StateChangeSink) {
        self.mark_silent(&mut self.registry.lock(), now_ms, client, fx);
    }

    /// A client's last connection has broken, or will soon, and its memory is kept for its next process: until it is heard of, its
    /// replicas are only handed out of what is nowhere else, and it gets nothing new. It becomes silent when its time is
    /// over, as any other.
    pub fn client_restarting(&self, client: Uuid) {
        if let Some(known) = self.registry.lock().clients.get_mut(&client) {
            known.restarting = true;
            self.set_restarting(client, true);
        }
    }

    /// With the registry locked.
    fn set_restarting(&self, client: Uuid, away: bool) {
        let segments = self.segments.load();
        segments.iter().filter(|(_, it)| it.client == client).for_each(|(_, it)| it.set_restarting(away));
    }

    fn mark_silent(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let Some(known) = registry.clients.get_mut(&client) else { return };
        let segments = self.segments.load();
        let is_heard = |it: &SegmentEntry| it.client == client && it.is_readable();
        let heard: Vec<&Arc<SegmentEntry>> =
            segments.iter().map(|(_, it)| it).filter(|it| is_heard(it)).collect();
        let disk = self.disk(client).filter(|disk| disk.is_responsive());
        // A silent client may have mounted some of its segments.
        if known.silent && heard.is_empty() && disk.is_none() {
            return;
        }
        // The grace period begins now, whatever time the client had left.
        (known.silent, known.last_seen_ms) = (true, now_ms.saturating_sub(self.settings.client_ttl_ms));
        heard.iter().for_each(|it| it.set_silent(true));
        if let Some(disk) = disk {
            disk.set_silent(true);
        }
        fx.record(StateChange::ClientSilent { client, at_ms: now_ms });
    }

    /// A client has mounted all that it has: it lives.
    pub(crate) fn mark_alive(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        now_ms: u64,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let before = registry.clients.insert(client, ClientLiveness::alive(now_ms));
        if before.is_some_and(|it| it.restarting) {
            self.set_restarting(client, false);
        }
        if before.is_none_or(|it| it.silent) {
            fx.record(StateChange::ClientRecovered { client, at_ms: now_ms });
        }
        if let Some(disk) = self.disk(client) {
            disk.set_silent(false);
        }
    }

    /// Makes clients silent that have not been heard of, drops those that have been silent for too long, and unmounts
    /// segments whose time has come.
    pub(crate) fn expire_clients(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let mut registry = self.registry.lock();
        let ttl = self.settings.client_ttl_ms;
        let late = |it: &ClientLiveness, by: u64| it.last_seen_ms.saturating_add(by) <= now_ms;
        let silent: BTreeMap<Uuid, ClientLiveness> =
            registry.clients.iter().filter(|(_, it)| late(it, ttl)).map(|(id, it)| (*id, *it)).collect();
        for (client, known) in silent {
            if known.silent && late(&known, ttl.saturating_add(self.settings.client_grace_ms)) {
                self.remove_client(&mut registry, client, fx);
            } else {
                self.mark_silent(&mut registry, now_ms, client, fx);
            }
        }
        let segments = Arc::clone(&self.segments.load());
        for (_, segment) in segments.iter() {
            if segment.unmount_at_ms().is_some_and(|at| at <= now_ms) {
                self.drop_segment(segment.descriptor.id, UnmountCause::Unmounted, now_ms, fx);
            }
        }
    }

    fn remove_client(
        &self,
        registry: &mut MutexGuard<'_, ClientRegistry>,
        client: Uuid,
        fx: &mut dyn StateChangeSink,
    ) {
        let segments = Arc::clone(&self.segments.load());
        for (_, segment) in segments.iter().filter(|(_, it)| it.client == client) {
            self.drop_segment(segment.descriptor.id, UnmountCause::ClientExpired, 0, fx);
        }
        self.drop_disk(client, 0, fx);
        registry.clients.remove(&client);
        fx.record(StateChange::ClientExpired { client });
    }

    /// Ends the building of a master from facts, and begins to serve: every client that is not silent has a full
    /// period to be heard of.
    pub fn finish_replay(&self, now_ms: u64) {
        for known in self.registry.lock().clients.values_mut().filter(|it| !it.silent) {
            known.last_seen_ms = now_ms;
        }
        self.resume_transfers();
        self.sort_lists();
        for (_, segment) in self.segments.load().iter() {
            segment.with_allocator(crate::allocator::SegmentAllocator::drop_offset_index);
        }
    }

    /// Clients that are heard of, and those that are silent.
    pub fn client_counts(&self) -> (usize, usize) {
        let registry = self.registry.lock();
        let silent = registry.clients.values().filter(|it| it.silent).count();
        (registry.clients.len() - silent, silent)
    }

    /// The hosts of clients' segments, without ports. Unknown clients are left out.
    pub fn query_ip(&self, clients: &[Uuid]) -> BTreeMap<Uuid, Vec<String>> {
        let segments = self.segments.load();
        let mut found = BTreeMap::new();
        for client in clients {
            let own = segments.iter().filter(|(_, it)| it.client == *client);
            let mut hosts: Vec<String> =
                own.map(|(_, it)| host(&it.descriptor.te_endpoint).to_owned()).collect();
            hosts.sort_unstable();
            hosts.dedup();
            if !hosts.is_empty() {
                found.insert(*client, hosts);
            }
        }
        found
    }

    /// What becomes of the segment with this name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status(&self, name: &str) -> Result<SegmentStatus, mooncake_wire::ErrorCode> {
        let segments = self.segments.load();
        let first = segments.indices_by_name(name).first().and_then(|at| segments.get(*at));
        first.map(|it| it.status()).ok_or(mooncake_wire::ErrorCode::SEGMENT_NOT_FOUND)
    }

    /// What becomes of the segment with this id.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`.
    pub fn segment_status_by_id(&self, id: Uuid) -> Result<SegmentStatus, mooncake_wire::ErrorCode> {
        let segments = self.segments.load();
        let segment = segments.index_of(id).and_then(|at| segments.get(at));
        segment.map(|it| it.status()).ok_or(mooncake_wire::ErrorCode::SEGMENT_NOT_FOUND)
    }
}

fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

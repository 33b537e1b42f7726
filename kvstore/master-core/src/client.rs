//! Heartbeats, disconnects and expiry of clients.

use std::sync::atomic::Ordering::Relaxed;

use mooncake_wire::types::{PingReply, Uuid};

use crate::change::StateChangeSink;
use crate::client_registry::ClientCounts;
use crate::master::MasterCore;

impl MasterCore {
    /// Handles a client's heartbeat. On `NEED_REMOUNT` the client must mount all of its segments again.
    pub fn ping(&self, now_ms: u64, client: Uuid) -> PingReply {
        let client_status = self.registry.lock().record_heartbeat(&self.objects, now_ms, client);
        PingReply { view_version_id: self.view_version.load(Relaxed), client_status }
    }

    /// Handles a closed connection: the client's replicas are not returned to readers until it mounts its segments again.
    pub fn client_disconnected(&self, now_ms: u64, client: Uuid, fx: &mut dyn StateChangeSink) {
        self.registry.lock().mark_silent(&self.objects, now_ms, client, fx);
    }

    /// Handles a client restart during which a holder preserves its memory. Until its next heartbeat, its replicas are returned only
    /// for objects without another one, and it gets no new objects. Without a heartbeat it becomes silent after `client_ttl_ms`, as
    /// any other client.
    pub fn client_restarting(&self, client: Uuid) {
        self.registry.lock().mark_restarting(&self.objects, client);
    }

    /// Expires clients, and unmounts segments whose unmount time has passed.
    pub(crate) fn expire_clients(&self, now_ms: u64, fx: &mut dyn StateChangeSink) {
        let mut registry = self.registry.lock();
        registry.expire(&self.objects, now_ms, fx);
        self.objects.unmount_due_segments(now_ms, fx);
    }

    pub fn client_counts(&self) -> ClientCounts {
        self.registry.lock().counts()
    }
}

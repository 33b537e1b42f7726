//! Capabilities for callers with a certificate, and the keys that nodes send for them.

use std::sync::Arc;

use bytes::BytesMut;
use mooncake_wire::ErrorCode;
use mooncake_wire::capability::{Rights, SegmentKeyArguments, encode_reply};
use mooncake_wire::frame::{Fault, attach_to_response};
use mooncake_wire::types::{Replica, ReplicaMedium};

use super::Call;
use crate::capabilities::{Holder, KeyedSegment};
use crate::server::Server;

impl Call<'_> {
    /// Grants the caller what its reply names, if it has a certificate. A read may last as long as the lease, a write until another writer may
    /// take over the key.
    pub(super) fn grant<'r>(
        &mut self,
        rights: Rights,
        replicas: impl IntoIterator<Item = &'r Replica<Arc<str>>>,
    ) {
        let Some(certificate) = self.peer else { return };
        let settings = self.core.settings();
        let lifetime_ms = match rights {
            Rights::Read => settings.lease_ttl_ms,
            Rights::Write => settings.put_discard_ms,
        };
        let holder = Holder { certificate, rights, lifetime_ms };
        for replica in replicas {
            if let ReplicaMedium::Memory(buffer) = &replica.medium {
                self.server.capabilities.issue(self.now_ms, holder, buffer, &mut self.grants);
            }
        }
    }

    /// Attaches what was granted to the reply that begins at `start`.
    pub(super) fn attach_grants(&mut self, start: usize) {
        if !self.grants.is_empty()
            && let Err(error) = attach_to_response(self.out, start, &self.grants)
        {
            tracing::warn!(%error, "capabilities do not fit into a reply");
        }
    }
}

/// Answers a node that sends the key of a segment.
///
/// # Errors
/// The fault to be answered.
pub(super) fn receive_key(
    server: &Server,
    now_ms: u64,
    sequence: u32,
    it: &SegmentKeyArguments,
    out: &mut BytesMut,
) -> Result<(), Fault> {
    let key = it.segment_key().ok_or_else(Fault::invalid_argument)?;
    let reply =
        server.master.segment_range(it.segment_id, it.client_id).and_then(|(endpoint, base, size)| {
            let segment = KeyedSegment {
                id: it.segment_id,
                base,
                size,
                key,
                clock_ms: it.clock_ms,
                received_ms: now_ms,
            };
            let is_kept = server.capabilities.register(endpoint, segment);
            if is_kept { Ok(()) } else { Err(ErrorCode::NO_AVAILABLE_HANDLE) }
        });
    encode_reply(sequence, reply, out).map_err(|_| Fault::invalid_argument())
}

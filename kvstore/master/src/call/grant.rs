//! Capabilities for callers with a certificate, and the keys that nodes send for them.

use std::sync::Arc;

use bytes::BytesMut;
use mooncake_wire::ErrorCode;
use mooncake_wire::capability::{AccessRights, SegmentKeyArguments, encode_reply};
use mooncake_wire::frame::{RpcFault, attach_to_response};
use mooncake_wire::types::{ReplicaDescriptor, ReplicaMedium};

use super::RpcCall;
use crate::capabilities::{CapabilityClaims, KeyedSegment};
use crate::server::MasterServer;

impl RpcCall<'_> {
    /// Grants the caller what its reply names, if it has a certificate. A read may last as long as the lease, a write until another writer may
    /// take over the key.
    pub(super) fn grant<'r>(
        &mut self,
        rights: AccessRights,
        replicas: impl IntoIterator<Item = &'r ReplicaDescriptor<Arc<str>>>,
    ) {
        let Some(certificate) = self.peer else { return };
        let settings = self.core.settings();
        let lifetime_ms = match rights {
            AccessRights::Read => settings.lease_ttl_ms,
            AccessRights::Write => settings.put_discard_ms,
        };
        let holder = CapabilityClaims { certificate, rights, lifetime_ms };
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
    server: &MasterServer,
    now_ms: u64,
    sequence: u32,
    it: &SegmentKeyArguments,
    out: &mut BytesMut,
) -> Result<(), RpcFault> {
    let key = it.segment_key().ok_or_else(RpcFault::invalid_argument)?;
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
    encode_reply(sequence, reply, out).map_err(|_| RpcFault::invalid_argument())
}

//! Issues capabilities to callers with a certificate, and receives the segment keys for them.

use std::sync::Arc;

use mooncake_wire::ErrorCode;
use mooncake_wire::capability::{AccessRights, SegmentKeyArguments, encode_reply};
use mooncake_wire::frame::{RpcFault, attach_to_response};
use mooncake_wire::types::{ReplicaDescriptor, ReplicaMedium};
use moongate_master_core::{ClientSegment, SegmentRange};

use super::{ExtensionCall, RpcCall};
use crate::capabilities::{CapabilityClaims, KeyedSegment};

impl RpcCall<'_> {
    /// Grants the caller access to the replicas in its reply, if it has a certificate. Read access lasts as long as the lease, write access
    /// until another writer may replace the pending write.
    pub(super) fn grant<'r>(
        &mut self,
        rights: AccessRights,
        replicas: impl IntoIterator<Item = &'r ReplicaDescriptor<Arc<str>>>,
    ) {
        let Some(certificate) = self.peer else { return };
        let options = self.core.settings();
        let lifetime_ms = match rights {
            AccessRights::Read => options.lease_ttl_ms,
            AccessRights::Write => options.put_discard_ms,
        };
        let holder = CapabilityClaims { certificate, rights, lifetime_ms };
        for replica in replicas {
            if let ReplicaMedium::Memory(buffer) = &replica.medium {
                self.server.capabilities.issue(self.now_ms, holder, buffer, &mut self.grants);
            }
        }
    }

    /// Attaches the granted capabilities to the reply that starts at `start`.
    pub(super) fn attach_grants(&mut self, start: usize) {
        if !self.grants.is_empty()
            && let Err(error) = attach_to_response(self.out, start, &self.grants)
        {
            tracing::warn!(%error, "cannot attach capabilities to a reply");
        }
    }
}

/// Registers the key of a segment that a node sent, and replies.
///
/// # Errors
/// The fault to reply with.
pub(super) fn receive_key(call: ExtensionCall<'_>, arguments: &SegmentKeyArguments) -> Result<(), RpcFault> {
    let ExtensionCall { server, now_ms, sequence, out, .. } = call;
    let key = arguments.segment_key().ok_or_else(RpcFault::invalid_argument)?;
    let segment = ClientSegment { segment: arguments.segment_id, client: arguments.client_id };
    let reply = server.master.segment_range(segment).and_then(|SegmentRange { endpoint, base, size }| {
        let segment = KeyedSegment {
            id: arguments.segment_id,
            base,
            size,
            key,
            clock_ms: arguments.clock_ms,
            received_ms: now_ms,
        };
        let is_registered = server.capabilities.register(endpoint, segment);
        if is_registered { Ok(()) } else { Err(ErrorCode::NO_AVAILABLE_HANDLE) }
    });
    encode_reply(sequence, reply, out).map_err(|_| RpcFault::invalid_argument())
}

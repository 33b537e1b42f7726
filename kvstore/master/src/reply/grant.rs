//! Issues capabilities to callers with a certificate.

use std::sync::Arc;

use mooncake_wire::capability::AccessRights;
use mooncake_wire::types::{ReplicaDescriptor, ReplicaMedium};

use super::CallReply;
use crate::capabilities::CapabilityClaims;

impl CallReply<'_> {
    /// Grants the caller access to the replicas in its reply, if it has a certificate. Read access lasts as long as the lease, write access
    /// until another writer may replace the pending write.
    pub(crate) fn grant<'r>(
        &mut self,
        rights: AccessRights,
        replicas: impl IntoIterator<Item = &'r ReplicaDescriptor<Arc<str>>>,
    ) {
        let Some(certificate) = self.peer else { return };
        let options = self.server.master.settings();
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
}

//! Encodes the reply to one call.

use bytes::BytesMut;
use mooncake_wire::Dialect;
use mooncake_wire::capability::CertificateFingerprint;
use mooncake_wire::frame::{RpcFault, attach_to_response};
use mooncake_wire::pack::{Pack, PackError};
use mooncake_wire::rpc::{RpcDefinition, encode_reply};

use crate::server::MasterServer;

/// The reply to one call, until it is encoded.
pub(crate) struct CallReply<'c> {
    pub(crate) server: &'c MasterServer,
    pub(crate) now_ms: u64,
    pub(crate) dialect: Dialect,
    /// Sequence number of the request.
    pub(crate) sequence: u32,
    /// The caller's certificate, if callers must have one.
    pub(crate) peer: Option<CertificateFingerprint>,
    /// Capabilities to attach.
    pub(crate) grants: BytesMut,
    pub(crate) out: &'c mut BytesMut,
}

impl CallReply<'_> {
    /// Appends the reply with the granted capabilities.
    pub(crate) fn encode<M: RpcDefinition, S>(&mut self, reply: &M::Reply<S>) -> Result<(), PackError>
    where
        M::Reply<S>: Pack,
    {
        let start = self.out.len();
        encode_reply::<M, S>(self.sequence, self.dialect, reply, self.out)?;
        if !self.grants.is_empty()
            && let Err(error) = attach_to_response(self.out, start, &self.grants)
        {
            tracing::warn!(%error, "cannot attach capabilities to a reply");
        }
        Ok(())
    }

    /// Appends a fault instead of the reply.
    pub(crate) fn encode_fault(&mut self, fault: &RpcFault) {
        write_fault(fault, self.sequence, self.out);
    }
}

/// Appends the fault of a request that is not executed.
pub(crate) fn write_fault(fault: &RpcFault, sequence: u32, out: &mut BytesMut) {
    if let Err(error) = fault.write(sequence, out) {
        tracing::warn!(%error, "cannot encode a fault");
    }
}

//! Counters of the data plane server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(not(feature = "simulation"))]
use mooncake_wire::capability::CapabilityError;

use crate::plane::{TransferOperation, TransferProtocol};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of the data plane, shared by all threads.
        #[derive(Debug, Default)]
        pub struct TransferCounters {
            $(pub(super) $name: AtomicU64,)*
        }

        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct TransferCountersSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl TransferCounters {
            /// Reads all counters, without atomicity between them.
            #[must_use]
            pub fn snapshot(&self) -> TransferCountersSnapshot {
                TransferCountersSnapshot { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Completed reads of this node's memory.
    reads,
    /// Completed writes to this node's memory.
    writes,
    /// Bytes of all completed reads.
    read_bytes,
    /// Bytes of all completed writes.
    written_bytes,
    /// Nanoseconds of completed reads, from the header to the last byte handed to the kernel.
    read_nanos,
    /// Nanoseconds of completed writes, from the header to the status.
    write_nanos,
    /// Completed transfers of either kind with v1.
    v1,
    /// Completed transfers of either kind with v2.
    v2,
    /// Completed transfers of either kind with the checked protocol.
    checked,
    /// Completed transfers of either kind through mapped memory.
    mapped,
    /// Requests outside this node's memory.
    rejected,
    /// Transfers that failed: the peer disconnected or was too slow.
    failed,
    /// Reads that waited for unacknowledged writes.
    delayed_reads,
    /// Reads rejected because an unacknowledged write did not complete in time.
    unfinished,
    /// Written bodies that failed their checksum.
    damaged,
    /// Requests with an invalid header.
    malformed,
    /// Transfers whose capability was not issued for this certificate and segment.
    refused_forged,
    /// Transfers whose capability had expired.
    refused_expired,
    /// Transfers outside the range of their capability.
    refused_range,
    /// Transfers whose capability grants the other operation.
    refused_rights,
    /// Connections closed because TLS failed or the peer's certificate was rejected.
    unauthenticated,
    /// Accepted connections since the start.
    opened,
    /// Closed connections since the start.
    closed,
    /// Connections rejected because of their address.
    not_allowed,
    /// Connections rejected because of a connection limit.
    over_limit,
    /// Connections without a request, evicted for new ones.
    evicted,
}

impl TransferCounters {
    #[cfg(not(feature = "simulation"))]
    pub(super) fn refused(&self, refusal: CapabilityError) {
        let count = match refusal {
            CapabilityError::InvalidSignature => &self.refused_forged,
            CapabilityError::Expired => &self.refused_expired,
            CapabilityError::OutOfRange => &self.refused_range,
            CapabilityError::WrongOperation => &self.refused_rights,
        };
        count.fetch_add(1, Relaxed);
    }

    pub(super) fn record_transfer(
        &self,
        operation: TransferOperation,
        protocol: TransferProtocol,
        bytes: u64,
        nanos: u64,
    ) {
        let (number, sum, time) = match operation {
            TransferOperation::Read => (&self.reads, &self.read_bytes, &self.read_nanos),
            TransferOperation::Write => (&self.writes, &self.written_bytes, &self.write_nanos),
        };
        number.fetch_add(1, Relaxed);
        sum.fetch_add(bytes, Relaxed);
        time.fetch_add(nanos, Relaxed);
        let protocol = match protocol {
            TransferProtocol::V1 => &self.v1,
            TransferProtocol::V2 => &self.v2,
            TransferProtocol::Checked => &self.checked,
            TransferProtocol::Mapped(_) => &self.mapped,
        };
        protocol.fetch_add(1, Relaxed);
    }
}

//! What the data plane has done.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(not(feature = "simulation"))]
use mooncake_wire::capability::CapabilityError;

use crate::plane::{TransferOperation, TransferProtocol};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What the data plane has done. Any thread may count.
        #[derive(Debug, Default)]
        pub struct Counts {
            $(pub(super) $name: AtomicU64,)*
        }

        /// The same at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            /// The numbers of now.
            #[must_use]
            pub fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counts! {
    /// Transfers out of this memory that have ended well.
    reads,
    /// Transfers into it that have ended well.
    writes,
    /// Bytes of the former.
    read_bytes,
    /// Bytes of the latter.
    written_bytes,
    /// Nanoseconds of the former, from the header to the last byte handed to the kernel.
    read_nanos,
    /// Nanoseconds of the latter.
    write_nanos,
    /// Transfers of either kind in the first protocol.
    v1,
    /// In the second.
    v2,
    /// In ours.
    checked,
    /// Ranges that are not within this memory.
    rejected,
    /// Transfers that have broken off: the peer went away, or was too slow.
    failed,
    /// Reads that have waited for writes that are not acknowledged.
    delayed_reads,
    /// Reads that were refused because such a write has not ended.
    unfinished,
    /// Written bodies that were not what their checksum says.
    damaged,
    /// Headers that were none.
    malformed,
    /// Transfers whose capability was not issued for the peer's certificate and the segment.
    refused_forged,
    /// Transfers whose capability had expired.
    refused_expired,
    /// Transfers outside the range of their capability.
    refused_range,
    /// Transfers whose capability grants the other operation.
    refused_rights,
    /// Connections that were closed because TLS failed, or the peer had no certificate of the authority.
    unauthenticated,
    /// Connections that have been taken.
    opened,
    /// Connections that have been closed.
    closed,
    /// Connections from addresses that are not allowed.
    not_allowed,
    /// Connections that were too many.
    over_limit,
    /// Connections without a request that were closed to make room for others.
    evicted,
}

impl Counts {
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
        };
        protocol.fetch_add(1, Relaxed);
    }
}

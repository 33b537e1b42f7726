//! Errors of the transfer client.

use std::time::Duration;

use mooncake_wire::capability::CapabilityError;

/// A transfer failed. The connection stays usable only after [`TransferError::Checksum`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// The connection could not be established.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// Address of the node's data plane.
        address: String,
        /// Error of the connection attempt.
        reason: String,
    },
    /// The connection broke during a transfer.
    #[error("the connection to {address} broke: {reason}")]
    Broken {
        /// Address of the node's data plane.
        address: String,
        /// Error of the socket or of TLS.
        reason: String,
    },
    /// The range is not within the node's memory, perhaps because the node restarted.
    #[error("{address} rejected {size} bytes at {start:#x}: the range is not within its memory")]
    Rejected {
        /// Address of the node's data plane.
        address: String,
        /// Address of the first byte.
        start: u64,
        /// Length in bytes of the range.
        size: u64,
    },
    /// The node rejected the capability.
    #[error("{address} rejected {size} bytes at {start:#x}: {refusal}")]
    Refused {
        /// Address of the node's data plane.
        address: String,
        /// Address of the first byte.
        start: u64,
        /// Length in bytes of the range.
        size: u64,
        /// Why the node rejected it.
        refusal: CapabilityError,
    },
    /// The connection requires a capability, and none is set.
    #[error(
        "the master has granted no access to {size} bytes at {start:#x} of {address}; if this persists, check that the node and the master log no errors about segment keys"
    )]
    NotGranted {
        /// Address of the node's data plane.
        address: String,
        /// Address of the first byte.
        start: u64,
        /// Length in bytes of the range.
        size: u64,
    },
    /// The bytes differ from those that were written or sent.
    #[error("{size} bytes at {start:#x} of {address} are corrupt: checksum mismatch")]
    Checksum {
        /// Address of the node's data plane.
        address: String,
        /// Address of the first byte.
        start: u64,
        /// Length in bytes of the range.
        size: u64,
    },
    /// No byte was transferred within the limit.
    #[error("{address} made no progress for {limit:?}")]
    TimedOut {
        /// Address of the node's data plane.
        address: String,
        /// The stall limit of the connection.
        limit: Duration,
    },
}

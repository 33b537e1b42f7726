//! Why transfers fail.

use std::time::Duration;

use mooncake_wire::capability::CapabilityError;

/// A transfer has failed. Only after [`TransferError::Checksum`] can the connection still be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// There is no connection.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// Where the node's data plane should be.
        address: String,
        /// Why not.
        reason: String,
    },
    /// The connection has broken.
    #[error("the connection to {address} has broken: {reason}")]
    Broken {
        /// The node's data plane.
        address: String,
        /// How.
        reason: String,
    },
    /// The node has no such memory, perhaps because it has been restarted.
    #[error("{address} refuses {size} bytes at {start:#x}: this is not within its memory")]
    Rejected {
        /// The node's data plane.
        address: String,
        /// The first byte.
        start: u64,
        /// How many.
        size: u64,
    },
    /// The node has refused the capability.
    #[error("{address} refuses {size} bytes at {start:#x}: {refusal}")]
    Refused {
        /// The node's data plane.
        address: String,
        /// The first byte.
        start: u64,
        /// How many.
        size: u64,
        /// Why.
        refusal: CapabilityError,
    },
    /// The connection needs a capability, and there is none.
    #[error(
        "the master has granted no access to {size} bytes at {start:#x} of {address}; if this persists, check that the node and the master log no errors about segment keys"
    )]
    NotGranted {
        /// The node's data plane.
        address: String,
        /// The first byte.
        start: u64,
        /// How many.
        size: u64,
    },
    /// The bytes are not those that were written, or that were sent.
    #[error("{size} bytes at {start:#x} of {address} are damaged: their checksum is wrong")]
    Checksum {
        /// The node's data plane.
        address: String,
        /// The first byte.
        start: u64,
        /// How many.
        size: u64,
    },
    /// The node has not got on.
    #[error("{address} has been silent for {limit:?}")]
    TimedOut {
        /// The node's data plane.
        address: String,
        /// The limit.
        limit: Duration,
    },
}

//! Errors of the transfer client.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::capability::CapabilityError;
use moongate_runtime::{TLS_REQUIRED, describe_tls_error};

use crate::plane::InvalidStatusError;

/// A transfer failed. The connection stays usable only after [`TransferError::Checksum`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    /// The connection could not be established.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Address of the node's data plane.
        address: String,
        source: TransferConnectError,
    },
    /// The connection broke during a transfer.
    #[error("the connection to {address} broke: {source}")]
    Broken {
        /// Address of the node's data plane.
        address: String,
        source: BrokenConnectionError,
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

/// Why a connection could not be established.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferConnectError {
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    /// The socket or TLS failed.
    #[error("{0}")]
    Io(#[source] Arc<io::Error>),
}

impl From<io::Error> for TransferConnectError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// How a connection broke.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BrokenConnectionError {
    /// The socket, TLS or RDMA failed.
    #[error("{}", describe_tls_error(.0))]
    Io(#[source] Arc<io::Error>),
    /// The node requires TLS, but this program has no certificate.
    #[error("{TLS_REQUIRED}")]
    TlsRequired,
    /// A status of a later release.
    #[error("the node sent the unknown status {0}")]
    UnknownStatus(u32),
    #[error(transparent)]
    InvalidStatus(#[from] InvalidStatusError),
}

impl From<io::Error> for BrokenConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

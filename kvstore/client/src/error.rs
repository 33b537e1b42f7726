//! Errors of object operations.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use moongate_master_client::rpc::RpcError;
use moongate_transfer::descriptor::NoTcpError;
use moongate_transfer::{DirectoryError, TransferError};

/// Pause before a retry when the master granted no access: nodes send it their keys with each heartbeat, once a second.
pub(crate) const GRANT_PAUSE: Duration = Duration::from_millis(600);

/// Why an operation on an object failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvError {
    /// The object does not exist, or is not readable yet.
    #[error("there is no object {key:?} in the store")]
    NotFound { key: String },
    /// Replicas exist, but none in a medium that this client can read.
    #[error("{key:?} has no replica that can be read over TCP, only {media}")]
    NoReplica {
        key: String,
        /// Media of the existing replicas.
        media: String,
    },
    /// The caller's buffer is smaller than the object.
    #[error("{key:?} has {size} bytes and the buffer only {capacity}")]
    TooSmall {
        key: String,
        /// Size of the object in bytes.
        size: u64,
        /// Size of the buffer in bytes.
        capacity: usize,
    },
    /// The object is larger than [`KvClientOptions::largest_object`](crate::KvClientOptions::largest_object).
    #[error("{key:?} has {size} bytes, more than the limit of {limit}; raise the client's largest_object")]
    TooLarge {
        key: String,
        /// Size of the object in bytes.
        size: u64,
        limit: u64,
    },
    /// Mooncake's stores reject objects without content.
    #[error("{key:?} has no content, and a store accepts no empty objects")]
    Empty { key: String },
    /// The master found no free space, after several attempts.
    #[error(
        "the store has no free space for the {size} bytes of {key:?}; add store nodes, or wait until leases expire"
    )]
    NoRoom {
        key: String,
        /// Size of the object in bytes.
        size: u64,
    },
    /// Each attempt to read took longer than the object's lease.
    #[error(
        "reading {key:?} took longer than its lease of {lease:?}, {attempts} times; \
         raise the master's --default_kv_lease_ttl"
    )]
    LeaseEnded { key: String, lease: Duration, attempts: u32 },
    /// No replica matches the writer's checksum.
    #[error(
        "{key:?} is corrupt: none of its {replicas} replicas matches the writer's checksum; remove the object"
    )]
    Damaged { key: String, replicas: usize },
    /// The transfer failed, after all retries.
    #[error("{what} {key:?}: {source}")]
    Transfer {
        /// The operation: `read` or `write`.
        what: &'static str,
        key: String,
        /// Why the last attempt failed.
        source: NodeError,
    },
    /// The master refused the call or did not answer.
    #[error("{what}: {source}")]
    Master {
        /// The operation, with its key.
        what: String,
        source: RpcError,
    },
}

impl KvError {
    /// The Mooncake error code that corresponds to this error, if there is one.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Master { source: RpcError::Refused(code), .. } => Some(*code),
            Self::NotFound { .. } => Some(ErrorCode::OBJECT_NOT_FOUND),
            Self::Damaged { .. } => Some(ErrorCode::CHECKSUM_MISMATCH),
            Self::NoRoom { .. } => Some(ErrorCode::NO_AVAILABLE_HANDLE),
            _ => None,
        }
    }

    /// Whether the master granted no access. A restarted master grants none until nodes have sent it their keys.
    pub(crate) fn is_not_granted(&self) -> bool {
        let is_missing = |source: &NodeError| {
            matches!(source, NodeError::Transfer { source: TransferError::NotGranted { .. }, .. })
        };
        matches!(self, Self::Transfer { source, .. } if is_missing(source))
    }

    pub(crate) fn master(what: &str, key: &str, source: RpcError) -> Self {
        match source {
            RpcError::Refused(ErrorCode::OBJECT_NOT_FOUND | ErrorCode::REPLICA_IS_NOT_READY) => {
                Self::NotFound { key: key.to_owned() }
            }
            source => Self::Master { what: format!("{what} {key:?}"), source },
        }
    }
}

/// Why a transfer with a node failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NodeError {
    /// The lookup of the node's transfer address failed.
    #[error(
        "cannot look up the transfer address of node {endpoint}: {source}; check --metadata, and that the node runs"
    )]
    Lookup { endpoint: Arc<str>, source: Box<NodeLookupError> },
    /// The object is only on the node's disk, and staging it failed.
    #[error("cannot read from the disk of the node at {endpoint}: {source}")]
    Disk {
        /// Address of the node's port for disk reads.
        endpoint: Arc<str>,
        source: Box<RpcError>,
    },
    /// The transfer with the node failed.
    #[error("node {endpoint}: {source}")]
    Transfer { endpoint: Arc<str>, source: TransferError },
}

/// Why a node's transfer address was not found.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NodeLookupError {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    NoTcp(#[from] NoTcpError),
}

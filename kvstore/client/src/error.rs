//! Why an object could not be put or got.

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use moongate_master_client::rpc::RpcError;
use moongate_transfer::TransferError;

/// Pause before another attempt when the master has granted no access: nodes send their keys with each heartbeat, once a second.
pub(crate) const GRANT_PAUSE: Duration = Duration::from_millis(600);

/// Why an operation on an object failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvError {
    /// There is no such object, or none that can be read yet.
    #[error("there is no object {key:?} in the store")]
    NotFound {
        /// The object's key.
        key: String,
    },
    /// Nodes hold the object, but none in a way that this client can read.
    #[error("{key:?} has no replica that can be read over TCP, only {found}")]
    NoReplica {
        /// The object's key.
        key: String,
        /// What there is.
        found: String,
    },
    /// The caller's buffer is too small.
    #[error("{key:?} has {size} bytes and the buffer only {capacity}")]
    TooSmall {
        /// The object's key.
        key: String,
        /// Bytes of the object.
        size: u64,
        /// Bytes of the buffer.
        capacity: usize,
    },
    /// The object is larger than allowed.
    #[error(
        "{key:?} has {size} bytes, more than the {limit} that are allowed; raise the client's largest object"
    )]
    TooLarge {
        /// The object's key.
        key: String,
        /// Its bytes.
        size: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The store takes no objects without content.
    #[error("{key:?} has no content, and a store keeps no empty objects")]
    Empty {
        /// The object's key.
        key: String,
    },
    /// The master has no room.
    #[error(
        "the store has no room for the {size} bytes of {key:?}; add store nodes, or wait until leases end"
    )]
    NoRoom {
        /// The object's key.
        key: String,
        /// Its bytes.
        size: u64,
    },
    /// Reading took longer than the object's lease, again and again.
    #[error(
        "reading {key:?} took longer than its lease of {lease:?}, {attempts} times; \
         raise the master's --default_kv_lease_ttl"
    )]
    LeaseEnded {
        /// The object's key.
        key: String,
        /// The lease.
        lease: Duration,
        /// How often it was tried.
        attempts: u32,
    },
    /// What was read is not what was written.
    #[error(
        "the bytes of {key:?} are not those that were written, whichever of {replicas} replicas is read: \
         their checksum is wrong; remove the object"
    )]
    Damaged {
        /// The object's key.
        key: String,
        /// How many replicas it has.
        replicas: usize,
    },
    /// The bytes could not be moved.
    #[error("{what} {key:?}: {source}")]
    Transfer {
        /// `read` or `write`.
        what: &'static str,
        /// The object's key.
        key: String,
        /// Why the last attempt failed.
        source: NodeError,
    },
    /// The master did not do it.
    #[error("{what}: {source}")]
    Master {
        /// What was asked for.
        what: String,
        /// Why not.
        source: RpcError,
    },
}

impl KvError {
    /// The master's code, if it is what the master answered.
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

    /// Whether the master has granted no access, as one that was restarted until nodes have sent it their keys.
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

/// Why bytes could not be moved to or from a node.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NodeError {
    /// It is not known where the node serves transfers.
    #[error(
        "where the node {endpoint} serves transfers is not known: {reason}; check --metadata, and that it runs"
    )]
    Lookup {
        /// The node.
        endpoint: Arc<str>,
        /// Why not.
        reason: String,
    },
    /// The object is only on the node's disk, and the node did not bring it into memory.
    #[error("the disk of the node at {endpoint}: {reason}")]
    Disk {
        /// Where the node is asked for it.
        endpoint: Arc<str>,
        /// Why not.
        reason: String,
    },
    /// The transfer failed.
    #[error("node {endpoint}: {source}")]
    Transfer {
        /// The node.
        endpoint: Arc<str>,
        /// How.
        source: TransferError,
    },
}

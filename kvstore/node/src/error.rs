//! Why a node cannot be started.

use std::io;
use std::net::IpAddr;

use moongate_master_client::rpc::RpcError;
use moongate_memory::segment;
use moongate_runtime::{BindError, TlsConfigError};
use moongate_transfer::DirectoryError;

use crate::config::NodeConfigError;
use crate::listeners::NodeListenError;

/// Why a node cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] NodeConfigError),
    /// Its addresses.
    #[error(transparent)]
    Place(#[from] NodeListenError),
    /// TLS with the store's other programs.
    #[error(transparent)]
    Tls(#[from] TlsConfigError),
    /// RDMA passes capabilities by.
    #[error(
        "--store-tls-cert cannot be used with the protocol rdma: RDMA is neither encrypted nor authorized; set MOONCAKE_PROTOCOL=tcp, or unset --store-tls-cert"
    )]
    AuthenticatedRdma,
    /// The networks of its clients are not configured.
    #[error(
        "this node listens on {address}, where its memory can be read and written without authentication: set --allow-peers (MOONGATE_STORE_ALLOW_PEERS) to the networks of its clients, as 10.0.0.0/8, or to 0.0.0.0/0,::/0 for all"
    )]
    NoPeers {
        /// Where it would listen.
        address: IpAddr,
    },
    /// Its HTTP port.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Its memory.
    #[error("no memory to lend: {0}")]
    Memory(#[from] segment::SegmentError),
    /// What the memory is cannot be noted.
    #[error("no memory to lend: {0}")]
    Ledger(#[from] moongate_memory::ledger::LedgerError),
    /// There shall be a tier on a disk, and it is not said where.
    #[error(
        "enable_ssd_offload is set: set ssd_offload_path (MOONCAKE_OFFLOAD_FILE_STORAGE_PATH) to a folder on the disk"
    )]
    NoDiskPath,
    /// There shall be a tier on a disk, and it is not said how large.
    #[error(
        "enable_ssd_offload is set: give the bytes of the disk that are for objects, as --tier-size 500gb"
    )]
    NoDiskSize,
    /// The tier.
    #[error("no tier on a disk: {0}")]
    Disk(#[from] moongate_tier::TierError),
    /// The memory for readers of the tier.
    #[error("no memory for readers of the disk: {0}")]
    Buffer(#[from] moongate_memory::RegionError),
    /// The metadata server.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The master.
    #[error(
        "the master at {address} does not take this node: {source}; check master_server_address (MOONCAKE_MASTER)"
    )]
    Master {
        /// Where it should be.
        address: String,
        /// Why not.
        source: RpcError,
    },
    /// The system.
    #[error("cannot start: {0}")]
    Io(#[from] io::Error),
}

impl NodeStartError {
    /// Whether a setting is wrong or missing: the same start fails again until it is corrected.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        matches!(
            self,
            Self::Config(_)
                | Self::Place(NodeListenError::Host { .. })
                | Self::NoPeers { .. }
                | Self::Tls(_)
                | Self::AuthenticatedRdma
                | Self::Directory(DirectoryError::Insecure(_))
                | Self::NoDiskPath
                | Self::NoDiskSize
        )
    }
}

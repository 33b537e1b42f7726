//! Errors that prevent a node from starting.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use moongate_master_client::rpc::RpcError;
use moongate_memory::segment;
use moongate_runtime::{BindError, TlsConfigError};
use moongate_transfer::DirectoryError;

use crate::config::NodeConfigError;
use crate::listeners::NodeListenError;

/// An error that prevents a node from starting.
#[derive(Debug, thiserror::Error)]
pub enum NodeStartError {
    #[error(transparent)]
    Config(#[from] NodeConfigError),
    #[error(transparent)]
    Place(#[from] NodeListenError),
    #[error(transparent)]
    Tls(#[from] TlsConfigError),
    /// RDMA transfers are not checked against capabilities.
    #[error(
        "--store-tls-cert cannot be used with the protocol rdma: RDMA is neither encrypted nor authorized; set MOONCAKE_PROTOCOL=tcp, or unset --store-tls-cert"
    )]
    AuthenticatedRdma,
    /// `--allow-peers` is missing, and the node does not listen on loopback.
    #[error(
        "this node listens on {address}, where its memory can be read and written without authentication: set --allow-peers (MOONGATE_STORE_ALLOW_PEERS) to the networks of its clients, as 10.0.0.0/8, or to 0.0.0.0/0,::/0 for all"
    )]
    NoPeers { address: IpAddr },
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The socket of `--shared-memory` cannot be opened.
    #[error("cannot listen at {path} (--shared-memory): {source}", path = path.display())]
    SharedMemory { path: PathBuf, source: io::Error },
    #[error("cannot open the segment's memory: {0}")]
    Memory(#[from] segment::SegmentError),
    /// The segment's identity cannot be written to its ledger.
    #[error("cannot open the segment's memory: {0}")]
    Ledger(#[from] moongate_memory::ledger::LedgerError),
    /// Disk offload is on, but `ssd_offload_path` is not set.
    #[error(
        "enable_ssd_offload is set: set ssd_offload_path (MOONCAKE_OFFLOAD_FILE_STORAGE_PATH) to a folder on the disk"
    )]
    NoDiskPath,
    /// Disk offload is on, but `--tier-size` is not set.
    #[error("enable_ssd_offload is set: set --tier-size to the disk space for objects, as --tier-size 500gb")]
    NoDiskSize,
    #[error("cannot open the disk tier: {0}")]
    Disk(#[from] moongate_tier::TierError),
    /// The staging buffer for reads from disk.
    #[error("cannot allocate the staging buffer for disk reads: {0}")]
    Buffer(#[from] moongate_memory::RegionError),
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The master refused the node, or was not reachable in time.
    #[error(
        "cannot register with the master at {address}: {source}; check master_server_address (MOONCAKE_MASTER)"
    )]
    Master { address: String, source: RpcError },
    #[error("cannot start: {0}")]
    Io(#[from] io::Error),
}

impl NodeStartError {
    /// Whether a setting is invalid or missing: retries fail until it is corrected.
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

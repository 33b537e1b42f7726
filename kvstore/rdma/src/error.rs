//! Errors of the RDMA setup and of connections.

use std::io;
use std::time::Duration;

use crate::connection::HandshakeMessageError;
use crate::device::RdmaDeviceError;

/// Why a process cannot use RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaSetupError {
    /// The program was built without RDMA.
    #[error("this program was built without the feature `rdma`")]
    NotBuilt,
    #[error("cannot list the RDMA devices of this machine: {0}")]
    ListDevices(#[source] io::Error),
    /// The machine has no device.
    #[error("this machine has no RDMA device")]
    NoDevice,
    /// Devices exist, but none is usable.
    #[error("no usable RDMA device: {}", .0.iter().map(UnusableDeviceError::to_string).collect::<Vec<_>>().join("; "))]
    Unusable(Vec<UnusableDeviceError>),
    /// The staging memory cannot be allocated.
    #[error("cannot allocate staging memory: {0}")]
    Memory(#[from] moongate_memory::RegionError),
    /// The kernel refused to register memory.
    #[error("cannot register memory with the RDMA devices: {0}; raise the locked memory limit (ulimit -l)")]
    Register(#[source] io::Error),
}

/// A device that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{device}: {source}")]
pub struct UnusableDeviceError {
    pub device: String,
    pub source: RdmaDeviceError,
}

/// No RDMA connection to a node could be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {source}")]
pub struct RdmaConnectError {
    /// Name of the node, or path of its device.
    pub address: String,
    pub source: RdmaLinkSetupError,
}

/// Why a link to a node's device could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum RdmaLinkSetupError {
    #[error("its descriptor lists no RDMA device")]
    NoDevice,
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    /// The node does not respond to handshakes.
    #[error(transparent)]
    Handshake(io::Error),
    /// The node's response sets up no connection.
    #[error(transparent)]
    Response(#[from] HandshakeMessageError),
    /// libibverbs refused to create or connect the queue pairs.
    #[error(transparent)]
    QueuePairs(io::Error),
}

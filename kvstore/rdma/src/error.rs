//! Errors of the RDMA setup.

use std::io;

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
    #[error("no usable RDMA device: {0}")]
    Unusable(String),
    /// The staging memory cannot be allocated.
    #[error("cannot allocate staging memory: {0}")]
    Memory(#[from] moongate_memory::RegionError),
    /// The kernel refused to register memory.
    #[error("cannot register memory with the RDMA devices: {0}; raise the locked memory limit (ulimit -l)")]
    Register(#[source] io::Error),
}

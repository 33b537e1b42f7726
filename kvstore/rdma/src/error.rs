//! Why a process cannot use RDMA.

use std::io;

/// Why there is no RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaSetupError {
    /// The program cannot.
    #[error("this program was built without the feature `rdma`")]
    NotBuilt,
    /// The machine does not tell.
    #[error("the devices of this machine cannot be listed: {0}")]
    ListDevices(#[source] io::Error),
    /// There is nothing.
    #[error("this machine has no RDMA device")]
    NoDevice,
    /// There is nothing that can be used.
    #[error("none of the RDMA devices can be used: {0}")]
    Unusable(String),
    /// The system has no memory.
    #[error("no memory for transfers: {0}")]
    Memory(#[from] moongate_memory::RegionError),
    /// The devices do not take it.
    #[error(
        "memory cannot be registered with the RDMA devices: {0}; raise the limit of locked memory, ulimit -l"
    )]
    Register(#[source] io::Error),
}

//! One-sided RDMA between a store's nodes and clients, compatible with Mooncake's transfer engine.
//!
//! - [`device`]: lists the machine's devices and their GIDs.
//! - [`topology`]: chooses a device for a memory location.
//! - [`connection`]: handshake messages that connect queue pairs.
//! - [`RdmaFabric`]: all devices of a process.
//! - [`RdmaAcceptor`]: server side of connections.
//! - [`RdmaConnection`]: client side, reads and writes a node's memory.
//!
//! With the feature `verbs`, which needs libibverbs (without it, [`RdmaFabric::open`] returns an error):
//! - `Nic`: an opened device.
//! - `RdmaLink`: a connection between two devices.

#[cfg(feature = "verbs")]
mod acceptor;
pub mod connection;
pub mod device;
#[cfg(feature = "verbs")]
mod dial;
mod error;
#[cfg(feature = "verbs")]
mod fabric;
pub mod gid;
#[cfg(feature = "verbs")]
mod link;
#[cfg(feature = "verbs")]
mod nic;
#[cfg(feature = "verbs")]
mod staging;
#[cfg(not(feature = "verbs"))]
mod stub;
pub mod topology;
#[cfg(feature = "verbs")]
mod verbs;

#[cfg(feature = "verbs")]
pub use acceptor::RdmaAcceptor;
#[cfg(feature = "verbs")]
pub use dial::RdmaConnection;
pub use error::{RdmaConnectError, RdmaLinkSetupError, RdmaSetupError, UnusableDeviceError};
#[cfg(feature = "verbs")]
pub use fabric::{RdmaFabric, RegisteredMemory};
#[cfg(feature = "verbs")]
pub use link::{LocalMemory, RdmaLink, RdmaLinkError, RdmaOperation, RemoteMemory, SLICE, WorkRequestError};
#[cfg(feature = "verbs")]
pub use nic::Nic;
#[cfg(feature = "verbs")]
pub use staging::{RdmaStaging, STAGING_CHUNK, StagingChunk};
#[cfg(not(feature = "verbs"))]
pub use stub::{RdmaAcceptor, RdmaConnection, RdmaFabric, RdmaStaging, RegisteredMemory};
#[cfg(feature = "verbs")]
pub use verbs::{RegisteredRegion, WorkCompletionError};

/// Name of this transport in descriptors, masters and configurations.
pub const PROTOCOL: &str = "rdma";

/// Whether this program is built with RDMA. Without it, opening devices fails.
pub const IS_BUILT: bool = cfg!(feature = "verbs");

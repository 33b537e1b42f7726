//! One-sided RDMA between a store's nodes and clients, as Mooncake's transfer engine does it.
//!
//! - [`device`]: which devices the machine has, and what peers call them.
//! - [`topology`]: which of them is used for which memory.
//! - [`connection`]: the words by which two sides connect.
//! - [`RdmaFabric`]: all devices of a process, and its description of itself.
//! - [`RdmaAcceptor`]: answers peers that want to connect.
//! - [`RdmaConnection`]: reads and writes a node's memory.
//!
//! With the feature `verbs`, which needs libibverbs; without it, [`RdmaFabric::open`] says that it is missing:
//! - `Nic`: a device at work.
//! - `RdmaLink`: a connection of two devices.

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
pub use error::RdmaSetupError;
#[cfg(feature = "verbs")]
pub use fabric::{RdmaFabric, RegisteredMemory};
#[cfg(feature = "verbs")]
pub use link::{LocalMemory, RdmaLink, RdmaLinkError, RdmaOperation, RemoteMemory, SLICE};
#[cfg(feature = "verbs")]
pub use nic::Nic;
#[cfg(feature = "verbs")]
pub use staging::{RdmaStaging, STAGING_CHUNK, StagingChunk};
#[cfg(not(feature = "verbs"))]
pub use stub::{RdmaAcceptor, RdmaConnection, RdmaFabric, RdmaStaging, RegisteredMemory};
#[cfg(feature = "verbs")]
pub use verbs::RegisteredRegion;

/// What descriptors, masters and configurations call this way of transferring.
pub const PROTOCOL: &str = "rdma";

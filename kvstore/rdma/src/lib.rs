//! One-sided RDMA between a store's nodes and clients, as Mooncake's transfer engine does it.
//!
//! - [`device`]: which devices the machine has, and what peers call them.
//! - [`topology`]: which of them is used for which memory.
//! - [`connection`]: the words by which two sides connect.
//! - [`Fabric`]: all devices of a process, and its description of itself.
//! - [`Acceptor`]: answers peers that want to connect.
//! - [`Connection`]: reads and writes a node's memory.
//!
//! With the feature `verbs`, which needs libibverbs; without it, [`Fabric::open`] says that it is missing:
//! - `Nic`: a device at work.
//! - `Link`: a connection of two devices.

#[cfg(not(feature = "verbs"))]
mod absent;
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
pub mod topology;
#[cfg(feature = "verbs")]
mod verbs;

#[cfg(not(feature = "verbs"))]
pub use absent::{Acceptor, Connection, Fabric, Lent, Staging};
#[cfg(feature = "verbs")]
pub use acceptor::Acceptor;
#[cfg(feature = "verbs")]
pub use dial::Connection;
pub use error::NoRdma;
#[cfg(feature = "verbs")]
pub use fabric::{Fabric, Lent};
#[cfg(feature = "verbs")]
pub use link::{Link, LinkError, Local, Operation, SLICE, Target};
#[cfg(feature = "verbs")]
pub use nic::Nic;
#[cfg(feature = "verbs")]
pub use staging::{PIECE, Piece, Staging};
#[cfg(feature = "verbs")]
pub use verbs::Registered;

/// What descriptors, masters and configurations call this way of transferring.
pub const PROTOCOL: &str = "rdma";

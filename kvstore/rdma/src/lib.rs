//! One-sided RDMA between a store's nodes and clients, as Mooncake's transfer engine does it.
//!
//! - [`device`]: which devices the machine has, and what peers call them.
//! - [`topology`]: which of them is used for which memory.
//! - [`connection`]: the words by which two sides connect.
//!
//! With the feature `verbs` (which needs libibverbs):
//! - `Nic`: a device at work.
//! - `Fabric`: all devices of a process, and its description of itself.
//! - `Acceptor`: answers peers that want to connect.
//! - `Connection`: reads and writes a node's memory.
//! - `Link`: a connection of two devices.

#[cfg(feature = "verbs")]
mod acceptor;
pub mod connection;
pub mod device;
#[cfg(feature = "verbs")]
mod dial;
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

#[cfg(feature = "verbs")]
pub use acceptor::Acceptor;
#[cfg(feature = "verbs")]
pub use dial::{Connection, DialError};
#[cfg(feature = "verbs")]
pub use fabric::{Fabric, Lent, NoRdma, PROTOCOL};
#[cfg(feature = "verbs")]
pub use link::{Link, LinkError, Local, Operation, SLICE, Target};
#[cfg(feature = "verbs")]
pub use nic::Nic;
#[cfg(feature = "verbs")]
pub use staging::{PIECE, Piece, Staging, StagingError};
#[cfg(feature = "verbs")]
pub use verbs::Registered;

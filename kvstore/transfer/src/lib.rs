//! Mooncake's transfer engine over TCP, both sides of it.
//!
//! - [`descriptor`]: what a node tells about its memory and its ports.
//! - [`directory`]: where descriptors are found: an HTTP metadata server, or the node itself.
//! - [`handshake`]: the port on which a node answers for itself.
//! - [`plane`]: the bytes of the data plane.
//! - [`dial`]: reads and writes another node's memory.
//! - [`serve`]: lets others read and write memory of one's own.

mod apart;
mod channel;
pub mod descriptor;
pub mod dial;
pub mod directory;
mod error;
pub mod handshake;
mod peers;
pub mod plane;
pub mod serve;

pub use descriptor::{Buffer, Device, SegmentDescriptor};
pub use dial::{Connection, Limits};
pub use directory::{Directory, DirectoryError, Metadata, MetadataError};
pub use error::TransferError;
pub use peers::{Peers, PeersError};
pub use plane::Protocol;

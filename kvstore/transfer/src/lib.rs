//! Mooncake's transfer engine over TCP, both sides of it.
//!
//! - [`descriptor`]: what a node tells about its memory and its ports.
//! - [`directory`]: where descriptors are found: an HTTP metadata server, or the node itself.
//! - [`handshake`]: the port on which a node answers for itself.
//! - [`plane`]: the bytes of the data plane.
//! - [`dial`]: reads and writes another node's memory.
//! - [`serve`]: lets others read and write memory of one's own.

mod allowed_peers;
mod channel;
mod cpu_spread;
pub mod descriptor;
pub mod dial;
pub mod directory;
mod error;
pub mod handshake;
pub mod plane;
pub mod serve;

pub use allowed_peers::{AllowedPeers, AllowedPeersError};
pub use descriptor::{DeviceDescriptor, SegmentBuffer, SegmentDescriptor};
pub use dial::{TransferConnection, TransferLimits};
pub use directory::{DescriptorDirectory, DirectoryError, MetadataSource, MetadataSourceError};
pub use error::TransferError;
pub use plane::TransferProtocol;

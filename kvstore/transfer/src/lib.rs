//! Mooncake's transfer engine over TCP, both sides of it.
//!
//! - [`descriptor`]: a node's memory ranges and ports.
//! - [`directory`]: descriptor lookup, from an HTTP metadata server or the node itself.
//! - [`handshake`]: the handshake port of a node.
//! - [`plane`]: the wire format of the data plane.
//! - [`dial`]: client of the data plane.
//! - [`serve`]: server of the data plane.
//! - [`shared`]: memory that a node and clients on its host have in common.

mod allowed_peers;
mod channel;
mod cpu_spread;
pub mod descriptor;
pub mod dial;
pub mod directory;
mod error;
pub mod handshake;
mod limits;
pub mod plane;
pub mod serve;
pub mod shared;

pub use allowed_peers::{AllowedPeers, AllowedPeersError};
pub use descriptor::{DeviceDescriptor, SegmentBuffer, SegmentDescriptor, SharedMemoryAddress};
pub use dial::TransferConnection;
pub use directory::{
    DescriptorDirectory, DirectoryError, HandshakeError, MetadataServerError, MetadataSource,
    MetadataSourceError,
};
pub use error::{BrokenConnectionError, TransferConnectError, TransferError};
pub use limits::TransferLimits;
pub use plane::TransferProtocol;
pub use shared::{SharedMapping, SharedMappings};

//! What a node serves over RDMA, if the configuration asks for it.
//!
//! What peers write over RDMA passes this process by: nothing is recorded of it, and no checksum is made. So only memory
//! that ends with the process is served so, and the node tells peers that it has no checksums.

use std::sync::Arc;

use moongate_memory::MappedRegion;
pub(crate) use moongate_rdma::PROTOCOL;
use moongate_rdma::{RdmaAcceptor, RdmaFabric, RdmaSetupError, RegisteredMemory};
use moongate_transfer::SegmentDescriptor;
use moongate_transfer::handshake::{HandshakeHandler, HandshakeKind, TcpHandshakeHandler};

use crate::config::NodeConfig;
use crate::membership::PROTOCOL as TCP;

/// What is served over RDMA: nothing, or all of it.
#[derive(Default)]
pub(crate) struct RdmaRegistrations {
    /// The devices.
    pub(crate) fabric: Option<Arc<RdmaFabric>>,
    /// The node's segment.
    pub(crate) segment: Option<RegisteredMemory>,
    /// The buffer for objects from a disk, if there is one.
    pub(crate) buffer: Option<RegisteredMemory>,
}

/// Opens the devices that the configuration asks for, and registers memory with them. If that cannot be, the log says
/// why, and the node serves over TCP.
pub(crate) fn open(
    config: &NodeConfig,
    lasts: bool,
    segment: &Arc<MappedRegion>,
    buffer: Option<&Arc<MappedRegion>>,
) -> RdmaRegistrations {
    let opened = if config.protocol == TCP {
        return RdmaRegistrations::default();
    } else if config.protocol != PROTOCOL {
        Err(format!("the protocol is `{}`, write rdma or tcp", config.protocol))
    } else if lasts {
        Err("memory that outlives the process needs a record of what is written, and RDMA makes none; \
             use --memory process"
            .to_owned())
    } else {
        serve(&config.devices, segment, buffer).map_err(|error| error.to_string())
    };
    match opened {
        Ok(served) => {
            tracing::info!("this node serves transfers over RDMA, and over TCP to those who ask for it");
            served
        }
        Err(reason) => {
            tracing::warn!("no RDMA, this node serves transfers over TCP: {reason}");
            RdmaRegistrations::default()
        }
    }
}

fn serve(
    devices: &[String],
    segment: &Arc<MappedRegion>,
    buffer: Option<&Arc<MappedRegion>>,
) -> Result<RdmaRegistrations, RdmaSetupError> {
    let fabric = Arc::new(RdmaFabric::open(devices)?);
    let segment = fabric.register(segment)?;
    let buffer = buffer.map(|buffer| fabric.register(buffer)).transpose()?;
    Ok(RdmaRegistrations { fabric: Some(fabric), segment: Some(segment), buffer })
}

/// Says in a descriptor that the node has RDMA.
pub(crate) fn describe(fabric: &RdmaFabric, descriptor: &mut SegmentDescriptor) {
    fabric.describe(descriptor);
    // A checksum of what came over TCP says nothing about what came over RDMA later.
    descriptor.moongate = 0;
}

/// Who answers the handshakes of the node of this name.
pub(crate) fn handshake_handler(
    node: Arc<TcpHandshakeHandler>,
    fabric: Option<Arc<RdmaFabric>>,
    name: &str,
) -> Arc<dyn HandshakeHandler> {
    match fabric {
        Some(fabric) => {
            Arc::new(NodeHandshakeHandler { node, acceptor: RdmaAcceptor::new(fabric, name.to_owned()) })
        }
        None => node,
    }
}

/// Answers handshakes, those about RDMA connections too.
struct NodeHandshakeHandler {
    node: Arc<TcpHandshakeHandler>,
    acceptor: RdmaAcceptor,
}

impl HandshakeHandler for NodeHandshakeHandler {
    fn respond(&self, kind: HandshakeKind, question: &[u8]) -> Vec<u8> {
        match kind {
            HandshakeKind::Connection | HandshakeKind::Legacy => self.acceptor.respond(question),
            HandshakeKind::Metadata | HandshakeKind::Notify | HandshakeKind::Probe => {
                self.node.respond(kind, question)
            }
        }
    }
}

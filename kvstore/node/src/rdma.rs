//! What a node serves over RDMA, if the configuration asks for it.
//!
//! What peers write over RDMA passes this process by: nothing is recorded of it, and no checksum is made. So only memory
//! that ends with the process is served so, and the node tells peers that it has no checksums.

use std::sync::Arc;

use moongate_memory::Region;
pub(crate) use moongate_rdma::PROTOCOL;
use moongate_rdma::{Acceptor, Fabric, Lent, NoRdma};
use moongate_transfer::SegmentDescriptor;
use moongate_transfer::handshake::{Answers, Kind, Node};

use crate::config::Config;
use crate::membership::PROTOCOL as TCP;

/// What is served over RDMA: nothing, or all of it.
#[derive(Default)]
pub(crate) struct Served {
    /// The devices.
    pub(crate) fabric: Option<Arc<Fabric>>,
    /// The node's segment.
    pub(crate) segment: Option<Lent>,
    /// The buffer for objects from a disk, if there is one.
    pub(crate) buffer: Option<Lent>,
}

/// Opens the devices that the configuration asks for, and registers memory with them. If that cannot be, the log says
/// why, and the node serves over TCP.
pub(crate) fn open(
    config: &Config,
    lasts: bool,
    segment: &Arc<Region>,
    buffer: Option<&Arc<Region>>,
) -> Served {
    let opened = if config.protocol == TCP {
        return Served::default();
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
            Served::default()
        }
    }
}

fn serve(devices: &[String], segment: &Arc<Region>, buffer: Option<&Arc<Region>>) -> Result<Served, NoRdma> {
    let fabric = Arc::new(Fabric::open(devices)?);
    let segment = fabric.lend(segment)?;
    let buffer = buffer.map(|buffer| fabric.lend(buffer)).transpose()?;
    Ok(Served { fabric: Some(fabric), segment: Some(segment), buffer })
}

/// Says in a descriptor that the node has RDMA.
pub(crate) fn describe(fabric: &Fabric, descriptor: &mut SegmentDescriptor) {
    fabric.describe(descriptor);
    // A checksum of what came over TCP says nothing about what came over RDMA later.
    descriptor.moongate = 0;
}

/// Who answers the handshakes of the node of this name.
pub(crate) fn answers(node: Arc<Node>, fabric: Option<Arc<Fabric>>, name: &str) -> Arc<dyn Answers> {
    match fabric {
        Some(fabric) => Arc::new(Handshakes { node, acceptor: Acceptor::new(fabric, name.to_owned()) }),
        None => node,
    }
}

/// Answers handshakes, those about RDMA connections too.
struct Handshakes {
    node: Arc<Node>,
    acceptor: Acceptor,
}

impl Answers for Handshakes {
    fn answer(&self, kind: Kind, question: &[u8]) -> Vec<u8> {
        match kind {
            Kind::Connection | Kind::Legacy => self.acceptor.answer(question),
            Kind::Metadata | Kind::Notify | Kind::Probe => self.node.answer(kind, question),
        }
    }
}

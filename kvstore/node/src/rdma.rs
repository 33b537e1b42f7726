//! What a node serves over RDMA, if the configuration asks for it.
//!
//! What peers write over RDMA passes this process by: nothing is recorded of it, and no checksum is made. So only memory
//! that ends with the process is served so, and the node tells peers that it has no checksums.

use std::sync::Arc;

use moongate_memory::Region;
use moongate_rdma::{Acceptor, Fabric, Lent, PROTOCOL};
use moongate_transfer::SegmentDescriptor;
use moongate_transfer::handshake::{Answers, Kind, Node};

use crate::config::Config;

/// The devices that the configuration asks for, and `region` registered with them. If there can be none, the log says
/// why, and the node serves over TCP.
pub(crate) fn open(config: &Config, lasts: bool, region: &Arc<Region>) -> Option<(Arc<Fabric>, Lent)> {
    if config.protocol != PROTOCOL {
        return None;
    }
    let opened = if lasts {
        Err("memory that outlives the process needs a record of what is written, and RDMA makes none; \
             use --memory process"
            .to_owned())
    } else if config.ssd_offload {
        Err("what is on its disk is read over TCP only; use enable_ssd_offload or RDMA, not both".to_owned())
    } else {
        let fabric = Fabric::open(&config.devices);
        let lent = fabric.and_then(|fabric| Ok((fabric.lend(region)?, Arc::new(fabric))));
        lent.map(|(lent, fabric)| (fabric, lent)).map_err(|error| error.to_string())
    };
    match opened {
        Ok(opened) => {
            tracing::info!("this node serves transfers over RDMA, and over TCP to those who ask for it");
            Some(opened)
        }
        Err(reason) => {
            tracing::warn!("no RDMA, this node serves transfers over TCP: {reason}");
            None
        }
    }
}

/// Says in a descriptor that the node has RDMA.
pub(crate) fn describe(fabric: &Fabric, descriptor: &mut SegmentDescriptor) {
    fabric.describe(descriptor);
    // A checksum of what came over TCP says nothing about what came over RDMA later.
    descriptor.moongate = 0;
}

/// Answers handshakes, those about RDMA connections too.
pub(crate) struct Handshakes {
    node: Arc<Node>,
    acceptor: Acceptor,
}

impl Handshakes {
    /// For the node of this name.
    pub(crate) fn new(node: Arc<Node>, fabric: Arc<Fabric>, name: &str) -> Self {
        Self { node, acceptor: Acceptor::new(fabric, name.to_owned()) }
    }
}

impl Answers for Handshakes {
    fn answer(&self, kind: Kind, question: &[u8]) -> Vec<u8> {
        match kind {
            Kind::Connection | Kind::Legacy => self.acceptor.answer(question),
            Kind::Metadata | Kind::Notify | Kind::Probe => self.node.answer(kind, question),
        }
    }
}

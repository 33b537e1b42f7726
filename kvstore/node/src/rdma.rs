//! RDMA transfers of a node, if the configuration enables them.
//!
//! RDMA writes bypass this process: they are not recorded in the ledger and get no checksum, and the descriptor announces no
//! checksums. Memory of a holder is complete after a restart all the same: what a peer wrote before it reported its object to the
//! master is in the memory, which has outlived the process. A file may have lost writes at a reboot, so that it is not served over RDMA.

use std::sync::Arc;

use moongate_memory::MappedRegion;
use moongate_rdma::{PROTOCOL, RdmaAcceptor, RdmaFabric, RdmaSetupError, RegisteredMemory};
use moongate_transfer::SegmentDescriptor;
use moongate_transfer::handshake::{HandshakeHandler, HandshakeKind, TcpHandshakeHandler};

use crate::args::SegmentBackingArg;
use crate::config::{NodeConfig, TCP_PROTOCOL};

/// Why a node that is configured for another protocol than TCP does not serve RDMA.
#[derive(Debug, thiserror::Error)]
enum RdmaServeError {
    #[error("unknown protocol `{0}`, write rdma or tcp")]
    UnknownProtocol(String),
    #[error(
        "memory in a folder needs a record of each write, which RDMA bypasses; use a holder, or --memory process"
    )]
    MemoryInFolder,
    #[error(transparent)]
    Setup(#[from] RdmaSetupError),
}

/// Devices and memory regions that serve RDMA. All are `None` if the node serves TCP only.
#[derive(Default)]
pub(crate) struct RdmaRegistrations {
    pub(crate) fabric: Option<Arc<RdmaFabric>>,
    pub(crate) segment: Option<RegisteredMemory>,
    /// The staging buffer of the disk tier, if there is one.
    pub(crate) buffer: Option<RegisteredMemory>,
}

/// Whether peers may write to the memory over RDMA. It depends on the program and the configuration only: a device that is missing at one
/// start does not change what the memory holds.
pub(crate) fn is_configured(config: &NodeConfig, memory: &SegmentBackingArg) -> bool {
    moongate_rdma::IS_BUILT && config.protocol == PROTOCOL && !matches!(memory, SegmentBackingArg::Folder(_))
}

/// Opens the configured devices and registers memory with them. On failure, logs the reason and falls back to TCP.
pub(crate) fn open(
    config: &NodeConfig,
    memory: &SegmentBackingArg,
    segment: &Arc<MappedRegion>,
    buffer: Option<&Arc<MappedRegion>>,
) -> RdmaRegistrations {
    if config.protocol == TCP_PROTOCOL {
        return RdmaRegistrations::default();
    }
    match serve(config, memory, segment, buffer) {
        Ok(served) => {
            tracing::info!("this node serves transfers over RDMA and TCP");
            served
        }
        Err(reason) => {
            tracing::warn!("RDMA is not available, serving transfers over TCP: {reason}");
            RdmaRegistrations::default()
        }
    }
}

fn serve(
    config: &NodeConfig,
    memory: &SegmentBackingArg,
    segment: &Arc<MappedRegion>,
    buffer: Option<&Arc<MappedRegion>>,
) -> Result<RdmaRegistrations, RdmaServeError> {
    if config.protocol != PROTOCOL {
        return Err(RdmaServeError::UnknownProtocol(config.protocol.clone()));
    }
    if matches!(memory, SegmentBackingArg::Folder(_)) {
        return Err(RdmaServeError::MemoryInFolder);
    }
    let fabric = Arc::new(RdmaFabric::open(&config.devices)?);
    let segment = fabric.register(segment)?;
    let buffer = buffer.map(|buffer| fabric.register(buffer)).transpose()?;
    Ok(RdmaRegistrations { fabric: Some(fabric), segment: Some(segment), buffer })
}

/// Adds the RDMA devices to a descriptor.
pub(crate) fn describe(fabric: &RdmaFabric, descriptor: &mut SegmentDescriptor) {
    fabric.describe(descriptor);
    // A checksum from a TCP write becomes wrong when RDMA overwrites the range.
    descriptor.moongate = 0;
}

/// The handler for handshakes of the node with this name.
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

/// Handles handshakes, including those for RDMA connections.
struct NodeHandshakeHandler {
    node: Arc<TcpHandshakeHandler>,
    acceptor: RdmaAcceptor,
}

impl HandshakeHandler for NodeHandshakeHandler {
    fn respond(&self, kind: HandshakeKind, request: &[u8]) -> Vec<u8> {
        match kind {
            HandshakeKind::Connection | HandshakeKind::Legacy => self.acceptor.respond(request),
            HandshakeKind::Metadata | HandshakeKind::Notify | HandshakeKind::Probe => {
                self.node.respond(kind, request)
            }
        }
    }
}

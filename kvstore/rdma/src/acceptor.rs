//! Server side of RDMA connections: responds to handshakes of type 0 and owns the local ends of the links.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::connection::{HandshakeMessage, HandshakeMessageError, NicPath};
use crate::fabric::RdmaFabric;
use crate::link::RdmaLink;
use crate::nic::Nic;

/// Maximum number of links. An unused link costs nothing, but its peer may have vanished without closing it: a new link evicts the oldest,
/// and a peer that still uses that one reconnects.
const MAX_LINKS: usize = 4096;

/// Why a peer's connection is rejected. The peer gets the text.
#[derive(Debug, thiserror::Error)]
enum RdmaAcceptError {
    #[error("`{path}` is not a device of this node, {node}")]
    OtherNode { path: String, node: String },
    #[error("this node has no device {0}")]
    NoDevice(String),
    #[error(transparent)]
    Request(#[from] HandshakeMessageError),
    /// libibverbs refused to create or connect the queue pairs.
    #[error(transparent)]
    QueuePairs(#[from] io::Error),
}

/// Accepts RDMA connections of peers.
#[derive(Debug)]
pub struct RdmaAcceptor {
    fabric: Arc<RdmaFabric>,
    /// Name of this node, as in its descriptor.
    node: String,
    /// Links with the peer's and the own device path, oldest first.
    links: Mutex<VecDeque<(String, String, RdmaLink)>>,
}

impl RdmaAcceptor {
    /// Creates the acceptor of the node with this name.
    #[must_use]
    pub fn new(fabric: Arc<RdmaFabric>, node: String) -> Self {
        Self { fabric, node, links: Mutex::default() }
    }

    /// Responds to a handshake; both messages are JSON.
    #[must_use]
    pub fn respond(&self, request: &[u8]) -> Vec<u8> {
        let request = match HandshakeMessage::read(request) {
            Ok(request) => request,
            Err(error) => {
                return HandshakeMessage::refusal(&HandshakeMessage::default(), error.to_string()).write();
            }
        };
        match self.connect(&request) {
            Ok(response) => response.write(),
            Err(reason) => {
                tracing::warn!(peer = request.local_nic_path, %reason, "RDMA connection rejected");
                HandshakeMessage::refusal(&request, reason.to_string()).write()
            }
        }
    }

    /// Number of links that are open.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links.lock().len()
    }

    fn connect(&self, request: &HandshakeMessage) -> Result<HandshakeMessage, RdmaAcceptError> {
        let nic = self.nic(&request.peer_nic_path)?;
        let remote = request.remote(None)?;
        let link = RdmaLink::new(nic, request.local_nic_path.clone())?;
        link.connect(&remote)?;
        let response = HandshakeMessage {
            local_nic_path: request.peer_nic_path.clone(),
            local_lid: nic.device().lid,
            local_gid: nic.device().gid.gid.to_string(),
            peer_nic_path: request.local_nic_path.clone(),
            qp_num: link.numbers(),
            reply_msg: String::new(),
        };
        self.store_link(request, link);
        Ok(response)
    }

    fn nic(&self, path: &str) -> Result<&Arc<Nic>, RdmaAcceptError> {
        let requested = NicPath::parse(path)
            .filter(|path| path.node == self.node)
            .ok_or_else(|| RdmaAcceptError::OtherNode { path: path.to_owned(), node: self.node.clone() })?;
        let nic = self.fabric.nics().iter().find(|nic| nic.device().name == requested.device);
        nic.ok_or(RdmaAcceptError::NoDevice(requested.device))
    }

    /// Stores a link and drops an earlier one between the same devices, which cannot be used any more.
    fn store_link(&self, request: &HandshakeMessage, link: RdmaLink) {
        let mut links = self.links.lock();
        let mut replaced: Vec<_> = Vec::new();
        let same = links
            .iter()
            .position(|(peer, own, _)| *peer == request.local_nic_path && *own == request.peer_nic_path);
        replaced.extend(same.and_then(|index| links.remove(index)));
        if links.len() >= MAX_LINKS {
            replaced.extend(links.pop_front());
        }
        links.push_back((request.local_nic_path.clone(), request.peer_nic_path.clone(), link));
        // Destroying queue pairs is slow, so it happens outside the lock.
        drop(links);
        drop(replaced);
    }
}

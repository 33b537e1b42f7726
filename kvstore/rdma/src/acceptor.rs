//! Server side of RDMA connections: responds to handshakes of type 0 and owns the local ends of the links.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::connection::{HandshakeMessage, NicPath};
use crate::fabric::RdmaFabric;
use crate::link::RdmaLink;
use crate::nic::Nic;

/// Maximum number of links. An unused link costs nothing, but its peer may have vanished without closing it: a new link evicts the oldest,
/// and a peer that still uses that one reconnects.
const MAX_LINKS: usize = 4096;

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
                tracing::warn!(peer = request.local_nic_path, reason, "RDMA connection rejected");
                HandshakeMessage::refusal(&request, reason).write()
            }
        }
    }

    /// Number of links that are open.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links.lock().len()
    }

    fn connect(&self, request: &HandshakeMessage) -> Result<HandshakeMessage, String> {
        let nic = self.nic(&request.peer_nic_path)?;
        let remote = request.remote(None).map_err(|error| error.to_string())?;
        let link = RdmaLink::new(nic, request.local_nic_path.clone()).map_err(|error| error.to_string())?;
        link.connect(&remote).map_err(|error| error.to_string())?;
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

    fn nic(&self, path: &str) -> Result<&Arc<Nic>, String> {
        let requested = NicPath::parse(path).filter(|path| path.node == self.node);
        let requested =
            requested.ok_or_else(|| format!("`{path}` is not a device of this node, {}", self.node))?;
        let nic = self.fabric.nics().iter().find(|nic| nic.device().name == requested.device);
        nic.ok_or_else(|| format!("this node has no device {}", requested.device))
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

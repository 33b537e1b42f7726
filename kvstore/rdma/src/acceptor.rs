//! The side of a node that is connected to: it answers questions of kind 0, and keeps its ends of the links.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::connection::{HandshakeMessage, NicPath};
use crate::fabric::RdmaFabric;
use crate::link::RdmaLink;
use crate::nic::Nic;

/// Links that are kept at most. A link costs nothing while nobody uses it, but its peer may have gone without a word:
/// the oldest gives way to a new one, and a peer that still used it connects again.
const MAX_LINKS: usize = 4096;

/// Answers peers that want to connect.
#[derive(Debug)]
pub struct RdmaAcceptor {
    fabric: Arc<RdmaFabric>,
    /// The node's name.
    node: String,
    /// The newest last, with the device of the peer and ours.
    links: Mutex<VecDeque<(String, String, RdmaLink)>>,
}

impl RdmaAcceptor {
    /// For the node of this name.
    #[must_use]
    pub fn new(fabric: Arc<RdmaFabric>, node: String) -> Self {
        Self { fabric, node, links: Mutex::default() }
    }

    /// Answers a question, both as JSON.
    #[must_use]
    pub fn respond(&self, question: &[u8]) -> Vec<u8> {
        let question = match HandshakeMessage::read(question) {
            Ok(question) => question,
            Err(error) => {
                return HandshakeMessage::refusal(&HandshakeMessage::default(), error.to_string()).write();
            }
        };
        match self.connect(&question) {
            Ok(answer) => answer.write(),
            Err(reason) => {
                tracing::warn!(peer = question.local_nic_path, reason, "an RDMA connection is refused");
                HandshakeMessage::refusal(&question, reason).write()
            }
        }
    }

    /// Links that are kept.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links.lock().len()
    }

    fn connect(&self, question: &HandshakeMessage) -> Result<HandshakeMessage, String> {
        let nic = self.nic(&question.peer_nic_path)?;
        let remote = question.remote(None).map_err(|error| error.to_string())?;
        let link = RdmaLink::new(nic, question.local_nic_path.clone()).map_err(|error| error.to_string())?;
        link.connect(&remote).map_err(|error| error.to_string())?;
        let answer = HandshakeMessage {
            local_nic_path: question.peer_nic_path.clone(),
            local_lid: nic.device().lid,
            local_gid: nic.device().gid.gid.to_string(),
            peer_nic_path: question.local_nic_path.clone(),
            qp_num: link.numbers(),
            reply_msg: String::new(),
        };
        self.store_link(question, link);
        Ok(answer)
    }

    fn nic(&self, path: &str) -> Result<&Arc<Nic>, String> {
        let meant = NicPath::parse(path).filter(|path| path.node == self.node);
        let meant = meant.ok_or_else(|| format!("`{path}` is no device of this node, {}", self.node))?;
        let nic = self.fabric.nics().iter().find(|nic| nic.device().name == meant.device);
        nic.ok_or_else(|| format!("this node has no device {}", meant.device))
    }

    /// Keeps a link. One that the same devices had before is of no use any more.
    fn store_link(&self, question: &HandshakeMessage, link: RdmaLink) {
        let mut links = self.links.lock();
        let mut gone: Vec<_> = Vec::new();
        let same = links
            .iter()
            .position(|(peer, own, _)| *peer == question.local_nic_path && *own == question.peer_nic_path);
        gone.extend(same.and_then(|at| links.remove(at)));
        if links.len() >= MAX_LINKS {
            gone.extend(links.pop_front());
        }
        links.push_back((question.local_nic_path.clone(), question.peer_nic_path.clone(), link));
        // Destroying queue pairs takes a while.
        drop(links);
        drop(gone);
    }
}

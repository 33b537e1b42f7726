//! What is known of the store, for people.

use serde::Serialize;

use super::StoreView;

/// The store at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct StoreSeen {
    /// Those that live first.
    nodes: Vec<NodeSeen>,
    /// Whether its master's events are followed, and none is missing.
    events_current: bool,
}

/// A store node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct NodeSeen {
    /// Where transfers begin.
    endpoint: String,
    /// Whether it lives; the master goes on to list one that does not.
    up: bool,
}

impl StoreView {
    /// What is known now.
    pub(crate) fn seen(&self) -> StoreSeen {
        let nodes = self.nodes.lock().seen();
        StoreSeen {
            nodes: nodes.into_iter().map(|(endpoint, up)| NodeSeen { endpoint, up }).collect(),
            events_current: self.following.is_current(),
        }
    }
}

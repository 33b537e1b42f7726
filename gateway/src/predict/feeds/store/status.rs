//! Status of the store view for `/debug/fleet`.

use serde::Serialize;

use super::StoreView;

/// The store at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct StoreViewStatus {
    /// Live nodes first.
    nodes: Vec<StoreNodeStatus>,
    /// Whether the master's events are complete.
    events_in_sync: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct StoreNodeStatus {
    /// Endpoint of the node's transfers.
    endpoint: String,
    /// Whether the node is alive; the master keeps listing dead ones for seconds.
    up: bool,
}

impl StoreView {
    pub(crate) fn status(&self) -> StoreViewStatus {
        let nodes = self.nodes.lock().status();
        StoreViewStatus {
            nodes: nodes.into_iter().map(|(endpoint, up)| StoreNodeStatus { endpoint, up }).collect(),
            events_in_sync: self.event_sync.is_in_sync(),
        }
    }
}

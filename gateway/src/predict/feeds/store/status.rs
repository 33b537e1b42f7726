//! What is known of the store, for people.

use serde::Serialize;

use super::StoreView;

/// The store at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct StoreViewStatus {
    /// Those that live first.
    nodes: Vec<StoreNodeStatus>,
    /// Whether its master's events are followed, and none is missing.
    events_current: bool,
}

/// A store node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct StoreNodeStatus {
    /// Where transfers begin.
    endpoint: String,
    /// Whether it lives; the master goes on to list one that does not.
    up: bool,
}

impl StoreView {
    /// What is known now.
    pub(crate) fn status(&self) -> StoreViewStatus {
        let nodes = self.nodes.lock().status();
        StoreViewStatus {
            nodes: nodes.into_iter().map(|(endpoint, up)| StoreNodeStatus { endpoint, up }).collect(),
            events_current: self.event_sync.is_in_sync(),
        }
    }
}

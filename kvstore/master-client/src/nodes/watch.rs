//! Combines the master's node list with the nodes' connections.

use std::collections::{BTreeMap, VecDeque};

use futures_util::stream::{self, AbortHandle, BoxStream, SelectAll, StreamExt as _};

use super::connection::{self, NodeConnectionEvent};
use super::descriptor::DescriptorLookup;
use super::{NodeLossReason, NodeWatchOptions, StoreNodeEvent, WatchedNode};
use crate::admin::{AdminClient, AdminError};

/// Reports when store nodes join, leave and fail. It has no background task: it makes progress only while
/// [`NodeWatcher::next`] is polled.
pub struct NodeWatcher {
    polls: BoxStream<'static, Result<Vec<WatchedNode>, AdminError>>,
    connections: SelectAll<BoxStream<'static, (WatchedNode, NodeConnectionEvent)>>,
    state: NodeWatchState,
}

/// The state of all listed nodes, and the events not returned yet.
pub(super) struct NodeWatchState {
    lookup: DescriptorLookup,
    options: NodeWatchOptions,
    nodes: BTreeMap<WatchedNode, ListedNode>,
    master_lost: bool,
    /// Whether an unwatchable node was logged; further ones are not.
    logged_unwatchable: bool,
    logged_node_limit: bool,
    pub(super) events: VecDeque<StoreNodeEvent>,
}

/// A node that the master lists.
struct ListedNode {
    lost: bool,
    connection: AbortHandle,
}

impl NodeWatcher {
    /// Watches the nodes of the master behind `admin`.
    #[must_use]
    pub fn new(admin: AdminClient, options: NodeWatchOptions) -> Self {
        let pause = options.poll_interval;
        let state = NodeWatchState::new(
            DescriptorLookup::new(options.metadata.clone(), admin.http(), admin.tls()),
            options,
        );
        let polls = stream::unfold((admin, false), move |(admin, again)| async move {
            if again {
                tokio::time::sleep(pause).await;
            }
            Some((nodes_of(&admin).await, (admin, true)))
        });
        Self { polls: polls.boxed(), connections: SelectAll::new(), state }
    }

    /// Waits for the next event. Cancel-safe: no event is lost if the future is dropped.
    pub async fn next(&mut self) -> StoreNodeEvent {
        loop {
            if let Some(event) = self.state.events.pop_front() {
                return event;
            }
            tokio::select! {
                Some(result) = self.polls.next() => {
                    for connection in self.state.on_poll(result) {
                        self.connections.push(connection);
                    }
                }
                Some((node, event)) = self.connections.next() => self.state.on_connection_event(&node, event),
                // The polls never end, so this is never reached.
                else => std::future::pending().await,
            }
        }
    }

    /// The nodes that are up according to the events returned so far.
    pub fn live_nodes(&self) -> impl Iterator<Item = &WatchedNode> {
        self.state.live_nodes()
    }

    /// Nodes that are lost although the master still lists them and their blocks.
    pub fn lost_nodes(&self) -> impl Iterator<Item = &WatchedNode> {
        self.state.lost_nodes()
    }
}

async fn nodes_of(admin: &AdminClient) -> Result<Vec<WatchedNode>, AdminError> {
    let mut nodes: Vec<_> = match admin.segments_detail().await {
        Ok(detail) => {
            let node = |segment: mooncake_wire::admin::SegmentDetail| WatchedNode {
                endpoint: segment.te_endpoint,
                client: Some(segment.client_id),
                name: segment.segment_name,
            };
            detail.segments.into_iter().map(node).collect()
        }
        Err(AdminError::NotFound { .. }) => {
            let node = |name: String| WatchedNode { endpoint: name.clone(), client: None, name };
            admin.segments().await?.into_iter().map(node).collect()
        }
        Err(error) => return Err(error),
    };
    // A node may have several segments.
    nodes.sort();
    nodes.dedup_by(|one, other| (&one.endpoint, one.client) == (&other.endpoint, other.client));
    Ok(nodes)
}

impl NodeWatchState {
    pub(super) fn new(lookup: DescriptorLookup, options: NodeWatchOptions) -> Self {
        Self {
            lookup,
            options,
            nodes: BTreeMap::new(),
            master_lost: false,
            logged_unwatchable: false,
            logged_node_limit: false,
            events: VecDeque::new(),
        }
    }

    pub(super) fn live_nodes(&self) -> impl Iterator<Item = &WatchedNode> {
        self.nodes.iter().filter(|(_, listed)| !listed.lost).map(|(node, _)| node)
    }

    pub(super) fn lost_nodes(&self) -> impl Iterator<Item = &WatchedNode> {
        self.nodes.iter().filter(|(_, listed)| listed.lost).map(|(node, _)| node)
    }

    /// Applies the result of a poll. Returns the connections to new nodes.
    pub(super) fn on_poll(
        &mut self,
        result: Result<Vec<WatchedNode>, AdminError>,
    ) -> Vec<BoxStream<'static, (WatchedNode, NodeConnectionEvent)>> {
        let listed = match result {
            Ok(listed) => listed,
            Err(error) => {
                if !std::mem::replace(&mut self.master_lost, true) {
                    self.events.push_back(StoreNodeEvent::MasterLost(error));
                }
                return Vec::new();
            }
        };
        if std::mem::take(&mut self.master_lost) {
            self.events.push_back(StoreNodeEvent::MasterRecovered);
        }
        self.nodes.retain(|node, listed_node| {
            let is_listed = listed.binary_search(node).is_ok();
            if !is_listed {
                listed_node.connection.abort();
                if !listed_node.lost {
                    self.events.push_back(StoreNodeEvent::Lost(node.clone(), NodeLossReason::Unlisted));
                }
            }
            is_listed
        });
        listed.into_iter().filter_map(|node| self.listed(node)).collect()
    }

    /// Adds a listed node. Returns its connection if it is new.
    fn listed(
        &mut self,
        node: WatchedNode,
    ) -> Option<BoxStream<'static, (WatchedNode, NodeConnectionEvent)>> {
        if self.nodes.contains_key(&node) {
            return None;
        }
        if self.nodes.len() >= self.options.max_nodes {
            if !std::mem::replace(&mut self.logged_node_limit, true) {
                let max = self.options.max_nodes;
                tracing::warn!(max, "the store has more nodes than the limit; further ones are not watched");
            }
            return None;
        }
        let events = connection::events(node.endpoint.clone(), self.lookup.clone(), &self.options);
        let (events, connection) = stream::abortable(events);
        self.nodes.insert(node.clone(), ListedNode { lost: false, connection });
        self.events.push_back(StoreNodeEvent::Up(node.clone()));
        Some(events.map(move |event| (node.clone(), event)).boxed())
    }

    /// Applies an event of a node's connection.
    pub(super) fn on_connection_event(&mut self, node: &WatchedNode, event: NodeConnectionEvent) {
        let Some(listed_node) = self.nodes.get_mut(node) else { return };
        match event {
            NodeConnectionEvent::Connected if listed_node.lost => {
                listed_node.lost = false;
                self.events.push_back(StoreNodeEvent::Up(node.clone()));
            }
            NodeConnectionEvent::Closed(loss) if !listed_node.lost => {
                listed_node.lost = true;
                self.events.push_back(StoreNodeEvent::Lost(node.clone(), loss));
            }
            NodeConnectionEvent::Connected | NodeConnectionEvent::Closed(_) => {}
            NodeConnectionEvent::Unwatchable(reason) => {
                if !std::mem::replace(&mut self.logged_unwatchable, true) {
                    tracing::info!(
                        endpoint = node.endpoint,
                        %reason,
                        "a store node cannot be watched by a connection; its death is detected only when the master \
                         no longer lists it (logged once for all such nodes)"
                    );
                }
            }
        }
    }
}

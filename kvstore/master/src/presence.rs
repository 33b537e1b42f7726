//! Which nodes are connected.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Nodes without a connection that may still reconnect. One more counts as lost at once.
const MAX_RECONNECTING: usize = 16_384;

/// Nodes that are connected, or were a moment ago. A connection has at most one node, so the bound of connections bounds the former.
#[derive(Debug)]
pub(crate) struct NodePresence {
    nodes: Mutex<PresenceTable>,
    reconnect_ms: u64,
}

#[derive(Debug, Default)]
struct PresenceTable {
    by_id: HashMap<Uuid, NodeConnections>,
    /// How many of them have no connection.
    reconnecting: usize,
}

#[derive(Debug, Default)]
struct NodeConnections {
    /// Connections on which it sends heartbeats.
    connections: usize,
    /// Its latest heartbeat.
    last_heartbeat: HeartbeatAttributes,
    /// When it is lost if it has not sent a heartbeat by then. Only without a connection.
    lost_at_ms: Option<u64>,
}

/// Attributes of a node's heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HeartbeatAttributes {
    /// Whether its memory is persistent, so that it returns after its process ends.
    pub(crate) is_persistent: bool,
    /// Whether the connection carries its heartbeats only, so that it closes only when the node's process ends.
    pub(crate) dedicated: bool,
}

/// How a node is gone whose last connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeDeparture {
    /// With its memory, as far as anybody knows.
    Lost,
    /// Its memory is kept, and whoever connects to it waits for its next process.
    Restarting,
}

impl NodePresence {
    /// A node whose pooled connections are all closed has this time for its next heartbeat.
    pub(crate) fn new(reconnect_ms: u64) -> Self {
        Self { nodes: Mutex::default(), reconnect_ms }
    }

    /// A node is heard on a connection on which another was before, or it itself, or none.
    pub(crate) fn record_heartbeat(
        &self,
        now_ms: u64,
        before: Option<Uuid>,
        node: Uuid,
        heartbeat: HeartbeatAttributes,
    ) {
        let is_new = before != Some(node);
        if let Some(before) = before.filter(|_| is_new) {
            self.connection_closed(now_ms, before);
        }
        let mut nodes = self.nodes.lock();
        let PresenceTable { by_id: known, reconnecting } = &mut *nodes;
        let known = known.entry(node).or_default();
        known.connections += usize::from(is_new);
        known.last_heartbeat = heartbeat;
        if known.lost_at_ms.take().is_some() {
            *reconnecting -= 1;
        }
    }

    /// A node has a connection less. Returns how it is gone if that was the last one and it is certain already. If it is not,
    /// [`Self::take_expired`] returns the node later.
    pub(crate) fn connection_closed(&self, now_ms: u64, node: Uuid) -> Option<NodeDeparture> {
        let mut nodes = self.nodes.lock();
        let reconnecting = nodes.reconnecting;
        let known = nodes.by_id.get_mut(&node)?;
        known.connections = known.connections.saturating_sub(1);
        if known.connections > 0 || known.lost_at_ms.is_some() {
            return None;
        }
        let HeartbeatAttributes { is_persistent: returns, dedicated } = known.last_heartbeat;
        if !returns && !dedicated && self.reconnect_ms > 0 && reconnecting < MAX_RECONNECTING {
            known.lost_at_ms = Some(now_ms.saturating_add(self.reconnect_ms));
            nodes.reconnecting += 1;
            return None;
        }
        nodes.by_id.remove(&node);
        Some(if returns { NodeDeparture::Restarting } else { NodeDeparture::Lost })
    }

    /// Nodes that have not sent a heartbeat in time since their last connection was closed. Each is returned once.
    pub(crate) fn take_expired(&self, now_ms: u64) -> Vec<Uuid> {
        let mut nodes = self.nodes.lock();
        if nodes.reconnecting == 0 {
            return Vec::new();
        }
        let is_lost = |_: &Uuid, node: &mut NodeConnections| node.lost_at_ms.is_some_and(|at| at <= now_ms);
        let lost: Vec<Uuid> = nodes.by_id.extract_if(is_lost).map(|(node, _)| node).collect();
        nodes.reconnecting -= lost.len();
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOLED: HeartbeatAttributes = HeartbeatAttributes { is_persistent: false, dedicated: false };
    const RETURNS: HeartbeatAttributes = HeartbeatAttributes { is_persistent: true, dedicated: false };
    const DEDICATED: HeartbeatAttributes = HeartbeatAttributes { is_persistent: false, dedicated: true };

    fn ids() -> [Uuid; 2] {
        [1, 2].map(|first| Uuid { first, second: 0 })
    }

    #[test]
    fn the_last_connection_counts_and_what_was_said_last() {
        let (presence, [one, other]) = (NodePresence::new(1000), ids());
        presence.record_heartbeat(0, None, one, POOLED);
        presence.record_heartbeat(0, None, one, RETURNS);
        presence.record_heartbeat(0, None, one, RETURNS);
        presence.record_heartbeat(0, Some(one), other, RETURNS);
        presence.record_heartbeat(0, Some(other), other, DEDICATED);
        assert_eq!(presence.connection_closed(0, one), None);
        assert_eq!(presence.connection_closed(0, one), Some(NodeDeparture::Restarting));
        assert_eq!(presence.connection_closed(0, one), None);
        assert_eq!(presence.connection_closed(0, other), Some(NodeDeparture::Lost));
        assert!(presence.nodes.lock().by_id.is_empty());
    }

    #[test]
    fn pooled_connections_keep_a_node_until_its_next_heartbeat() {
        let (presence, [one, other]) = (NodePresence::new(1000), ids());
        for node in [one, one, other] {
            presence.record_heartbeat(0, None, node, POOLED);
        }
        assert_eq!([one, one, other].map(|node| presence.connection_closed(100, node)), [None; 3]);
        assert_eq!(presence.take_expired(1099), []);
        // One closed its pool and continues on another connection, the other has ended.
        presence.record_heartbeat(1099, None, one, POOLED);
        assert_eq!(presence.take_expired(1100), [other]);
        assert_eq!(presence.take_expired(u64::MAX), []);
        assert_eq!(presence.connection_closed(2000, one), None);
        assert_eq!((presence.take_expired(2999), presence.take_expired(3000)), (vec![], vec![one]));
        assert!(presence.nodes.lock().by_id.is_empty() && presence.nodes.lock().reconnecting == 0);
    }
}

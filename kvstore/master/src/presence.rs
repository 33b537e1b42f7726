//! Tracks which nodes are connected.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Maximum number of nodes without a connection that may still reconnect. Beyond it, nodes count as lost at once.
const MAX_RECONNECTING: usize = 16_384;

/// Connected nodes, and those that may still reconnect. A connection belongs to one node at most, which bounds the former.
#[derive(Debug)]
pub(crate) struct NodePresence {
    nodes: Mutex<PresenceTable>,
    reconnect_ms: u64,
}

#[derive(Debug, Default)]
struct PresenceTable {
    by_id: HashMap<Uuid, NodeConnections>,
    /// Number of nodes without a connection.
    reconnecting: usize,
}

#[derive(Debug, Default)]
struct NodeConnections {
    /// Number of connections on which it sends heartbeats.
    connections: usize,
    /// Attributes of its latest heartbeat.
    last_heartbeat: HeartbeatAttributes,
    /// Deadline for the next heartbeat while it has no connection; then it is lost.
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

/// How a node without connections has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeDeparture {
    /// Its memory is lost with it, as far as the master can detect.
    Lost,
    /// Its memory is persistent, and readers wait for its next process.
    Restarting,
}

impl NodePresence {
    /// `reconnect_ms`: time for the next heartbeat after all pooled connections of a node have closed.
    pub(crate) fn new(reconnect_ms: u64) -> Self {
        Self { nodes: Mutex::default(), reconnect_ms }
    }

    /// Records a heartbeat on a connection. `previous` is the node of the last heartbeat on the same connection.
    pub(crate) fn record_heartbeat(
        &self,
        now_ms: u64,
        previous: Option<Uuid>,
        node: Uuid,
        heartbeat: HeartbeatAttributes,
    ) {
        let is_new = previous != Some(node);
        if let Some(previous) = previous.filter(|_| is_new) {
            self.connection_closed(now_ms, previous);
        }
        let mut nodes = self.nodes.lock();
        let PresenceTable { by_id, reconnecting } = &mut *nodes;
        let entry = by_id.entry(node).or_default();
        entry.connections += usize::from(is_new);
        entry.last_heartbeat = heartbeat;
        if entry.lost_at_ms.take().is_some() {
            *reconnecting -= 1;
        }
    }

    /// A connection of a node has closed. Returns how the node has left if this was the last one and that is certain. If it may still
    /// reconnect, [`Self::take_expired`] returns it later.
    pub(crate) fn connection_closed(&self, now_ms: u64, node: Uuid) -> Option<NodeDeparture> {
        let mut nodes = self.nodes.lock();
        let reconnecting = nodes.reconnecting;
        let entry = nodes.by_id.get_mut(&node)?;
        entry.connections = entry.connections.saturating_sub(1);
        if entry.connections > 0 || entry.lost_at_ms.is_some() {
            return None;
        }
        let HeartbeatAttributes { is_persistent, dedicated } = entry.last_heartbeat;
        if !is_persistent && !dedicated && self.reconnect_ms > 0 && reconnecting < MAX_RECONNECTING {
            entry.lost_at_ms = Some(now_ms.saturating_add(self.reconnect_ms));
            nodes.reconnecting += 1;
            return None;
        }
        nodes.by_id.remove(&node);
        Some(if is_persistent { NodeDeparture::Restarting } else { NodeDeparture::Lost })
    }

    /// Nodes that have not sent a heartbeat in time since their last connection closed. Each is returned once.
    pub(crate) fn take_expired(&self, now_ms: u64) -> Vec<Uuid> {
        let mut nodes = self.nodes.lock();
        if nodes.reconnecting == 0 {
            return Vec::new();
        }
        let is_lost = |_: &Uuid, node: &mut NodeConnections| {
            node.lost_at_ms.is_some_and(|deadline_ms| deadline_ms <= now_ms)
        };
        let lost: Vec<Uuid> = nodes.by_id.extract_if(is_lost).map(|(node, _)| node).collect();
        nodes.reconnecting -= lost.len();
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOLED: HeartbeatAttributes = HeartbeatAttributes { is_persistent: false, dedicated: false };
    const PERSISTENT: HeartbeatAttributes = HeartbeatAttributes { is_persistent: true, dedicated: false };
    const DEDICATED: HeartbeatAttributes = HeartbeatAttributes { is_persistent: false, dedicated: true };

    fn ids() -> [Uuid; 2] {
        [1, 2].map(|first| Uuid { first, second: 0 })
    }

    #[test]
    fn the_last_heartbeat_decides_at_the_last_connection() {
        let (presence, [one, other]) = (NodePresence::new(1000), ids());
        presence.record_heartbeat(0, None, one, POOLED);
        presence.record_heartbeat(0, None, one, PERSISTENT);
        presence.record_heartbeat(0, None, one, PERSISTENT);
        presence.record_heartbeat(0, Some(one), other, PERSISTENT);
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
        // One node closed its pool and continues on another connection, the other node has ended.
        presence.record_heartbeat(1099, None, one, POOLED);
        assert_eq!(presence.take_expired(1100), [other]);
        assert_eq!(presence.take_expired(u64::MAX), []);
        assert_eq!(presence.connection_closed(2000, one), None);
        assert_eq!((presence.take_expired(2999), presence.take_expired(3000)), (vec![], vec![one]));
        assert!(presence.nodes.lock().by_id.is_empty() && presence.nodes.lock().reconnecting == 0);
    }
}

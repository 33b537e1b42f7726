//! Which nodes are connected.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Nodes without a connection that may still reconnect. One more counts as lost at once.
const MAX_RECONNECTING: usize = 16_384;

/// Nodes that are connected, or were a moment ago. A connection has at most one node, so the bound of connections bounds the former.
#[derive(Debug)]
pub(crate) struct Presence {
    nodes: Mutex<Nodes>,
    reconnect_ms: u64,
}

#[derive(Debug, Default)]
struct Nodes {
    known: HashMap<Uuid, Node>,
    /// How many of them have no connection.
    reconnecting: usize,
}

#[derive(Debug, Default)]
struct Node {
    /// Connections on which it sends heartbeats.
    connections: usize,
    /// Its latest heartbeat.
    last: Heartbeat,
    /// When it is lost if it has not sent a heartbeat by then. Only without a connection.
    lost_at_ms: Option<u64>,
}

/// Attributes of a node's heartbeat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    /// Whether its memory is persistent, so that it returns after its process ends.
    pub(crate) returns: bool,
    /// Whether the connection carries its heartbeats only, so that it closes only when the node's process ends.
    pub(crate) dedicated: bool,
}

/// How a node is gone whose last connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gone {
    /// With its memory, as far as anybody knows.
    Lost,
    /// Its memory is kept, and whoever connects to it waits for its next process.
    Away,
}

impl Presence {
    /// A node whose pooled connections are all closed has this time for its next heartbeat.
    pub(crate) fn new(reconnect_ms: u64) -> Self {
        Self { nodes: Mutex::default(), reconnect_ms }
    }

    /// A node is heard on a connection on which another was before, or it itself, or none.
    pub(crate) fn heard(&self, now_ms: u64, before: Option<Uuid>, node: Uuid, heartbeat: Heartbeat) {
        let is_new = before != Some(node);
        if let Some(before) = before.filter(|_| is_new) {
            self.ended(now_ms, before);
        }
        let mut nodes = self.nodes.lock();
        let Nodes { known, reconnecting } = &mut *nodes;
        let known = known.entry(node).or_default();
        known.connections += usize::from(is_new);
        known.last = heartbeat;
        if known.lost_at_ms.take().is_some() {
            *reconnecting -= 1;
        }
    }

    /// A node has a connection less. Returns how it is gone if that was the last one and it is certain already. If it is not,
    /// [`Self::overdue`] returns the node later.
    pub(crate) fn ended(&self, now_ms: u64, node: Uuid) -> Option<Gone> {
        let mut nodes = self.nodes.lock();
        let reconnecting = nodes.reconnecting;
        let known = nodes.known.get_mut(&node)?;
        known.connections = known.connections.saturating_sub(1);
        if known.connections > 0 || known.lost_at_ms.is_some() {
            return None;
        }
        let Heartbeat { returns, dedicated } = known.last;
        if !returns && !dedicated && self.reconnect_ms > 0 && reconnecting < MAX_RECONNECTING {
            known.lost_at_ms = Some(now_ms.saturating_add(self.reconnect_ms));
            nodes.reconnecting += 1;
            return None;
        }
        nodes.known.remove(&node);
        Some(if returns { Gone::Away } else { Gone::Lost })
    }

    /// Nodes that have not sent a heartbeat in time since their last connection was closed. Each is returned once.
    pub(crate) fn overdue(&self, now_ms: u64) -> Vec<Uuid> {
        let mut nodes = self.nodes.lock();
        if nodes.reconnecting == 0 {
            return Vec::new();
        }
        let is_lost = |_: &Uuid, node: &mut Node| node.lost_at_ms.is_some_and(|at| at <= now_ms);
        let lost: Vec<Uuid> = nodes.known.extract_if(is_lost).map(|(node, _)| node).collect();
        nodes.reconnecting -= lost.len();
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOLED: Heartbeat = Heartbeat { returns: false, dedicated: false };
    const RETURNS: Heartbeat = Heartbeat { returns: true, dedicated: false };
    const DEDICATED: Heartbeat = Heartbeat { returns: false, dedicated: true };

    fn ids() -> [Uuid; 2] {
        [1, 2].map(|first| Uuid { first, second: 0 })
    }

    #[test]
    fn the_last_connection_counts_and_what_was_said_last() {
        let (presence, [one, other]) = (Presence::new(1000), ids());
        presence.heard(0, None, one, POOLED);
        presence.heard(0, None, one, RETURNS);
        presence.heard(0, None, one, RETURNS);
        presence.heard(0, Some(one), other, RETURNS);
        presence.heard(0, Some(other), other, DEDICATED);
        assert_eq!(presence.ended(0, one), None);
        assert_eq!(presence.ended(0, one), Some(Gone::Away));
        assert_eq!(presence.ended(0, one), None);
        assert_eq!(presence.ended(0, other), Some(Gone::Lost));
        assert!(presence.nodes.lock().known.is_empty());
    }

    #[test]
    fn a_node_with_pooled_connections_has_time_for_its_next_heartbeat() {
        let (presence, [one, other]) = (Presence::new(1000), ids());
        for node in [one, one, other] {
            presence.heard(0, None, node, POOLED);
        }
        assert_eq!([one, one, other].map(|node| presence.ended(100, node)), [None; 3]);
        assert_eq!(presence.overdue(1099), []);
        // One closed its pool and continues on another connection, the other has ended.
        presence.heard(1099, None, one, POOLED);
        assert_eq!(presence.overdue(1100), [other]);
        assert_eq!(presence.overdue(u64::MAX), []);
        assert_eq!(presence.ended(2000, one), None);
        assert_eq!((presence.overdue(2999), presence.overdue(3000)), (vec![], vec![one]));
        assert!(presence.nodes.lock().known.is_empty() && presence.nodes.lock().reconnecting == 0);
    }
}

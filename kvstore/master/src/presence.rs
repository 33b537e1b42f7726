//! Which nodes are connected.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Nodes that are connected. A connection has at most one node, so the bound of connections bounds this too.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    nodes: Mutex<HashMap<Uuid, Node>>,
}

#[derive(Debug, Default)]
struct Node {
    /// Connections on which it beats its heart.
    connections: usize,
    /// Whether it has said last that it will be back when it is gone.
    returns: bool,
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
    /// A node is heard on a connection on which another was before, or it itself, or none.
    pub(crate) fn heard(&self, before: Option<Uuid>, node: Uuid, returns: bool) {
        let is_new = before != Some(node);
        if let Some(before) = before.filter(|_| is_new) {
            self.ended(before);
        }
        let mut nodes = self.nodes.lock();
        let known = nodes.entry(node).or_default();
        known.connections += usize::from(is_new);
        known.returns = returns;
    }

    /// A node has a connection less. Tells how it is gone if that was the last one.
    pub(crate) fn ended(&self, node: Uuid) -> Option<Gone> {
        let mut nodes = self.nodes.lock();
        let known = nodes.get_mut(&node)?;
        known.connections = known.connections.saturating_sub(1);
        if known.connections > 0 {
            return None;
        }
        let gone = if known.returns { Gone::Away } else { Gone::Lost };
        nodes.remove(&node);
        Some(gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_connection_counts_and_what_was_said_last() {
        let presence = Presence::default();
        let [one, other] = [1, 2].map(|first| Uuid { first, second: 0 });
        presence.heard(None, one, false);
        presence.heard(None, one, true);
        presence.heard(None, one, true);
        presence.heard(Some(one), other, true);
        presence.heard(Some(other), other, false);
        assert_eq!(presence.ended(one), None);
        assert_eq!(presence.ended(one), Some(Gone::Away));
        assert_eq!(presence.ended(one), None);
        assert_eq!(presence.ended(other), Some(Gone::Lost));
        assert!(presence.nodes.lock().is_empty());
    }
}

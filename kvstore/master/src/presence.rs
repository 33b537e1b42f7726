//! Which nodes are connected.

use std::collections::HashMap;

use mooncake_wire::types::Uuid;
use parking_lot::Mutex;

/// Connections on which each node beats its heart. A connection has at most one node, so the bound of connections
/// bounds this too.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    connections: Mutex<HashMap<Uuid, usize>>,
}

impl Presence {
    /// A connection has another node than before, or none. Returns whether the node before has no connection left.
    pub(crate) fn moved(&self, from: Option<Uuid>, to: Option<Uuid>) -> bool {
        if from == to {
            return false;
        }
        let mut connections = self.connections.lock();
        if let Some(to) = to {
            *connections.entry(to).or_default() += 1;
        }
        let Some(from) = from else { return false };
        let left = connections.get_mut(&from).map_or(0, |count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left == 0 {
            connections.remove(&from);
        }
        left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_connection_counts() {
        let presence = Presence::default();
        let [one, other] = [1, 2].map(|first| Some(Uuid { first, second: 0 }));
        assert!(!presence.moved(None, one));
        assert!(!presence.moved(None, one));
        assert!(!presence.moved(one, None));
        assert!(presence.moved(one, other));
        assert!(presence.moved(other, None));
        assert!(!presence.moved(None, None));
        assert!(presence.connections.lock().is_empty());
    }
}

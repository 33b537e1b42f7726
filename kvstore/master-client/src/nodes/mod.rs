//! Liveness of store nodes.
//!
//! A master expires a dead node after ten seconds without heartbeats, and until then reports the node's blocks as readable.
//! So a [`NodeWatcher`] not only polls the master's list of nodes, but also keeps an idle connection to the transfer port of
//! each node. When a node's process ends, its kernel closes that connection at once.
//!
//! When a connection ends, the watcher reconnects once before it reports the node as lost, because a node may close idle
//! connections. Without such a connection (an RDMA-only node has no TCP port), only the master's list is used.

mod connection;
#[cfg(test)]
mod connection_tests;
mod descriptor;
mod watch;
#[cfg(test)]
mod watch_tests;

use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::types::Uuid;
use moongate_runtime::BackoffPolicy;

pub use connection::{IdleConnectionError, NodeConnectError};
#[doc(hidden)]
pub use descriptor::transfer_address;
pub use descriptor::{DescriptorLookupError, MetadataSource};
pub use watch::NodeWatcher;

use crate::admin::AdminError;

/// A store node in the master's list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchedNode {
    /// The transfer endpoint, as in replica descriptors. Before 0.3.12 the master does not report it,
    /// and this is the name; with the peer-to-peer handshake its port differs from the one in replicas.
    pub endpoint: String,
    /// The node's client id, which changes when its process restarts. `None` before 0.3.12.
    pub client: Option<Uuid>,
    /// Name of the node's segments.
    pub name: String,
}

/// Why a node was reported as lost.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NodeLossReason {
    /// The connection to its transfer port ended, and a reconnect failed. The master may still list the node.
    #[error("its transfer port is unreachable: {ended}, then {source}")]
    Unreachable {
        ended: IdleConnectionError,
        /// Why the reconnect failed.
        source: Arc<NodeConnectError>,
    },
    /// Its transfer port has changed: the process was replaced.
    #[error("its process was replaced")]
    Replaced,
    /// The master no longer lists it.
    #[error("the master no longer lists it")]
    Unlisted,
}

/// A change in the set of live nodes, or of the master's availability.
#[derive(Clone, Debug)]
pub enum StoreNodeEvent {
    /// The node is new, or reachable again.
    Up(WatchedNode),
    /// The node is no longer readable.
    Lost(WatchedNode, NodeLossReason),
    /// The master's node list cannot be fetched. Known nodes stay, and their death is still detected.
    MasterLost(AdminError),
    /// The master's node list is available again. The master may be a new process without the old keys. Nodes stay, because
    /// they remount their segments so soon that the list may never have lacked them.
    MasterRecovered,
}

/// Poll interval, time limits and size of a [`NodeWatcher`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeWatchOptions {
    /// Pause between a response of the master and the next poll.
    pub poll_interval: Duration,
    /// Where nodes publish their transfer ports.
    pub metadata: MetadataSource,
    /// Time limit for the lookup of a node's transfer port, and separately for the connection to it.
    pub connect_timeout: Duration,
    /// Jittered pauses between attempts to reach a node.
    pub retry: BackoffPolicy,
    /// Maximum number of watched nodes. Further ones are ignored.
    pub max_nodes: usize,
}

impl Default for NodeWatchOptions {
    fn default() -> Self {
        Self {
            poll_interval: Duration::from_millis(500),
            metadata: MetadataSource::Handshake,
            connect_timeout: Duration::from_secs(1),
            retry: BackoffPolicy { initial: Duration::from_millis(100), max: Duration::from_secs(5) },
            max_nodes: 4096,
        }
    }
}

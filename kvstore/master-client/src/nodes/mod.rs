//! Which store nodes live.
//!
//! A master notices a dead node when its heartbeats have been missing for ten seconds, and says until then that the
//! node's pages can be read. So a [`NodeWatcher`] not only asks the master which nodes there are; it also holds a
//! connection to the port on which each node serves transfers, and says nothing on it. The kernel of a node whose
//! process ends closes that connection at once.
//!
//! A connection that ends is tried again before its node is called lost, because a node may close what is idle.
//! Where such a connection cannot be had (a node that serves RDMA only has no such port), the master's word is all
//! there is.

mod connection;
#[cfg(test)]
mod connection_tests;
mod descriptor;
mod watch;
#[cfg(test)]
mod watch_tests;

use std::time::Duration;

use mooncake_wire::types::Uuid;

pub use descriptor::MetadataSource;
#[doc(hidden)]
pub use descriptor::transfer_address;
pub use watch::NodeWatcher;

use crate::admin::AdminError;
use crate::backoff::BackoffPolicy;

/// A process that lends memory to the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchedNode {
    /// Where transfers begin: what replicas have as their endpoint. Before 0.3.12 the master does not tell it,
    /// and it is the name; with the peer-to-peer handshake that is another port than the one in replicas.
    pub endpoint: String,
    /// The client's id, which a restarted process has anew. Not known before 0.3.12.
    pub client: Option<Uuid>,
    /// The name of its segments.
    pub name: String,
}

/// Why a node is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeLossReason {
    /// Its transfer port ended the connection and could not be reached again. The master may list it for a while.
    #[error("its transfer port does not answer any more: {0}")]
    Unreachable(String),
    /// Its transfer port has become another one: the process was replaced.
    #[error("another process has taken its place")]
    Replaced,
    /// The master does not list it any more.
    #[error("the master does not list it any more")]
    Unlisted,
}

/// What has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreNodeEvent {
    /// The node is there, or there again.
    Up(WatchedNode),
    /// Nothing can be read from the node any more.
    Lost(WatchedNode, NodeLossReason),
    /// The master does not tell its nodes. Those that were told stay, and are still noticed when they die.
    MasterLost(AdminError),
    /// The master tells its nodes again. It may be another process, which has lost all keys: nodes stay, and mount
    /// their memory again so soon that they need not have been missing.
    MasterRecovered,
}

/// How nodes are watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeWatchOptions {
    /// How long to wait after an answer of the master before it is asked again.
    pub poll_interval: Duration,
    /// Where nodes tell their transfer ports.
    pub metadata: MetadataSource,
    /// Time limit for finding a node's transfer port, and again for connecting to it.
    pub connect_timeout: Duration,
    /// Pauses between attempts to reach a node.
    pub retry: BackoffPolicy,
    /// Nodes that are watched. Further ones are ignored.
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

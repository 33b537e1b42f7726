//! Removal of a node from the store: the master moves its objects to other nodes before the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mooncake_wire::node_drain::NodeDrainArguments;
use moongate_master_client::rpc::RpcError;
use moongate_runtime::Supervisor;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::membership::{DRAIN_EXPIRY, NodeMembership};

/// How often an expired removal is cancelled at a master that does not respond.
const CANCEL_PERIOD: Duration = Duration::from_secs(5);

/// Whether the node is about to be removed.
#[derive(Debug, Default)]
pub(crate) struct NodeRemoval {
    /// When the removal expires; `None` if there is none.
    expires_at: Mutex<Option<Instant>>,
    /// Objects that the master has yet to move, as of its last response.
    left: AtomicU64,
}

impl NodeRemoval {
    /// Starts or continues to move the node's objects away. Returns the number of those that are left.
    ///
    /// # Errors
    /// [`RpcError::Fault`] from Mooncake's masters.
    pub(crate) async fn drain(&self, membership: &NodeMembership) -> Result<u64, RpcError> {
        let before = self.expires_at.lock().replace(Instant::now() + DRAIN_EXPIRY);
        if before.is_none() {
            tracing::info!("this node will be removed: the master moves its objects to other nodes");
        }
        let left = membership.master.drain_node(arguments(membership, false)).await?;
        self.left.store(left, Ordering::Relaxed);
        Ok(left)
    }

    /// Ends a removal: the node stays.
    pub(crate) async fn cancel(&self, membership: &NodeMembership) -> Result<(), RpcError> {
        if self.expires_at.lock().is_none() {
            return Ok(());
        }
        match membership.master.drain_node(arguments(membership, true)).await {
            Ok(_) | Err(RpcError::Fault(_)) => {
                *self.expires_at.lock() = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a removal has begun and was not cancelled.
    pub(crate) fn is_active(&self) -> bool {
        self.expires_at.lock().is_some()
    }

    fn is_expired(&self) -> bool {
        self.expires_at.lock().is_some_and(|until| until <= Instant::now())
    }

    /// Cancels a removal that was not continued, until the supervisor shuts down.
    pub(crate) async fn cancel_when_expired(&self, membership: &NodeMembership) {
        loop {
            tokio::time::sleep(CANCEL_PERIOD).await;
            if !self.is_expired() {
                continue;
            }
            match self.cancel(membership).await {
                Ok(()) => tracing::warn!(
                    "the node was drained for its removal and is still running: it accepts objects again"
                ),
                Err(error) => tracing::warn!(%error, "cannot cancel the removal of this node at the master"),
            }
        }
    }
}

fn arguments(membership: &NodeMembership, is_cancelled: bool) -> NodeDrainArguments {
    NodeDrainArguments { client_id: membership.client_id, is_cancelled }
}

/// Starts to watch for expired removals.
pub(crate) fn start(removal: Arc<NodeRemoval>, membership: NodeMembership, supervisor: &Supervisor) {
    let stop = supervisor.token();
    supervisor.spawn_essential("store-removal", async move {
        stop.run_until_cancelled(removal.cancel_when_expired(&membership)).await;
        let left = removal.left.load(Ordering::Relaxed);
        if removal.is_active() && left > 0 {
            tracing::error!(
                objects = left,
                "this node ends before the master has moved all of its objects: those without another copy are lost with it"
            );
        }
    });
}

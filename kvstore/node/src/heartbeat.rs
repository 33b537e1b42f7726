//! Heartbeats to the master, on a dedicated thread so that no other work of the node delays them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mooncake_wire::types::ClientStatus;
use moongate_master_client::rpc::{self, MasterClient};
use moongate_runtime::{BackoffPolicy, DedicatedThread, Supervisor};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::membership::NodeMembership;

/// Heartbeat period. By default, a master expires a node after ten seconds without a heartbeat.
const PERIOD: Duration = Duration::from_secs(1);
/// Pause before a heartbeat is repeated after a failure: objects in a node may be readable only after its next heartbeat.
const RETRY: Duration = Duration::from_millis(250);
/// Time limit of one heartbeat.
const TIME_LIMIT: Duration = Duration::from_secs(3);

/// Results of heartbeats, shared with health, metrics and the descriptor publisher.
#[derive(Debug, Default)]
pub(crate) struct HeartbeatState {
    /// Whether the master answered the last heartbeat.
    healthy: AtomicBool,
    pub(crate) succeeded: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// Times that the node mounted its segments again because the master had expired it.
    pub(crate) remounts: AtomicU64,
    /// Notified after each remount, so that the descriptor is published again.
    pub(crate) remounted: Notify,
}

impl HeartbeatState {
    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    fn set_healthy(&self, healthy: bool) -> bool {
        self.healthy.swap(healthy, Ordering::Relaxed)
    }
}

/// Sends heartbeats until `stop` is cancelled.
///
/// # Errors
/// When the thread or its runtime cannot be created.
pub(crate) fn start(
    membership: &NodeMembership,
    state: Arc<HeartbeatState>,
    stop: CancellationToken,
    supervisor: &Supervisor,
) -> std::io::Result<DedicatedThread> {
    let membership = membership.clone();
    let heartbeats = async move {
        let supervisor = Supervisor::new();
        let options = rpc::MasterClientOptions {
            connections: 1,
            timeout: TIME_LIMIT,
            retry: BackoffPolicy { initial: RETRY / 5, max: RETRY },
            ..rpc::MasterClientOptions::default()
        };
        let (address, authentication) =
            (membership.master.address(), membership.master.authentication().cloned());
        let master = MasterClient::authenticated(address, options, authentication, &supervisor);
        let membership = membership.with_heartbeat_master(master);
        stop.run_until_cancelled(run(&membership, &state)).await;
        supervisor.token().cancel();
    };
    DedicatedThread::start(supervisor, "heartbeat", "heartbeat".to_owned(), heartbeats)
}

async fn run(membership: &NodeMembership, state: &HeartbeatState) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let result = match membership.ping().await {
            Ok(ClientStatus::NEED_REMOUNT) => remount(membership, state).await,
            // A restarted master has no keys.
            Ok(_) => membership.send_keys().await,
            Err(error) => Err(error),
        };
        match result {
            Ok(()) => {
                state.succeeded.fetch_add(1, Ordering::Relaxed);
                if !state.set_healthy(true) {
                    tracing::info!(master = membership.master.address(), "heartbeats to the master succeed");
                }
            }
            Err(error) => {
                state.failed.fetch_add(1, Ordering::Relaxed);
                ticks.reset_after(RETRY);
                if state.set_healthy(false) {
                    tracing::warn!(%error, "the master does not answer heartbeats; retrying");
                }
            }
        }
    }
}

async fn remount(membership: &NodeMembership, state: &HeartbeatState) -> Result<(), rpc::RpcError> {
    membership.remount().await?;
    if state.succeeded.load(Ordering::Relaxed) == 0 {
        // Masters request a remount from every new node, so this is no expiry.
        return Ok(());
    }
    state.remounts.fetch_add(1, Ordering::Relaxed);
    state.remounted.notify_one();
    tracing::warn!(
        "the master had expired this node; its segments are mounted again, and objects that the master did not restore are lost"
    );
    Ok(())
}

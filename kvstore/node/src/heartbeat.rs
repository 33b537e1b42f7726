//! Heartbeats, on a thread of their own: nothing else that the node does holds them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mooncake_wire::types::ClientStatus;
use moongate_master_client::rpc::{self, MasterClient};
use moongate_runtime::{DedicatedThread, Supervisor};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::membership::NodeMembership;

/// Time between two heartbeats. A master forgets a node after ten seconds without one, unless it is set otherwise.
const PERIOD: Duration = Duration::from_secs(1);
/// Time for one heartbeat.
const TIME_LIMIT: Duration = Duration::from_secs(3);

/// What has come of heartbeats.
#[derive(Debug, Default)]
pub(crate) struct HeartbeatState {
    /// Whether the master has answered the last one.
    healthy: AtomicBool,
    pub(crate) succeeded: AtomicU64,
    pub(crate) failed: AtomicU64,
    /// How often the master had forgotten this node.
    pub(crate) remounts: AtomicU64,
    /// Told after each of these.
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
/// When there can be no thread, or no runtime for it.
pub(crate) fn start(
    membership: &NodeMembership,
    pulse: Arc<HeartbeatState>,
    stop: CancellationToken,
    supervisor: &Supervisor,
) -> std::io::Result<DedicatedThread> {
    let membership = membership.clone();
    let beating = async move {
        let supervisor = Supervisor::new();
        let options = rpc::MasterClientOptions {
            connections: 1,
            timeout: TIME_LIMIT,
            ..rpc::MasterClientOptions::default()
        };
        let (address, authentication) =
            (membership.master.address(), membership.master.authentication().cloned());
        let own = MasterClient::authenticated(address, options, authentication, &supervisor);
        let membership = membership.with_heartbeat_master(own);
        stop.run_until_cancelled(run(&membership, &pulse)).await;
        supervisor.token().cancel();
    };
    DedicatedThread::start(supervisor, "heartbeat", "heartbeat".to_owned(), beating)
}

async fn run(membership: &NodeMembership, pulse: &HeartbeatState) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let result = match membership.ping().await {
            Ok(ClientStatus::NEED_REMOUNT) => remount(membership, pulse).await,
            // A master that was restarted has no keys.
            Ok(_) => membership.send_keys().await,
            Err(error) => Err(error),
        };
        match result {
            Ok(()) => {
                pulse.succeeded.fetch_add(1, Ordering::Relaxed);
                if !pulse.set_healthy(true) {
                    tracing::info!(master = membership.master.address(), "the master knows this node");
                }
            }
            Err(error) => {
                pulse.failed.fetch_add(1, Ordering::Relaxed);
                if pulse.set_healthy(false) {
                    tracing::warn!(%error, "the master does not answer heartbeats; trying again");
                }
            }
        }
    }
}

async fn remount(membership: &NodeMembership, pulse: &HeartbeatState) -> Result<(), rpc::RpcError> {
    membership.remount().await?;
    if pulse.succeeded.load(Ordering::Relaxed) == 0 {
        // Masters ask every node that is new to them.
        return Ok(());
    }
    pulse.remounts.fetch_add(1, Ordering::Relaxed);
    pulse.remounted.notify_one();
    tracing::warn!(
        "the master had forgotten this node; it lends its memory again, and what the master has not restored is not found any more"
    );
    Ok(())
}

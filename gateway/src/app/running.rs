//! A running gateway, and its drain.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::TopologyReader;
use moongate_runtime::{ListenerHandle, Supervisor};
use tokio_util::sync::CancellationToken;

use crate::ingress::GatewayContext;

/// Time to flush final error events before connections are closed.
const CONNECTION_SHUTDOWN_GRACE: Duration = Duration::from_millis(500);

/// A running gateway, with its listeners and tasks.
#[derive(Debug)]
pub struct RunningGateway {
    /// Address of the public listener.
    pub address: SocketAddr,
    /// Address of the admin listener.
    pub admin_address: SocketAddr,
    /// The discovered engines, read by status commands.
    pub topology: TopologyReader,
    pub(super) state: Arc<GatewayContext>,
    pub(super) public: ListenerHandle,
    pub(super) admin: ListenerHandle,
    pub(super) supervisor: Supervisor,
    pub(super) public_drain: CancellationToken,
    pub(super) admin_drain: CancellationToken,
    pub(super) drain_delay: Duration,
    pub(super) drain_deadline: Duration,
}

impl RunningGateway {
    /// Whether the fleet can serve requests now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state.dispatcher.fleet.current().can_serve()
    }

    #[must_use]
    pub fn connections(&self) -> usize {
        self.public.connections()
    }

    /// Open connections to engines, and how many of them are idle.
    #[must_use]
    pub fn engine_connections(&self) -> (usize, usize) {
        let fleet = self.state.dispatcher.fleet.current();
        let pools = fleet.engines().map(|member| &member.endpoint.pool);
        pools.fold((0, 0), |(open, idle), pool| (open + pool.open(), idle + pool.idle()))
    }

    /// Requests in flight to engines.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        let fleet = self.state.dispatcher.fleet.current();
        fleet.engines().map(|member| member.endpoint.in_flight.count()).sum()
    }

    /// Drains the gateway: `/ready` fails at once; after the delay no connection is accepted; open requests may end until the
    /// deadline; then streams get an error event and connections are closed. Returns the number of connections closed by the
    /// deadline.
    pub async fn drain(&self) -> usize {
        self.state.draining.cancel();
        tracing::info!(delay = ?self.drain_delay, deadline = ?self.drain_deadline, "draining");
        tokio::time::sleep(self.drain_delay).await;
        self.public_drain.cancel();
        let mut closed = 0;
        if !self.public.wait_idle(self.drain_deadline).await {
            tracing::warn!(
                connections = self.public.connections(),
                "drain deadline exceeded; ending open streams"
            );
            self.state.force_close.cancel();
            closed = self.public.drain_then_close(CONNECTION_SHUTDOWN_GRACE).await;
        }
        self.admin_drain.cancel();
        self.admin.drain_then_close(CONNECTION_SHUTDOWN_GRACE).await;
        closed
    }

    /// Drains, then stops all tasks of the supervisor.
    pub async fn stop(self) {
        let closed = self.drain().await;
        if closed > 0 {
            tracing::warn!(connections = closed, "connections closed by the drain deadline");
        }
        if let Err(unfinished) = self.supervisor.shutdown(CONNECTION_SHUTDOWN_GRACE * 4).await {
            tracing::warn!(tasks = %unfinished, "tasks did not end in time");
        }
    }
}

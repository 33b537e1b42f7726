//! Turns topology changes into fleet snapshots.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use moongate_discovery::TopologyReader;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::endpoint::EndpointLimits;
use super::snapshot::Fleet;

/// The current fleet. Cheap to clone; reading never waits.
#[derive(Debug, Clone, Default)]
pub(crate) struct FleetReader(Arc<ArcSwap<Fleet>>);

impl FleetReader {
    pub(crate) fn current(&self) -> Arc<Fleet> {
        self.0.load_full()
    }

    /// Builds and publishes the fleet of the topology's current snapshot.
    pub(crate) fn refresh(&self, topology: &TopologyReader, limits: EndpointLimits) {
        let previous = self.0.load();
        let fleet = Fleet::build(&topology.current(), &previous, limits);
        tracing::info!(
            generation = fleet.generation,
            usable = fleet.members.len(),
            waiting = fleet.waiting.len(),
            models = ?fleet.model_names(),
            "fleet changed"
        );
        for waiting in
            fleet.waiting.iter().filter(|waiting| waiting.probed && !previous.waiting.contains(waiting))
        {
            tracing::warn!(instance = %waiting.id, reason = waiting.reason, "engine is not used");
        }
        self.0.store(Arc::new(fleet));
    }
}

/// How often idle connections are checked for age and closure.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Follows `topology` until `stop`, and keeps idle connections fresh.
pub(crate) async fn follow(
    reader: FleetReader,
    mut topology: TopologyReader,
    limits: EndpointLimits,
    stop: CancellationToken,
) {
    let mut sweep = interval(SWEEP_EVERY);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            changed = topology.changed() => match changed {
                Some(_) => reader.refresh(&topology, limits),
                None => break,
            },
            _ = sweep.tick() => reader.current().members.iter().for_each(|member| member.endpoint.pool.sweep()),
        }
    }
    reader.current().members.iter().for_each(|member| member.endpoint.pool.clear());
}

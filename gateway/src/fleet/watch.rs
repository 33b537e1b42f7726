//! Builds fleet snapshots from topology changes.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use moongate_discovery::TopologyReader;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::endpoint::EndpointLimits;
use super::snapshot::FleetSnapshot;
use super::version_pairing::VersionRule;
use crate::kv_index::KvIndex;
use crate::lora_adapters::LoraAdapterFile;

/// The current fleet. Cheap to clone; reading never blocks.
#[derive(Debug, Clone)]
pub(crate) struct FleetReader {
    current: Arc<ArcSwap<FleetSnapshot>>,
    generation: Arc<watch::Sender<u64>>,
}

impl Default for FleetReader {
    fn default() -> Self {
        Self { current: Arc::default(), generation: Arc::new(watch::Sender::new(0)) }
    }
}

impl FleetReader {
    /// A fleet without engines, whose later engines pair by this rule.
    pub(crate) fn new(versions: VersionRule) -> Self {
        let reader = Self::default();
        reader.current.store(Arc::new(FleetSnapshot::pairing_by(versions)));
        reader
    }

    pub(crate) fn current(&self) -> Arc<FleetSnapshot> {
        self.current.load_full()
    }

    /// A fleet that does not change.
    #[cfg(test)]
    pub(crate) fn fixed(fleet: FleetSnapshot) -> Self {
        let reader = Self::default();
        reader.current.store(Arc::new(fleet));
        reader
    }

    /// Waits until the fleet reflects this generation of the topology.
    pub(crate) async fn wait_for(&self, generation: u64) {
        // The sender is a field of `self`, so that it cannot be closed.
        drop(self.generation.subscribe().wait_for(|published| *published >= generation).await);
    }

    /// Notifies of every new fleet.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Builds and publishes the fleet of the topology's current snapshot.
    pub(crate) fn refresh(
        &self,
        topology: &TopologyReader,
        limits: &EndpointLimits,
        (index, adapters): (&Arc<KvIndex>, &LoraAdapterFile),
    ) {
        let previous = self.current.load();
        let fleet = FleetSnapshot::build(&topology.current(), &previous, limits, (index, adapters.current()));
        tracing::info!(
            generation = fleet.generation,
            usable = fleet.engines().count(),
            unusable = fleet.unusable.len(),
            unpaired = fleet.unpaired.len(),
            models = ?fleet.served_models(),
            "fleet changed"
        );
        for instance in
            fleet.unusable.iter().filter(|instance| instance.probed && !previous.unusable.contains(instance))
        {
            tracing::warn!(engine = %instance.id, reason = instance.reason, "engine is not usable");
        }
        for engine in fleet.unpaired.iter().filter(|engine| !previous.unpaired.contains(engine)) {
            tracing::warn!(%engine, "engine gets no requests: no partner has its version (--pair-versions)");
        }
        let generation = fleet.generation;
        self.current.store(Arc::new(fleet));
        self.generation.send_replace(generation);
    }
}

/// How often idle connections are checked for age and closure.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Follows `topology` and the LoRA adapters that engines can load until `stop`, and closes stale idle connections.
pub(crate) async fn watch_topology(
    reader: FleetReader,
    mut topology: TopologyReader,
    limits: EndpointLimits,
    (index, adapters): (Arc<KvIndex>, Arc<LoraAdapterFile>),
    stop: CancellationToken,
) {
    let mut reloads = adapters.subscribe();
    let mut sweep = interval(SWEEP_INTERVAL);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            changed = topology.changed() => match changed {
                Some(_) => reader.refresh(&topology, &limits, (&index, &adapters)),
                None => break,
            },
            // The sender is in `adapters`, so that it cannot be closed.
            Ok(()) = reloads.changed() => reader.refresh(&topology, &limits, (&index, &adapters)),
            _ = sweep.tick() => reader.current().engines().for_each(|member| member.endpoint.pool.sweep()),
        }
    }
    reader.current().engines().for_each(|member| member.endpoint.pool.clear());
}

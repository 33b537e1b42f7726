//! Gauges of each engine.

use moongate_runtime::metrics::MetricsRegistry;
use moongate_scheduler::InstanceLoad;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::fleet::FleetSnapshot;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct EngineLabels {
    pub(super) instance: String,
    pub(super) role: String,
}

/// Set from the fleet at each scrape.
#[derive(Debug)]
pub(super) struct EngineGauges {
    pub(super) up: Family<EngineLabels, Gauge>,
    pub(super) breaker_open: Family<EngineLabels, Gauge>,
    suspect: Family<EngineLabels, Gauge>,
    pub(super) in_flight: Family<EngineLabels, Gauge>,
    pending_prefill_tokens: Family<EngineLabels, Gauge>,
    active_decode_tokens: Family<EngineLabels, Gauge>,
    pub(super) connections: Family<EngineLabels, Gauge>,
    idle_connections: Family<EngineLabels, Gauge>,
    unusable: Gauge,
    unpaired: Gauge,
    generation: Gauge,
}

impl EngineGauges {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            up: registry.register("moongate_engine_up", "1 if health checks pass", Family::default()),
            breaker_open: registry.register(
                "moongate_engine_breaker_open",
                "1 while the circuit breaker is open and requests avoid the engine",
                Family::default(),
            ),
            suspect: registry.register(
                "moongate_engine_suspect",
                "1 while new requests avoid the engine because it accepts requests but produces no output",
                Family::default(),
            ),
            in_flight: registry.register(
                "moongate_engine_requests_in_flight",
                "Requests of this gateway in flight on the engine",
                Family::default(),
            ),
            pending_prefill_tokens: registry.register(
                "moongate_engine_pending_prefill_tokens",
                "Prompt tokens of requests without a first token (estimated from bytes where the prompt is text)",
                Family::default(),
            ),
            active_decode_tokens: registry.register(
                "moongate_engine_active_decode_tokens",
                "Tokens that running requests are expected to occupy",
                Family::default(),
            ),
            connections: registry.register(
                "moongate_engine_connections",
                "Open connections",
                Family::default(),
            ),
            idle_connections: registry.register(
                "moongate_engine_idle_connections",
                "Open connections without a request",
                Family::default(),
            ),
            unusable: registry.register(
                "moongate_engines_unusable",
                "Engines that are listed but not usable; `GET /ready` gives the reasons",
                Gauge::default(),
            ),
            unpaired: registry.register(
                "moongate_engines_unpaired",
                "Prefill and decode engines that get no requests because no partner has their version (`--pair-versions`)",
                Gauge::default(),
            ),
            generation: registry.register(
                "moongate_topology_generation",
                "Number of topology changes",
                Gauge::default(),
            ),
        }
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        for family in self.families() {
            family.get_or_create(&EngineLabels { instance: String::new(), role: String::new() }).set(0);
        }
    }

    pub(super) fn families(&self) -> [&Family<EngineLabels, Gauge>; 8] {
        [
            &self.up,
            &self.breaker_open,
            &self.suspect,
            &self.in_flight,
            &self.pending_prefill_tokens,
            &self.active_decode_tokens,
            &self.connections,
            &self.idle_connections,
        ]
    }

    pub(super) fn set(&self, fleet: &FleetSnapshot, loads: &[InstanceLoad]) {
        let families = self.families();
        families.iter().for_each(|family| family.clear());
        for (member, load) in fleet.engines_with_load(loads) {
            let endpoint = &member.endpoint;
            let labels =
                EngineLabels { instance: endpoint.id.to_string(), role: member.instance.role.to_string() };
            let values = [
                i64::from(endpoint.is_healthy()),
                i64::from(endpoint.breaker.is_open()),
                i64::from(endpoint.silence.is_suspect()),
                i64::from(endpoint.in_flight.count()),
                i64::try_from(load.pending_prefill_tokens).unwrap_or(i64::MAX),
                i64::try_from(load.active_decode_tokens).unwrap_or(i64::MAX),
                i64::try_from(endpoint.pool.open()).unwrap_or(i64::MAX),
                i64::try_from(endpoint.pool.idle()).unwrap_or(i64::MAX),
            ];
            for (family, value) in families.iter().zip(values) {
                family.get_or_create(&labels).set(value);
            }
        }
        self.unusable.set(i64::try_from(fleet.unusable.len()).unwrap_or(i64::MAX));
        self.unpaired.set(i64::try_from(fleet.unpaired.len()).unwrap_or(i64::MAX));
        self.generation.set(i64::try_from(fleet.generation).unwrap_or(i64::MAX));
    }
}

//! Gauges of each engine.

use moongate_scheduler::InstanceLoad;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::fleet::FleetSnapshot;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    instance: String,
    role: String,
}

/// Set from the fleet at each scrape.
#[derive(Debug, Default)]
pub(super) struct EngineGauges {
    up: Family<EngineLabels, Gauge>,
    breaker_open: Family<EngineLabels, Gauge>,
    suspect: Family<EngineLabels, Gauge>,
    in_flight: Family<EngineLabels, Gauge>,
    pending_prefill_tokens: Family<EngineLabels, Gauge>,
    active_decode_tokens: Family<EngineLabels, Gauge>,
    connections: Family<EngineLabels, Gauge>,
    idle_connections: Family<EngineLabels, Gauge>,
    unusable: Gauge,
    generation: Gauge,
}

impl EngineGauges {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let gauges = EngineGauges::default();
        let sub = registry.sub_registry_with_prefix("engine");
        for (name, help, family) in [
            ("up", "1 if health checks pass", &gauges.up),
            (
                "breaker_open",
                "1 while the circuit breaker is open and requests avoid the engine",
                &gauges.breaker_open,
            ),
            (
                "suspect",
                "1 while new requests avoid the engine because it accepts requests but produces no output",
                &gauges.suspect,
            ),
            ("requests_in_flight", "Requests of this gateway in flight on the engine", &gauges.in_flight),
            (
                "pending_prefill_tokens",
                "Prompt tokens of requests without a first token (estimated from bytes where the prompt is text)",
                &gauges.pending_prefill_tokens,
            ),
            (
                "active_decode_tokens",
                "Upper limit of the tokens of running requests",
                &gauges.active_decode_tokens,
            ),
            ("connections", "Open connections", &gauges.connections),
            ("idle_connections", "Open connections without a request", &gauges.idle_connections),
        ] {
            sub.register(name, help, family.clone());
        }
        registry.register(
            "engines_unusable",
            "Engines that are listed but not usable; `GET /ready` gives the reasons",
            gauges.unusable.clone(),
        );
        registry.register("topology_generation", "Number of topology changes", gauges.generation.clone());
        gauges
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        for family in self.families() {
            family.get_or_create(&EngineLabels { instance: String::new(), role: String::new() }).set(0);
        }
    }

    fn families(&self) -> [&Family<EngineLabels, Gauge>; 8] {
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
        for (member, load) in fleet.members.iter().zip(loads) {
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
        self.generation.set(i64::try_from(fleet.generation).unwrap_or(i64::MAX));
    }
}

//! Load of the fleet as a fraction of its capacity, for requests that must not slow down others.

use moongate_scheduler::{InstanceIndex, InstanceLoad, ModelIndex};

use crate::fleet::FleetSnapshot;

/// Sequences of an engine at full load, as no engine reports its limit: half of vLLM's default.
const NOMINAL_SEQUENCES: f64 = 128.0;

/// Load of the busiest model's engines, 0 to about 1; infinite while every engine that could compute a prompt of the model
/// already has one.
pub(super) fn fleet_load(fleet: &FleetSnapshot, loads: &[InstanceLoad]) -> f64 {
    let models = fleet.served_models().iter().filter_map(|name| fleet.model(name).ok());
    models.map(|model| model_load(fleet, loads, model)).fold(0.0, f64::max)
}

fn model_load(fleet: &FleetSnapshot, loads: &[InstanceLoad], model: ModelIndex) -> f64 {
    let available = |engines: &[InstanceIndex]| -> Vec<(InstanceIndex, InstanceLoad)> {
        let engines = engines.iter().filter_map(|ix| Some((*ix, *loads.get(ix.as_usize())?)));
        engines.filter(|(_, load)| load.available).collect()
    };
    let prefills = available(fleet.cluster.prefills(model));
    let decodes = available(fleet.cluster.decodes(model));
    if !prefills.is_empty() && prefills.iter().all(|(_, load)| load.pending_prefills > 0) {
        return f64::INFINITY;
    }
    let computing = mean(prefills.iter().map(|(_, load)| load.prefill_share));
    // Plain workers generate too; without decodes, all are plain.
    let generating = if decodes.is_empty() { &prefills } else { &decodes };
    computing.max(mean(generating.iter().map(|(ix, load)| generation_load(fleet, *ix, load))))
}

/// The larger share of the engine's KV cache and of its sequences.
fn generation_load(fleet: &FleetSnapshot, ix: InstanceIndex, load: &InstanceLoad) -> f64 {
    let reported = load.reported.unwrap_or_default();
    // Requests on paths that are passed through are unknown to the scheduler.
    let sent = fleet.member(ix).map_or(0, |member| member.endpoint.in_flight.count());
    let sequences = load.decode_sequences.max(sent).max(reported.running.saturating_add(reported.waiting));
    let tokens = match reported.capacity_tokens {
        0 => 0.0,
        capacity => load.decode_tokens() as f64 / capacity as f64,
    };
    tokens.max(f64::from(sequences) / NOMINAL_SEQUENCES)
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len();
    if count == 0 { 0.0 } else { values.sum::<f64>() / count as f64 }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineRole};
    use moongate_scheduler::ReportedLoad;

    use super::*;
    use crate::fleet::EngineInFlightGuard;
    use crate::kv_index::KvIndex;
    use crate::test_fleet::{engine, snapshot};

    fn fleet(roles: &[EngineRole]) -> FleetSnapshot {
        let engines = roles.iter().enumerate();
        let engines = engines.map(|(number, role)| engine(&number.to_string(), *role, EngineKind::Vllm, 1));
        snapshot(engines.collect(), &FleetSnapshot::default(), &KvIndex::new(100))
    }

    fn idle() -> InstanceLoad {
        InstanceLoad { available: true, ..InstanceLoad::default() }
    }

    #[test]
    fn a_fleet_is_busy_once_every_prefill_has_a_prompt() {
        let fleet = fleet(&[EngineRole::Prefill, EngineRole::Prefill, EngineRole::Decode]);
        let busy = InstanceLoad { pending_prefills: 1, prefill_share: 0.5, ..idle() };
        assert_eq!(fleet_load(&fleet, &[idle(), idle(), idle()]), 0.0);
        assert_eq!(fleet_load(&fleet, &[busy, idle(), idle()]), 0.25);
        assert_eq!(fleet_load(&fleet, &[busy, busy, idle()]), f64::INFINITY);
        let down = InstanceLoad { available: false, ..idle() };
        assert_eq!(fleet_load(&fleet, &[busy, down, idle()]), f64::INFINITY);
        assert_eq!(fleet_load(&fleet, &[down, down, down]), 0.0);
    }

    #[test]
    fn generation_counts_by_cache_and_sequences() {
        let fleet = fleet(&[EngineRole::Plain]);
        let report = ReportedLoad { used_tokens: 30, capacity_tokens: 100, ..ReportedLoad::default() };
        let loaded = InstanceLoad { reported: Some(report), active_decode_tokens: 40, ..idle() };
        assert_eq!(fleet_load(&fleet, &[loaded]), 0.4);
        let running = ReportedLoad { running: 32, waiting: 32, ..ReportedLoad::default() };
        assert_eq!(fleet_load(&fleet, &[InstanceLoad { reported: Some(running), ..idle() }]), 0.5);
        let _sent: Vec<_> =
            (0..32).map(|_| EngineInFlightGuard::new(fleet.members[0].endpoint.clone())).collect();
        assert_eq!(fleet_load(&fleet, &[idle()]), 0.25);
    }
}

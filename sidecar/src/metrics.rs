//! The sidecar's metrics, in Prometheus' text format 0.0.4: the engine's own metrics, in that format, follow.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use moongate_discovery::EngineLoad;
use moongate_runtime::metrics::{MetricsRegistry, MetricsWriter};
use tokio::time::Instant;

use crate::registrations::GatewayLink;
use crate::state::{EngineObservation, SidecarState};

/// All metrics as text. `registrations`: the numbers of accepted and of rejected registrations.
pub(crate) fn text(
    state: SidecarState,
    links: &BTreeMap<SocketAddr, GatewayLink>,
    registrations: [u64; 2],
) -> String {
    let gateways = gateways_by_state(links);
    let mut registry = MetricsRegistry::default();
    registry.collect(move |writer| {
        write_engine(writer, &state);
        write_gateways(writer, gateways, registrations);
    });
    registry.prometheus_text()
}

fn write_engine(writer: &mut MetricsWriter<'_>, state: &SidecarState) {
    let is_up = state.local_engine.is_some() && state.error.is_none();
    writer.gauge("moongate_sidecar_engine_up", "1 while the engine serves", u32::from(is_up));
    writer.gauge(
        "moongate_sidecar_draining",
        "1 while the engine is being drained",
        u32::from(state.drain.is_some()),
    );
    if let Some(load) = state.observation.as_ref().and_then(|observation| observation.load.as_ref()) {
        writer.gauge(
            "moongate_sidecar_engine_running",
            "Requests running on the engine, if reported",
            load.running,
        );
        writer.gauge(
            "moongate_sidecar_engine_waiting",
            "Requests queued on the engine, if reported",
            load.waiting,
        );
    }
    writer.gauge_by(
        "moongate_sidecar_lora_adapters",
        "Desired LoRA adapters by state: `loaded`, `pending`, `failed`",
        "state",
        [
            ("loaded", state.adapters.loaded.len()),
            ("pending", state.adapters.pending.len()),
            ("failed", state.adapters.failed.len()),
        ],
    );
}

fn gateways_by_state(links: &BTreeMap<SocketAddr, GatewayLink>) -> [(&'static str, usize); 3] {
    let unreachable = links.values().filter(|link| link.error.is_some()).count();
    let is_using = |link: &&GatewayLink| {
        let registration = link.last_registration.as_ref();
        link.error.is_none() && registration.is_some_and(|(_, response)| response.usable)
    };
    let using = links.values().filter(is_using).count();
    [("using", using), ("not_using", links.len() - using - unreachable), ("unreachable", unreachable)]
}

fn write_gateways(
    writer: &mut MetricsWriter<'_>,
    by_state: [(&'static str, usize); 3],
    [accepted, rejected]: [u64; 2],
) {
    writer.gauge_by(
        "moongate_sidecar_gateways",
        "Gateways by state: `using` the engine, `not_using` it, `unreachable`",
        "state",
        by_state,
    );
    writer.counter_by(
        "moongate_sidecar_registrations_total",
        "Registrations and renewals by outcome: `accepted`, `rejected` (or failed)",
        "outcome",
        [("accepted", accepted), ("rejected", rejected)],
    );
}

/// All metrics of a sidecar as Prometheus scrapes them: the source of the table in `docs/metrics.md`.
#[must_use]
pub fn all_metrics() -> String {
    let observation = EngineObservation { started_at: Instant::now(), load: Some(EngineLoad::default()) };
    text(SidecarState { observation: Some(observation), ..SidecarState::default() }, &BTreeMap::new(), [0; 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_head_and_its_samples() {
        let links = BTreeMap::from([(SocketAddr::from(([127, 0, 0, 1], 1)), GatewayLink::default())]);
        let text = text(SidecarState::default(), &links, [3, 0]);
        assert!(
            text.contains("# TYPE moongate_sidecar_engine_up gauge\nmoongate_sidecar_engine_up 0\n"),
            "{text}"
        );
        assert!(text.contains("moongate_sidecar_gateways{state=\"not_using\"} 1\n"), "{text}");
        assert!(text.contains("moongate_sidecar_registrations_total{outcome=\"accepted\"} 3\n"), "{text}");
        assert!(!text.contains("engine_running"), "the load is not known");
    }
}

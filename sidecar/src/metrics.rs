//! The sidecar's metrics, in Prometheus' text format, the format of the engines' own metrics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;

use moongate_discovery::EngineLoad;
use tokio::time::Instant;

use crate::registrations::GatewayLink;
use crate::state::{EngineObservation, SidecarState};

/// All metrics as text. `registrations`: the numbers of accepted and of rejected registrations.
pub(crate) fn text(
    state: &SidecarState,
    links: &BTreeMap<SocketAddr, GatewayLink>,
    registrations: [u64; 2],
) -> String {
    let mut text = String::new();
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, u64)]| {
        let _infallible =
            writeln!(text, "# HELP moongate_sidecar_{name} {help}\n# TYPE moongate_sidecar_{name} {kind}");
        for (labels, value) in samples {
            let _infallible = writeln!(text, "moongate_sidecar_{name}{labels} {value}");
        }
    };
    let load = state.observation.as_ref().and_then(|observation| observation.load.as_ref());
    family("engine_up", "gauge", "1 while the engine serves.", &[("", up(state))]);
    family(
        "draining",
        "gauge",
        "1 while the engine is being drained.",
        &[("", state.drain.is_some().into())],
    );
    if let Some(load) = load {
        family(
            "engine_running",
            "gauge",
            "Requests running on the engine, if reported.",
            &[("", load.running.into())],
        );
        family(
            "engine_waiting",
            "gauge",
            "Requests queued on the engine, if reported.",
            &[("", load.waiting.into())],
        );
    }
    let count =
        |predicate: fn(&GatewayLink) -> bool| links.values().filter(|link| predicate(link)).count() as u64;
    let gateways = [
        (
            r#"{state="using"}"#,
            count(|link| {
                link.error.is_none() && link.last_registration.as_ref().is_some_and(|(_, a)| a.usable)
            }),
        ),
        (
            r#"{state="not_using"}"#,
            count(|link| {
                link.error.is_none() && link.last_registration.as_ref().is_none_or(|(_, a)| !a.usable)
            }),
        ),
        (r#"{state="unreachable"}"#, count(|link| link.error.is_some())),
    ];
    family(
        "gateways",
        "gauge",
        "Gateways by state: `using` the engine, `not_using` it, `unreachable`.",
        &gateways,
    );
    let [accepted, rejected] = registrations;
    let registrations = [(r#"{outcome="accepted"}"#, accepted), (r#"{outcome="rejected"}"#, rejected)];
    family(
        "registrations_total",
        "counter",
        "Registrations and renewals by outcome: `accepted`, `rejected` (or failed).",
        &registrations,
    );
    let adapters = [
        (r#"{state="loaded"}"#, state.adapters.loaded.len() as u64),
        (r#"{state="pending"}"#, state.adapters.pending.len() as u64),
        (r#"{state="failed"}"#, state.adapters.failed.len() as u64),
    ];
    family(
        "lora_adapters",
        "gauge",
        "Desired LoRA adapters by state: `loaded`, `pending`, `failed`.",
        &adapters,
    );
    moongate_runtime::append_process_metrics(&mut text);
    text
}

/// All metrics of a sidecar as Prometheus scrapes them: the source of the table in `docs/metrics.md`.
#[must_use]
pub fn all_metrics() -> String {
    let observation = EngineObservation { started_at: Instant::now(), load: Some(EngineLoad::default()) };
    text(
        &SidecarState { observation: Some(observation), ..SidecarState::default() },
        &BTreeMap::new(),
        [0; 2],
    )
}

fn up(state: &SidecarState) -> u64 {
    (state.local_engine.is_some() && state.error.is_none()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_has_its_head_and_its_samples() {
        let links = BTreeMap::from([(SocketAddr::from(([127, 0, 0, 1], 1)), GatewayLink::default())]);
        let text = text(&SidecarState::default(), &links, [3, 0]);
        assert!(
            text.contains("# TYPE moongate_sidecar_engine_up gauge\nmoongate_sidecar_engine_up 0\n"),
            "{text}"
        );
        assert!(text.contains("moongate_sidecar_gateways{state=\"not_using\"} 1\n"), "{text}");
        assert!(text.contains("moongate_sidecar_registrations_total{outcome=\"accepted\"} 3\n"), "{text}");
        assert!(!text.contains("engine_running"), "the load is not known");
    }
}

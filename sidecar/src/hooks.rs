//! Conditions of the upgrade hooks `/drain` and `/settled`: what they still wait for. Pure: callers pass the time.

use std::net::SocketAddr;
use std::time::Duration;

use moongate_discovery::EngineLoad;
use tokio::time::Instant;

use crate::registrations::GatewayLink;
use crate::state::{EngineObservation, SidecarState};

/// Time for which gateways must have no request on the engine: requests that were routed before the drain have arrived by then.
const MIN_QUIET: Duration = Duration::from_millis(200);

/// What a drain still waits for; `None`: the engine is idle and no gateway routes to it.
pub(crate) fn drain_blocker(
    state: &SidecarState,
    links: &[(SocketAddr, &GatewayLink)],
    lease: Duration,
    now: Instant,
) -> Option<String> {
    let Some(drain) = &state.drain else { return Some("drain not started".to_owned()) };
    if state.error.is_some() {
        // An engine that is down has no requests.
        return None;
    }
    let mut quiet_since = drain.since;
    for (gateway, link) in links {
        let Some((sent_at, response)) = &link.last_registration else { continue };
        // An unreachable gateway may route to the engine until its lease has expired.
        let lease_end = *sent_at + lease;
        let since = match link.quiet_since.filter(|_| *sent_at >= drain.since) {
            Some(since) => since.max(drain.since),
            None if link.error.is_some() && lease_end <= now => lease_end,
            None if link.error.is_some() => {
                return Some(format!("gateway {gateway} is unreachable"));
            }
            None if response.usable => return Some(format!("gateway {gateway} still routes to the engine")),
            None => return Some(format!("requests of gateway {gateway}")),
        };
        quiet_since = quiet_since.max(since);
    }
    let is_current = |observed: &&EngineObservation| observed.started_at >= quiet_since + MIN_QUIET;
    let Some(observation) = state.observation.as_ref().filter(is_current) else {
        return Some("next load check".to_owned());
    };
    match &observation.load {
        None => Some("engine load unknown".to_owned()),
        Some(load) if !is_idle(load) => Some("requests in progress on the engine".to_owned()),
        Some(_) => None,
    }
}

/// Whether the engine has no running, queued or transferring request.
fn is_idle(load: &EngineLoad) -> bool {
    load.running == 0 && load.waiting == 0 && load.handing_over == 0
}

/// Why the engine is not yet back in service after a restart; `None`: it is.
pub(crate) fn settle_blocker(
    state: &SidecarState,
    links: &[(SocketAddr, &GatewayLink)],
    has_gateways: bool,
) -> Option<String> {
    if state.drain.is_some() {
        return Some("the restart of the engine".to_owned());
    }
    if let Some(error) = &state.error {
        return Some(format!("the engine: {error}"));
    }
    if state.local_engine.is_none() {
        return Some("the engine".to_owned());
    }
    if let Some(name) = state.adapters.pending.first() {
        return Some(format!("the LoRA adapter {name}"));
    }
    let mut usable = 0;
    for (gateway, link) in links {
        match &link.last_registration {
            // Unreachable gateways count only if no other gateway uses the engine.
            _ if link.error.is_some() => {}
            None => return Some(format!("gateway {gateway}")),
            Some((_, response)) if !response.usable => {
                let reason =
                    response.reason.as_deref().unwrap_or("it does not use the engine and reports no reason");
                return Some(format!("gateway {gateway}: {reason}"));
            }
            Some(_) => usable += 1,
        }
    }
    (usable == 0 && has_gateways).then(|| "no reachable gateway".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moongate_discovery::{EngineKind, EngineRole};
    use reqwest::StatusCode;

    use super::*;
    use crate::registrations::{RegistrationError, RegistrationResponse};
    use crate::state::{EngineUnavailableError, LocalEngine};

    const LEASE: Duration = Duration::from_secs(6);

    fn unreachable() -> Option<Arc<RegistrationError>> {
        let error =
            RegistrationError::Rejected { status: StatusCode::SERVICE_UNAVAILABLE, body: String::new() };
        Some(Arc::new(error))
    }

    fn gateway() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 9000))
    }

    fn serving(look: Instant, running: u32) -> SidecarState {
        let mut state = SidecarState::default();
        let url = "http://127.0.0.1:8000".to_owned();
        let found = LocalEngine {
            url: url.clone(),
            advertised: url,
            engine: EngineKind::Vllm,
            role: EngineRole::Plain,
        };
        let load = EngineLoad { running, ..EngineLoad::default() };
        state.set_up(found, EngineObservation { started_at: look, load: Some(load) });
        state
    }

    fn link(sent_at: Instant, usable: bool, load: u32, quiet_since: Option<Instant>) -> GatewayLink {
        let response = RegistrationResponse { usable, load, ..RegistrationResponse::default() };
        GatewayLink { last_registration: Some((sent_at, response)), quiet_since, ..GatewayLink::default() }
    }

    #[test]
    fn a_drain_ends_when_gateways_are_quiet_and_the_engine_is_idle() {
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        let blocker = |state: &SidecarState, link: &GatewayLink, ms| {
            drain_blocker(state, &[(gateway(), link)], LEASE, at(ms))
        };
        let mut state = serving(at(400), 0);
        assert!(blocker(&state, &link(at(10), true, 0, None), 500).is_some(), "no drain was requested");
        state.drain(now);
        for (link, part) in [
            (link(at(10), true, 0, None), "still routes to the engine"),
            (link(at(10), false, 2, None), "requests of gateway"),
            (link(now - LEASE, false, 0, Some(now - LEASE)), "requests of gateway"),
            (link(at(10), false, 0, Some(at(300))), "next load check"),
        ] {
            let blocker = blocker(&state, &link, 500).unwrap();
            assert!(blocker.contains(part), "{blocker}");
        }
        assert_eq!(blocker(&state, &link(at(10), false, 0, Some(at(10))), 500), None);
        assert_eq!(
            blocker(&state, &link(at(10), false, 0, Some(now - LEASE)), 500),
            None,
            "quiet since before the drain"
        );
        let mut busy = serving(at(400), 1);
        busy.drain(now);
        assert!(blocker(&busy, &link(at(10), false, 0, Some(at(10))), 500).unwrap().contains("in progress"));
        busy.set_down(EngineUnavailableError::NotReady { reason: "refused".to_owned(), timed_out: false });
        assert_eq!(
            blocker(&busy, &link(at(10), true, 1, None), 500),
            None,
            "an engine that is down has no requests"
        );
    }

    #[test]
    fn a_drain_waits_for_the_lease_of_an_unreachable_gateway() {
        let now = Instant::now();
        let unreachable = GatewayLink { error: unreachable(), ..link(now, true, 1, None) };
        let mut state = serving(now + LEASE * 2, 0);
        state.drain(now);
        let blocker = |after| drain_blocker(&state, &[(gateway(), &unreachable)], LEASE, now + after);
        assert!(blocker(LEASE / 2).unwrap().contains("is unreachable"));
        assert_eq!(blocker(LEASE * 2), None);
    }

    #[test]
    fn an_engine_is_settled_when_gateways_use_it() {
        let now = Instant::now();
        let mut state = serving(now, 0);
        let used = link(now, true, 0, None);
        let unused = link(now, false, 0, None);
        let dead = GatewayLink { error: unreachable(), ..GatewayLink::default() };
        let blocker = |state: &SidecarState, links: &[&GatewayLink]| {
            let links: Vec<_> = links.iter().map(|link| (gateway(), *link)).collect();
            settle_blocker(state, &links, true)
        };
        assert_eq!(blocker(&state, &[&used, &dead]), None);
        assert!(blocker(&state, &[&used, &unused]).is_some());
        assert!(blocker(&state, &[&used, &GatewayLink::default()]).is_some(), "not registered yet");
        assert!(blocker(&state, &[&dead]).is_some());
        assert!(blocker(&state, &[]).is_some(), "no gateway is found");
        assert_eq!(settle_blocker(&state, &[], false), None, "no gateway is configured");
        state.adapters.pending.push("a".to_owned());
        assert!(blocker(&state, &[&used]).unwrap().contains('a'));
        state.drain(now);
        assert!(blocker(&state, &[&used]).unwrap().contains("restart"));
    }
}

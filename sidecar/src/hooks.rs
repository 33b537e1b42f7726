//! What an operator asks before and after it restarts the engine: is it drained, is it settled. Pure: time is given.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::engine::is_idle;
use crate::gateway_link::GatewayLink;
use crate::state::SidecarState;

/// Gateways must have nothing on the engine for so long: a request that was decided on before the hold is there by then.
const MIN_QUIET: Duration = Duration::from_millis(200);

/// What a drain still waits for; `None`: the engine has nothing to do, and gets nothing to do.
pub(crate) fn drain_blocker(
    state: &SidecarState,
    links: &[(SocketAddr, &GatewayLink)],
    lease: Duration,
    now: Instant,
) -> Option<String> {
    let Some(drain) = &state.drain else { return Some("the drain to begin".to_owned()) };
    if state.error.is_some() {
        // An engine that is down has no requests.
        return None;
    }
    let mut quiet_since = drain.since;
    for (gateway, link) in links {
        let Some((told, answer)) = &link.last_registration else { continue };
        // A gateway that does not answer sends requests until its lease is over.
        let forgotten = *told + lease;
        let since = match link.quiet_since.filter(|_| *told >= drain.since) {
            Some(since) => since.max(drain.since),
            None if link.error.is_some() && forgotten <= now => forgotten,
            None if link.error.is_some() => {
                return Some(format!("gateway {gateway}, which does not answer"));
            }
            None if answer.usable => return Some(format!("gateway {gateway} to send nothing more")),
            None => return Some(format!("requests of gateway {gateway}")),
        };
        quiet_since = quiet_since.max(since);
    }
    let Some(look) = state.observation.as_ref().filter(|look| look.started_at >= quiet_since + MIN_QUIET)
    else {
        return Some("a look at the engine".to_owned());
    };
    match &look.load {
        None => Some("the engine, which does not tell its load".to_owned()),
        Some(load) if !is_idle(load) => Some("requests in progress on the engine".to_owned()),
        Some(_) => None,
    }
}

/// What stands against taking the engine for restarted and back at work; `None`: nothing.
pub(crate) fn settle_blocker(
    state: &SidecarState,
    links: &[(SocketAddr, &GatewayLink)],
    has_gateways: bool,
) -> Option<String> {
    if state.drain.is_some() {
        return Some("the restart of the engine".to_owned());
    }
    if let Some(trouble) = &state.error {
        return Some(format!("the engine: {trouble}"));
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
            // Those that do not answer are waited for only if no other has the engine.
            _ if link.error.is_some() => {}
            None => return Some(format!("gateway {gateway}")),
            Some((_, answer)) if !answer.usable => {
                let reason =
                    answer.reason.as_deref().unwrap_or("it does not say why it does not use the engine");
                return Some(format!("gateway {gateway}: {reason}"));
            }
            Some(_) => usable += 1,
        }
    }
    (usable == 0 && has_gateways).then(|| "a gateway that answers".to_owned())
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineLoad, EngineRole};

    use super::*;
    use crate::gateway_link::RegistrationResponse;
    use crate::state::{EngineObservation, LocalEngine};

    const LEASE: Duration = Duration::from_secs(6);

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

    fn link(told: Instant, usable: bool, load: u32, quiet_since: Option<Instant>) -> GatewayLink {
        let answer = RegistrationResponse { usable, load, ..RegistrationResponse::default() };
        GatewayLink { last_registration: Some((told, answer)), quiet_since, ..GatewayLink::default() }
    }

    #[test]
    fn drained_is_who_gets_nothing_and_then_has_nothing() {
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        let waits = |state: &SidecarState, link: &GatewayLink, ms| {
            drain_blocker(state, &[(gateway(), link)], LEASE, at(ms))
        };
        let mut state = serving(at(400), 0);
        assert!(waits(&state, &link(at(10), true, 0, None), 500).is_some(), "not asked for");
        state.drain(now);
        for (link, part) in [
            (link(at(10), true, 0, None), "send nothing more"),
            (link(at(10), false, 2, None), "requests of gateway"),
            (link(now - LEASE, false, 0, Some(now - LEASE)), "requests of gateway"),
            (link(at(10), false, 0, Some(at(300))), "a look at the engine"),
        ] {
            let waits = waits(&state, &link, 500).unwrap();
            assert!(waits.contains(part), "{waits}");
        }
        assert_eq!(waits(&state, &link(at(10), false, 0, Some(at(10))), 500), None);
        assert_eq!(waits(&state, &link(at(10), false, 0, Some(now - LEASE)), 500), None, "held before, too");
        let mut busy = serving(at(400), 1);
        busy.drain(now);
        assert!(waits(&busy, &link(at(10), false, 0, Some(at(10))), 500).unwrap().contains("in progress"));
        busy.set_down("refused".to_owned());
        assert_eq!(waits(&busy, &link(at(10), true, 1, None), 500), None, "a dead engine has nothing");
    }

    #[test]
    fn a_silent_gateway_is_waited_for_until_its_lease_is_over() {
        let now = Instant::now();
        let silent = GatewayLink { error: Some("refused".to_owned()), ..link(now, true, 1, None) };
        let mut state = serving(now + LEASE * 2, 0);
        state.drain(now);
        let waits = |after| drain_blocker(&state, &[(gateway(), &silent)], LEASE, now + after);
        assert!(waits(LEASE / 2).unwrap().contains("does not answer"));
        assert_eq!(waits(LEASE * 2), None);
    }

    #[test]
    fn settled_is_an_engine_that_gateways_use() {
        let now = Instant::now();
        let mut state = serving(now, 0);
        let used = link(now, true, 0, None);
        let unused = link(now, false, 0, None);
        let dead = GatewayLink { error: Some("refused".to_owned()), ..GatewayLink::default() };
        let waits = |state: &SidecarState, links: &[&GatewayLink]| {
            let links: Vec<_> = links.iter().map(|link| (gateway(), *link)).collect();
            settle_blocker(state, &links, true)
        };
        assert_eq!(waits(&state, &[&used, &dead]), None);
        assert!(waits(&state, &[&used, &unused]).is_some());
        assert!(waits(&state, &[&used, &GatewayLink::default()]).is_some(), "it has not been told yet");
        assert!(waits(&state, &[&dead]).is_some());
        assert!(waits(&state, &[]).is_some(), "none is found");
        assert_eq!(settle_blocker(&state, &[], false), None, "none is wanted");
        state.adapters.pending.push("a".to_owned());
        assert!(waits(&state, &[&used]).unwrap().contains('a'));
        state.drain(now);
        assert!(waits(&state, &[&used]).unwrap().contains("restart"));
    }
}

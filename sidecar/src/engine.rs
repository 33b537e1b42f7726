//! Finds the engine, and looks at it again and again.

use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{
    EngineLoad, EngineLoadError, EngineRole, ProbeOptions, ProbeVerdict, RoleNames, StaticInstance,
    fetch_load, probe_once,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::options::SidecarOptions;
use crate::sidecar::SidecarContext;
use crate::state::{EngineObservation, LocalEngine};

/// Between two looks while the engine is awaited, or while somebody waits for it to be idle.
const FAST_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Between two looks while it serves.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// After so long everything is asked anew: what it serves may have changed.
const REPROBE_INTERVAL: Duration = Duration::from_secs(30);
/// Unanswered questions in a row until the engine counts as away: one that is busy answers late.
const MAX_MISSES: u32 = 5;

/// Looks until `stop`.
pub(crate) async fn watch(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut watcher = EngineWatcher { last_probe: None, misses: 0 };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = watcher.poll(&sidecar) => {}
        }
        let pause = {
            let state = sidecar.state.borrow();
            if state.error.is_some() || state.drain.is_some() || state.local_engine.is_none() {
                FAST_POLL_INTERVAL
            } else {
                POLL_INTERVAL
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sidecar.drain_requested.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

struct EngineWatcher {
    /// When everything was last asked, and by whom it was answered; `None` while the engine is away.
    last_probe: Option<(Instant, LocalEngine)>,
    misses: u32,
}

impl EngineWatcher {
    async fn poll(&mut self, sidecar: &SidecarContext) {
        let begun = Instant::now();
        let known = self.last_probe.take();
        let (asked, found) = match known {
            Some((asked, found)) if begun.duration_since(asked) < REPROBE_INTERVAL => (asked, found),
            known => match find_engine(sidecar).await {
                Ok(found) => (begun, found),
                Err(missed) => {
                    self.last_probe = known;
                    return self.record_miss(sidecar, missed.reason, missed.timed_out);
                }
            },
        };
        let begun = Instant::now();
        let api_key = sidecar.options.engine_api_key.as_deref();
        let load = match fetch_load(&sidecar.client, found.engine, &found.url, api_key).await {
            Ok(load) => Some(load),
            Err(EngineLoadError::Missing(..)) => None,
            Err(trouble) => {
                self.last_probe = Some((asked, found));
                return self.record_miss(sidecar, trouble.to_string(), trouble.timed_out());
            }
        };
        self.misses = 0;
        self.last_probe = Some((asked, found.clone()));
        sidecar.state.send_modify(|state| {
            if state.error.is_some() || state.local_engine.as_ref() != Some(&found) {
                tracing::info!(url = found.url, engine = ?found.engine, role = %found.role, "the engine serves");
            }
            state.expire_drain(begun);
            state.set_up(found, EngineObservation { started_at: begun, load });
        });
    }

    fn record_miss(&mut self, sidecar: &SidecarContext, reason: String, timed_out: bool) {
        self.misses += 1;
        if timed_out && self.last_probe.is_some() && self.misses < MAX_MISSES {
            return;
        }
        self.last_probe = None;
        sidecar.state.send_modify(|state| {
            state.expire_drain(Instant::now());
            if state.set_down(reason.clone()) {
                tracing::warn!(reason, "the engine does not serve");
            }
        });
    }
}

/// Why no engine was found.
struct EngineNotFound {
    reason: String,
    /// Whether one may be there that was too busy to answer.
    timed_out: bool,
}

impl From<String> for EngineNotFound {
    fn from(reason: String) -> Self {
        Self { reason, timed_out: false }
    }
}

/// The first of the possible addresses at which an engine serves. One may listen at the pod's address alone.
async fn find_engine(sidecar: &SidecarContext) -> Result<LocalEngine, EngineNotFound> {
    let options = &sidecar.options;
    let mut urls = options.engine_url.clone();
    for url in &options.engine_url {
        let other = advertised_url(url, options.advertise_host.as_deref())?;
        if !urls.contains(&other) {
            urls.push(other);
        }
    }
    let (mut reasons, mut timed_out) = (Vec::new(), false);
    for url in &urls {
        match probe(sidecar, url).await {
            Ok(found) => return Ok(found),
            Err(missed) => {
                timed_out |= missed.timed_out;
                reasons.push(missed.reason);
            }
        }
    }
    Err(EngineNotFound { reason: reasons.join("; "), timed_out })
}

async fn probe(sidecar: &SidecarContext, url: &str) -> Result<LocalEngine, EngineNotFound> {
    let options = &sidecar.options;
    let role = options.role.or_else(role_of_group).unwrap_or(EngineRole::Plain);
    let verdict = match probe_as(sidecar, url, role).await? {
        // What the engine itself says goes before what a name says, but not before what a person says.
        ProbeVerdict::NotReady { facts: Some(facts), .. }
            if options.role.is_none() && facts.reported_role.is_some_and(|reported| reported != role) =>
        {
            let reported = facts.reported_role.unwrap_or(role);
            return local_engine(options, url, reported, probe_as(sidecar, url, reported).await?);
        }
        verdict => verdict,
    };
    local_engine(options, url, role, verdict)
}

async fn probe_as(sidecar: &SidecarContext, url: &str, role: EngineRole) -> Result<ProbeVerdict, String> {
    let options = &sidecar.options;
    let instance = StaticInstance {
        connector: options.kv_connector,
        bootstrap_port: options.bootstrap_port,
        ..StaticInstance::new(role, url)
    };
    let probing = ProbeOptions {
        api_key: options.engine_api_key.clone(),
        trust: Some(sidecar.engine_trust.clone()),
        ..ProbeOptions::default()
    };
    let report = probe_once(&instance, &probing).await.map_err(|error| error.to_string())?;
    Ok(report.verdict)
}

fn local_engine(
    options: &SidecarOptions,
    url: &str,
    role: EngineRole,
    verdict: ProbeVerdict,
) -> Result<LocalEngine, EngineNotFound> {
    let facts = match verdict {
        // That its connector is not known yet is for the gateway to settle, which sees the other engines.
        ProbeVerdict::Ready(facts) | ProbeVerdict::NoConnector { facts, .. } => facts,
        ProbeVerdict::NotReady { reason, timed_out, .. } => return Err(EngineNotFound { reason, timed_out }),
    };
    let advertised = advertised_url(url, options.advertise_host.as_deref())?;
    Ok(LocalEngine { url: url.trim_end_matches('/').to_owned(), advertised, engine: facts.engine, role })
}

/// The engine's URL with the host under which others reach it.
fn advertised_url(url: &str, host: Option<&str>) -> Result<String, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{url}: {error}");
    let mut parsed = url::Url::parse(url).map_err(|error| wrong(&error))?;
    if let Some(host) = host {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        parsed.set_host(Some(&bracketed)).map_err(|error| wrong(&error))?;
    }
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

/// The role that the name of the pod's role in its RoleBasedGroup tells.
fn role_of_group() -> Option<EngineRole> {
    let own = rbg_api::RbgIdentity::from_env(|name| std::env::var(name).ok());
    RoleNames::default().role(&own.role?)
}

/// Whether the engine has nothing to do.
pub(crate) fn is_idle(load: &EngineLoad) -> bool {
    load.running == 0 && load.waiting == 0 && load.handing_over == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_the_pods_address() {
        let url = "http://127.0.0.1:8000/";
        assert_eq!(advertised_url(url, None).unwrap(), "http://127.0.0.1:8000");
        assert_eq!(advertised_url(url, Some("10.1.2.3")).unwrap(), "http://10.1.2.3:8000");
        assert_eq!(advertised_url(url, Some("fd00::1")).unwrap(), "http://[fd00::1]:8000");
        assert!(advertised_url("nowhere", None).is_err());
    }
}

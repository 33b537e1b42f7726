//! Finds the engine and polls it.

use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{
    DiscoveryError, EngineLoadError, EngineRole, ProbeOptions, ProbeVerdict, RoleNames, StaticInstance,
    fetch_load, probe_once,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::context::SidecarContext;
use crate::options::SidecarOptions;
use crate::state::{EngineObservation, EngineUnavailableError, LocalEngine};

/// Poll interval while the engine is down or draining.
const FAST_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Poll interval while the engine serves.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of complete probes, since the engine's facts may have changed.
const REPROBE_INTERVAL: Duration = Duration::from_secs(30);
/// Consecutive timeouts after which the engine counts as down: a busy engine responds late.
const MAX_MISSES: u32 = 5;

/// Polls the engine until `stop`.
pub(crate) async fn watch(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut watcher = EngineWatcher { last_probe: None, misses: 0 };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = watcher.poll(&sidecar) => {}
        }
        let delay = {
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
            () = tokio::time::sleep(delay) => {}
        }
    }
}

struct EngineWatcher {
    /// Time and result of the last complete probe; `None` while the engine is down.
    last_probe: Option<(Instant, LocalEngine)>,
    misses: u32,
}

impl EngineWatcher {
    async fn poll(&mut self, sidecar: &SidecarContext) {
        let started = Instant::now();
        let previous = self.last_probe.take();
        let (probed_at, engine) = match previous {
            Some((probed_at, engine)) if started.duration_since(probed_at) < REPROBE_INTERVAL => {
                (probed_at, engine)
            }
            previous => match find_engine(sidecar).await {
                Ok(engine) => (started, engine),
                Err(error) => {
                    self.last_probe = previous;
                    return self.record_miss(sidecar, error);
                }
            },
        };
        let started = Instant::now();
        let api_key = sidecar.options.engine_api_key.as_deref();
        let load = match fetch_load(&sidecar.client, engine.engine, &engine.url, api_key).await {
            Ok(loads) => Some(loads.total()),
            Err(EngineLoadError::Missing { .. }) => None,
            Err(error) => {
                self.last_probe = Some((probed_at, engine));
                return self.record_miss(sidecar, error.into());
            }
        };
        self.misses = 0;
        self.last_probe = Some((probed_at, engine.clone()));
        sidecar.state.send_modify(|state| {
            if state.error.is_some() || state.local_engine.as_ref() != Some(&engine) {
                tracing::info!(url = engine.url, engine = ?engine.engine, role = %engine.role, "the engine serves");
            }
            state.expire_drain(started);
            state.set_up(engine, EngineObservation { started_at: started, load });
        });
    }

    fn record_miss(&mut self, sidecar: &SidecarContext, error: EngineUnavailableError) {
        self.misses += 1;
        if error.timed_out() && self.last_probe.is_some() && self.misses < MAX_MISSES {
            return;
        }
        self.last_probe = None;
        sidecar.state.send_modify(|state| {
            state.expire_drain(Instant::now());
            let reason = error.to_string();
            if state.set_down(error) {
                tracing::warn!(reason, "the engine does not serve");
            }
        });
    }
}

/// The first candidate address at which an engine serves, also under the pod's own address: an engine may listen there only.
async fn find_engine(sidecar: &SidecarContext) -> Result<LocalEngine, EngineUnavailableError> {
    let options = &sidecar.options;
    let mut urls = options.engine_url.clone();
    for url in &options.engine_url {
        let advertised = advertised_url(url, options.advertise_host.as_deref())?;
        if !urls.contains(&advertised) {
            urls.push(advertised);
        }
    }
    let mut errors = Vec::new();
    for url in &urls {
        match probe(sidecar, url).await {
            Ok(engine) => return Ok(engine),
            Err(error) => errors.push(error),
        }
    }
    Err(EngineUnavailableError::NotFound(errors))
}

async fn probe(sidecar: &SidecarContext, url: &str) -> Result<LocalEngine, EngineUnavailableError> {
    let options = &sidecar.options;
    let role = options.role.or_else(role_of_group).unwrap_or(EngineRole::Plain);
    let verdict = match probe_as(sidecar, url, role).await? {
        // The role that the engine reports overrides one derived from a name, but not `--role`.
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

async fn probe_as(
    sidecar: &SidecarContext,
    url: &str,
    role: EngineRole,
) -> Result<ProbeVerdict, DiscoveryError> {
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
    Ok(probe_once(&instance, &probing).await?.verdict)
}

fn local_engine(
    options: &SidecarOptions,
    url: &str,
    role: EngineRole,
    verdict: ProbeVerdict,
) -> Result<LocalEngine, EngineUnavailableError> {
    let facts = match verdict {
        // The gateway can derive an unknown connector from the other engines.
        ProbeVerdict::Ready(facts) | ProbeVerdict::NoConnector { facts, .. } => facts,
        ProbeVerdict::NotReady { reason, timed_out, .. } => {
            return Err(EngineUnavailableError::NotReady { reason, timed_out });
        }
    };
    let advertised = advertised_url(url, options.advertise_host.as_deref())?;
    Ok(LocalEngine { url: url.trim_end_matches('/').to_owned(), advertised, engine: facts.engine, role })
}

/// The engine's URL with the advertised host.
fn advertised_url(url: &str, host: Option<&str>) -> Result<String, EngineUnavailableError> {
    let invalid = |source| EngineUnavailableError::Url { url: url.to_owned(), source };
    let mut parsed = url::Url::parse(url).map_err(invalid)?;
    if let Some(host) = host {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        parsed.set_host(Some(&bracketed)).map_err(invalid)?;
    }
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

/// The engine role derived from the name of the pod's role in its RoleBasedGroup.
fn role_of_group() -> Option<EngineRole> {
    let own = rbg_api::RbgIdentity::from_env(|name| std::env::var(name).ok());
    RoleNames::default().role(&own.role?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advertised_url_has_the_pods_address() {
        let url = "http://127.0.0.1:8000/";
        assert_eq!(advertised_url(url, None).unwrap(), "http://127.0.0.1:8000");
        assert_eq!(advertised_url(url, Some("10.1.2.3")).unwrap(), "http://10.1.2.3:8000");
        assert_eq!(advertised_url(url, Some("fd00::1")).unwrap(), "http://[fd00::1]:8000");
        assert!(advertised_url("nowhere", None).is_err());
    }
}

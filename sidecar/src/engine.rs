//! Finds the engine, and looks at it again and again.

use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::{
    EngineLoad, LoadTrouble, ProbeOptions, Role, RoleNames, StaticInstance, Verdict, ask_load, probe_once,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::options::SidecarOptions;
use crate::sidecar::Sidecar;
use crate::state::{Found, Look};

/// Between two looks while the engine is awaited, or while somebody waits for it to be idle.
const SOON: Duration = Duration::from_millis(100);
/// Between two looks while it serves.
const EVERY: Duration = Duration::from_secs(1);
/// After so long everything is asked anew: what it serves may have changed.
const ANEW: Duration = Duration::from_secs(30);
/// Unanswered questions in a row until the engine counts as away: one that is busy answers late.
const MISSES: u32 = 5;

/// Looks until `stop`.
pub(crate) async fn watch(sidecar: Arc<Sidecar>, stop: CancellationToken) {
    let mut watcher = Watcher { asked: None, misses: 0 };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = watcher.look(&sidecar) => {}
        }
        let pause = {
            let state = sidecar.state.borrow();
            if state.trouble.is_some() || state.drain.is_some() || state.found.is_none() {
                SOON
            } else {
                EVERY
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sidecar.drain_asked.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

struct Watcher {
    /// When everything was last asked, and by whom it was answered; `None` while the engine is away.
    asked: Option<(Instant, Found)>,
    misses: u32,
}

impl Watcher {
    async fn look(&mut self, sidecar: &Sidecar) {
        let begun = Instant::now();
        let known = self.asked.take();
        let (asked, found) = match known {
            Some((asked, found)) if begun.duration_since(asked) < ANEW => (asked, found),
            known => match find(sidecar).await {
                Ok(found) => (begun, found),
                Err(missed) => {
                    self.asked = known;
                    return self.missed(sidecar, missed.reason, missed.timed_out);
                }
            },
        };
        let begun = Instant::now();
        let api_key = sidecar.options.engine_api_key.as_deref();
        let load = match ask_load(&sidecar.client, found.engine, &found.url, api_key).await {
            Ok(load) => Some(load),
            Err(LoadTrouble::NotTold(..)) => None,
            Err(trouble) => {
                self.asked = Some((asked, found));
                return self.missed(sidecar, trouble.to_string(), trouble.timed_out());
            }
        };
        self.misses = 0;
        self.asked = Some((asked, found.clone()));
        sidecar.state.send_modify(|state| {
            if state.trouble.is_some() || state.found.as_ref() != Some(&found) {
                tracing::info!(url = found.url, engine = ?found.engine, role = %found.role, "the engine serves");
            }
            state.expire(begun);
            state.serves(found, Look { begun, load });
        });
    }

    fn missed(&mut self, sidecar: &Sidecar, reason: String, timed_out: bool) {
        self.misses += 1;
        if timed_out && self.asked.is_some() && self.misses < MISSES {
            return;
        }
        self.asked = None;
        sidecar.state.send_modify(|state| {
            state.expire(Instant::now());
            if state.fails(reason.clone()) {
                tracing::warn!(reason, "the engine does not serve");
            }
        });
    }
}

/// Why no engine was found.
struct Missed {
    reason: String,
    /// Whether one may be there that was too busy to answer.
    timed_out: bool,
}

impl From<String> for Missed {
    fn from(reason: String) -> Self {
        Self { reason, timed_out: false }
    }
}

/// The first of the possible addresses at which an engine serves. One may listen at the pod's address alone.
async fn find(sidecar: &Sidecar) -> Result<Found, Missed> {
    let options = &sidecar.options;
    let mut urls = options.engine_url.clone();
    for url in &options.engine_url {
        let other = advertised(url, options.advertise_host.as_deref())?;
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
    Err(Missed { reason: reasons.join("; "), timed_out })
}

async fn probe(sidecar: &Sidecar, url: &str) -> Result<Found, Missed> {
    let options = &sidecar.options;
    let role = options.role.or_else(role_of_group).unwrap_or(Role::Plain);
    let verdict = match probe_as(sidecar, url, role).await? {
        // What the engine itself says goes before what a name says, but not before what a person says.
        Verdict::NotReady { facts: Some(facts), .. }
            if options.role.is_none() && facts.reported_role.is_some_and(|reported| reported != role) =>
        {
            let reported = facts.reported_role.unwrap_or(role);
            return found(options, url, reported, probe_as(sidecar, url, reported).await?);
        }
        verdict => verdict,
    };
    found(options, url, role, verdict)
}

async fn probe_as(sidecar: &Sidecar, url: &str, role: Role) -> Result<Verdict, String> {
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

fn found(options: &SidecarOptions, url: &str, role: Role, verdict: Verdict) -> Result<Found, Missed> {
    let facts = match verdict {
        // That its connector is not known yet is for the gateway to settle, which sees the other engines.
        Verdict::Ready(facts) | Verdict::NoConnector { facts, .. } => facts,
        Verdict::NotReady { reason, timed_out, .. } => return Err(Missed { reason, timed_out }),
    };
    let advertised = advertised(url, options.advertise_host.as_deref())?;
    Ok(Found { url: url.trim_end_matches('/').to_owned(), advertised, engine: facts.engine, role })
}

/// The engine's URL with the host under which others reach it.
fn advertised(url: &str, host: Option<&str>) -> Result<String, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{url}: {error}");
    let mut parsed = url::Url::parse(url).map_err(|error| wrong(&error))?;
    if let Some(host) = host {
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        parsed.set_host(Some(&bracketed)).map_err(|error| wrong(&error))?;
    }
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

/// The role that the name of the pod's role in its RoleBasedGroup tells.
fn role_of_group() -> Option<Role> {
    let own = rbg_api::Identity::from_env(|name| std::env::var(name).ok());
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
        assert_eq!(advertised(url, None).unwrap(), "http://127.0.0.1:8000");
        assert_eq!(advertised(url, Some("10.1.2.3")).unwrap(), "http://10.1.2.3:8000");
        assert_eq!(advertised(url, Some("fd00::1")).unwrap(), "http://[fd00::1]:8000");
        assert!(advertised("nowhere", None).is_err());
    }
}

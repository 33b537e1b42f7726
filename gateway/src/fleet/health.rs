//! Active health checks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_discovery::InstanceId;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::snapshot::FleetMember;
use super::watch::FleetReader;

/// Settings of the health checks.
#[derive(Debug, Clone)]
pub(crate) struct HealthCheckLimits {
    /// Path that answers 200 on a healthy engine.
    pub(crate) path: String,
    pub(crate) interval: Duration,
    /// Above one second, because SGLang's `/health` runs a generation and takes that long on an idle engine.
    pub(crate) timeout: Duration,
    /// Consecutive failed checks that make an engine unhealthy; a single success makes it healthy again.
    pub(crate) failures: u32,
}

/// A failed health check.
#[derive(Debug, thiserror::Error)]
enum HealthCheckError {
    #[error("GET {path} responded with {status}")]
    Status { path: String, status: http::StatusCode },
    /// There is no response.
    #[error("GET {path}: {source}")]
    Request { path: String, source: reqwest::Error },
}

/// Checks the health of every engine until `stop`.
pub(crate) async fn check_health(
    fleet: FleetReader,
    client: reqwest::Client,
    limits: HealthCheckLimits,
    stop: CancellationToken,
) {
    let mut failures: HashMap<InstanceId, u32> = HashMap::new();
    let mut tick = interval(limits.interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let members: Vec<FleetMember> = fleet.current().engines().cloned().collect();
        let mut checks: FuturesUnordered<_> = members
            .iter()
            .map(|member| {
                let check = check(&client, &member.instance.url, &limits);
                async move { (member, check.await) }
            })
            .collect();
        while let Some((member, outcome)) = checks.next().await {
            let failed = failures.entry(member.endpoint.id.clone()).or_default();
            *failed = if outcome.is_ok() { 0 } else { failed.saturating_add(1) };
            let healthy = *failed < limits.failures;
            if member.endpoint.set_healthy(healthy) {
                let engine = &member.endpoint.id;
                match outcome {
                    Ok(()) => tracing::info!(%engine, "engine is healthy again"),
                    Err(reason) => tracing::warn!(%engine, %reason, "engine is unhealthy: no new requests"),
                }
            }
        }
        failures.retain(|id, _| members.iter().any(|member| member.endpoint.id == *id));
    }
}

/// Interval between two health checks of a suspect engine.
const SUSPECT_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Checks the health of suspect engines at once and until they are trusted again, until `stop`: the regular checks are too far
/// apart to end streams on an engine that has stopped. `suspected` is notified when an engine becomes suspect.
pub(crate) async fn probe_suspects(
    fleet: FleetReader,
    client: reqwest::Client,
    limits: HealthCheckLimits,
    suspected: Arc<Notify>,
    stop: CancellationToken,
) {
    let mut checks = FuturesUnordered::new();
    let mut checked: HashSet<InstanceId> = HashSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = suspected.notified() => {}
            Some((member, outcome)) = checks.next(), if !checks.is_empty() => {
                let (member, outcome): (FleetMember, Result<(), HealthCheckError>) = (member, outcome);
                checked.remove(&member.endpoint.id);
                member.endpoint.silence.record_health_check(outcome.is_ok());
                if let (true, Err(reason)) = (member.endpoint.silence.is_suspect(), outcome) {
                    let engine = &member.endpoint.id;
                    tracing::debug!(%engine, %reason, "suspect engine fails its health check");
                }
            }
        }
        for member in fleet.current().engines().filter(|member| member.endpoint.silence.is_suspect()) {
            if checked.insert(member.endpoint.id.clone()) {
                let (client, limits, member) = (client.clone(), limits.clone(), member.clone());
                let is_recheck = member.endpoint.silence.was_health_checked();
                checks.push(async move {
                    if is_recheck {
                        tokio::time::sleep(SUSPECT_CHECK_INTERVAL).await;
                    }
                    let outcome = check(&client, &member.instance.url, &limits).await;
                    (member, outcome)
                });
            }
        }
    }
}

async fn check(
    client: &reqwest::Client,
    url: &str,
    limits: &HealthCheckLimits,
) -> Result<(), HealthCheckError> {
    let path = limits.path.clone();
    let request = client.get(format!("{url}{}", limits.path)).timeout(limits.timeout);
    match moongate_runtime::net::send_request(request).await {
        Ok(response) if response.status().is_success() => Ok(()),
        Ok(response) => Err(HealthCheckError::Status { path, status: response.status() }),
        Err(error) => Err(HealthCheckError::Request { path, source: error.without_url() }),
    }
}

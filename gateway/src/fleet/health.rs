//! Active health checks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::Uri;
use moongate_discovery::InstanceId;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::snapshot::{FleetMember, FleetSnapshot};
use super::watch::FleetReader;
use crate::upstream::{EngineQuery, EngineQueryError, LegError};

/// Settings of the health checks.
#[derive(Debug, Clone)]
pub(crate) struct HealthCheckLimits {
    /// Path that answers 200 on a healthy engine.
    pub(crate) path: Uri,
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
    #[error(transparent)]
    Query(#[from] EngineQueryError),
}

impl HealthCheckError {
    /// Whether the check says nothing about the engine: the gateway had no connection left for it.
    fn is_own(&self) -> bool {
        let Self::Query(EngineQueryError::Exchange { error, .. }) = self else { return false };
        matches!(**error, LegError::NoConnectionLeft)
    }
}

/// An engine's place in the cycle of health checks.
#[derive(Debug)]
struct CheckedEngine {
    due: Instant,
    is_in_check: bool,
    /// Consecutive failed checks.
    failures: u32,
}

/// Steps of an interval at which due checks start.
const STEPS: u32 = 32;

/// Checks the health of every engine until `stop`. The checks of a large fleet are spread over the interval: together they would
/// delay requests.
pub(crate) async fn check_health(fleet: FleetReader, limits: HealthCheckLimits, stop: CancellationToken) {
    let mut engines: HashMap<InstanceId, CheckedEngine> = HashMap::new();
    let mut checks = FuturesUnordered::new();
    let mut tick = interval((limits.interval / STEPS).max(Duration::from_millis(1)));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some((member, outcome)) = checks.next(), if !checks.is_empty() => {
                let (member, outcome): (FleetMember, Result<(), HealthCheckError>) = (member, outcome);
                if let Some(engine) = engines.get_mut(&member.endpoint.id) {
                    engine.is_in_check = false;
                    record_check(engine, &member, outcome, &limits);
                }
            }
            _ = tick.tick() => {
                for member in due_engines(&mut engines, &fleet.current(), limits.interval) {
                    let limits = limits.clone();
                    checks.push(async move {
                        let outcome = check_pooled(&member, &limits).await;
                        (member, outcome)
                    });
                }
            }
        }
    }
}

/// Starts the checks that are due. New engines take places that are spread over the interval, the first one now.
fn due_engines(
    engines: &mut HashMap<InstanceId, CheckedEngine>,
    fleet: &FleetSnapshot,
    interval: Duration,
) -> Vec<FleetMember> {
    let now = Instant::now();
    let members: Vec<_> = fleet.engines().collect();
    let new = members.iter().filter(|member| !engines.contains_key(&member.endpoint.id));
    let new: Vec<_> = new.map(|member| member.endpoint.id.clone()).collect();
    let spacing = interval / u32::try_from(new.len().max(1)).unwrap_or(u32::MAX);
    for (place, id) in (0..).zip(new) {
        engines.insert(id, CheckedEngine { due: now + spacing * place, is_in_check: false, failures: 0 });
    }
    if engines.len() > members.len() {
        let listed: HashSet<_> = members.iter().map(|member| &member.endpoint.id).collect();
        engines.retain(|id, _| listed.contains(id));
    }
    let mut due = Vec::new();
    for member in members {
        if let Some(engine) = engines.get_mut(&member.endpoint.id)
            && !engine.is_in_check
            && engine.due <= now
        {
            engine.is_in_check = true;
            // After a stall, missed checks are skipped.
            let next = engine.due + interval;
            engine.due = if next > now { next } else { now + interval };
            due.push(member.clone());
        }
    }
    due
}

fn record_check(
    engine: &mut CheckedEngine,
    member: &FleetMember,
    outcome: Result<(), HealthCheckError>,
    limits: &HealthCheckLimits,
) {
    if outcome.as_ref().is_err_and(HealthCheckError::is_own) {
        return;
    }
    engine.failures = if outcome.is_ok() { 0 } else { engine.failures.saturating_add(1) };
    if member.endpoint.set_healthy(engine.failures < limits.failures) {
        let engine = &member.endpoint.id;
        match outcome {
            Ok(()) => tracing::info!(%engine, "engine is healthy again"),
            Err(reason) => tracing::warn!(%engine, %reason, "engine is unhealthy: no new requests"),
        }
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

/// Most bytes of a health check's response.
const MAX_BYTES: usize = 64 << 10;

/// Checks an engine on a connection of its pool, which costs a third of a new one.
async fn check_pooled(member: &FleetMember, limits: &HealthCheckLimits) -> Result<(), HealthCheckError> {
    let (uri, headers) = (limits.path.clone(), Arc::default());
    let query = EngineQuery { uri, headers, limit: limits.timeout, max_bytes: MAX_BYTES };
    match member.endpoint.pool.query(&query).await {
        Ok((status, _)) if status.is_success() => Ok(()),
        Ok((status, _)) => Err(HealthCheckError::Status { path: limits.path.to_string(), status }),
        Err(error) => Err(error.into()),
    }
}

/// Checks an engine on a new connection.
async fn check(
    client: &reqwest::Client,
    url: &str,
    limits: &HealthCheckLimits,
) -> Result<(), HealthCheckError> {
    let path = limits.path.to_string();
    let request = client.get(format!("{url}{}", limits.path)).timeout(limits.timeout);
    match moongate_runtime::net::send_request(request).await {
        Ok(response) if response.status().is_success() => Ok(()),
        Ok(response) => Err(HealthCheckError::Status { path, status: response.status() }),
        Err(error) => Err(HealthCheckError::Request { path, source: error.without_url() }),
    }
}

#[cfg(test)]
mod tests {
    use moongate_discovery::{EngineKind, EngineRole};

    use super::*;
    use crate::kv_index::KvIndex;
    use crate::test_fleet::{engine, snapshot};

    const INTERVAL: Duration = Duration::from_secs(10);

    fn fleet(count: usize) -> FleetSnapshot {
        let name = |number| format!("e{number}");
        let engines = (0..count).map(|number| engine(&name(number), EngineRole::Plain, EngineKind::Vllm, 1));
        snapshot(engines.collect(), &FleetSnapshot::default(), &KvIndex::new(1000))
    }

    fn due(engines: &mut HashMap<InstanceId, CheckedEngine>, fleet: &FleetSnapshot) -> usize {
        due_engines(engines, fleet, INTERVAL).len()
    }

    #[tokio::test(start_paused = true)]
    async fn checks_of_a_fleet_are_spread_over_the_interval() {
        let (mut engines, fleet) = (HashMap::new(), fleet(100));
        let mut started = Vec::new();
        for _ in 0..3 * 20 {
            started.push(due(&mut engines, &fleet));
            engines.values_mut().for_each(|engine| engine.is_in_check = false);
            tokio::time::advance(INTERVAL / 20).await;
        }
        // The last ones of the third round are due after the last step.
        assert_eq!(started.iter().sum::<usize>(), 3 * 100 - 4);
        assert!(started.iter().all(|count| (1..=5).contains(count)), "{started:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_has_one_check_at_a_time_until_it_is_delisted() {
        let mut engines = HashMap::new();
        assert_eq!(due(&mut engines, &fleet(1)), 1, "the first check is at once");
        tokio::time::advance(INTERVAL * 3).await;
        assert_eq!(due(&mut engines, &fleet(1)), 0, "its check has not ended");
        engines.values_mut().for_each(|engine| engine.is_in_check = false);
        assert_eq!(due(&mut engines, &fleet(1)), 1);
        engines.values_mut().for_each(|engine| engine.is_in_check = false);
        assert_eq!(due(&mut engines, &fleet(1)), 0, "missed checks are skipped");
        assert_eq!(due(&mut engines, &fleet(3)), 1);
        assert_eq!((due(&mut engines, &fleet(0)), engines.len()), (0, 0));
    }
}

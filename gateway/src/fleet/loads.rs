//! Polls engines for their own load, which includes requests of other gateways.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use moongate_discovery::{
    EngineKind, InstanceId, LOAD_QUERY_TIMEOUT, MAX_LOAD_BYTES, MissingLoadError, RankLoads, load_path,
    parse_load,
};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::endpoint::UpstreamEndpoint;
use super::snapshot::FleetMember;
use super::watch::FleetReader;
use crate::upstream::{EngineQuery, EngineQueryError};

/// Pause after an engine has not answered.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);
/// vLLM reports its load among all its metrics (about 100 kB), so it is polled less often.
const VLLM_INTERVAL: Duration = Duration::from_secs(1);

/// Most queries per second of all engines with requests, and of all others.
const BUSY_QUERIES: f64 = 1_000.0;
const IDLE_QUERIES: f64 = 400.0;

/// When an engine was polled, and when it is polled again.
#[derive(Debug, Clone, Copy)]
struct PolledEngine {
    /// End of the last query; `None` before the first.
    last: Option<Instant>,
    /// Pause of an engine of this kind, or after a failure.
    pause: Duration,
    /// Whether it had no request.
    was_idle: bool,
    is_queried: bool,
}

/// Shortest pauses between two queries of an engine, so that those of a large fleet cost no more than they save.
#[derive(Debug, Clone, Copy)]
struct PollPauses {
    busy: Duration,
    idle: Duration,
}

impl PollPauses {
    fn of(engines: usize) -> Self {
        let pause = |queries: f64| Duration::from_secs_f64(engines as f64 / queries);
        Self { busy: pause(BUSY_QUERIES), idle: pause(IDLE_QUERIES) }
    }
}

impl PolledEngine {
    /// Before the first query.
    const NEW: Self = Self { last: None, pause: Duration::ZERO, was_idle: false, is_queried: false };

    /// Whether it is to be queried now. An engine that gets a request is no longer idle.
    fn is_due(&self, now: Instant, pauses: PollPauses, in_flight: u32) -> bool {
        let is_idle = self.was_idle && in_flight == 0;
        let pause = self.pause.max(if is_idle { pauses.idle } else { pauses.busy });
        !self.is_queried && self.last.is_none_or(|last| last + pause <= now)
    }
}

/// Polls every engine each `poll_interval`, or less often in a large fleet, until `stop`, and passes the loads to `reported`.
pub(crate) async fn poll_loads(
    fleet: FleetReader,
    authorization: Option<HeaderValue>,
    poll_interval: Duration,
    reported: impl Fn(&Arc<UpstreamEndpoint>, &RankLoads),
    stop: CancellationToken,
) {
    let mut polled: HashMap<InstanceId, PolledEngine> = HashMap::new();
    let mut polled_generation = None;
    let headers: Arc<HeaderMap> =
        Arc::new(authorization.map(|value| (header::AUTHORIZATION, value)).into_iter().collect());
    let mut queries = FuturesUnordered::new();
    let mut tick = interval(poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some((member, outcome)) = queries.next(), if !queries.is_empty() => {
                let (member, outcome): (FleetMember, Result<RankLoads, LoadQueryError>) = (member, outcome);
                let (pause, was_idle) = match outcome {
                    Ok(loads) => {
                        reported(&member.endpoint, &loads);
                        let total = loads.total();
                        let pause = if member.is_sglang() { Duration::ZERO } else { VLLM_INTERVAL };
                        (pause, (total.running, total.waiting, total.handing_over) == (0, 0, 0))
                    }
                    Err(reason) => {
                        tracing::debug!(engine = %member.endpoint.id, %reason, "engine load unavailable");
                        (FAILURE_PAUSE, false)
                    }
                };
                let last = Some(Instant::now());
                let engine = PolledEngine { last, pause, was_idle, is_queried: false };
                polled.insert(member.endpoint.id.clone(), engine);
            }
            _ = tick.tick() => {
                let current = fleet.current();
                if polled_generation != Some(current.generation) {
                    let usable: HashSet<_> = current.engines().map(|member| &member.instance.id).collect();
                    polled.retain(|id, _| usable.contains(id));
                    polled_generation = Some(current.generation);
                }
                let (now, pauses) = (Instant::now(), PollPauses::of(current.engines().count()));
                for member in current.engines() {
                    let id = &member.endpoint.id;
                    let engine = match polled.get_mut(id) {
                        Some(engine) => engine,
                        None => polled.entry(id.clone()).or_insert(PolledEngine::NEW),
                    };
                    if engine.is_due(now, pauses, member.endpoint.in_flight.count()) {
                        engine.is_queried = true;
                        let (headers, member) = (headers.clone(), member.clone());
                        queries.push(async move {
                            let outcome = query_load(headers, &member).await;
                            (member, outcome)
                        });
                    }
                }
            }
        }
    }
}

/// Why an engine's load is unknown.
#[derive(Debug, thiserror::Error)]
enum LoadQueryError {
    #[error(transparent)]
    Query(#[from] EngineQueryError),
    #[error("HTTP {0}")]
    Status(StatusCode),
    #[error(transparent)]
    Missing(#[from] MissingLoadError),
}

async fn query_load(headers: Arc<HeaderMap>, member: &FleetMember) -> Result<RankLoads, LoadQueryError> {
    let engine = member.facts().map_or(EngineKind::Vllm, |facts| facts.engine);
    let (uri, limit) = (Uri::from_static(load_path(engine)), LOAD_QUERY_TIMEOUT);
    let query = EngineQuery { uri, headers, limit, max_bytes: MAX_LOAD_BYTES };
    let (status, body) = member.endpoint.pool.query(&query).await?;
    if !status.is_success() {
        return Err(LoadQueryError::Status(status));
    }
    Ok(parse_load(engine, &body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_engines_of_a_large_fleet_are_polled_less_often() {
        let now = Instant::now();
        let (small, large) = (PollPauses::of(4), PollPauses::of(1_000));
        assert!(PolledEngine::NEW.is_due(now, large, 0));
        let engine = PolledEngine { last: Some(now), was_idle: true, ..PolledEngine::NEW };
        let after = |ms| now + Duration::from_millis(ms);
        assert!(engine.is_due(after(100), small, 0), "a small fleet is polled at each tick");
        assert!(!engine.is_due(after(2_400), large, 0) && engine.is_due(after(2_500), large, 0));
        assert!(
            !engine.is_due(after(900), large, 1) && engine.is_due(after(1_000), large, 1),
            "it has a request"
        );
        let busy = PolledEngine { was_idle: false, ..engine };
        assert!(busy.is_due(after(1_000), large, 0));
        assert!(!PolledEngine { is_queried: true, ..busy }.is_due(after(9_000), large, 0));
        assert!(!PolledEngine { pause: FAILURE_PAUSE, ..busy }.is_due(after(9_000), large, 0));
    }
}

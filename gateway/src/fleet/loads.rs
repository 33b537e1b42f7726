//! Polls engines for their own load, which includes requests of other gateways.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_discovery::{EngineKind, EngineLoadError, InstanceId, RankLoads, fetch_load};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::endpoint::UpstreamEndpoint;
use super::snapshot::FleetMember;
use super::watch::FleetReader;

/// Pause after an engine has not answered.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);
/// vLLM reports its load among all its metrics (about 100 kB), so it is polled less often.
const VLLM_INTERVAL: Duration = Duration::from_secs(1);

/// Polls every engine each `every` until `stop`, and passes the loads to `reported`.
pub(crate) async fn poll_loads(
    fleet: FleetReader,
    client: reqwest::Client,
    poll_interval: Duration,
    reported: impl Fn(&Arc<UpstreamEndpoint>, &RankLoads),
    stop: CancellationToken,
) {
    // Next poll time; `None` while a query is running.
    let mut next: HashMap<InstanceId, Option<Instant>> = HashMap::new();
    let mut queries = FuturesUnordered::new();
    let mut tick = interval(poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some((member, outcome)) = queries.next(), if !queries.is_empty() => {
                let (member, outcome): (FleetMember, Result<RankLoads, EngineLoadError>) = (member, outcome);
                let pause = match outcome {
                    Ok(loads) => {
                        reported(&member.endpoint, &loads);
                        if member.is_sglang() { Duration::ZERO } else { VLLM_INTERVAL }
                    }
                    Err(reason) => {
                        tracing::debug!(engine = %member.endpoint.id, %reason, "engine load unavailable");
                        FAILURE_PAUSE
                    }
                };
                next.insert(member.endpoint.id.clone(), Some(Instant::now() + pause));
            }
            _ = tick.tick() => {
                let current = fleet.current();
                next.retain(|id, _| current.is_usable(id));
                for member in current.engines() {
                    let due = next.entry(member.endpoint.id.clone()).or_insert_with(|| Some(Instant::now()));
                    if due.take_if(|at| *at <= Instant::now()).is_some() {
                        let (client, member) = (client.clone(), member.clone());
                        queries.push(async move {
                            let outcome = query_load(&client, &member).await;
                            (member, outcome)
                        });
                    }
                }
            }
        }
    }
}

async fn query_load(client: &reqwest::Client, member: &FleetMember) -> Result<RankLoads, EngineLoadError> {
    let engine = member.facts().map_or(EngineKind::Vllm, |facts| facts.engine);
    fetch_load(client, engine, &member.instance.url, None).await
}

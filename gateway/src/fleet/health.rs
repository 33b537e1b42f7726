//! Active health checks.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_discovery::InstanceId;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::follow::FleetReader;

/// How engines are checked.
#[derive(Debug, Clone)]
pub(crate) struct HealthLimits {
    /// Path that answers 200 on a healthy engine.
    pub(crate) path: String,
    pub(crate) every: Duration,
    /// Above one second, because SGLang's `/health` runs a generation and takes that long on an idle engine.
    pub(crate) timeout: Duration,
    /// Failed checks in a row that make an engine unhealthy; a single success makes it healthy again.
    pub(crate) failures: u32,
}

/// Asks every engine for its health until `stop`.
pub(crate) async fn check_health(
    fleet: FleetReader,
    client: reqwest::Client,
    limits: HealthLimits,
    stop: CancellationToken,
) {
    let mut failures: HashMap<InstanceId, u32> = HashMap::new();
    let mut tick = interval(limits.every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        let members = fleet.current().members.clone();
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
                let instance = &member.endpoint.id;
                match outcome {
                    Ok(()) => tracing::info!(%instance, "engine is healthy again"),
                    Err(reason) => tracing::warn!(%instance, reason, "engine is unhealthy: no new requests"),
                }
            }
        }
        failures.retain(|id, _| members.iter().any(|member| member.endpoint.id == *id));
    }
}

async fn check(client: &reqwest::Client, url: &str, limits: &HealthLimits) -> Result<(), String> {
    let request = client.get(format!("{url}{}", limits.path)).timeout(limits.timeout);
    match request.send().await {
        Ok(response) if response.status().is_success() => Ok(()),
        Ok(response) => Err(format!("GET {} answered {}", limits.path, response.status())),
        Err(error) => Err(format!("GET {}: {}", limits.path, error.without_url())),
    }
}

//! `/debug/fleet`: the data of the console. The format is described in `docs/console.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response};
use moongate_discovery::{EngineInstance, InstanceReadiness, KubernetesWorkload, PhysicalLocation};
use moongate_scheduler::{InstanceLoad, PolicyName};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use super::handler::GatewayContext;
use crate::feedback::RequestTotals;
use crate::fleet::{FleetMember, FleetSnapshot, PromptCountSnapshot, domain_name};
use crate::predict::StoreViewStatus;

/// Increases when a member is removed or changes its meaning. New members do not increase it.
const SCHEMA_VERSION: u32 = 2;
/// Reason of a suspect engine.
const SUSPECT: &str = "suspect: it accepts requests but produces no output";
/// Why an engine gets no requests although it serves.
const UNPAIRED: &str = "no engine of its version to pair with (--pair-versions)";
/// The response is rebuilt at most once per this interval, whatever the number of readers.
const CACHE_TTL: Duration = Duration::from_millis(500);

/// Cache of the rendered response.
#[derive(Debug)]
pub(crate) struct FleetStatusCache {
    policy: PolicyName,
    started: Instant,
    /// The last response, and when it was built. Concurrent requests wait for the one that rebuilds it.
    cached: Mutex<Option<(Instant, Bytes)>>,
}

#[derive(Serialize)]
struct FleetStatusResponse<'a> {
    schema_version: u32,
    /// Seconds since 1970.
    now: f64,
    gateway: GatewayStatus,
    totals: RequestTotals,
    index: IndexStatus,
    models: Vec<&'a str>,
    /// `null` without `--mooncake-admin`.
    store: Option<StoreViewStatus>,
    instances: Vec<FleetInstanceStatus<'a>>,
}

#[derive(Serialize)]
struct GatewayStatus {
    release: &'static str,
    policy: &'static str,
    uptime_s: f64,
    ready: bool,
    draining: bool,
    generation: u64,
    /// Requests that wait for engines.
    queued: usize,
}

#[derive(Serialize)]
struct IndexStatus {
    blocks: usize,
    bytes: usize,
}

#[derive(Serialize)]
struct FleetInstanceStatus<'a> {
    id: &'a str,
    url: &'a str,
    role: String,
    source: String,
    place: &'a PhysicalLocation,
    workload: &'a KubernetesWorkload,
    /// `serving`, `not_ready` (with a reason), `unhealthy` (health checks fail) or `paused` (its breaker is open, or with a reason,
    /// it is suspect).
    state: &'static str,
    reason: Option<&'a str>,
    /// `null` until the engine has been probed.
    engine: Option<&'static str>,
    version: Option<&'a str>,
    models: &'a [String],
    /// Hand-over protocol; only engines with equal protocols form a pair.
    handover: Option<&'static str>,
    uses_store: bool,
    /// Requests of this gateway on the engine.
    in_flight: u32,
    prompts: Option<PromptCountSnapshot>,
    load: Option<InstanceLoadStatus>,
}

#[derive(Serialize)]
struct InstanceLoadStatus {
    waiting_prompts: u32,
    waiting_tokens: u64,
    wait_s: f64,
    decode_tokens: u64,
    /// The latest load that the engine reported, including requests of other gateways.
    reported: Option<ReportedLoadStatus>,
}

#[derive(Serialize)]
struct ReportedLoadStatus {
    running: u32,
    waiting: u32,
    used_tokens: u64,
    /// 0 if the engine does not report it.
    capacity_tokens: u64,
}

pub(super) async fn fleet(State(gateway): State<Arc<GatewayContext>>) -> Response<Body> {
    let mut response = Response::new(Body::from(gateway.fleet_status.response(&gateway)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

impl FleetStatusCache {
    pub(crate) fn new(policy: PolicyName) -> Self {
        Self { policy, started: Instant::now(), cached: Mutex::default() }
    }

    /// The response, at most [`CACHE_TTL`] old.
    fn response(&self, gateway: &GatewayContext) -> Bytes {
        let mut cached = self.cached.lock();
        if let Some((built_at, response)) = &*cached
            && built_at.elapsed() < CACHE_TTL
        {
            return response.clone();
        }
        let response = Bytes::from(self.render(gateway));
        *cached = Some((Instant::now(), response.clone()));
        response
    }

    fn render(&self, gateway: &GatewayContext) -> String {
        let queue = &gateway.dispatcher.admission;
        let topology = gateway.dispatcher.topology.current();
        let (fleet, loads) = queue.loads();
        let by_id: HashMap<_, _> = fleet
            .engines_with_load(&loads)
            .map(|(member, load)| (&member.instance.id, (member, load)))
            .collect();
        let instances = topology
            .instances
            .iter()
            .map(|instance| FleetInstanceStatus::of(instance, &fleet, by_id.get(&instance.id).copied()));
        let size = gateway.index.size();
        let response = FleetStatusResponse {
            schema_version: SCHEMA_VERSION,
            now: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            gateway: GatewayStatus {
                release: env!("CARGO_PKG_VERSION"),
                policy: self.policy.as_str(),
                uptime_s: self.started.elapsed().as_secs_f64(),
                ready: fleet.can_serve(),
                draining: gateway.draining.is_cancelled(),
                generation: topology.generation,
                queued: queue.queued(),
            },
            totals: gateway.metrics.totals(),
            index: IndexStatus { blocks: size.blocks, bytes: size.bytes },
            models: fleet.served_models().iter().map(AsRef::as_ref).collect(),
            store: gateway.predictor.store_status(),
            instances: instances.collect(),
        };
        serde_json::to_string(&response).unwrap_or_else(|error| {
            // Unreachable: all values can be represented in JSON.
            tracing::error!(%error, "cannot serialize the fleet status");
            "{}".to_owned()
        })
    }
}

impl<'a> FleetInstanceStatus<'a> {
    /// `member`: its first rank, and the load of all its ranks, if it is usable.
    fn of(
        instance: &'a EngineInstance,
        fleet: &FleetSnapshot,
        member: Option<(&FleetMember, InstanceLoad)>,
    ) -> Self {
        let endpoint = fleet.endpoint(&instance.id);
        let facts = instance.facts.as_ref();
        let (state, reason) = match &instance.readiness {
            InstanceReadiness::NotReady { reason } => ("not_ready", Some(reason.as_str())),
            InstanceReadiness::Ready if member.is_none() => ("not_ready", Some("discovered, not yet usable")),
            InstanceReadiness::Ready => match endpoint {
                Some(endpoint) if !endpoint.is_healthy() => ("unhealthy", None),
                Some(endpoint) if endpoint.breaker.is_open() => ("paused", None),
                Some(endpoint) if endpoint.silence.is_suspect() => ("paused", Some(SUSPECT)),
                _ if fleet.unpaired.contains(&instance.id) => ("paused", Some(UNPAIRED)),
                _ => ("serving", None),
            },
        };
        let in_cluster = member.and_then(|(member, _)| fleet.cluster.get(fleet.index_of(&member.name)?));
        Self {
            id: &instance.id.0,
            url: &instance.url,
            role: instance.role.to_string(),
            source: instance.source.to_string(),
            place: &instance.location,
            workload: &instance.workload,
            state,
            reason,
            engine: facts.map(|facts| facts.engine.as_str()),
            version: facts.map(|facts| facts.version.as_str()),
            models: facts.map_or(&[], |facts| &facts.models),
            handover: in_cluster.and_then(|instance| domain_name(instance.domain)),
            uses_store: facts.is_some_and(|facts| facts.store.is_some()),
            in_flight: endpoint.map_or(0, |endpoint| endpoint.in_flight.count()),
            prompts: endpoint.map(|endpoint| endpoint.prompt_counters.snapshot()),
            load: member.map(|(_, load)| InstanceLoadStatus::of(&load)),
        }
    }
}

impl InstanceLoadStatus {
    fn of(load: &InstanceLoad) -> Self {
        Self {
            waiting_prompts: load.pending_prefills,
            waiting_tokens: load.prefill_backlog_tokens(),
            wait_s: load.prefill_wait,
            decode_tokens: load.decode_tokens(),
            reported: load.reported.map(|reported| ReportedLoadStatus {
                running: reported.running,
                waiting: reported.waiting,
                used_tokens: reported.used_tokens,
                capacity_tokens: reported.capacity_tokens,
            }),
        }
    }
}

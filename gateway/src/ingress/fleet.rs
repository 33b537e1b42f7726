//! `/debug/fleet`: everything that the console shows, at one moment. The form is described in `docs/console.md`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Response};
use moongate_discovery::{
    EngineInstance, EngineKind, InstanceReadiness, KubernetesWorkload, PhysicalLocation,
};
use moongate_scheduler::{InstanceLoad, PolicyName};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use super::handler::GatewayContext;
use crate::feedback::RequestTotals;
use crate::fleet::{FleetSnapshot, PromptCountSnapshot, domain_name};
use crate::predict::StoreViewStatus;

/// Grows when a member is removed or means something else. New members are added without.
const SCHEMA_VERSION: u32 = 1;
/// Reason of a suspect engine.
const SUSPECT: &str = "suspect: it accepts requests but produces no output";
/// However many look, it is made anew no more often than this.
const CACHE_TTL: Duration = Duration::from_millis(500);

/// What the answer needs besides the gateway's other parts.
#[derive(Debug)]
pub(crate) struct FleetStatusCache {
    policy: PolicyName,
    started: Instant,
    /// The last answer, and when it was made. Whoever asks meanwhile waits for the one who makes the next.
    cached: Mutex<Option<(Instant, Bytes)>>,
}

#[derive(Serialize)]
struct FleetStatusResponse<'a> {
    form: u32,
    /// Seconds since 1970.
    now: f64,
    gateway: GatewayStatus,
    totals: RequestTotals,
    index: IndexStatus,
    models: Vec<&'a str>,
    /// `null` if the gateway was told of no store.
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
    held: usize,
}

#[derive(Serialize)]
struct IndexStatus {
    pages: usize,
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
    /// `serving`, `not_ready` (with a reason), `unhealthy` (health checks fail) or `paused` (its breaker is open, or with a
    /// reason, it is suspect).
    state: &'static str,
    reason: Option<&'a str>,
    /// `null` before the engine has told.
    engine: Option<&'static str>,
    version: Option<&'a str>,
    models: &'a [String],
    /// By what it hands over; engines of different kinds make no pair.
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
    /// What the engine itself has told last, with the traffic of other gateways.
    reported: Option<ReportedLoadStatus>,
}

#[derive(Serialize)]
struct ReportedLoadStatus {
    running: u32,
    waiting: u32,
    used_tokens: u64,
    /// 0 if it does not tell.
    capacity_tokens: u64,
}

/// Answers `/debug/fleet`.
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

    /// The answer, at most [`CACHE_TTL`] old.
    fn response(&self, gateway: &GatewayContext) -> Bytes {
        let mut made = self.cached.lock();
        if let Some((at, answer)) = &*made
            && at.elapsed() < CACHE_TTL
        {
            return answer.clone();
        }
        let answer = Bytes::from(self.render(gateway));
        *made = Some((Instant::now(), answer.clone()));
        answer
    }

    fn render(&self, gateway: &GatewayContext) -> String {
        let desk = &gateway.dispatcher.admission;
        let topology = gateway.dispatcher.topology.current();
        let (fleet, loads) = desk.loads();
        let with_load = fleet.members.iter().zip(&loads).enumerate();
        let by_id: HashMap<_, _> =
            with_load.map(|(at, (member, load))| (&member.instance.id, (at, load))).collect();
        let instances = topology
            .instances
            .iter()
            .map(|instance| FleetInstanceStatus::of(instance, &fleet, by_id.get(&instance.id).copied()));
        let size = gateway.index.size();
        let answer = FleetStatusResponse {
            form: SCHEMA_VERSION,
            now: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            gateway: GatewayStatus {
                release: env!("CARGO_PKG_VERSION"),
                policy: self.policy.as_str(),
                uptime_s: self.started.elapsed().as_secs_f64(),
                ready: fleet.can_serve(),
                draining: gateway.draining.is_cancelled(),
                generation: topology.generation,
                held: desk.queued(),
            },
            totals: gateway.metrics.totals(),
            index: IndexStatus { pages: size.blocks, bytes: size.bytes },
            models: fleet.served_models().iter().map(AsRef::as_ref).collect(),
            store: gateway.predictor.store_status(),
            instances: instances.collect(),
        };
        serde_json::to_string(&answer).unwrap_or_else(|error| {
            // Not reached: there is nothing in it that JSON cannot say.
            tracing::error!(%error, "the fleet's state cannot be written");
            "{}".to_owned()
        })
    }
}

impl<'a> FleetInstanceStatus<'a> {
    /// `member`: its position in the fleet and its load, if it may be sent requests.
    fn of(
        instance: &'a EngineInstance,
        fleet: &FleetSnapshot,
        member: Option<(usize, &InstanceLoad)>,
    ) -> Self {
        let endpoint = fleet.endpoint(&instance.id);
        let facts = instance.facts.as_ref();
        let (state, reason) = match &instance.readiness {
            InstanceReadiness::NotReady { reason } => ("not_ready", Some(reason.as_str())),
            InstanceReadiness::Ready if member.is_none() => ("not_ready", Some("seen only just now")),
            InstanceReadiness::Ready => match endpoint {
                Some(endpoint) if !endpoint.is_healthy() => ("unhealthy", None),
                Some(endpoint) if endpoint.breaker.is_open() => ("paused", None),
                Some(endpoint) if endpoint.silence.is_suspect() => ("paused", Some(SUSPECT)),
                _ => ("serving", None),
            },
        };
        let in_cluster = member.and_then(|(at, _)| fleet.cluster.instances().get(at));
        Self {
            id: &instance.id.0,
            url: &instance.url,
            role: instance.role.to_string(),
            source: instance.source.to_string(),
            place: &instance.location,
            workload: &instance.workload,
            state,
            reason,
            engine: facts.map(|facts| match facts.engine {
                EngineKind::Sglang => "sglang",
                EngineKind::Vllm => "vllm",
            }),
            version: facts.map(|facts| facts.version.as_str()),
            models: facts.map_or(&[], |facts| &facts.models),
            handover: in_cluster.map(|instance| domain_name(instance.domain)),
            uses_store: facts.is_some_and(|facts| facts.store.is_some()),
            in_flight: endpoint.map_or(0, |endpoint| endpoint.in_flight.count()),
            prompts: endpoint.map(|endpoint| endpoint.prompt_counters.snapshot()),
            load: member.map(|(_, load)| InstanceLoadStatus::of(load)),
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

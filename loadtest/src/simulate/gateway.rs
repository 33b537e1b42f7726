//! Gateways: each drives a scheduler exactly as the real one does.

use std::sync::Arc;

use moongate_scheduler::{
    AttemptId, CacheHitPrediction, EngineCacheParams, EngineRoute, InstanceIndex, InstanceRole, LocationIds,
    ModelIndex, PairingDomain, PolicyName, ReportedLoad, RequestProfile, RoutingDecision, SchedulableFleet,
    SchedulableInstance, ScheduleRejection, ScheduleRequest, Scheduler, SchedulerEvent, SchedulerOptions,
    StoreTokenRun, TierHits, network_distance, tokens_by_site,
};

use super::cache_index::StoredPrompt;
use super::decode::DecodeLoad;
use super::event_queue::SimulationEvent;
use super::fleet::{FleetNotification, SimulatedFleet, SimulatedRoute};
use super::indices::{AttemptIndex, GatewayIndex, PrefillIndex, WorkloadIndex};
use super::outcome::SimulatedOutcome;
use super::prefill::PromptCounts;
use super::run::RequestRouter;
use super::settings::{SimPrefetchPolicy, SimulationOptions};
use crate::engine::tokens::mix;

/// A scheduler that requests an immediate poll would stop the simulated time.
const MIN_WAKEUP_DELAY_S: f64 = 0.001;
/// Time of a request's ticket to the gateway that decides, and of the decision back.
const TICKET_DELAY_S: f64 = 0.001;
/// Background requests are sent while the load is below this, at most one per interval; the load is read at another interval. As
/// in the gateway.
const BACKGROUND_MAX_LOAD: f64 = 0.5;
const BACKGROUND_INTERVAL_S: f64 = 0.005;
const BACKGROUND_POLL_S: f64 = 0.010;
/// Maximum number of engines tried for one request.
const MAX_ATTEMPTS: usize = 4;

#[derive(Debug)]
struct SimulatedGateway {
    scheduler: Scheduler,
    random: fastrand::Rng,
    /// Time of the next scheduled poll, and its serial number.
    wake_at: f64,
    wake_serial: u32,
    /// When the predictions of queued requests were computed.
    refreshed_s: f64,
    /// Whether anything has changed since its scheduler was polled.
    stale: bool,
}

#[derive(Debug)]
pub(crate) struct SimulatedGateways {
    gateways: Vec<SimulatedGateway>,
    of_attempt: Vec<GatewayIndex>,
    seed: u64,
    /// Engines already tried for requests that lost an engine.
    excluded: std::collections::HashMap<WorkloadIndex, Vec<InstanceIndex>>,
    scheduler_events: Vec<SchedulerEvent>,
    instances: usize,
    /// Position in the workload from which on no background request has been sent.
    next_background: usize,
}

impl SimulatedGateways {
    pub(crate) fn new(
        policy: PolicyName,
        scheduling: &SchedulerOptions,
        settings: &SimulationOptions,
        seed: u64,
    ) -> Self {
        let cluster = Arc::new(cluster(settings));
        let mut scheduling = scheduling.clone();
        if settings.exact_information {
            scheduling.service_prior = settings.prefill_time_model();
        }
        if settings.tpot_target_known {
            scheduling.tpot_target = Some(settings.tpot_target_s);
        }
        let gateway = |number: u64| {
            let mut scheduler = Scheduler::new(policy.build(&scheduling), scheduling.clone());
            scheduler.set_cluster(0.0, Arc::clone(&cluster));
            SimulatedGateway {
                scheduler,
                random: fastrand::Rng::with_seed(mix(seed, number)),
                wake_at: f64::INFINITY,
                wake_serial: 0,
                refreshed_s: 0.0,
                stale: false,
            }
        };
        let instances = cluster.instances().len();
        Self {
            gateways: (0..settings.gateways.max(1) as u64).map(gateway).collect(),
            of_attempt: Vec::new(),
            seed,
            excluded: std::collections::HashMap::new(),
            scheduler_events: Vec::new(),
            instances,
            next_background: 0,
        }
    }

    fn submit(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        let attempt = fleet.attempt(request);
        let gateway = if fleet.settings.shared_queue { GatewayIndex::default() } else { self.home(request) };
        self.of_attempt.push(gateway);
        let prediction = predict(now, request, self.instances, fleet);
        let asked = fleet.workload.request(request);
        let submission = ScheduleRequest {
            request: RequestProfile {
                model: ModelIndex(0),
                input_tokens: asked.input_tokens,
                // Most clients set no limit.
                max_output_tokens: None,
                sequences: 1,
                priority: asked.class.priority(),
                session: Some(asked.session),
                tenant: asked.class.tenant.map(|tenant| tenant as u64),
                ttft_target: fleet
                    .settings
                    .ttft_targets
                    .then(|| fleet.settings.ttft_target_s(asked.input_tokens)),
            },
            prediction,
            excluded: self.excluded.get(&request).cloned().unwrap_or_default(),
        };
        self.gateways[gateway.get()].scheduler.submit(now, attempt.id(), submission);
        self.poll_scheduler(now, gateway, fleet);
    }

    /// The gateway that a request's client sends it to.
    fn home(&self, request: WorkloadIndex) -> GatewayIndex {
        let number = mix(request.get() as u64, self.seed) % self.gateways.len() as u64;
        GatewayIndex::new(number as usize)
    }

    fn gateway_of(&mut self, attempt: AttemptIndex) -> &mut SimulatedGateway {
        &mut self.gateways[self.of_attempt[attempt.get()].get()]
    }

    /// Polls one scheduler and carries out its decisions.
    fn poll_scheduler(&mut self, now: f64, index: GatewayIndex, fleet: &mut SimulatedFleet<'_>) {
        let gateway = &mut self.gateways[index.get()];
        gateway.stale = false;
        if now - gateway.refreshed_s >= fleet.settings.refresh_s {
            let queued: Vec<AttemptId> = gateway.scheduler.queued().collect();
            for attempt in queued {
                let request = fleet.attempts[AttemptIndex::of(attempt).get()].request;
                gateway.scheduler.update_prediction(attempt, predict(now, request, self.instances, fleet));
            }
            gateway.refreshed_s = now;
        }
        let mut events = std::mem::take(&mut self.scheduler_events);
        gateway.scheduler.poll(now, gateway.random.u64(..), &mut events);
        for event in events.drain(..) {
            match event {
                SchedulerEvent::Send { attempt, decision } => {
                    let attempt = AttemptIndex::of(attempt);
                    let route = simulated_route(decision.route, fleet.settings);
                    let priority = priority(attempt, &decision, fleet);
                    fleet.send(now, attempt, route, priority);
                }
                SchedulerEvent::Reject { attempt, rejection } => {
                    reject(now, AttemptIndex::of(attempt), &rejection, fleet);
                }
            }
        }
        self.scheduler_events = events;
        let gateway = &mut self.gateways[index.get()];
        match gateway.scheduler.next_poll_at() {
            Some(time) => {
                let wake_at = time.max(now + MIN_WAKEUP_DELAY_S);
                if wake_at < gateway.wake_at || gateway.wake_at <= now {
                    gateway.wake_at = wake_at;
                    gateway.wake_serial = gateway.wake_serial.wrapping_add(1);
                    let serial = gateway.wake_serial;
                    fleet
                        .events
                        .schedule(wake_at, SimulationEvent::SchedulerWakeup { gateway: index, serial });
                }
            }
            None => {
                gateway.wake_at = f64::INFINITY;
                gateway.wake_serial = gateway.wake_serial.wrapping_add(1);
            }
        }
    }

    fn handle_lost_attempt(
        &mut self,
        now: f64,
        attempt: AttemptIndex,
        engine: InstanceIndex,
        fleet: &mut SimulatedFleet<'_>,
    ) {
        let gateway = self.gateway_of(attempt);
        gateway.scheduler.ended(now, attempt.id());
        gateway.stale = true;
        let request = fleet.attempts[attempt.get()].request;
        let tried = self.excluded.entry(request).or_default();
        tried.push(engine);
        let started = !fleet.result.records[request.get()].first_token_s.is_nan();
        if started || tried.len() >= MAX_ATTEMPTS {
            fleet.finish(now, request, SimulatedOutcome::Failed);
        } else {
            self.submit(now, request, fleet);
        }
    }
}

impl RequestRouter for SimulatedGateways {
    fn on_arrival(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        if fleet.settings.shared_queue && self.home(request) != GatewayIndex::default() {
            fleet.events.schedule(now + TICKET_DELAY_S, SimulationEvent::TicketArrived(request));
        } else {
            self.submit(now, request, fleet);
        }
    }

    fn on_ticket(&mut self, now: f64, request: WorkloadIndex, fleet: &mut SimulatedFleet<'_>) {
        self.submit(now, request, fleet);
    }

    fn on_background_tick(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) -> f64 {
        let mut requests = fleet.workload.requests.iter().enumerate().skip(self.next_background);
        let next = requests.find(|(_, request)| request.class.background).map(|(position, _)| position);
        let Some(position) = next else { return f64::INFINITY };
        let request = WorkloadIndex::new(position);
        self.next_background = position;
        let home = if fleet.settings.shared_queue { GatewayIndex::default() } else { self.home(request) };
        let load = self.gateways[home.get()].scheduler.background_load(now, &[]);
        if load >= BACKGROUND_MAX_LOAD
            || fleet.result.running_background >= fleet.settings.background_concurrency
        {
            return BACKGROUND_POLL_S;
        }
        self.next_background = position + 1;
        fleet.result.record_arrival(now, request);
        self.submit(now, request, fleet);
        BACKGROUND_INTERVAL_S
    }

    fn on_notification(&mut self, now: f64, notice: FleetNotification, fleet: &mut SimulatedFleet<'_>) {
        match notice {
            FleetNotification::Computed(_) => {}
            FleetNotification::FirstToken(attempt) => {
                let cached = fleet.attempts[attempt.get()].computed.cached_tokens();
                let gateway = self.gateway_of(attempt);
                gateway.scheduler.first_token(now, attempt.id(), Some(cached));
                gateway.stale = true;
            }
            FleetNotification::Finished(attempt) => {
                let request = fleet.attempts[attempt.get()].request;
                let output_tokens = fleet.workload.request(request).output_tokens;
                let gateway = self.gateway_of(attempt);
                gateway.scheduler.response_complete(now, attempt.id(), output_tokens.into());
                gateway.scheduler.ended(now, attempt.id());
                gateway.stale = true;
            }
            FleetNotification::Lost { attempt, engine } => {
                self.handle_lost_attempt(now, attempt, engine, fleet);
            }
            FleetNotification::AvailabilityChanged { engine, up } => {
                for gateway in &mut self.gateways {
                    gateway.scheduler.set_available(engine, up);
                    gateway.stale = true;
                }
            }
        }
    }

    fn after_notifications(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) {
        for index in (0..self.gateways.len()).map(GatewayIndex::new) {
            if self.gateways[index.get()].stale {
                self.poll_scheduler(now, index, fleet);
            }
        }
    }

    fn on_load_poll(&mut self, now: f64, fleet: &mut SimulatedFleet<'_>) {
        for engine in InstanceIndex::all().take(self.instances) {
            let reported = load_report(engine, fleet);
            for gateway in &mut self.gateways {
                gateway.scheduler.report(now, engine, reported);
                gateway.stale = true;
            }
        }
        self.after_notifications(now, fleet);
    }

    fn on_wakeup(&mut self, now: f64, index: GatewayIndex, serial: u32, fleet: &mut SimulatedFleet<'_>) {
        let gateway = &mut self.gateways[index.get()];
        if gateway.wake_serial == serial {
            gateway.wake_at = f64::INFINITY;
            self.poll_scheduler(now, index, fleet);
        }
    }
}

fn reject(now: f64, attempt: AttemptIndex, rejection: &ScheduleRejection, fleet: &mut SimulatedFleet<'_>) {
    let request = fleet.attempts[attempt.get()].request;
    match rejection {
        ScheduleRejection::Overloaded { retry_after } => {
            let record = &mut fleet.result.records[request.get()];
            let first = record.retry_after_s.is_nan();
            if first {
                record.retry_after_s = retry_after.max(0.0);
            }
            if first && fleet.settings.retry {
                fleet.events.schedule(now + retry_after.max(0.0), SimulationEvent::RequestArrived(request));
            } else {
                fleet.finish(now, request, SimulatedOutcome::Rejected);
            }
        }
        ScheduleRejection::UnknownModel | ScheduleRejection::NoneAvailable { .. } => {
            fleet.finish(now, request, SimulatedOutcome::Failed);
        }
    }
}

/// Priority that the gateway sends to engines that order by it: the policy's value, or otherwise the computation in
/// milliseconds plus a share of the arrival time, so that no request starves.
fn priority(attempt: AttemptIndex, decision: &RoutingDecision, fleet: &SimulatedFleet<'_>) -> i64 {
    if let Some(priority) = decision.engine_priority {
        return priority;
    }
    let request = fleet.attempts[attempt.get()].request;
    let input = fleet.workload.request(request).input_tokens as usize;
    let new = usize::try_from(decision.reservation.prefill_tokens).unwrap_or(input).min(input);
    let service =
        fleet.settings.service.prefill_base_s + fleet.settings.service.prefill_compute_s(new, input - new);
    let aged = fleet.settings.priority_ageing * fleet.result.records[request.get()].arrived_s;
    (1_000.0 * (service + aged)) as i64
}

fn simulated_route(route: EngineRoute, settings: &SimulationOptions) -> SimulatedRoute {
    let (prefill, decode) = (route.prefill_instance(), route.decode_instance());
    SimulatedRoute {
        prefill: PrefillIndex::new(prefill.as_usize()),
        decode: settings.decode_engine(decode).unwrap_or_default(),
    }
}

/// Predicts the hits of a request's prompt from the current index.
fn predict(
    now: f64,
    request: WorkloadIndex,
    instances: usize,
    fleet: &mut SimulatedFleet<'_>,
) -> CacheHitPrediction {
    let workload = fleet.workload;
    let view = &mut fleet.caches.gateway_index;
    view.apply_due_changes(now);
    let mut per_instance = vec![TierHits::default(); instances];
    let input_tokens = workload.request(request).input_tokens;
    let StoredPrompt { runs: shared, sites: runs } =
        view.predict(workload.blocks(request), workload.block_tokens, input_tokens, &mut per_instance);
    if fleet.settings.decode > 0 {
        // Decode engines fetch nothing.
        per_instance[fleet.settings.prefill..].iter_mut().for_each(|hits| hits.l3_tokens = 0);
    }
    let distance = if fleet.settings.zones > 1 && fleet.settings.zones_known {
        let sites = fleet.settings.store_sites();
        let of = |(engine, hits): (InstanceIndex, &TierHits)| {
            let Some(prefill) = fleet.settings.prefill_engine(engine) else { return 1.0 };
            let first_token = hits.l1_tokens + hits.l2_tokens;
            let wanted = StoreTokenRun { first_token, tokens: hits.l3_tokens };
            let tokens = tokens_by_site(&runs, sites.len(), wanted);
            network_distance(&tokens, &sites, &fleet.settings.topology_place(prefill))
        };
        InstanceIndex::all().zip(&per_instance).map(of).collect()
    } else {
        Vec::new()
    };
    CacheHitPrediction {
        per_instance,
        network_distance: distance,
        shared,
        pages: workload.keys(request),
        text_prefixes: Arc::default(),
        page_tokens: workload.block_tokens,
        excludes_pending: false,
    }
}

/// Load report of an engine.
fn load_report(engine: InstanceIndex, fleet: &SimulatedFleet<'_>) -> ReportedLoad {
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let prefill = fleet.settings.prefill_engine(engine);
    let is_decode = engine.as_usize() >= fleet.settings.prefill;
    let capacity_tokens = if is_decode { fleet.settings.decode_tokens } else { fleet.settings.l1_tokens };
    let mut reported = ReportedLoad { capacity_tokens, ..ReportedLoad::default() };
    if let Some(prefill) = prefill.and_then(|prefill| fleet.prefills.get(prefill.get())) {
        let PromptCounts { running, waiting } = prefill.counts();
        reported.running = count(running);
        reported.waiting = count(waiting);
        reported.waiting_uncached_tokens = prefill.waiting_uncached();
        reported.used_tokens = prefill.running_tokens();
    }
    let decode = fleet.settings.decode_engine(engine);
    if let Some(decode) = decode.and_then(|decode| fleet.decodes.get(decode.get())) {
        let DecodeLoad { running, waiting, tokens } = decode.load();
        reported.running += count(running);
        reported.waiting += count(waiting);
        reported.used_tokens += tokens;
    }
    reported
}

/// The fleet as discovery would report it.
fn cluster(settings: &SimulationOptions) -> SchedulableFleet {
    let service = &settings.service;
    let cache = EngineCacheParams {
        page_tokens: 64,
        prefetch: match settings.prefetch {
            SimPrefetchPolicy::BestEffort => moongate_scheduler::PrefetchBehavior::BestEffort,
            SimPrefetchPolicy::WaitComplete => moongate_scheduler::PrefetchBehavior::WaitComplete,
            SimPrefetchPolicy::Timeout => moongate_scheduler::PrefetchBehavior::Timeout {
                base_s: settings.prefetch_timeout_base_s,
                per_1k_tokens_s: settings.prefetch_timeout_per_ki_s,
            },
        },
        prefetch_threshold: settings.prefetch_threshold,
        l2_bytes_per_s: service.host_load_bytes_per_s,
        // Engines do not report how fast they read from the store.
        l3_bytes_per_s: if settings.exact_information {
            service.storage_bytes_per_s
        } else {
            EngineCacheParams::default().l3_bytes_per_s
        },
        kv_bytes_per_token: service.kv_bytes_per_token as f64,
        l2_tokens: settings.l2_tokens,
        max_prefill_tokens: u32::try_from(service.chunk_tokens).unwrap_or(u32::MAX),
    };
    let instance = |role: InstanceRole, number: usize, location: LocationIds| SchedulableInstance {
        name: format!("{}-{number}", if role == InstanceRole::Decode { "decode" } else { "prefill" }).into(),
        role,
        models: vec![ModelIndex(0)],
        loadable: Vec::new(),
        domain: PairingDomain(0),
        rank: 0,
        location,
        cache: cache.clone(),
        local_prefill: role == InstanceRole::Decode && settings.local_prefill,
    };
    let entry = if settings.decode == 0 { InstanceRole::Plain } else { InstanceRole::Prefill };
    let location = |number| {
        if settings.zones_known {
            settings.topology_place(PrefillIndex::new(number))
        } else {
            LocationIds::default()
        }
    };
    let prefills = (0..settings.prefill).map(|number| instance(entry, number, location(number)));
    // Transfers to all decode engines take equally long.
    let decodes =
        (0..settings.decode).map(|number| instance(InstanceRole::Decode, number, LocationIds::default()));
    SchedulableFleet::new(prefills.chain(decodes).collect())
}

//! Gateways: each drives a scheduler exactly as the real one does.

use std::sync::Arc;

use moongate_scheduler::{
    Ask, CacheRules, Cluster, Decision, Event as Answer, Instance, InstanceIx, ModelIx, PairingDomain, Place,
    PolicyName, Prediction, Refusal, Reported, Request, Role, Route, Scheduler,
    Settings as SchedulerSettings, Ticket, TierHits, farness, tokens_by_site,
};

use super::clock::Event;
use super::fleet::{Fleet, Notice};
use super::outcome::State;
use super::run::Control;
use super::settings::{Prefetch, Settings};
use crate::engine::tokens::mix;

/// A scheduler that wants to be called at once would stop the simulated time.
const SHORTEST_WAKE_S: f64 = 0.001;
/// Most engines tried for one request.
const MOST_ATTEMPTS: usize = 4;

#[derive(Debug)]
struct Gateway {
    scheduler: Scheduler,
    random: fastrand::Rng,
    /// When it will be called, and the serial number of that plan.
    wake_at: f64,
    wake_serial: u32,
    /// When the predictions of held requests were made.
    refreshed_s: f64,
    /// Something has changed since its scheduler was asked.
    stale: bool,
}

/// All gateways.
#[derive(Debug)]
pub(crate) struct Gateways {
    gateways: Vec<Gateway>,
    /// Gateway of each attempt.
    of_attempt: Vec<u32>,
    seed: u64,
    /// Engines tried for the requests that lost one.
    barred: std::collections::HashMap<u32, Vec<InstanceIx>>,
    answers: Vec<Answer>,
    instances: usize,
}

impl Gateways {
    pub(crate) fn new(
        policy: PolicyName,
        scheduling: &SchedulerSettings,
        settings: &Settings,
        seed: u64,
    ) -> Self {
        let cluster = Arc::new(cluster(settings));
        let gateway = |number: u64| {
            let mut scheduler = Scheduler::new(policy.build(scheduling), scheduling.clone());
            scheduler.set_cluster(0.0, Arc::clone(&cluster));
            Gateway {
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
            barred: std::collections::HashMap::new(),
            answers: Vec::new(),
            instances,
        }
    }

    fn submit(&mut self, now: f64, request: u32, fleet: &mut Fleet<'_>) {
        let attempt = fleet.attempt(request);
        let number = mix(u64::from(request), self.seed) % self.gateways.len() as u64;
        self.of_attempt.push(u32::try_from(number).unwrap_or(0));
        let prediction = predict(now, request, self.instances, fleet);
        let asked = &fleet.workload.requests[request as usize];
        let ask = Ask {
            request: Request {
                model: ModelIx(0),
                input_tokens: asked.input_tokens,
                output_tokens: asked.output_tokens,
                sequences: 1,
                priority: 0,
                session: Some(asked.session),
                tenant: None,
                ttft_target: fleet
                    .settings
                    .deadlines
                    .then(|| fleet.settings.ttft_target_s(asked.input_tokens)),
            },
            prediction,
            barred: self.barred.get(&request).cloned().unwrap_or_default(),
        };
        let gateway = &mut self.gateways[number as usize];
        gateway.scheduler.submit(now, Ticket(u64::from(attempt)), ask);
        self.ask(now, number as usize, fleet);
    }

    /// Asks one scheduler what to do, and does it.
    fn ask(&mut self, now: f64, number: usize, fleet: &mut Fleet<'_>) {
        let gateway = &mut self.gateways[number];
        gateway.stale = false;
        if now - gateway.refreshed_s >= fleet.settings.refresh_s {
            let held: Vec<Ticket> = gateway.scheduler.held().collect();
            for ticket in held {
                let request = fleet.attempts[ticket.0 as usize].request;
                gateway.scheduler.refresh(ticket, predict(now, request, self.instances, fleet));
            }
            gateway.refreshed_s = now;
        }
        let mut answers = std::mem::take(&mut self.answers);
        gateway.scheduler.poll(now, gateway.random.u64(..), &mut answers);
        for answer in answers.drain(..) {
            match answer {
                Answer::Send { ticket, decision } => {
                    let engines = engines(decision.route, fleet.settings.prefill);
                    let priority = priority(ticket, &decision, fleet);
                    fleet.send(now, u32::try_from(ticket.0).unwrap_or(u32::MAX), engines, priority);
                }
                Answer::Refuse { ticket, refusal } => refuse(now, ticket, &refusal, fleet),
            }
        }
        self.answers = answers;
        let gateway = &mut self.gateways[number];
        match gateway.scheduler.wake_at() {
            Some(at) => {
                let at = at.max(now + SHORTEST_WAKE_S);
                if at < gateway.wake_at || gateway.wake_at <= now {
                    gateway.wake_at = at;
                    gateway.wake_serial = gateway.wake_serial.wrapping_add(1);
                    let number = u32::try_from(number).unwrap_or(u32::MAX);
                    fleet.calendar.plan(at, Event::Wake(number, gateway.wake_serial));
                }
            }
            None => {
                gateway.wake_at = f64::INFINITY;
                gateway.wake_serial = gateway.wake_serial.wrapping_add(1);
            }
        }
    }

    fn lost(&mut self, now: f64, attempt: u32, engine: usize, fleet: &mut Fleet<'_>) {
        let gateway = &mut self.gateways[self.of_attempt[attempt as usize] as usize];
        gateway.scheduler.ended(now, Ticket(u64::from(attempt)));
        gateway.stale = true;
        let request = fleet.attempts[attempt as usize].request;
        let tried = self.barred.entry(request).or_default();
        tried.push(InstanceIx(u32::try_from(engine).unwrap_or(u32::MAX)));
        let begun = !fleet.outcome.records[request as usize].first_token_s.is_nan();
        if begun || tried.len() >= MOST_ATTEMPTS {
            fleet.finish(now, request, State::Failed);
        } else {
            self.submit(now, request, fleet);
        }
    }
}

impl Control for Gateways {
    fn arrive(&mut self, now: f64, request: u32, fleet: &mut Fleet<'_>) {
        self.submit(now, request, fleet);
    }

    fn notice(&mut self, now: f64, notice: Notice, fleet: &mut Fleet<'_>) {
        match notice {
            Notice::Computed(_) => {}
            Notice::FirstToken(attempt) => {
                let cached = fleet.attempts[attempt as usize].computed.cached_tokens();
                let gateway = &mut self.gateways[self.of_attempt[attempt as usize] as usize];
                gateway.scheduler.first_token(now, Ticket(u64::from(attempt)), Some(cached));
                gateway.stale = true;
            }
            Notice::Ended(attempt) => {
                let gateway = &mut self.gateways[self.of_attempt[attempt as usize] as usize];
                gateway.scheduler.ended(now, Ticket(u64::from(attempt)));
                gateway.stale = true;
            }
            Notice::Lost(attempt, engine) => self.lost(now, attempt, engine, fleet),
            Notice::Turned(engine, up) => {
                for gateway in &mut self.gateways {
                    let ix = InstanceIx(u32::try_from(engine).unwrap_or(u32::MAX));
                    gateway.scheduler.set_available(ix, up);
                    gateway.stale = true;
                }
            }
        }
    }

    fn settle(&mut self, now: f64, fleet: &mut Fleet<'_>) {
        for number in 0..self.gateways.len() {
            if self.gateways[number].stale {
                self.ask(now, number, fleet);
            }
        }
    }

    fn poll(&mut self, now: f64, fleet: &mut Fleet<'_>) {
        for at in 0..self.instances {
            let reported = report(at, fleet);
            for gateway in &mut self.gateways {
                gateway.scheduler.report(now, InstanceIx(u32::try_from(at).unwrap_or(u32::MAX)), reported);
                gateway.stale = true;
            }
        }
        self.settle(now, fleet);
    }

    fn wake(&mut self, now: f64, gateway: usize, serial: u32, fleet: &mut Fleet<'_>) {
        if self.gateways[gateway].wake_serial == serial {
            self.gateways[gateway].wake_at = f64::INFINITY;
            self.ask(now, gateway, fleet);
        }
    }
}

fn refuse(now: f64, ticket: Ticket, refusal: &Refusal, fleet: &mut Fleet<'_>) {
    let request = fleet.attempts[ticket.0 as usize].request;
    match refusal {
        Refusal::Overloaded { retry_after } => {
            let record = &mut fleet.outcome.records[request as usize];
            let first = record.retry_after_s.is_nan();
            if first {
                record.retry_after_s = retry_after.max(0.0);
            }
            if first && fleet.settings.retry {
                fleet.calendar.plan(now + retry_after.max(0.0), Event::Arrive(request));
            } else {
                fleet.finish(now, request, State::Rejected);
            }
        }
        Refusal::UnknownModel | Refusal::NoneAvailable { .. } => fleet.finish(now, request, State::Failed),
    }
}

/// What the gateway writes into the request's priority for engines that order by it: what the policy says, or else the computation
/// in milliseconds and some of the time of arrival, so that nobody waits for ever.
fn priority(ticket: Ticket, decision: &Decision, fleet: &Fleet<'_>) -> i64 {
    if let Some(priority) = decision.engine_priority {
        return priority;
    }
    let request = fleet.attempts[ticket.0 as usize].request as usize;
    let input = fleet.workload.requests[request].input_tokens as usize;
    let new = usize::try_from(decision.booking.prefill_tokens).unwrap_or(input).min(input);
    let service =
        fleet.settings.service.prefill_base_s + fleet.settings.service.prefill_compute_s(new, input - new);
    let aged = fleet.settings.priority_ageing * fleet.outcome.records[request].arrived_s;
    (1_000.0 * (service + aged)) as i64
}

/// The engines of a route, each counted within its kind. On plain workers one engine does both.
fn engines(route: Route, prefills: usize) -> (usize, usize) {
    match route {
        Route::Pair { prefill, decode, .. } => (prefill.at(), decode.at().saturating_sub(prefills)),
        Route::Single { worker } => (worker.at(), worker.at()),
    }
}

/// What the index says of a request's prompt now.
fn predict(now: f64, request: u32, instances: usize, fleet: &mut Fleet<'_>) -> Prediction {
    let workload = fleet.workload;
    let view = &mut fleet.memory.view;
    view.advance(now);
    let mut per_instance = vec![TierHits::default(); instances];
    let input_tokens = workload.requests[request as usize].input_tokens;
    let (shared, runs) =
        view.predict(workload.blocks(request), workload.block_tokens, input_tokens, &mut per_instance);
    let farness = if fleet.settings.zones > 1 && fleet.settings.zones_known {
        let sites = fleet.settings.sites();
        let of = |(engine, hits): (usize, &TierHits)| {
            let tokens = tokens_by_site(&runs, sites.len(), hits.l1_tokens + hits.l2_tokens, hits.l3_tokens);
            farness(&tokens, &sites, &fleet.settings.place(engine))
        };
        per_instance.iter().enumerate().map(of).collect()
    } else {
        Vec::new()
    };
    Prediction {
        per_instance,
        farness,
        shared,
        pages: workload.keys(request),
        page_tokens: workload.block_tokens,
    }
}

/// What an engine says of its load.
fn report(at: usize, fleet: &Fleet<'_>) -> Reported {
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let plain = fleet.settings.decode == 0;
    let capacity_tokens =
        if at < fleet.settings.prefill { fleet.settings.l1_tokens } else { fleet.settings.decode_tokens };
    let mut reported = Reported { capacity_tokens, ..Reported::default() };
    if let Some(prefill) = fleet.prefills.get(at) {
        let (running, waiting) = prefill.counts();
        reported.running = count(running);
        reported.waiting = count(waiting);
        reported.waiting_uncached_tokens = prefill.waiting_uncached();
        reported.used_tokens = prefill.running_tokens();
    }
    let decode = if plain { Some(at) } else { at.checked_sub(fleet.settings.prefill) };
    if let Some(decode) = decode.and_then(|decode| fleet.decodes.get(decode)) {
        let (running, waiting, tokens) = decode.load();
        reported.running += count(running);
        reported.waiting += count(waiting);
        reported.used_tokens += tokens;
    }
    reported
}

/// The fleet as discovery would describe it.
fn cluster(settings: &Settings) -> Cluster {
    let service = &settings.service;
    let cache = CacheRules {
        page_tokens: 64,
        prefetch: match settings.prefetch {
            Prefetch::BestEffort => moongate_scheduler::Prefetch::BestEffort,
            Prefetch::WaitComplete => moongate_scheduler::Prefetch::WaitComplete,
            Prefetch::Timeout => moongate_scheduler::Prefetch::Timeout {
                base_s: settings.prefetch_timeout_base_s,
                per_1k_tokens_s: settings.prefetch_timeout_per_ki_s,
            },
        },
        prefetch_threshold: settings.prefetch_threshold,
        l2_bytes_per_s: service.host_load_bytes_per_s,
        // No engine tells how fast it reads from its store.
        l3_bytes_per_s: CacheRules::default().l3_bytes_per_s,
        kv_bytes_per_token: service.kv_bytes_per_token as f64,
        l2_tokens: settings.l2_tokens,
        max_prefill_tokens: u32::try_from(service.chunk_tokens).unwrap_or(u32::MAX),
    };
    let instance = |role: Role, number: usize, place: Place| Instance {
        name: format!("{}-{number}", if role == Role::Decode { "decode" } else { "prefill" }).into(),
        role,
        models: vec![ModelIx(0)],
        domain: PairingDomain(0),
        dp_size: 1,
        place,
        cache: cache.clone(),
    };
    let entry = if settings.decode == 0 { Role::Plain } else { Role::Prefill };
    let place = |number| if settings.zones_known { settings.place(number) } else { Place::default() };
    let prefills = (0..settings.prefill).map(|number| instance(entry, number, place(number)));
    // A hand-over takes as long to each of them.
    let decodes = (0..settings.decode).map(|number| instance(Role::Decode, number, Place::default()));
    Cluster::new(prefills.chain(decodes).collect())
}

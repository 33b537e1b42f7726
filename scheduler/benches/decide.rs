//! Decision latency: one request on an idle fleet, and a round over many queued requests.
//!
//! Prints what criterion does not report: percentiles and allocations per decision. `cargo bench -p moongate-scheduler
//! --bench decide`.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a benchmark fails by panicking and reports to a person"
)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use hdrhistogram::Histogram;
use moongate_scheduler::{
    AttemptId, CacheHitPrediction, EngineCacheParams, InstanceRole, LocationIds, ModelIndex, PairingDomain,
    PolicyName, PrefetchBehavior, RequestProfile, SchedulableFleet, SchedulableInstance, ScheduleRequest,
    Scheduler, SchedulerEvent, SchedulerOptions, TierHits,
};

/// About how long an engine takes for a prompt.
const PROMPT_SECONDS: f64 = 3.2;

fn cluster(prefills: usize, decodes: usize) -> Arc<SchedulableFleet> {
    let engine = |role, number| SchedulableInstance {
        name: format!("{role:?}-{number}").into(),
        role,
        models: vec![ModelIndex(0)],
        loadable: Vec::new(),
        domain: PairingDomain(0),
        rank: 0,
        location: LocationIds::default(),
        cache: EngineCacheParams {
            prefetch: PrefetchBehavior::WaitComplete,
            page_tokens: 64,
            ..EngineCacheParams::default()
        },
        local_prefill: false,
    };
    let prefills = (0..prefills).map(|number| engine(InstanceRole::Prefill, number));
    Arc::new(SchedulableFleet::new(
        prefills.chain((0..decodes).map(|number| engine(InstanceRole::Decode, number))).collect(),
    ))
}

/// All engines share the store's prefix; one of `per_own_prefix` engines also has a prefix of its own.
fn ask(engines: usize, per_own_prefix: usize, random: &mut fastrand::Rng) -> ScheduleRequest {
    let input_tokens = random.u32(1_000..60_000);
    let shared = random.u32(..input_tokens / 2);
    let mut hits = || {
        let own = if random.usize(..per_own_prefix) == 0 { random.u32(..input_tokens) } else { 0 };
        TierHits {
            l1_tokens: own / 2,
            l2_tokens: own / 2,
            l3_tokens: shared.saturating_sub(own),
            ..TierHits::default()
        }
    };
    let per_instance = (0..engines).map(|_| hits()).collect();
    ScheduleRequest {
        request: RequestProfile {
            model: ModelIndex(0),
            input_tokens,
            max_output_tokens: Some(300),
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        },
        prediction: CacheHitPrediction { per_instance, ..CacheHitPrediction::default() },
        excluded: Vec::new(),
    }
}

struct SchedulerBench {
    scheduler: Scheduler,
    random: fastrand::Rng,
    engines: usize,
    prefills: usize,
    per_own_prefix: usize,
    attempts: u64,
    now: f64,
    events: Vec<SchedulerEvent>,
}

impl SchedulerBench {
    fn new(policy: PolicyName, prefills: usize, decodes: usize) -> Self {
        let settings = SchedulerOptions::default();
        let mut scheduler = Scheduler::new(policy.build(&settings), settings);
        scheduler.set_cluster(0.0, cluster(prefills, decodes));
        let random = fastrand::Rng::with_seed(1);
        let engines = prefills + decodes;
        Self {
            scheduler,
            random,
            engines,
            prefills,
            per_own_prefix: 4,
            attempts: 0,
            now: 0.0,
            events: Vec::new(),
        }
    }

    fn submit(&mut self) -> AttemptId {
        self.attempts += 1;
        let ask = ask(self.engines, self.per_own_prefix, &mut self.random);
        self.scheduler.submit(self.now, AttemptId(self.attempts), ask);
        AttemptId(self.attempts)
    }

    /// Runs one poll; returns its duration in seconds.
    fn poll(&mut self) -> f64 {
        self.events.clear();
        let entropy = self.random.u64(..);
        let started = Instant::now();
        self.scheduler.poll(self.now, entropy, &mut self.events);
        started.elapsed().as_secs_f64()
    }

    /// Submits a request, decides, and removes it again; returns seconds from submission to decision.
    fn decide(&mut self) -> f64 {
        let ask = ask(self.engines, self.per_own_prefix, &mut self.random);
        self.attempts += 1;
        let attempt = AttemptId(self.attempts);
        let started = Instant::now();
        self.scheduler.submit(self.now, attempt, ask);
        let submitted = started.elapsed().as_secs_f64();
        let seconds = submitted + self.poll();
        assert_eq!(self.events.len(), 1);
        self.scheduler.ended(self.now, attempt);
        seconds
    }

    /// Submits requests until `count` of them are queued; dispatched ones are added to `running`.
    fn fill(&mut self, count: usize, running: &mut Vec<AttemptId>) {
        while self.scheduler.queued().count() < count {
            self.submit();
            self.poll();
            running.extend(self.sent());
        }
    }

    /// Attempts that the last poll dispatched.
    fn sent(&self) -> impl Iterator<Item = AttemptId> {
        self.events.iter().filter_map(|event| match event {
            SchedulerEvent::Send { attempt, .. } => Some(*attempt),
            SchedulerEvent::Reject { .. } => None,
        })
    }

    /// Frees one engine; returns the seconds until a queued request was chosen for it.
    fn release(&mut self, running: &mut Vec<AttemptId>) -> f64 {
        // As often as the engines compute prompts.
        self.now += PROMPT_SECONDS / self.prefills as f64;
        let done = running.swap_remove(self.random.usize(..running.len()));
        self.scheduler.ended(self.now, done);
        let seconds = self.poll();
        running.extend(self.sent());
        seconds
    }
}

/// Engines that compute what they are sent, one prompt after the other, with an error of up to a tenth of the prediction.
struct BusyFleet {
    bench: SchedulerBench,
    free_at: Vec<f64>,
    /// By the time of the first token, in nanoseconds.
    running: BTreeSet<(u64, AttemptId)>,
}

impl BusyFleet {
    /// One of `per_own_prefix` engines has a prefix of a prompt that the others do not have.
    fn new(prefills: usize, decodes: usize, per_own_prefix: usize) -> Self {
        let bench = SchedulerBench {
            per_own_prefix,
            ..SchedulerBench::new(PolicyName::Predictive, prefills, decodes)
        };
        Self { bench, free_at: vec![0.0; prefills], running: BTreeSet::new() }
    }

    fn poll(&mut self) -> f64 {
        let seconds = self.bench.poll();
        for event in &self.bench.events {
            let SchedulerEvent::Send { attempt, decision } = event else { continue };
            let engine = decision.route.prefill_instance();
            let explained = decision.explanation.candidates.iter().zip(&decision.explanation.terms);
            let (_, terms) = explained.clone().find(|(candidate, _)| candidate.instance == engine).unwrap();
            let free_at = &mut self.free_at[engine.as_usize()];
            let service = terms.service * (0.9 + 0.2 * self.bench.random.f64());
            *free_at = free_at.max(self.bench.now + terms.fetch) + service;
            self.running.insert(((*free_at * 1e9) as u64, *attempt));
        }
        seconds
    }

    /// Fills the queue, and polls as often as the scheduler wants until the next first token; returns the seconds of the poll after it.
    fn release(&mut self, queued: usize, rechecks: &mut Histogram<u64>) -> f64 {
        while self.bench.scheduler.queued().count() < queued {
            self.bench.submit();
            self.poll();
        }
        let end = |fleet: &Self| fleet.running.first().map_or(f64::INFINITY, |&(end, _)| end as f64 * 1e-9);
        while let Some(next) = self.bench.scheduler.next_poll_at().filter(|next| *next < end(self)) {
            self.bench.now = self.bench.now.max(next);
            rechecks.record((self.poll() * 1e9) as u64).unwrap();
        }
        self.bench.now = self.bench.now.max(end(self));
        let (_, attempt) = self.running.pop_first().unwrap();
        self.bench.scheduler.first_token(self.bench.now, attempt, None);
        self.bench.scheduler.ended(self.bench.now, attempt);
        self.poll()
    }
}

/// Rounds of a fleet in which all engines are busy, with `queued` requests queued.
fn busy(name: &str, mut fleet: BusyFleet, queued: usize, rounds: usize) {
    let mut rechecks: Histogram<u64> = Histogram::new(3).unwrap();
    // The first rounds find all engines idle.
    for _ in 0..rounds / 4 {
        fleet.release(queued, &mut rechecks);
    }
    rechecks.clear();
    let started = fleet.bench.now;
    percentiles(&format!("busy, {name}: an engine becomes free"), rounds, || {
        fleet.release(queued, &mut rechecks)
    });
    let us = |quantile| rechecks.value_at_quantile(quantile) as f64 / 1e3;
    let per_second = rechecks.len() as f64 / (fleet.bench.now - started);
    eprintln!("busy, {name}: rechecks p50 {:.1} us, p99 {:.1} us, {per_second:.0}/s", us(0.5), us(0.99));
    eprintln!("busy, {name}: {:.0} first tokens/s", rounds as f64 / (fleet.bench.now - started));
}

fn percentiles(name: &str, rounds: usize, mut seconds: impl FnMut() -> f64) {
    let mut histogram: Histogram<u64> = Histogram::new(3).unwrap();
    for _ in 0..rounds {
        histogram.record((seconds() * 1e9) as u64).unwrap();
    }
    let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    eprintln!("{name}: p50 {:.1} us, p99 {:.1} us, max {:.1} us", us(0.5), us(0.99), us(1.0));
}

fn decide(criterion: &mut Criterion) {
    for policy in PolicyName::ALL {
        let mut bench = SchedulerBench::new(policy, 48, 16);
        percentiles(&format!("decide, 64 engines, {policy}"), 20_000, || bench.decide());
        criterion.bench_function(&format!("decide/64 engines/{policy}"), |bencher| {
            bencher.iter(|| bench.decide());
        });
    }
    let mut bench = SchedulerBench::new(PolicyName::Predictive, 750, 250);
    percentiles("decide, 1,000 engines, predictive", 5_000, || bench.decide());
}

fn release(criterion: &mut Criterion) {
    let mut bench = SchedulerBench::new(PolicyName::Predictive, 32, 8);
    let mut running = Vec::new();
    percentiles("release, 256 held x 32 prefills", 20_000, || {
        bench.fill(256, &mut running);
        bench.release(&mut running)
    });
    let mut large = SchedulerBench::new(PolicyName::Predictive, 750, 250);
    let mut running_in_large = Vec::new();
    percentiles("release, 1,000 held x 750 prefills", 2_000, || {
        large.fill(1_000, &mut running_in_large);
        large.release(&mut running_in_large)
    });
    busy("1,000 held x 750 prefills", BusyFleet::new(750, 250, 500), 1_000, 2_000);
    busy("the same, parts of a prompt on 250 engines", BusyFleet::new(750, 250, 4), 1_000, 2_000);
    bench.fill(256, &mut running);
    criterion.bench_function("hold/256 held x 32 prefills", |bencher| {
        bencher.iter(|| bench.poll());
    });
}

criterion_group!(benches, decide, release);
criterion_main!(benches);

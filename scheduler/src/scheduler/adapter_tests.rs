//! Requests for LoRA adapters settle on engines that have loaded them, and spread when a load is cheaper than the queue there.

use super::*;
use crate::cache_params::EngineCacheParams;
use crate::fleet::{LocationIds, ModelIndex, PairingDomain, SchedulableInstance};
use crate::policy::PolicyName;
use crate::prefill_time::PrefillTimeModel;

/// A millisecond per token, and a second per load until one was observed.
fn settings() -> SchedulerOptions {
    SchedulerOptions {
        service_prior: PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 },
        handover_prior_s_per_token: 0.0,
        length_price: 0.0,
        ..SchedulerOptions::default()
    }
}

const NONE: &[u32] = &[];

/// Plain workers by the adapters (models from 1) that each has loaded and can load.
fn workers(adapters: &[(&[u32], &[u32])]) -> Arc<SchedulableFleet> {
    let models = |numbers: &[u32]| numbers.iter().copied().map(ModelIndex).collect::<Vec<_>>();
    let instance = |(number, (loaded, loadable)): (usize, &(&[u32], &[u32]))| SchedulableInstance {
        name: format!("w{number}").into(),
        role: InstanceRole::Plain,
        models: [vec![ModelIndex(0)], models(loaded)].concat(),
        loadable: models(loadable),
        domain: PairingDomain(0),
        rank: 0,
        location: LocationIds::default(),
        cache: EngineCacheParams::default(),
        local_prefill: false,
    };
    Arc::new(SchedulableFleet::new(adapters.iter().enumerate().map(instance).collect()))
}

struct AdapterScheduler {
    scheduler: Scheduler,
    next: u64,
}

impl AdapterScheduler {
    fn new(cluster: Arc<SchedulableFleet>) -> Self {
        let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings()), settings());
        scheduler.set_cluster(0.0, cluster);
        Self { scheduler, next: 0 }
    }

    /// The attempt and the worker of a request that is decided at once; `None` if it is queued or rejected.
    fn send(&mut self, now: Seconds, model: u32, input_tokens: u32) -> Option<(AttemptId, u32)> {
        self.next += 1;
        let request = RequestProfile {
            model: ModelIndex(model),
            input_tokens,
            max_output_tokens: Some(1),
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        };
        let prediction = CacheHitPrediction::default();
        let submission = ScheduleRequest { request, prediction, excluded: Vec::new() };
        self.scheduler.submit(now, AttemptId(self.next), submission);
        let mut events = Vec::new();
        self.scheduler.poll(now, self.next, &mut events);
        match events.pop()? {
            SchedulerEvent::Send { attempt, decision } => {
                Some((attempt, decision.route.prefill_instance().0))
            }
            SchedulerEvent::Reject { .. } => None,
        }
    }

    fn end(&mut self, now: Seconds, attempt: AttemptId) {
        self.scheduler.first_token(now, attempt, None);
        self.scheduler.ended(now, attempt);
    }
}

#[test]
fn sequential_requests_of_an_adapter_settle_on_one_engine() {
    let mut fleet = AdapterScheduler::new(workers(&[(NONE, &[1, 2][..]); 4]));
    let mut homes = [None; 2];
    for step in 0..40_u32 {
        let (now, adapter) = (f64::from(step) * 10.0, 1 + step % 2);
        let (attempt, worker) = fleet.send(now, adapter, 100).unwrap();
        let home = homes[(adapter - 1) as usize].get_or_insert(worker);
        assert_eq!(*home, worker, "request {step}");
        fleet.scheduler.adapter_loaded(now + 0.5, InstanceIndex(worker), ModelIndex(adapter), Some(0.5));
        fleet.scheduler.adapter_wait_ended(now + 0.5, attempt);
        fleet.end(now + 0.6, attempt);
    }
    assert_ne!(homes[0], homes[1], "the second adapter goes to an engine with fewer");
}

#[test]
fn requests_during_a_load_wait_for_it() {
    let mut fleet = AdapterScheduler::new(workers(&[(NONE, &[1][..]); 4]));
    let (_, home) = fleet.send(0.0, 1, 10).unwrap();
    for step in 1..10 {
        assert_eq!(fleet.send(f64::from(step) * 0.05, 1, 10).map(|(_, worker)| worker), Some(home));
    }
}

#[test]
fn adapter_spreads_when_the_queue_is_longer_than_a_load() {
    let mut fleet = AdapterScheduler::new(workers(&[(&[1], &[]), (&[], &[1])]));
    // Half a second of queue is cheaper than a load of a second, three seconds are not.
    let (first, worker) = fleet.send(0.0, 1, 500).unwrap();
    assert_eq!(worker, 0);
    assert_eq!(fleet.send(0.0, 1, 100), None, "queued for the engine that has it");
    fleet.end(0.5, first);
    let mut fleet = AdapterScheduler::new(workers(&[(&[1], &[]), (&[], &[1])]));
    assert_eq!(fleet.send(0.0, 1, 3_000).unwrap().1, 0);
    assert_eq!(fleet.send(0.0, 1, 100).unwrap().1, 1);
}

#[test]
fn a_slow_load_makes_requests_wait_longer_before_they_spread() {
    let mut fleet = AdapterScheduler::new(workers(&[(&[1], &[]), (&[], &[1, 2])]));
    fleet.scheduler.adapter_loaded(0.0, InstanceIndex(1), ModelIndex(2), Some(20.0));
    assert_eq!(fleet.send(0.0, 1, 3_000).unwrap().1, 0);
    assert_eq!(fleet.send(0.0, 1, 100), None);
}

#[test]
fn engine_that_cannot_load_an_adapter_never_gets_its_requests() {
    let mut fleet = AdapterScheduler::new(workers(&[(&[], &[]), (&[], &[1]), (&[], &[])]));
    for step in 0..20 {
        if let Some((_, worker)) = fleet.send(f64::from(step) * 0.01, 1, 1_000) {
            assert_eq!(worker, 1);
        }
    }
    let mut without = AdapterScheduler::new(workers(&[(&[], &[]), (&[], &[2])]));
    assert_eq!(without.send(0.0, 1, 100), None);
}

#[test]
fn requests_of_the_base_model_ignore_adapters() {
    let mut fleet = AdapterScheduler::new(workers(&[(NONE, &[1][..]); 3]));
    let mut used = std::collections::BTreeSet::new();
    for step in 0..60 {
        let (attempt, worker) = fleet.send(f64::from(step), 0, 100).unwrap();
        used.insert(worker);
        fleet.end(f64::from(step) + 0.1, attempt);
    }
    assert_eq!(used.len(), 3);
}

#[test]
fn a_failed_load_is_not_expected_to_end() {
    let mut fleet = AdapterScheduler::new(workers(&[(NONE, &[1][..]); 2]));
    let (attempt, worker) = fleet.send(0.0, 1, 100).unwrap();
    fleet.scheduler.adapter_load_failed(0.5, InstanceIndex(worker), ModelIndex(1));
    fleet.scheduler.ended(0.5, attempt);
    let request = RequestProfile {
        model: ModelIndex(1),
        input_tokens: 1,
        max_output_tokens: None,
        sequences: 1,
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    };
    let residency = fleet.scheduler.adapter_residencies(0.5, &request).of(InstanceIndex(worker));
    assert!(matches!(residency, crate::AdapterResidency::Loadable { .. }), "{residency:?}");
}

/// A load is not taken for computation: the learned speed is that of the engine.
#[test]
fn prefill_times_are_learned_without_the_load() {
    let mut fleet = AdapterScheduler::new(workers(&[(&[], &[1])]));
    let mut now = 0.0;
    for adapter in [1; 30] {
        let (attempt, _) = fleet.send(now, adapter, 1_000).unwrap();
        // Twice as long as expected.
        fleet.scheduler.adapter_loaded(now + 2.0, InstanceIndex(0), ModelIndex(1), Some(2.0));
        fleet.scheduler.adapter_wait_ended(now + 2.0, attempt);
        fleet.end(now + 3.0, attempt);
        fleet.scheduler.adapter_load_failed(now + 3.0, InstanceIndex(0), ModelIndex(1));
        now += 100.0;
    }
    let service = fleet.scheduler.loads(now)[0].service.seconds(1_000, 0);
    assert!((0.9..1.1).contains(&service), "{service}");
}

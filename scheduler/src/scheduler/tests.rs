//! The state machine under policies that dispatch at once and under one that queues.

use proptest::prelude::*;

use super::*;
use crate::cache_params::EngineCacheParams;
use crate::decode_step::DecodeBatch;
use crate::fleet::{InstanceRole, LocationIds, ModelIndex, PairingDomain, SchedulableInstance};
use crate::policy::PolicyName;
use crate::prediction::TierHits;

fn instance(name: &str, role: InstanceRole) -> SchedulableInstance {
    SchedulableInstance {
        name: name.into(),
        role,
        models: vec![ModelIndex(0)],
        loadable: Vec::new(),
        domain: PairingDomain(0),
        rank: 0,
        location: LocationIds::default(),
        cache: EngineCacheParams::default(),
        local_prefill: false,
    }
}

fn cluster(names: &[&str]) -> Arc<SchedulableFleet> {
    let role = |name: &str| match name.as_bytes().first() {
        Some(b'p') => InstanceRole::Prefill,
        Some(b'd') => InstanceRole::Decode,
        _ => InstanceRole::Plain,
    };
    Arc::new(SchedulableFleet::new(names.iter().map(|name| instance(name, role(name))).collect()))
}

pub(super) fn scheduler(policy: PolicyName, names: &[&str]) -> Scheduler {
    let settings = SchedulerOptions::default();
    let mut scheduler = Scheduler::new(policy.build(&settings), settings);
    scheduler.set_cluster(0.0, cluster(names));
    scheduler
}

pub(super) fn submission(input_tokens: u32) -> ScheduleRequest {
    ScheduleRequest {
        request: RequestProfile {
            model: ModelIndex(0),
            input_tokens,
            max_output_tokens: Some(10),
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        },
        prediction: CacheHitPrediction::default(),
        excluded: Vec::new(),
    }
}

fn poll(scheduler: &mut Scheduler, now: Seconds) -> Vec<SchedulerEvent> {
    let mut events = Vec::new();
    scheduler.poll(now, 7, &mut events);
    events
}

fn sent_to(event: &SchedulerEvent) -> InstanceIndex {
    match event {
        SchedulerEvent::Send { decision, .. } => decision.route.prefill_instance(),
        SchedulerEvent::Reject { rejection: refusal, .. } => panic!("rejected: {refusal}"),
    }
}

#[test]
fn immediate_policies_dispatch_in_order_of_arrival() {
    let mut scheduler = scheduler(PolicyName::RoundRobin, &["p0", "p1", "d0"]);
    for attempt in 0..4 {
        scheduler.submit(0.0, AttemptId(attempt), submission(100));
    }
    assert_eq!(scheduler.queued().count(), 4);
    let events = poll(&mut scheduler, 0.0);
    let attempts: Vec<u64> = events
        .iter()
        .map(|event| match event {
            SchedulerEvent::Send { attempt, .. } | SchedulerEvent::Reject { attempt, .. } => attempt.0,
        })
        .collect();
    assert_eq!(attempts, [0, 1, 2, 3]);
    assert_eq!(events.iter().map(|event| sent_to(event).0).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(scheduler.queued().count(), 0);
}

#[test]
fn dispatches_count_for_later_decisions_of_the_same_poll() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    for attempt in 0..10 {
        scheduler.submit(0.0, AttemptId(attempt), submission(100));
    }
    let events = poll(&mut scheduler, 0.0);
    assert_eq!(events.iter().filter(|event| sent_to(event).0 == 0).count(), 5);
}

#[test]
fn excluded_and_unavailable_engines_are_not_used() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1", "w2"]);
    scheduler.set_available(InstanceIndex(2), false);
    for attempt in 0..5 {
        scheduler.submit(
            0.0,
            AttemptId(attempt),
            ScheduleRequest { excluded: vec![InstanceIndex(0)], ..submission(100) },
        );
    }
    assert!(poll(&mut scheduler, 0.0).iter().all(|event| sent_to(event) == InstanceIndex(1)));
    scheduler.submit(
        0.0,
        AttemptId(9),
        ScheduleRequest { excluded: vec![InstanceIndex(1), InstanceIndex(0)], ..submission(100) },
    );
    assert!(matches!(poll(&mut scheduler, 0.0)[..], [SchedulerEvent::Reject { attempt: AttemptId(9), .. }]));
    // Excluding engines for one request affects no other request.
    scheduler.submit(0.0, AttemptId(10), submission(1));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIndex(0));
}

#[test]
fn loads_follow_engines_by_name() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    scheduler.set_available(InstanceIndex(0), false);
    scheduler.submit(0.0, AttemptId(0), submission(5000));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIndex(1));
    scheduler.set_cluster(1.0, cluster(&["w1", "w2"]));
    assert_eq!(
        scheduler.engines[0]
            .load(1.0, scheduler.groups.models(InstanceIndex(0)).unwrap())
            .pending_prefill_tokens,
        5000
    );
    scheduler.submit(1.0, AttemptId(1), submission(100));
    assert_eq!(sent_to(&poll(&mut scheduler, 1.0)[0]), InstanceIndex(1));
    scheduler.ended(2.0, AttemptId(0));
    assert!(scheduler.engines[0].is_empty());
    // The load of an engine that left is dropped; the end of its requests changes nothing.
    scheduler.set_cluster(3.0, cluster(&["w1"]));
    scheduler.ended(3.0, AttemptId(1));
    assert!(scheduler.engines[0].is_empty());
}

/// Responses of 200 tokens at 30 ms on one decode and 60 ms on the other.
#[test]
fn time_per_token_is_learned_for_every_decode() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["p0", "d0", "d1"]);
    for attempt in 0..400 {
        let (now, decode) = (100.0 * attempt as f64, 1 + attempt as usize % 2);
        let other = InstanceIndex(3 - decode as u32);
        let request = ScheduleRequest { excluded: vec![other], ..submission(1_000) };
        scheduler.submit(now, AttemptId(attempt), request);
        assert_eq!(poll(&mut scheduler, now).len(), 1);
        scheduler.first_token(now, AttemptId(attempt), None);
        let end = now + 199.0 * 0.03 * decode as f64;
        scheduler.response_complete(end, AttemptId(attempt), 200);
        scheduler.ended(end, AttemptId(attempt));
    }
    let loads = scheduler.loads(50_000.0);
    let step = |ix: usize| loads[ix].decode_step.seconds(DecodeBatch { sequences: 1.0, tokens: 1_010.0 });
    assert!((step(1) / 0.03 - 1.0).abs() < 0.1 && (step(2) / 0.06 - 1.0).abs() < 0.1, "{loads:?}");
    assert!((loads[1].response_tokens - 200.0).abs() < 10.0, "{loads:?}");
}

/// Sends to the first worker, and only while it has nothing to compute.
#[derive(Debug)]
struct OneAtATimePolicy;

impl Policy for OneAtATimePolicy {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    fn rank(&self, input: &PolicyInput<'_>) -> f64 {
        f64::from(input.request.input_tokens - input.prediction.cached_tokens(InstanceIndex(0)))
    }

    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection> {
        if input.loads[0].pending_prefill_tokens > 0 {
            return Ok(PolicyVerdict::Defer { until: input.now + 5.0, held: None });
        }
        PolicyName::LeastLoad.build(&SchedulerOptions::default()).decide(input)
    }
}

fn one_at_a_time() -> Scheduler {
    let mut scheduler = Scheduler::new(Box::new(OneAtATimePolicy), SchedulerOptions::default());
    scheduler.set_cluster(0.0, cluster(&["w0"]));
    scheduler
}

fn only_attempt(events: &[SchedulerEvent]) -> Option<u64> {
    match events {
        [SchedulerEvent::Send { attempt, .. }] => Some(attempt.0),
        [] => None,
        _ => panic!("{events:?}"),
    }
}

#[test]
fn queued_requests_go_by_rank() {
    let mut scheduler = one_at_a_time();
    for (attempt, tokens) in [(0, 300), (1, 200), (2, 100), (3, 100)] {
        scheduler.submit(0.0, AttemptId(attempt), submission(tokens));
    }
    assert_eq!(only_attempt(&poll(&mut scheduler, 0.0)), Some(2));
    assert_eq!(scheduler.next_poll_at(), Some(5.0));
    assert_eq!(scheduler.queued().collect::<Vec<_>>(), [AttemptId(0), AttemptId(1), AttemptId(3)]);
    let hits = TierHits { l1_tokens: 250, ..TierHits::default() };
    scheduler.update_prediction(
        AttemptId(0),
        CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() },
    );
    scheduler.first_token(1.0, AttemptId(2), None);
    assert_eq!(only_attempt(&poll(&mut scheduler, 1.0)), Some(0));
    scheduler.ended(1.0, AttemptId(3));
    assert_eq!(only_attempt(&poll(&mut scheduler, 1.0)), None);
    scheduler.ended(2.0, AttemptId(0));
    assert_eq!(only_attempt(&poll(&mut scheduler, 2.0)), Some(1));
    assert_eq!(scheduler.next_poll_at(), None);
}

#[test]
fn queued_predictions_follow_cluster_changes() {
    let mut scheduler = one_at_a_time();
    scheduler.submit(0.0, AttemptId(0), submission(10));
    poll(&mut scheduler, 0.0);
    let hits = TierHits { l1_tokens: 9, ..TierHits::default() };
    let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
    scheduler.submit(
        0.0,
        AttemptId(1),
        ScheduleRequest { prediction, excluded: vec![InstanceIndex(0)], ..submission(10) },
    );
    scheduler.set_cluster(0.0, cluster(&["w7", "w0"]));
    assert_eq!(scheduler.queued[0].submission.excluded, [InstanceIndex(1)]);
    assert_eq!(scheduler.queued[0].submission.prediction.cached_tokens(InstanceIndex(1)), 9);
    assert_eq!(scheduler.queued[0].submission.prediction.cached_tokens(InstanceIndex(0)), 0);
}

#[derive(Debug, Clone, Copy)]
enum SchedulerOperation {
    Submit { tokens: u32, excluded: Option<u32> },
    Poll,
    FirstToken(usize),
    Complete(usize, u64),
    End(usize),
    Available(u32, bool),
    Report(u32, u64),
    Cluster(usize),
}

fn any_step() -> impl Strategy<Value = SchedulerOperation> {
    prop_oneof![
        4 => (1_u32..50_000, prop::option::of(0_u32..5)).prop_map(|(tokens, excluded)| SchedulerOperation::Submit { tokens, excluded }),
        4 => Just(SchedulerOperation::Poll),
        3 => (0_usize..40).prop_map(SchedulerOperation::FirstToken),
        2 => (0_usize..40, 0_u64..100).prop_map(|(n, tokens)| SchedulerOperation::Complete(n, tokens)),
        3 => (0_usize..40).prop_map(SchedulerOperation::End),
        1 => (0_u32..5, any::<bool>()).prop_map(|(ix, available)| SchedulerOperation::Available(ix, available)),
        1 => (0_u32..5, 0_u64..100_000).prop_map(|(ix, tokens)| SchedulerOperation::Report(ix, tokens)),
        1 => (0_usize..3).prop_map(SchedulerOperation::Cluster),
    ]
}

proptest! {
    /// For any sequence of events, no ineligible engine is used, and after the end of all requests no load is left.
    #[test]
    fn load_returns_to_zero(steps in prop::collection::vec(any_step(), 1..120), policy in 0..PolicyName::ALL.len()) {
        let fleets: [&[&str]; 3] = [&["p0", "p1", "d0", "d1", "w0"], &["d1", "p1", "w0"], &["p1", "p0", "d0"]];
        let mut scheduler = scheduler(PolicyName::ALL[policy], fleets[0]);
        let mut attempts: Vec<AttemptId> = Vec::new();
        for (now, step) in steps.into_iter().enumerate() {
            let now = now as Seconds;
            let nth = |n: usize| attempts.get(n % attempts.len().max(1)).copied();
            match step {
                SchedulerOperation::Submit { tokens, excluded } => {
                    let attempt = AttemptId(attempts.len() as u64);
                    let excluded = excluded.into_iter().map(InstanceIndex).collect();
                    scheduler.submit(now, attempt, ScheduleRequest { excluded, ..submission(tokens) });
                    attempts.push(attempt);
                }
                SchedulerOperation::Poll => {
                    let available: Vec<bool> = scheduler.engines.iter().map(|engine| engine.available).collect();
                    for event in poll(&mut scheduler, now) {
                        let SchedulerEvent::Send { decision, .. } = event else { continue };
                        prop_assert!(available[decision.route.prefill_instance().as_usize()] && available[decision.route.decode_instance().as_usize()]);
                    }
                }
                SchedulerOperation::FirstToken(n) => {
                    nth(n).into_iter().for_each(|attempt| scheduler.first_token(now, attempt, None));
                }
                SchedulerOperation::Complete(n, tokens) => {
                    nth(n).into_iter().for_each(|attempt| scheduler.response_complete(now, attempt, tokens));
                }
                SchedulerOperation::End(n) => nth(n).into_iter().for_each(|attempt| scheduler.ended(now, attempt)),
                SchedulerOperation::Available(ix, available) => scheduler.set_available(InstanceIndex(ix), available),
                SchedulerOperation::Report(ix, tokens) => scheduler.report(
                    now,
                    InstanceIndex(ix),
                    ReportedLoad { waiting_uncached_tokens: tokens, ..ReportedLoad::default() },
                ),
                SchedulerOperation::Cluster(n) => scheduler.set_cluster(now, cluster(fleets[n])),
            }
        }
        for &attempt in &attempts {
            scheduler.ended(1000.0, attempt);
        }
        prop_assert_eq!(scheduler.queued().count(), 0);
        prop_assert!(scheduler.in_flight.is_empty());
        prop_assert!(scheduler.engines.iter().all(EngineLoadTracker::is_empty));
    }
}

/// Requests with a new prefix that arrive together: the second one finds what the first one is computing.
#[test]
fn burst_with_one_prefix_goes_to_one_engine() {
    let mut scheduler = scheduler(PolicyName::Predictive, &["p0", "p1", "d"]);
    let submission = |last: u64| {
        let mut submission = submission(20_000);
        submission.prediction.pages = (0..19).chain([last]).collect();
        submission.prediction.page_tokens = 1_000;
        submission
    };
    let mut sent = |now: Seconds, attempt: u64, submission: ScheduleRequest| {
        scheduler.submit(now, AttemptId(attempt), submission);
        let events = poll(&mut scheduler, now);
        let [SchedulerEvent::Send { decision, .. }] = &events[..] else {
            // It waits until the engine with its prefix is free.
            scheduler.first_token(now + 10.0, AttemptId(attempt - 1), None);
            let [SchedulerEvent::Send { decision, .. }] = &poll(&mut scheduler, now + 10.0)[..] else {
                panic!("not sent: {events:?}")
            };
            return (decision.route.prefill_instance(), decision.pending_tokens);
        };
        (decision.route.prefill_instance(), decision.pending_tokens)
    };
    let (first, pending) = sent(0.0, 1, submission(100));
    assert_eq!(pending, 0);
    assert_eq!(sent(0.1, 2, submission(101)), (first, 19_000));
    let other = ScheduleRequest { prediction: CacheHitPrediction::default(), ..submission(0) };
    assert_ne!(sent(10.2, 3, other).0, first);
}

//! The state machine under push policies and under one that holds.

use proptest::prelude::*;

use super::*;
use crate::cache_params::EngineCacheParams;
use crate::fleet::{InstanceRole, LocationIds, ModelIndex, PairingDomain, SchedulableInstance};
use crate::policy::PolicyName;
use crate::prediction::TierHits;

fn instance(name: &str, role: InstanceRole) -> SchedulableInstance {
    SchedulableInstance {
        name: name.into(),
        role,
        models: vec![ModelIndex(0)],
        domain: PairingDomain(0),
        dp_size: 1,
        place: LocationIds::default(),
        cache: EngineCacheParams::default(),
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

fn scheduler(policy: PolicyName, names: &[&str]) -> Scheduler {
    let settings = SchedulerOptions::default();
    let mut scheduler = Scheduler::new(policy.build(&settings), settings);
    scheduler.set_cluster(0.0, cluster(names));
    scheduler
}

fn ask(input_tokens: u32) -> ScheduleRequest {
    ScheduleRequest {
        request: RequestProfile {
            model: ModelIndex(0),
            input_tokens,
            output_tokens: 10,
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
        SchedulerEvent::Reject { rejection: refusal, .. } => panic!("refused: {refusal}"),
    }
}

#[test]
fn push_policies_answer_at_once_in_order_of_arrival() {
    let mut scheduler = scheduler(PolicyName::RoundRobin, &["p0", "p1", "d0"]);
    for ticket in 0..4 {
        scheduler.submit(0.0, AttemptId(ticket), ask(100));
    }
    assert_eq!(scheduler.queued().count(), 4);
    let events = poll(&mut scheduler, 0.0);
    let tickets: Vec<u64> = events
        .iter()
        .map(|event| match event {
            SchedulerEvent::Send { attempt: ticket, .. } | SchedulerEvent::Reject { ticket, .. } => ticket.0,
        })
        .collect();
    assert_eq!(tickets, [0, 1, 2, 3]);
    assert_eq!(events.iter().map(|event| sent_to(event).0).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(scheduler.queued().count(), 0);
}

#[test]
fn what_was_sent_counts_for_the_next_decision_of_the_same_poll() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    for ticket in 0..10 {
        scheduler.submit(0.0, AttemptId(ticket), ask(100));
    }
    let events = poll(&mut scheduler, 0.0);
    assert_eq!(events.iter().filter(|event| sent_to(event).0 == 0).count(), 5);
}

#[test]
fn barred_and_unavailable_engines_are_not_used() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1", "w2"]);
    scheduler.set_available(InstanceIndex(2), false);
    for ticket in 0..5 {
        scheduler.submit(
            0.0,
            AttemptId(ticket),
            ScheduleRequest { excluded: vec![InstanceIndex(0)], ..ask(100) },
        );
    }
    assert!(poll(&mut scheduler, 0.0).iter().all(|event| sent_to(event) == InstanceIndex(1)));
    scheduler.submit(
        0.0,
        AttemptId(9),
        ScheduleRequest { excluded: vec![InstanceIndex(1), InstanceIndex(0)], ..ask(100) },
    );
    assert!(matches!(poll(&mut scheduler, 0.0)[..], [SchedulerEvent::Reject { ticket: AttemptId(9), .. }]));
    // Barring one request's engines bars them for no other.
    scheduler.submit(0.0, AttemptId(10), ask(1));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIndex(0));
}

#[test]
fn books_follow_their_engines_by_name() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    scheduler.set_available(InstanceIndex(0), false);
    scheduler.submit(0.0, AttemptId(0), ask(5000));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIndex(1));
    scheduler.set_cluster(1.0, cluster(&["w1", "w2"]));
    assert_eq!(scheduler.engines[0].load(1.0, &scheduler.learners[0]).pending_prefill_tokens, 5000);
    scheduler.submit(1.0, AttemptId(1), ask(100));
    assert_eq!(sent_to(&poll(&mut scheduler, 1.0)[0]), InstanceIndex(1));
    scheduler.ended(2.0, AttemptId(0));
    assert!(scheduler.engines[0].is_empty());
    // An engine that left takes its book along; the end of its requests finds nothing to correct.
    scheduler.set_cluster(3.0, cluster(&["w1"]));
    scheduler.ended(3.0, AttemptId(1));
    assert!(scheduler.engines[0].is_empty());
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
            return Ok(PolicyVerdict::Defer { until: input.now + 5.0 });
        }
        PolicyName::LeastLoad.build(&SchedulerOptions::default()).decide(input)
    }
}

fn one_at_a_time() -> Scheduler {
    let mut scheduler = Scheduler::new(Box::new(OneAtATimePolicy), SchedulerOptions::default());
    scheduler.set_cluster(0.0, cluster(&["w0"]));
    scheduler
}

fn only_ticket(events: &[SchedulerEvent]) -> Option<u64> {
    match events {
        [SchedulerEvent::Send { attempt: ticket, .. }] => Some(ticket.0),
        [] => None,
        _ => panic!("{events:?}"),
    }
}

#[test]
fn held_requests_go_by_rank() {
    let mut scheduler = one_at_a_time();
    for (ticket, tokens) in [(0, 300), (1, 200), (2, 100), (3, 100)] {
        scheduler.submit(0.0, AttemptId(ticket), ask(tokens));
    }
    assert_eq!(only_ticket(&poll(&mut scheduler, 0.0)), Some(2));
    assert_eq!(scheduler.next_poll_at(), Some(5.0));
    assert_eq!(scheduler.queued().collect::<Vec<_>>(), [AttemptId(0), AttemptId(1), AttemptId(3)]);
    let hits = TierHits { l1_tokens: 250, ..TierHits::default() };
    scheduler.update_prediction(
        AttemptId(0),
        CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() },
    );
    scheduler.first_token(1.0, AttemptId(2), None);
    assert_eq!(only_ticket(&poll(&mut scheduler, 1.0)), Some(0));
    scheduler.ended(1.0, AttemptId(3));
    assert_eq!(only_ticket(&poll(&mut scheduler, 1.0)), None);
    scheduler.ended(2.0, AttemptId(0));
    assert_eq!(only_ticket(&poll(&mut scheduler, 2.0)), Some(1));
    assert_eq!(scheduler.next_poll_at(), None);
}

#[test]
fn held_predictions_move_with_the_cluster() {
    let mut scheduler = one_at_a_time();
    scheduler.submit(0.0, AttemptId(0), ask(10));
    poll(&mut scheduler, 0.0);
    let hits = TierHits { l1_tokens: 9, ..TierHits::default() };
    let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
    scheduler.submit(
        0.0,
        AttemptId(1),
        ScheduleRequest { prediction, excluded: vec![InstanceIndex(0)], ..ask(10) },
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
        3 => (0_usize..40).prop_map(SchedulerOperation::End),
        1 => (0_u32..5, any::<bool>()).prop_map(|(ix, available)| SchedulerOperation::Available(ix, available)),
        1 => (0_u32..5, 0_u64..100_000).prop_map(|(ix, tokens)| SchedulerOperation::Report(ix, tokens)),
        1 => (0_usize..3).prop_map(SchedulerOperation::Cluster),
    ]
}

proptest! {
    /// Whatever happens in whatever order: no engine is used that may not be, and once all requests have ended the books are empty.
    #[test]
    fn books_are_conserved(steps in prop::collection::vec(any_step(), 1..120), policy in 0..PolicyName::ALL.len()) {
        let fleets: [&[&str]; 3] = [&["p0", "p1", "d0", "d1", "w0"], &["d1", "p1", "w0"], &["p1", "p0", "d0"]];
        let mut scheduler = scheduler(PolicyName::ALL[policy], fleets[0]);
        let mut tickets: Vec<AttemptId> = Vec::new();
        for (now, step) in steps.into_iter().enumerate() {
            let now = now as Seconds;
            let nth = |n: usize| tickets.get(n % tickets.len().max(1)).copied();
            match step {
                SchedulerOperation::Submit { tokens, excluded } => {
                    let ticket = AttemptId(tickets.len() as u64);
                    let excluded = excluded.into_iter().map(InstanceIndex).collect();
                    scheduler.submit(now, ticket, ScheduleRequest { excluded, ..ask(tokens) });
                    tickets.push(ticket);
                }
                SchedulerOperation::Poll => {
                    let available: Vec<bool> = scheduler.engines.iter().map(|engine| engine.available).collect();
                    for event in poll(&mut scheduler, now) {
                        let SchedulerEvent::Send { decision, .. } = event else { continue };
                        prop_assert!(available[decision.route.prefill_instance().as_usize()] && available[decision.route.decode_instance().as_usize()]);
                    }
                }
                SchedulerOperation::FirstToken(n) => {
                    nth(n).into_iter().for_each(|ticket| scheduler.first_token(now, ticket, None));
                }
                SchedulerOperation::End(n) => nth(n).into_iter().for_each(|ticket| scheduler.ended(now, ticket)),
                SchedulerOperation::Available(ix, available) => scheduler.set_available(InstanceIndex(ix), available),
                SchedulerOperation::Report(ix, tokens) => scheduler.report(
                    now,
                    InstanceIndex(ix),
                    ReportedLoad { waiting_uncached_tokens: tokens, ..ReportedLoad::default() },
                ),
                SchedulerOperation::Cluster(n) => scheduler.set_cluster(now, cluster(fleets[n])),
            }
        }
        for &ticket in &tickets {
            scheduler.ended(1000.0, ticket);
        }
        prop_assert_eq!(scheduler.queued().count(), 0);
        prop_assert!(scheduler.in_flight.is_empty());
        prop_assert!(scheduler.engines.iter().all(EngineLoadTracker::is_empty));
    }
}

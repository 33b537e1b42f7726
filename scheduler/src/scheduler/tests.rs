//! The state machine under push policies and under one that holds.

use proptest::prelude::*;

use super::*;
use crate::cache_rules::CacheRules;
use crate::cluster::{Instance, ModelIx, PairingDomain, Place, Role};
use crate::policy::PolicyName;
use crate::prediction::TierHits;

fn instance(name: &str, role: Role) -> Instance {
    Instance {
        name: name.into(),
        role,
        models: vec![ModelIx(0)],
        domain: PairingDomain(0),
        dp_size: 1,
        place: Place::default(),
        cache: CacheRules::default(),
    }
}

fn cluster(names: &[&str]) -> Arc<Cluster> {
    let role = |name: &str| match name.as_bytes().first() {
        Some(b'p') => Role::Prefill,
        Some(b'd') => Role::Decode,
        _ => Role::Plain,
    };
    Arc::new(Cluster::new(names.iter().map(|name| instance(name, role(name))).collect()))
}

fn scheduler(policy: PolicyName, names: &[&str]) -> Scheduler {
    let settings = Settings::default();
    let mut scheduler = Scheduler::new(policy.build(&settings), settings);
    scheduler.set_cluster(0.0, cluster(names));
    scheduler
}

fn ask(input_tokens: u32) -> Ask {
    Ask {
        request: Request {
            model: ModelIx(0),
            input_tokens,
            output_tokens: 10,
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        },
        prediction: Prediction::default(),
        barred: Vec::new(),
    }
}

fn poll(scheduler: &mut Scheduler, now: Seconds) -> Vec<Event> {
    let mut events = Vec::new();
    scheduler.poll(now, 7, &mut events);
    events
}

fn sent_to(event: &Event) -> InstanceIx {
    match event {
        Event::Send { decision, .. } => decision.route.entry(),
        Event::Refuse { refusal, .. } => panic!("refused: {refusal}"),
    }
}

#[test]
fn push_policies_answer_at_once_in_order_of_arrival() {
    let mut scheduler = scheduler(PolicyName::RoundRobin, &["p0", "p1", "d0"]);
    for ticket in 0..4 {
        scheduler.submit(0.0, Ticket(ticket), ask(100));
    }
    assert_eq!(scheduler.held().count(), 4);
    let events = poll(&mut scheduler, 0.0);
    let tickets: Vec<u64> = events
        .iter()
        .map(|event| match event {
            Event::Send { ticket, .. } | Event::Refuse { ticket, .. } => ticket.0,
        })
        .collect();
    assert_eq!(tickets, [0, 1, 2, 3]);
    assert_eq!(events.iter().map(|event| sent_to(event).0).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(scheduler.held().count(), 0);
}

#[test]
fn what_was_sent_counts_for_the_next_decision_of_the_same_poll() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    for ticket in 0..10 {
        scheduler.submit(0.0, Ticket(ticket), ask(100));
    }
    let events = poll(&mut scheduler, 0.0);
    assert_eq!(events.iter().filter(|event| sent_to(event).0 == 0).count(), 5);
}

#[test]
fn barred_and_unavailable_engines_are_not_used() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1", "w2"]);
    scheduler.set_available(InstanceIx(2), false);
    for ticket in 0..5 {
        scheduler.submit(0.0, Ticket(ticket), Ask { barred: vec![InstanceIx(0)], ..ask(100) });
    }
    assert!(poll(&mut scheduler, 0.0).iter().all(|event| sent_to(event) == InstanceIx(1)));
    scheduler.submit(0.0, Ticket(9), Ask { barred: vec![InstanceIx(1), InstanceIx(0)], ..ask(100) });
    assert!(matches!(poll(&mut scheduler, 0.0)[..], [Event::Refuse { ticket: Ticket(9), .. }]));
    // Barring one request's engines bars them for no other.
    scheduler.submit(0.0, Ticket(10), ask(1));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIx(0));
}

#[test]
fn books_follow_their_engines_by_name() {
    let mut scheduler = scheduler(PolicyName::LeastLoad, &["w0", "w1"]);
    scheduler.set_available(InstanceIx(0), false);
    scheduler.submit(0.0, Ticket(0), ask(5000));
    assert_eq!(sent_to(&poll(&mut scheduler, 0.0)[0]), InstanceIx(1));
    scheduler.set_cluster(1.0, cluster(&["w1", "w2"]));
    assert_eq!(scheduler.engines[0].load(1.0, &scheduler.learners[0]).pending_prefill_tokens, 5000);
    scheduler.submit(1.0, Ticket(1), ask(100));
    assert_eq!(sent_to(&poll(&mut scheduler, 1.0)[0]), InstanceIx(1));
    scheduler.ended(2.0, Ticket(0));
    assert!(scheduler.engines[0].is_empty());
    // An engine that left takes its book along; the end of its requests finds nothing to correct.
    scheduler.set_cluster(3.0, cluster(&["w1"]));
    scheduler.ended(3.0, Ticket(1));
    assert!(scheduler.engines[0].is_empty());
}

/// Sends to the first worker, and only while it has nothing to compute.
#[derive(Debug)]
struct OneAtATime;

impl Policy for OneAtATime {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoad
    }

    fn rank(&self, input: &Input<'_>) -> f64 {
        f64::from(input.request.input_tokens - input.prediction.cached_tokens(InstanceIx(0)))
    }

    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal> {
        if input.loads[0].pending_prefill_tokens > 0 {
            return Ok(Verdict::Hold { until: input.now + 5.0 });
        }
        PolicyName::LeastLoad.build(&Settings::default()).decide(input)
    }
}

fn one_at_a_time() -> Scheduler {
    let mut scheduler = Scheduler::new(Box::new(OneAtATime), Settings::default());
    scheduler.set_cluster(0.0, cluster(&["w0"]));
    scheduler
}

fn only_ticket(events: &[Event]) -> Option<u64> {
    match events {
        [Event::Send { ticket, .. }] => Some(ticket.0),
        [] => None,
        _ => panic!("{events:?}"),
    }
}

#[test]
fn held_requests_go_by_rank() {
    let mut scheduler = one_at_a_time();
    for (ticket, tokens) in [(0, 300), (1, 200), (2, 100), (3, 100)] {
        scheduler.submit(0.0, Ticket(ticket), ask(tokens));
    }
    assert_eq!(only_ticket(&poll(&mut scheduler, 0.0)), Some(2));
    assert_eq!(scheduler.wake_at(), Some(5.0));
    assert_eq!(scheduler.held().collect::<Vec<_>>(), [Ticket(0), Ticket(1), Ticket(3)]);
    let hits = TierHits { l1_tokens: 250, ..TierHits::default() };
    scheduler.refresh(Ticket(0), Prediction { per_instance: vec![hits], ..Prediction::default() });
    scheduler.first_token(1.0, Ticket(2), None);
    assert_eq!(only_ticket(&poll(&mut scheduler, 1.0)), Some(0));
    scheduler.ended(1.0, Ticket(3));
    assert_eq!(only_ticket(&poll(&mut scheduler, 1.0)), None);
    scheduler.ended(2.0, Ticket(0));
    assert_eq!(only_ticket(&poll(&mut scheduler, 2.0)), Some(1));
    assert_eq!(scheduler.wake_at(), None);
}

#[test]
fn held_predictions_move_with_the_cluster() {
    let mut scheduler = one_at_a_time();
    scheduler.submit(0.0, Ticket(0), ask(10));
    poll(&mut scheduler, 0.0);
    let hits = TierHits { l1_tokens: 9, ..TierHits::default() };
    let prediction = Prediction { per_instance: vec![hits], ..Prediction::default() };
    scheduler.submit(0.0, Ticket(1), Ask { prediction, barred: vec![InstanceIx(0)], ..ask(10) });
    scheduler.set_cluster(0.0, cluster(&["w7", "w0"]));
    assert_eq!(scheduler.held[0].ask.barred, [InstanceIx(1)]);
    assert_eq!(scheduler.held[0].ask.prediction.cached_tokens(InstanceIx(1)), 9);
    assert_eq!(scheduler.held[0].ask.prediction.cached_tokens(InstanceIx(0)), 0);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Submit { tokens: u32, barred: Option<u32> },
    Poll,
    FirstToken(usize),
    End(usize),
    Available(u32, bool),
    Report(u32, u64),
    Cluster(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u32..50_000, prop::option::of(0_u32..5)).prop_map(|(tokens, barred)| Step::Submit { tokens, barred }),
        4 => Just(Step::Poll),
        3 => (0_usize..40).prop_map(Step::FirstToken),
        3 => (0_usize..40).prop_map(Step::End),
        1 => (0_u32..5, any::<bool>()).prop_map(|(ix, available)| Step::Available(ix, available)),
        1 => (0_u32..5, 0_u64..100_000).prop_map(|(ix, tokens)| Step::Report(ix, tokens)),
        1 => (0_usize..3).prop_map(Step::Cluster),
    ]
}

proptest! {
    /// Whatever happens in whatever order: no engine is used that may not be, and once all requests have ended the books are empty.
    #[test]
    fn books_are_conserved(steps in prop::collection::vec(any_step(), 1..120), policy in 0..PolicyName::ALL.len()) {
        let fleets: [&[&str]; 3] = [&["p0", "p1", "d0", "d1", "w0"], &["d1", "p1", "w0"], &["p1", "p0", "d0"]];
        let mut scheduler = scheduler(PolicyName::ALL[policy], fleets[0]);
        let mut tickets: Vec<Ticket> = Vec::new();
        for (now, step) in steps.into_iter().enumerate() {
            let now = now as Seconds;
            let nth = |n: usize| tickets.get(n % tickets.len().max(1)).copied();
            match step {
                Step::Submit { tokens, barred } => {
                    let ticket = Ticket(tickets.len() as u64);
                    let barred = barred.into_iter().map(InstanceIx).collect();
                    scheduler.submit(now, ticket, Ask { barred, ..ask(tokens) });
                    tickets.push(ticket);
                }
                Step::Poll => {
                    let available: Vec<bool> = scheduler.engines.iter().map(|engine| engine.available).collect();
                    for event in poll(&mut scheduler, now) {
                        let Event::Send { decision, .. } = event else { continue };
                        prop_assert!(available[decision.route.entry().at()] && available[decision.route.exit().at()]);
                    }
                }
                Step::FirstToken(n) => {
                    nth(n).into_iter().for_each(|ticket| scheduler.first_token(now, ticket, None));
                }
                Step::End(n) => nth(n).into_iter().for_each(|ticket| scheduler.ended(now, ticket)),
                Step::Available(ix, available) => scheduler.set_available(InstanceIx(ix), available),
                Step::Report(ix, tokens) => scheduler.report(
                    now,
                    InstanceIx(ix),
                    Reported { waiting_uncached_tokens: tokens, ..Reported::default() },
                ),
                Step::Cluster(n) => scheduler.set_cluster(now, cluster(fleets[n])),
            }
        }
        for &ticket in &tickets {
            scheduler.ended(1000.0, ticket);
        }
        prop_assert_eq!(scheduler.held().count(), 0);
        prop_assert!(scheduler.sent.is_empty());
        prop_assert!(scheduler.engines.iter().all(EngineBook::is_empty));
    }
}

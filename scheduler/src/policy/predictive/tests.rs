//! Preferences of the policy, its waiting and its rejections.

mod bursts;
mod held;
mod round_plan;

use std::sync::Arc;

use proptest::prelude::*;

use super::super::fixture::PolicyFixture;
use super::*;
use crate::attempt::AttemptId;
use crate::cache_params::{EngineCacheParams, PrefetchBehavior};
use crate::decode_step::DecodeStepModel;
use crate::estimate::FETCH_LATENCY;
use crate::fleet::{
    LocationIds, ModelIndex, PairingDomain, ReportedLoad, SchedulableFleet, SchedulableInstance,
};
use crate::options::TtftTarget;
use crate::prediction::{CacheHitPrediction, TierHits};
use crate::prefill_time::PrefillTimeModel;
use crate::request::RequestProfile;
use crate::scheduler::{ScheduleRequest, Scheduler, SchedulerEvent};

/// A millisecond per token, whatever is cached; 10,000 tokens per second from the store.
fn fleet(prefills: usize, prefetch: PrefetchBehavior) -> Arc<SchedulableFleet> {
    let cache = EngineCacheParams {
        prefetch,
        kv_bytes_per_token: 1.0,
        l3_bytes_per_s: 10_000.0,
        l2_bytes_per_s: 1e9,
        ..EngineCacheParams::default()
    };
    let engine = |name: String, role| SchedulableInstance {
        name: name.into(),
        role,
        models: vec![ModelIndex(0)],
        loadable: Vec::new(),
        domain: PairingDomain(0),
        rank: 0,
        location: LocationIds::default(),
        cache: cache.clone(),
        local_prefill: false,
    };
    let prefills = (0..prefills).map(|n| engine(format!("p{n}"), InstanceRole::Prefill));
    Arc::new(SchedulableFleet::new(prefills.chain([engine("d".to_owned(), InstanceRole::Decode)]).collect()))
}

fn settings() -> SchedulerOptions {
    SchedulerOptions {
        service_prior: PrefillTimeModel { c0: 0.0, a: 0.001, b: 0.0, speed: 1.0 },
        handover_prior_s_per_token: 0.0,
        slack: 0.1,
        duplicate_price: 0.4,
        ..SchedulerOptions::default()
    }
}

struct TestScheduler {
    scheduler: Scheduler,
    prefills: usize,
    next: u64,
}

fn test_scheduler_with(
    prefills: usize,
    prefetch: PrefetchBehavior,
    settings: SchedulerOptions,
) -> TestScheduler {
    let mut scheduler = Scheduler::new(PolicyName::Predictive.build(&settings), settings);
    scheduler.set_cluster(0.0, fleet(prefills, prefetch));
    TestScheduler { scheduler, prefills, next: 0 }
}

fn test_scheduler(prefills: usize) -> TestScheduler {
    test_scheduler_with(prefills, PrefetchBehavior::WaitComplete, settings())
}

fn request(input_tokens: u32) -> RequestProfile {
    RequestProfile {
        model: ModelIndex(0),
        input_tokens,
        max_output_tokens: Some(1),
        sequences: 1,
        priority: 0,
        session: None,
        tenant: None,
        ttft_target: None,
    }
}

impl TestScheduler {
    fn submit_request(&mut self, now: f64, request: RequestProfile, hits: &[(usize, TierHits)]) -> u64 {
        let mut per_instance = vec![TierHits::default(); self.prefills + 1];
        hits.iter().for_each(|&(engine, hits)| per_instance[engine] = hits);
        self.submit_predicted(
            now,
            request,
            CacheHitPrediction { per_instance, ..CacheHitPrediction::default() },
        )
    }

    fn submit_predicted(&mut self, now: f64, request: RequestProfile, prediction: CacheHitPrediction) -> u64 {
        self.next += 1;
        self.scheduler.submit(
            now,
            AttemptId(self.next),
            ScheduleRequest { request, prediction, excluded: Vec::new() },
        );
        self.next
    }

    fn submit(&mut self, now: f64, tokens: u32, hits: &[(usize, TierHits)]) -> u64 {
        self.submit_request(now, request(tokens), hits)
    }

    fn poll(&mut self, now: f64) -> Vec<SchedulerEvent> {
        let mut events = Vec::new();
        self.scheduler.poll(now, 1, &mut events);
        events
    }

    /// Attempt and engine of what is dispatched now; nothing may be rejected.
    fn sent(&mut self, now: f64) -> Vec<(u64, usize)> {
        let sent = |event| match event {
            SchedulerEvent::Send { attempt, decision } => {
                (attempt.0, decision.route.prefill_instance().as_usize())
            }
            SchedulerEvent::Reject { rejection: refusal, .. } => panic!("rejected: {refusal}"),
        };
        self.poll(now).into_iter().map(sent).collect()
    }
}

fn own(tokens: u32) -> TierHits {
    TierHits { l2_tokens: tokens, ..TierHits::default() }
}

fn stored(tokens: u32) -> TierHits {
    TierHits { l3_tokens: tokens, ..TierHits::default() }
}

#[test]
fn request_waits_for_the_cached_engine_if_that_is_sooner() {
    let mut sim = test_scheduler(2);
    let first = sim.submit(0.0, 2_000, &[(0, own(1_000))]);
    assert_eq!(sim.sent(0.0), [(first, 0)]);
    // Engine 0 is free in a second, and then has 9 of 10 seconds' work.
    let second = sim.submit(0.0, 10_000, &[(0, own(9_000))]);
    assert_eq!(sim.sent(0.0), []);
    assert!((sim.scheduler.next_poll_at().unwrap() - 0.9).abs() < 1e-9);
    assert_eq!(sim.sent(0.9), [(second, 0)]);
}

/// A decode step takes 10 ms, and 10 ms for each sequence.
fn test_scheduler_with_target(tpot_target: f64) -> TestScheduler {
    let decode_step_prior = DecodeStepModel { base: 0.01, per_sequence: 0.01, per_token: 0.0, speed: 1.0 };
    let settings = SchedulerOptions { decode_step_prior, tpot_target: Some(tpot_target), ..settings() };
    test_scheduler_with(6, PrefetchBehavior::WaitComplete, settings)
}

#[test]
fn decode_gets_as_many_sequences_as_its_target_allows() {
    let mut sim = test_scheduler_with_target(0.045);
    let request = || RequestProfile { max_output_tokens: None, ..request(100) };
    let submitted: Vec<u64> = (0..6).map(|_| sim.submit_request(0.0, request(), &[])).collect();
    let sent: Vec<u64> = sim.sent(0.0).into_iter().map(|(attempt, _)| attempt).collect();
    assert_eq!(sent, submitted[..3]);
    assert!(sim.scheduler.next_poll_at().is_some_and(|at| at > 1.0));
    sent.iter().for_each(|&attempt| sim.scheduler.first_token(0.2, AttemptId(attempt), None));
    assert_eq!(sim.sent(0.2), []);
    sim.scheduler.response_complete(8.0, AttemptId(sent[1]), 200);
    sim.scheduler.ended(8.0, AttemptId(sent[1]));
    let next: Vec<u64> = sim.sent(8.0).into_iter().map(|(attempt, _)| attempt).collect();
    assert_eq!(next, submitted[3..4]);
}

#[test]
fn target_that_no_batch_meets_holds_nothing_back() {
    let mut sim = test_scheduler_with_target(0.015);
    for _ in 0..6 {
        sim.submit(0.0, 100, &[]);
    }
    assert_eq!(sim.sent(0.0).len(), 6);
}

#[test]
fn decode_with_room_is_preferred_to_one_with_fewer_tokens() {
    let mut fixture = PolicyFixture::new(1);
    let mut policy = PredictivePolicy::new(&settings());
    let mut chosen = |used_tokens: [u64; 2]| {
        for (load, (used_tokens, capacity_tokens)) in
            fixture.loads[1..].iter_mut().zip(used_tokens.into_iter().zip([20_000, 100_000]))
        {
            load.response_tokens = 100.0;
            load.external_sequences = 2;
            load.reported =
                Some(ReportedLoad { running: 2, used_tokens, capacity_tokens, ..ReportedLoad::default() });
        }
        fixture.decision(&mut policy).route.decode_instance().as_usize()
    };
    assert_eq!(chosen([9_500, 30_000]), 1);
    assert_eq!(chosen([19_500, 30_000]), 2);
}

#[test]
fn computes_elsewhere_if_that_finishes_sooner() {
    let mut sim = test_scheduler(2);
    let first = sim.submit(0.0, 20_000, &[(0, own(1_000))]);
    assert_eq!(sim.sent(0.0), [(first, 0)]);
    let second = sim.submit(0.0, 10_000, &[(0, own(9_000))]);
    assert_eq!(sim.sent(0.0), [(second, 1)]);
}

#[test]
fn the_only_engine_with_a_decode_is_found_in_a_large_fleet() {
    for with_decode in 150..158 {
        let mut instances = fleet(300, PrefetchBehavior::WaitComplete).instances().to_vec();
        for (number, instance) in instances.iter_mut().enumerate() {
            let is_apart = instance.role == InstanceRole::Prefill && number != with_decode;
            instance.domain = PairingDomain(u32::from(is_apart));
        }
        let mut sim = test_scheduler(300);
        sim.scheduler.set_cluster(0.0, Arc::new(SchedulableFleet::new(instances)));
        let only = sim.submit(0.0, 1_000, &[]);
        assert_eq!(sim.sent(0.0), [(only, with_decode)]);
    }
}

#[test]
fn duplicate_price_prevents_cheap_copies() {
    let mut sim = test_scheduler(2);
    let first = sim.submit(0.0, 2_000, &[(0, own(1))]);
    assert_eq!(sim.sent(0.0), [(first, 0)]);
    // Elsewhere it would finish after 3 s instead of 3.5 s, but with 1.5 s of computation repeated.
    let second = sim.submit(0.0, 3_000, &[(0, own(1_500))]);
    assert_eq!(sim.sent(0.0), []);
    assert_eq!(sim.sent(1.95), [(second, 0)]);
}

#[test]
fn a_copy_that_the_store_has_costs_its_read() {
    for (hits, engine) in [(stored(1_500), 1), (own(0), 0)] {
        let mut sim = test_scheduler(2);
        let first = sim.submit(0.0, 500, &[(0, own(1))]);
        assert_eq!(sim.sent(0.0), [(first, 0)]);
        // On engine 0 it would finish after 2 s. Elsewhere it finishes after 1.65 s, and what the copy evicts can be
        // read as well; or after 3 s without the store.
        let second = sim.submit(0.0, 3_000, &[(0, own(1_500)), (1, hits)]);
        let sent: Vec<_> = [0.0, 0.45].into_iter().flat_map(|now| sim.sent(now)).collect();
        assert_eq!(sent, [(second, engine)]);
    }
}

#[test]
fn only_one_request_is_planned_for_an_engine_at_a_time() {
    let mut sim = test_scheduler(2);
    let first = sim.submit(0.0, 1_000, &[(0, own(1))]);
    assert_eq!(sim.sent(0.0), [(first, 0)]);
    // Both finish earlier after the first request on its engine. Only one of them can.
    let second = sim.submit(0.0, 4_000, &[(0, own(2_000))]);
    let third = sim.submit(0.0, 4_000, &[(0, own(1_900))]);
    assert_eq!(sim.sent(0.0), [(third, 1)]);
    assert_eq!(sim.sent(1.0), [(second, 0)]);
}

#[test]
fn pages_are_fetched_while_the_engine_is_busy() {
    let mut sim = test_scheduler(1);
    sim.submit(0.0, 10_000, &[]);
    sim.sent(0.0);
    // Fetching takes five seconds.
    let second = sim.submit(0.0, 51_000, &[(0, stored(50_000))]);
    assert_eq!(sim.sent(4.8), []);
    assert_eq!(sim.sent(4.95), [(second, 0)]);
}

/// How long before the engine is free a prompt is sent, of which 50,000 tokens are read from a store that takes
/// `slowness` times as long as configured, after some observations.
fn lead_after_learning(slowness: f64) -> f64 {
    let mut sim = test_scheduler(1);
    let (mut now, mut lead) = (0.0, 0.0);
    for round in 0..60 {
        // Reads are best observed on an idle engine.
        let busy = if round % 10 == 0 { 1 } else { 40_000 };
        let first = sim.submit(now, busy, &[]);
        assert_eq!(sim.sent(now), [(first, 0)]);
        let second = sim.submit(now, 51_000, &[(0, stored(50_000))]);
        let free = now + f64::from(busy) / 1_000.0;
        let sent = loop {
            if !sim.sent(now).is_empty() {
                break now;
            }
            now = sim.scheduler.next_poll_at().unwrap();
        };
        lead = free - sent;
        sim.scheduler.first_token(free, AttemptId(first), Some(0));
        sim.scheduler.ended(free, AttemptId(first));
        now = free.max(sent + 5.0 * slowness) + 1.0;
        sim.scheduler.first_token(now, AttemptId(second), Some(50_000));
        sim.scheduler.ended(now, AttemptId(second));
    }
    lead
}

#[test]
fn fetch_time_is_learned() {
    // Five seconds by configuration. A faster store is observable only where an engine is idle, here six times.
    for (slowness, leads) in [(1.0, 5.0..5.2), (0.2, 1.0..2.5), (4.0, 16.0..21.0)] {
        let lead = lead_after_learning(slowness);
        assert!(leads.contains(&lead), "{slowness}: {lead}");
    }
}

#[test]
fn prompt_without_fetch_uses_engine_idle_time() {
    let mut sim = test_scheduler(1);
    let slow = sim.submit(0.0, 51_000, &[(0, stored(50_000))]);
    assert_eq!(sim.sent(0.0), [(slow, 0)]);
    // The blocks arrive after 5 s, so 19 s more of this prompt would be too much.
    let long = sim.submit(0.1, 24_000, &[]);
    assert_eq!(sim.sent(0.1), []);
    let short = sim.submit(0.2, 4_000, &[]);
    assert_eq!(sim.sent(0.2), [(short, 0)]);
    for (time, attempt) in [(4.2, short), (6.0, slow)] {
        sim.scheduler.first_token(time, AttemptId(attempt), None);
    }
    assert_eq!(sim.sent(6.0), [(long, 0)]);
}

#[test]
fn best_effort_prefers_the_busy_engine_that_has_time_to_fetch() {
    for (prefetch, engine) in [(PrefetchBehavior::BestEffort, 0), (PrefetchBehavior::WaitComplete, 1)] {
        let mut sim =
            test_scheduler_with(2, prefetch, SchedulerOptions { duplicate_price: 0.0, ..settings() });
        sim.submit(0.0, 3_000, &[(0, own(1))]);
        sim.sent(0.0);
        let second = sim.submit(0.0, 21_000, &[(0, stored(20_000)), (1, stored(20_000))]);
        // Fetching takes 2 s: engine 0 is busy for 3 s, engine 1 would not wait for its blocks.
        let sent: Vec<_> = [0.0, 1.0, 2.0].into_iter().flat_map(|now| sim.sent(now)).collect();
        assert_eq!(sent, [(second, engine)], "{prefetch:?}");
    }
}

#[test]
fn best_effort_fetch_waits_until_the_requests_ahead_are_sent() {
    let sent = |prefetch| {
        let mut sim = test_scheduler_with(1, prefetch, settings());
        let busy = sim.submit(0.0, 10_000, &[]);
        assert_eq!(sim.sent(0.0), [(busy, 0)]);
        let (short, fetching) =
            (sim.submit(0.0, 3_000, &[]), sim.submit(0.0, 55_000, &[(0, stored(50_000))]));
        // The engine is free after 10 s, and after 13 s for the second one, which fetches for 5 s.
        assert_eq!((short, fetching), (2, 3));
        [7.95, 9.95].map(|now| sim.sent(now).iter().map(|&(attempt, _)| attempt).collect::<Vec<_>>())
    };
    assert_eq!(sent(PrefetchBehavior::WaitComplete), [vec![3], vec![2]]);
    assert_eq!(sent(PrefetchBehavior::BestEffort), [vec![], vec![2, 3]]);
}

#[test]
fn engine_is_free_while_a_computed_prompt_waits_for_its_decode() {
    let sent_at_five = |waiting| {
        let mut sim = test_scheduler(1);
        let first = sim.submit(0.0, 1_000, &[]);
        let second = sim.submit(0.0, 1_000, &[]);
        assert_eq!(sim.sent(0.0), [(first, 0)]);
        sim.scheduler.report(0.5, InstanceIndex(1), ReportedLoad { waiting, ..ReportedLoad::default() });
        assert_eq!(sim.sent(0.95), [(second, 0)]);
        sim.submit(1.0, 1_000, &[]);
        sim.scheduler.report(1.0, InstanceIndex(1), ReportedLoad { waiting, ..ReportedLoad::default() });
        // Neither first token has arrived.
        sim.sent(5.0).len()
    };
    assert_eq!((sent_at_five(0), sent_at_five(1)), (0, 1));
}

#[test]
fn priority_scales_effective_length() {
    let mut sim = test_scheduler(1);
    sim.submit(0.0, 1_000, &[]);
    sim.sent(0.0);
    sim.submit(0.0, 3_000, &[]);
    let urgent = sim.submit_request(0.0, RequestProfile { priority: 1, ..request(5_000) }, &[]);
    sim.scheduler.ended(1.0, AttemptId(1));
    assert_eq!(sim.sent(1.0), [(urgent, 0)]);
}

#[test]
fn flood_of_one_tenant_does_not_starve_another() {
    let mut sim = test_scheduler(1);
    let of = |tenant, tokens| RequestProfile { tenant: Some(tenant), ..request(tokens) };
    sim.submit_request(0.0, of(2, 100), &[]);
    assert_eq!(sim.sent(0.0).len(), 1);
    sim.scheduler.ended(0.1, AttemptId(1));
    let mut now = 0.1;
    for _ in 0..50 {
        let attempt = sim.submit_request(now, of(1, 1_000), &[]);
        assert_eq!(sim.sent(now).len(), 1);
        now += 1.0;
        sim.scheduler.ended(now, AttemptId(attempt));
    }
    // Longer, but of a tenant that has used little.
    sim.submit_request(now, of(1, 1_000), &[]);
    sim.sent(now);
    sim.submit_request(now, of(1, 1_000), &[]);
    let small = sim.submit_request(now, of(2, 3_000), &[]);
    assert_eq!(sim.sent(now + 1.0), [(small, 0)]);
}

#[test]
fn decision_lists_the_cost_of_every_engine() {
    let mut sim = test_scheduler(3);
    sim.submit(0.0, 10_000, &[(1, own(9_000)), (2, stored(5_000))]);
    let Some(SchedulerEvent::Send { decision, .. }) = sim.poll(0.0).into_iter().next() else {
        panic!("not sent")
    };
    let RoutingDecision { explanation, predicted_ttft, route, .. } = decision;
    assert_eq!(route.prefill_instance(), InstanceIndex(1));
    let terms = &explanation.terms;
    assert_eq!(explanation.candidates.len(), 3);
    assert!(explanation.candidates.iter().zip(terms).all(|(c, t)| (c.cost - t.cost()).abs() < 1e-9));
    assert!((terms[0].service - 10.0).abs() < 1e-9 && (terms[1].service - 1.0).abs() < 1e-9);
    assert!((terms[2].fetch - 0.502).abs() < 1e-9);
    assert!((terms[0].duplicate - 0.4 * 9.0).abs() < 1e-9);
    assert!((predicted_ttft.unwrap() - 1.0).abs() < 1e-9);
}

proptest! {
    /// A prompt is sent when its blocks can be fetched just before the engine is free; without blocks to fetch, when
    /// the engine is free.
    #[test]
    fn only_requests_with_a_fetch_are_sent_early(busy in 1_u32..60_000, pages in 0_u32..80_000, own_tokens in 0_u32..20_000) {
        let mut sim = test_scheduler(1);
        let first = sim.submit(0.0, busy, &[]);
        prop_assert_eq!(sim.sent(0.0), [(first, 0)]);
        let hits = TierHits { l3_tokens: pages, ..own(own_tokens) };
        let second = sim.submit(0.0, own_tokens + pages + 1_000, &[(0, hits)]);
        let fetch = if pages < 256 { 0.0 } else { FETCH_LATENCY + f64::from(pages) / 10_000.0 };
        let due = f64::from(busy) / 1_000.0 - fetch - 0.1;
        if due > 0.01 {
            prop_assert_eq!(sim.sent(0.0), []);
            prop_assert_eq!(sim.sent(due - 0.005), []);
        }
        prop_assert_eq!(sim.sent(due.max(0.0) + 0.001), [(second, 0)]);
    }

    /// A request is rejected for its target only if it would miss it even as the next one.
    #[test]
    fn rejects_only_if_the_target_cannot_be_met(
        requests in prop::collection::vec((1_u32..20_000, 0.0_f64..2.0), 1..60),
        cold_factor in 1.0_f64..4.0,
    ) {
        let target = TtftTarget { base: 2.0, cold_factor };
        let mut sim = test_scheduler_with(2, PrefetchBehavior::WaitComplete, SchedulerOptions { ttft_target: Some(target), ..settings() });
        // Time at which each engine has finished its work.
        let mut free_at = [0.0_f64; 2];
        let mut running: Vec<(f64, u64)> = Vec::new();
        let mut arrived = vec![(0.0, 0)];
        let mut now = 0.0;
        for (tokens, gap) in requests {
            now += gap;
            running.retain(|&(end, attempt)| {
                if end <= now {
                    sim.scheduler.first_token(end, AttemptId(attempt), None);
                    sim.scheduler.ended(end, AttemptId(attempt));
                }
                end > now
            });
            sim.submit(now, tokens, &[]);
            arrived.push((now, tokens));
            for event in sim.poll(now) {
                match event {
                    SchedulerEvent::Send { attempt, decision } => {
                        let (_, tokens) = arrived[attempt.0 as usize];
                        let free = &mut free_at[decision.route.prefill_instance().as_usize()];
                        *free = free.max(now) + f64::from(tokens) / 1000.0;
                        running.push((*free, attempt.0));
                    }
                    SchedulerEvent::Reject { attempt, .. } => {
                        let (arrived, tokens) = arrived[attempt.0 as usize];
                        let service = f64::from(tokens) / 1000.0;
                        let soonest = free_at[0].min(free_at[1]).max(now) + service;
                        prop_assert!(soonest > arrived + f64::max(2.0, cold_factor * service) - 1e-6);
                    }
                }
            }
        }
    }

    /// A request is overtaken only by shorter ones that arrived within a multiple of the difference after it, and by
    /// all of these.
    #[test]
    fn overtaking_is_bounded_by_the_difference_in_computation(
        requests in prop::collection::vec((200_u32..20_000, 0.0_f64..5.0), 2..80),
    ) {
        let mut sim = test_scheduler(1);
        let busy = sim.submit(0.0, 1_000_000, &[]);
        sim.sent(0.0);
        let mut now = 0.0;
        // The latest time at which a request without computation could still overtake each.
        let mut ranks = Vec::new();
        for (tokens, gap) in requests {
            now += gap;
            let attempt = sim.submit(now, tokens, &[]);
            prop_assert_eq!(sim.sent(now), []);
            ranks.push((now + OVERTAKING_SERVICES * f64::from(tokens) / 1000.0, attempt));
        }
        ranks.sort_by(|left, right| left.0.total_cmp(&right.0));
        let mut running = busy;
        for (_, attempt) in ranks {
            now += 1_000_000.0;
            sim.scheduler.ended(now, AttemptId(running));
            prop_assert_eq!(sim.sent(now), [(attempt, 0)]);
            running = attempt;
        }
    }

    /// The same calls give the same decisions.
    #[test]
    fn decisions_are_repeatable(requests in prop::collection::vec((1_u32..20_000, 0_u32..20_000, 0_usize..3), 1..40)) {
        let run = || {
            let mut sim = test_scheduler(3);
            let mut events = Vec::new();
            for (step, &(tokens, cached, engine)) in requests.iter().enumerate() {
                sim.submit(step as f64, tokens, &[(engine, own(cached.min(tokens)))]);
                events.extend(sim.poll(step as f64));
                sim.scheduler.first_token(step as f64 + 0.5, AttemptId(step as u64 / 2), None);
            }
            events
        };
        prop_assert_eq!(run(), run());
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn prompts_of_similar_length_share_an_engine_if_both_are_free() {
    let mut sim = test_scheduler(2);
    let mut engines = [Vec::new(), Vec::new()];
    let mut now = 0.0;
    for step in 0..1_000 {
        // A hundred short prompts are as much work as a long one.
        let long = step % 101 == 0;
        let attempt = sim.submit(now, if long { 10_000 } else { 100 }, &[]);
        let sent = sim.sent(now);
        assert_eq!(sent.len(), 1);
        engines[usize::from(long)].push(sent[0].1);
        now += 20.0;
        sim.scheduler.first_token(now, AttemptId(attempt), None);
        sim.scheduler.ended(now, AttemptId(attempt));
    }
    let on_second = |engines: &[usize]| {
        let late = &engines[engines.len() / 2..];
        late.iter().sum::<usize>() as f64 / late.len() as f64
    };
    assert!(on_second(&engines[0]) < 0.3, "{:?}", engines[0]);
    assert!(on_second(&engines[1]) > 0.7, "{:?}", engines[1]);
}

#[test]
fn length_matters_less_the_more_is_cached() {
    let price = |cached| {
        let mut sim = test_scheduler_with(
            2,
            PrefetchBehavior::WaitComplete,
            SchedulerOptions { duplicate_price: 0.0, ..settings() },
        );
        let mut last = 0.0;
        for step in 0..300 {
            let now = 1_000.0 * f64::from(step);
            let attempt = sim.submit(now, 10_000, &[(0, own(cached)), (1, own(cached))]);
            let [SchedulerEvent::Send { decision, .. }] = &sim.poll(now)[..] else { panic!("not sent") };
            last = decision.explanation.terms.iter().map(|terms| terms.length / terms.service).sum();
            sim.scheduler.ended(now + 100.0, AttemptId(attempt));
        }
        last
    };
    let (cold, warm) = (price(0), price(9_000));
    assert!(warm < 0.2 * cold, "{warm} {cold}");
}

#[test]
fn engine_order_is_by_length_with_ageing() {
    let priority = |arrived: f64, tokens| {
        let mut sim = test_scheduler(1);
        sim.submit(arrived, tokens, &[]);
        match &sim.poll(arrived)[..] {
            [SchedulerEvent::Send { decision, .. }] => decision.engine_priority.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let hour = 1.8e9;
    assert!(priority(hour, 1_000) < priority(hour, 1_001));
    assert!(priority(hour + 30.0, 1_000) < priority(hour, 10_000));
    // Nine seconds longer, and a tenth of the waiting counts.
    assert!(priority(hour + 100.0, 1_000) > priority(hour, 10_000));
}

//! Requests with one new prefix that arrive together.

use super::*;
use crate::fleet::NextPass;

#[test]
fn burst_with_one_prefix_waits_if_passes_are_long() {
    // 0.5 s for each pass, and 0.1 ms per token.
    for (shared, engines) in [(1_000, [0, 0]), (0, [0, 1])] {
        let service_prior = PrefillTimeModel { c0: 0.5, a: 1e-4, b: 0.0, speed: 1.0 };
        let mut sim = test_scheduler_with(
            2,
            PrefetchBehavior::WaitComplete,
            SchedulerOptions { service_prior, ..settings() },
        );
        let first = sim.submit(0.0, 1_100, &[(0, own(1))]);
        assert_eq!(sim.sent(0.0), [(first, engines[0])]);
        // The first one's blocks will be there once it is computed.
        let second = sim.submit(0.05, 1_100, &[(0, own(shared))]);
        let sent: Vec<_> = [0.05, 0.6].into_iter().flat_map(|now| sim.sent(now)).collect();
        assert_eq!(sent, [(second, engines[1])]);
    }
}

#[test]
fn a_burst_with_one_prefix_shares_the_next_pass() {
    let service_prior = PrefillTimeModel { c0: 0.5, a: 1e-4, b: 0.0, speed: 1.0 };
    let mut sim = test_scheduler_with(
        2,
        PrefetchBehavior::WaitComplete,
        SchedulerOptions { service_prior, ..settings() },
    );
    let first = sim.submit(0.0, 1_100, &[(0, own(1))]);
    assert_eq!(sim.sent(0.0), [(first, 0)]);
    let rest: Vec<_> = (0..3).map(|_| sim.submit(0.05, 1_100, &[(0, own(1_000))])).collect();
    // All are sent just before the first pass ends, so that one more pass computes them together. One after the other, the
    // third would be sooner on the idle engine.
    assert_eq!(sim.sent(0.05), []);
    let sent = sim.sent(0.55);
    assert_eq!(sent, rest.into_iter().map(|request| (request, 0)).collect::<Vec<_>>());
}

#[test]
fn requests_without_a_common_prefix_are_spread() {
    let service_prior = PrefillTimeModel { c0: 0.04, a: 1e-4, b: 0.0, speed: 1.0 };
    let settings = SchedulerOptions { service_prior, length_price: 0.0, ..SchedulerOptions::default() };
    let mut sim = test_scheduler_with(4, PrefetchBehavior::WaitComplete, settings);
    let mut by_engine = [0; 4];
    for _ in 0..16 {
        sim.submit(0.0, 10, &[]);
    }
    sim.sent(0.0).into_iter().for_each(|(_, engine)| by_engine[engine] += 1);
    assert!(by_engine.iter().all(|count| (2..=4).contains(count)), "{by_engine:?}");
}

#[test]
fn a_shared_pass_costs_a_fifth_of_what_is_not_cached() {
    let mut fixture = PolicyFixture::new(1);
    let mut policy = PredictivePolicy::new(&settings());
    fixture.loads[0].service = PrefillTimeModel { c0: 0.5, a: 1e-4, b: 0.0, speed: 1.0 };
    let engine = InstanceIndex::all().next().unwrap();
    let mut price = |next_pass, cached| {
        fixture.loads[0].next_pass = next_pass;
        fixture.set_cached(0, cached, 0, 0);
        let priced = policy.cost_on(&fixture.input(), engine, cached).unwrap();
        (priced.estimate.shares_pass, priced.terms.congestion)
    };
    let shared = NextPass { room: 10_000, work: 0.5 };
    // A fifth of the pass's half second, for a prompt of 1,000 tokens.
    for (cached, expected) in [(0, 0.1), (500, 0.05), (900, 0.01)] {
        let (shares_pass, paid) = price(shared, cached);
        assert!(shares_pass && (paid - expected).abs() < 1e-9, "{cached} cached: {paid}");
    }
    assert_eq!(price(NextPass::default(), 0), (false, 0.0), "a pass of its own");
}

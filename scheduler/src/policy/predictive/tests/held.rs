//! Choices that are kept between rounds.

use super::*;
use crate::policy::Policy;

/// Keeps choices in a round of any size.
fn keeping(settings: &SchedulerOptions) -> Box<dyn Policy> {
    Box::new(PredictivePolicy { large_round: 0, ..PredictivePolicy::new(settings) })
}

/// Two busy engines, of which the first is about to be free, and a request that waits for the second, where most of it is cached.
fn held_request() -> (TestScheduler, [u64; 2], u64) {
    let mut sim = test_scheduler(2);
    sim.scheduler = Scheduler::new(keeping(&settings()), settings());
    sim.scheduler.set_cluster(0.0, fleet(2, PrefetchBehavior::WaitComplete));
    let running =
        [(0, 10_000), (1, 12_000)].map(|(engine, tokens)| sim.submit(0.0, tokens, &[(engine, own(1))]));
    assert_eq!(sim.sent(0.0), [(running[0], 0), (running[1], 1)]);
    let queued = sim.submit(9.92, 5_000, &[(1, own(4_900))]);
    assert_eq!(sim.sent(9.92), []);
    assert!((sim.scheduler.next_poll_at().unwrap() - 11.9).abs() < 0.001);
    (sim, running, queued)
}

#[test]
fn an_engine_that_is_free_early_gets_its_request_at_once() {
    let (mut sim, running, queued) = held_request();
    sim.scheduler.first_token(9.95, AttemptId(running[1]), None);
    assert_eq!(sim.sent(9.95), [(queued, 1)]);
}

#[test]
fn another_engine_that_is_free_early_gets_the_request() {
    let (mut sim, running, _) = held_request();
    // Nothing of it is cached, so it waits for the first engine.
    let queued = sim.submit(9.93, 3_000, &[]);
    assert_eq!(sim.sent(9.93), [(queued, 0)]);
    let queued = sim.submit(9.94, 4_000, &[(0, own(100))]);
    assert_eq!(sim.sent(9.94), []);
    sim.scheduler.first_token(9.95, AttemptId(running[1]), None);
    assert!(sim.sent(9.95).contains(&(queued, 1)));
}

#[test]
fn a_new_prediction_replaces_the_choice() {
    let (mut sim, _, queued) = held_request();
    // Its blocks have been evicted.
    sim.scheduler.update_prediction(AttemptId(queued), CacheHitPrediction::default());
    assert_eq!(sim.sent(9.95), [(queued, 0)]);
}

/// Interval between requests in seconds.
const INTERVAL: f64 = 0.7;

/// First tokens of these requests, if each engine needs the share `speed` of the predicted time.
fn answered(
    requests: &[(u32, u32, usize)],
    speed: f64,
    policy: fn(&SchedulerOptions) -> Box<dyn Policy>,
) -> Vec<(f64, u64)> {
    let mut sim = test_scheduler(3);
    let settings = settings();
    sim.scheduler = Scheduler::new(policy(&settings), settings);
    sim.scheduler.set_cluster(0.0, fleet(3, PrefetchBehavior::WaitComplete));
    let (mut now, mut answered, mut running) = (0.0, Vec::new(), Vec::<(f64, u64)>::new());
    let mut free_at = [0.0; 3];
    while answered.len() < requests.len() {
        let arrived = sim.next as usize;
        let arrival = if arrived < requests.len() { INTERVAL * arrived as f64 } else { f64::INFINITY };
        let answer = running.iter().map(|&(end, _)| end).fold(f64::INFINITY, f64::min);
        let poll = sim.scheduler.next_poll_at().unwrap_or(f64::INFINITY).max(now);
        now = arrival.min(answer).min(poll);
        if now == answer {
            let position = running.iter().position(|&(end, _)| end == now).unwrap();
            let (_, attempt) = running.swap_remove(position);
            answered.push((now, attempt));
            sim.scheduler.first_token(now, AttemptId(attempt), None);
            sim.scheduler.ended(now, AttemptId(attempt));
        } else if now == arrival {
            let (tokens, cached, engine) = requests[arrived];
            sim.submit(now, tokens, &[(engine, own(cached.min(tokens)))]);
        }
        for (attempt, engine) in sim.sent(now) {
            let (tokens, cached, home) = requests[attempt as usize - 1];
            let cached = if engine == home { cached.min(tokens - 1) } else { 0 };
            let end = f64::max(free_at[engine], now) + speed * f64::from(tokens - cached) / 1000.0;
            free_at[engine] = end;
            running.push((end, attempt));
        }
    }
    answered
}

/// Mean time to the first token of requests of up to 9 s, of which each engine gets about as many as it can compute.
fn mean_ttft(policy: fn(&SchedulerOptions) -> Box<dyn Policy>) -> f64 {
    let (mut total, mut count) = (0.0, 0.0);
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let requests: Vec<_> =
            (0..40).map(|_| (random.u32(1..9_000), random.u32(0..9_000), random.usize(..3))).collect();
        for (end, attempt) in answered(&requests, random.f64() + 0.5, policy) {
            total += end - INTERVAL * (attempt - 1) as f64;
            count += 1.0;
        }
    }
    total / count
}

#[test]
#[cfg_attr(miri, ignore = "thousands of decisions take minutes")]
fn kept_choices_are_as_good_as_those_of_each_round() {
    let kept = mean_ttft(keeping);
    let priced = mean_ttft(|settings| Box::new(PredictivePolicy::new(settings)));
    assert!((kept / priced - 1.0).abs() < 0.05, "{kept} {priced}");
}

use proptest::prelude::*;

use super::*;
use crate::kv_cache::KvEventSource;
use crate::listing::listed_instance;
use crate::topology::{EngineKind, EngineRole};

fn facts(version: &str) -> EngineFacts {
    EngineFacts {
        version: version.into(),
        models: vec!["m".into()],
        ..EngineFacts::unreported(EngineKind::Vllm)
    }
}

fn failed(timed_out: bool) -> ProbeVerdict {
    ProbeVerdict::NotReady { reason: "no answer".into(), facts: None, timed_out }
}

fn is_ready(entry: &ProbedInstance) -> bool {
    entry.instance(None).readiness == InstanceReadiness::Ready
}

fn finish(entry: &mut ProbedInstance, verdict: ProbeVerdict, now: Instant) -> bool {
    entry.start(1, now);
    entry.finish(1, verdict, now, 1.0, &ProbeOptions::default())
}

#[test]
fn failed_event_query_keeps_the_previous_result() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    let reported = |events| ProbeVerdict::Ready(EngineFacts { events, ..facts("1") });
    let events = |entry: &ProbedInstance| entry.instance(None).facts.as_ref().unwrap().events.clone();
    finish(&mut entry, reported(None), now);
    assert_eq!(events(&entry), None);
    let source = KvEventSource {
        dp_rank: 0,
        endpoint: "tcp://a:5557".into(),
        engine_binds: true,
        replay: None,
        topic: String::new(),
    };
    finish(&mut entry, reported(Some(vec![source.clone()])), now);
    assert!(!finish(&mut entry, reported(None), now), "nothing has changed");
    assert_eq!(events(&entry), Some(vec![source]));
    finish(&mut entry, reported(Some(Vec::new())), now);
    assert_eq!(events(&entry), Some(Vec::new()), "turned off");
}

#[test]
fn a_ready_instance_stays_ready_until_too_many_timeouts() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    assert!(!is_ready(&entry));
    assert!(finish(&mut entry, ProbeVerdict::Ready(facts("1")), now));
    for _ in 1..ProbeOptions::default().timeouts_to_unready {
        assert!(!finish(&mut entry, failed(true), now), "nothing visible changes");
        assert!(is_ready(&entry));
    }
    assert!(finish(&mut entry, failed(true), now));
    assert!(!is_ready(&entry));
    assert!(entry.instance(None).facts.is_some(), "the last facts are kept for diagnosis");
}

#[test]
fn a_refused_connection_ends_readiness_at_once() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    finish(&mut entry, ProbeVerdict::Ready(facts("1")), now);
    finish(&mut entry, failed(false), now);
    assert!(!is_ready(&entry));
}

#[test]
fn backoff_doubles_to_its_limit_and_success_resets_it() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    let mut waits = Vec::new();
    for _ in 0..7 {
        finish(&mut entry, failed(false), now);
        waits.push((entry.due().unwrap() - now).as_millis());
    }
    assert_eq!(waits, [250, 500, 1000, 2000, 4000, 5000, 5000]);
    finish(&mut entry, ProbeVerdict::Ready(facts("1")), now);
    assert_eq!(entry.due().unwrap() - now, Duration::from_secs(33), "30 s and the whole jitter");
    finish(&mut entry, failed(true), now);
    assert_eq!(entry.due().unwrap() - now, Duration::from_millis(250));
}

#[test]
fn changed_url_clears_facts_and_drops_the_running_probe() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    finish(&mut entry, ProbeVerdict::Ready(facts("1")), now);
    entry.start(7, now);
    let mut moved = listed_instance("a", EngineRole::Plain);
    moved.url = "http://elsewhere:8000".into();
    entry.update_listing(moved, now);
    assert_eq!(entry.instance(None).facts, None);
    assert_eq!(entry.due(), Some(now));
    assert!(!entry.finish(7, ProbeVerdict::Ready(facts("old")), now, 0.0, &ProbeOptions::default()));
    assert_eq!(entry.instance(None).facts, None);
}

#[test]
fn unavailable_instance_is_not_ready_until_probed_again() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    finish(&mut entry, ProbeVerdict::Ready(facts("1")), now);
    let mut unavailable = listed_instance("a", EngineRole::Plain);
    unavailable.unavailable_reason = Some("pod is not Ready".into());
    entry.update_listing(unavailable, now);
    assert_eq!(entry.due(), None);
    assert_eq!(
        entry.instance(None).readiness,
        InstanceReadiness::NotReady { reason: "pod is not Ready".into() }
    );
    entry.update_listing(listed_instance("a", EngineRole::Plain), now);
    assert!(!is_ready(&entry));
    finish(&mut entry, ProbeVerdict::Ready(facts("2")), now);
    assert!(is_ready(&entry));
}

#[test]
fn probe_requests_are_coalesced_and_spaced_apart() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Plain), now);
    finish(&mut entry, ProbeVerdict::Ready(facts("1")), now);
    entry.request_probe(now);
    entry.request_probe(now);
    assert_eq!(
        entry.due(),
        Some(now + MIN_PROBE_INTERVAL),
        "not before the minimum interval after the last start"
    );
    entry.start(1, now + MIN_PROBE_INTERVAL);
    entry.request_probe(now + MIN_PROBE_INTERVAL);
    entry.finish(1, ProbeVerdict::Ready(facts("1")), now + MIN_PROBE_INTERVAL, 0.0, &ProbeOptions::default());
    assert_eq!(entry.due(), Some(now + MIN_PROBE_INTERVAL * 2), "requested while running: probed once more");
}

#[test]
fn an_adopted_transfer_makes_an_unclassified_engine_usable() {
    let now = Instant::now();
    let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Decode), now);
    finish(&mut entry, ProbeVerdict::NoConnector { facts: facts("1"), reason: "set connector".into() }, now);
    assert!(entry.lacks_connector());
    assert_eq!(
        entry.instance(None).readiness,
        InstanceReadiness::NotReady { reason: "set connector".into() }
    );
    let adopted = entry.instance(Some(KvTransferMethod::VllmNixl));
    assert_eq!(
        adopted.usable_facts().and_then(|facts| facts.transfer.clone()),
        Some(KvTransferMethod::VllmNixl)
    );
}

proptest! {
    /// After any sequence of events, an instance that is not marked unavailable is probed again within the limits.
    #[test]
    fn the_next_probe_is_always_within_bounds(steps in proptest::collection::vec((0u8..6, 0.0f64..1.0), 1..60)) {
        let options = ProbeOptions::default();
        let mut now = Instant::now();
        let mut entry = ProbedInstance::new(listed_instance("a", EngineRole::Decode), now);
        for (step, jitter) in steps {
            now += Duration::from_millis(50);
            let verdict = match step {
                0 => ProbeVerdict::Ready(facts("1")),
                1 => failed(true),
                2 => failed(false),
                3 => ProbeVerdict::NoConnector { facts: facts("1"), reason: "r".into() },
                4 => { entry.request_probe(now); continue; }
                _ => {
                    let mut other = listed_instance("a", EngineRole::Decode);
                    other.url = format!("http://x:{}", 1 + (jitter * 3.0) as u16);
                    entry.update_listing(other, now);
                    continue;
                }
            };
            entry.start(1, now);
            prop_assert_eq!(entry.due(), None);
            entry.finish(1, verdict, now, jitter, &options);
            let wait = entry.due().unwrap() - now;
            prop_assert!(wait <= options.refresh.mul_f64(1.1));
            prop_assert!(wait >= MIN_PROBE_INTERVAL.min(options.backoff.initial / 2));
            prop_assert!(!is_ready(&entry) || entry.facts.is_some());
        }
    }
}

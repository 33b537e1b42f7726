use proptest::prelude::*;

use super::*;
use crate::cache::KvEventSource;
use crate::listing::sample;
use crate::topology::{Engine, Role};

fn facts(version: &str) -> EngineFacts {
    EngineFacts {
        engine: Engine::Vllm,
        version: version.into(),
        models: vec!["m".into()],
        reported_role: None,
        dp_size: 1,
        page_size: None,
        context_length: None,
        tokenizer: None,
        transfer: None,
        hashing: None,
        events: None,
        host_cache: None,
        store: None,
        priority_order: None,
    }
}

fn failed(timed_out: bool) -> Verdict {
    Verdict::NotReady { reason: "no answer".into(), facts: None, timed_out }
}

fn is_ready(entry: &Entry) -> bool {
    entry.instance(None).readiness == Readiness::Ready
}

fn finish(entry: &mut Entry, verdict: Verdict, now: Instant) -> bool {
    entry.start(1, now);
    entry.finish(1, verdict, now, 1.0, &ProbeOptions::default())
}

#[test]
fn an_unanswered_question_about_events_leaves_the_earlier_answer() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    let told = |events| Verdict::Ready(EngineFacts { events, ..facts("1") });
    let events = |entry: &Entry| entry.instance(None).facts.as_ref().unwrap().events.clone();
    finish(&mut entry, told(None), now);
    assert_eq!(events(&entry), None);
    let source = KvEventSource {
        dp_rank: 0,
        endpoint: "tcp://a:5557".into(),
        engine_binds: true,
        replay: None,
        topic: String::new(),
    };
    finish(&mut entry, told(Some(vec![source.clone()])), now);
    assert!(!finish(&mut entry, told(None), now), "nothing has changed");
    assert_eq!(events(&entry), Some(vec![source]));
    finish(&mut entry, told(Some(Vec::new())), now);
    assert_eq!(events(&entry), Some(Vec::new()), "turned off");
}

#[test]
fn time_outs_are_forgiven_until_they_are_too_many() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    assert!(!is_ready(&entry));
    assert!(finish(&mut entry, Verdict::Ready(facts("1")), now));
    for _ in 1..ProbeOptions::default().timeouts_to_unready {
        assert!(!finish(&mut entry, failed(true), now), "nothing visible changes");
        assert!(is_ready(&entry));
    }
    assert!(finish(&mut entry, failed(true), now));
    assert!(!is_ready(&entry));
    assert!(entry.instance(None).facts.is_some(), "the last facts stay for people to read");
}

#[test]
fn a_refused_connection_counts_at_once() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    finish(&mut entry, Verdict::Ready(facts("1")), now);
    finish(&mut entry, failed(false), now);
    assert!(!is_ready(&entry));
}

#[test]
fn backoff_doubles_to_its_limit_and_success_resets_it() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    let mut waits = Vec::new();
    for _ in 0..7 {
        finish(&mut entry, failed(false), now);
        waits.push((entry.due().unwrap() - now).as_millis());
    }
    assert_eq!(waits, [250, 500, 1000, 2000, 4000, 5000, 5000]);
    finish(&mut entry, Verdict::Ready(facts("1")), now);
    assert_eq!(entry.due().unwrap() - now, Duration::from_secs(33), "30 s and the whole jitter");
    finish(&mut entry, failed(true), now);
    assert_eq!(entry.due().unwrap() - now, Duration::from_millis(250));
}

#[test]
fn another_url_forgets_the_facts_and_drops_the_running_probes_answer() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    finish(&mut entry, Verdict::Ready(facts("1")), now);
    entry.start(7, now);
    let mut moved = sample("a", Role::Plain);
    moved.url = "http://elsewhere:8000".into();
    entry.relist(moved, now);
    assert_eq!(entry.instance(None).facts, None);
    assert_eq!(entry.due(), Some(now));
    assert!(!entry.finish(7, Verdict::Ready(facts("old")), now, 0.0, &ProbeOptions::default()));
    assert_eq!(entry.instance(None).facts, None);
}

#[test]
fn a_held_instance_is_not_probed_and_not_trusted_after_release_until_asked() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    finish(&mut entry, Verdict::Ready(facts("1")), now);
    let mut held = sample("a", Role::Plain);
    held.held = Some("pod is not Ready".into());
    entry.relist(held, now);
    assert_eq!(entry.due(), None);
    assert_eq!(entry.instance(None).readiness, Readiness::NotReady { reason: "pod is not Ready".into() });
    entry.relist(sample("a", Role::Plain), now);
    assert!(!is_ready(&entry));
    finish(&mut entry, Verdict::Ready(facts("2")), now);
    assert!(is_ready(&entry));
}

#[test]
fn requests_are_coalesced_and_kept_apart() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Plain), now);
    finish(&mut entry, Verdict::Ready(facts("1")), now);
    entry.ask(now);
    entry.ask(now);
    assert_eq!(entry.due(), Some(now + MIN_PROBE_GAP), "not sooner than the gap after the last start");
    entry.start(1, now + MIN_PROBE_GAP);
    entry.ask(now + MIN_PROBE_GAP);
    entry.finish(1, Verdict::Ready(facts("1")), now + MIN_PROBE_GAP, 0.0, &ProbeOptions::default());
    assert_eq!(entry.due(), Some(now + MIN_PROBE_GAP * 2), "asked while running: once more");
}

#[test]
fn an_adopted_transfer_makes_an_unclassified_engine_usable() {
    let now = Instant::now();
    let mut entry = Entry::new(sample("a", Role::Decode), now);
    finish(&mut entry, Verdict::NoConnector { facts: facts("1"), reason: "set connector".into() }, now);
    assert!(entry.lacks_connector());
    assert_eq!(entry.instance(None).readiness, Readiness::NotReady { reason: "set connector".into() });
    let adopted = entry.instance(Some(KvTransfer::VllmNixl));
    assert_eq!(adopted.usable().and_then(|facts| facts.transfer.clone()), Some(KvTransfer::VllmNixl));
}

proptest! {
    /// Whatever happens in whatever order, an instance that the source does not hold is probed again within bounds.
    #[test]
    fn the_next_probe_is_always_within_bounds(steps in proptest::collection::vec((0u8..6, 0.0f64..1.0), 1..60)) {
        let options = ProbeOptions::default();
        let mut now = Instant::now();
        let mut entry = Entry::new(sample("a", Role::Decode), now);
        for (step, jitter) in steps {
            now += Duration::from_millis(50);
            let verdict = match step {
                0 => Verdict::Ready(facts("1")),
                1 => failed(true),
                2 => failed(false),
                3 => Verdict::NoConnector { facts: facts("1"), reason: "r".into() },
                4 => { entry.ask(now); continue; }
                _ => {
                    let mut other = sample("a", Role::Decode);
                    other.url = format!("http://x:{}", 1 + (jitter * 3.0) as u16);
                    entry.relist(other, now);
                    continue;
                }
            };
            entry.start(1, now);
            prop_assert_eq!(entry.due(), None);
            entry.finish(1, verdict, now, jitter, &options);
            let wait = entry.due().unwrap() - now;
            prop_assert!(wait <= options.refresh.mul_f64(1.1));
            prop_assert!(wait >= MIN_PROBE_GAP.min(options.backoff_min / 2));
            prop_assert!(!is_ready(&entry) || entry.facts.is_some());
        }
    }
}

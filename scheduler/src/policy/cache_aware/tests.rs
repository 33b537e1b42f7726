//! Behaviour that follows from smg's rules.

use super::*;
use crate::policy::fixture::PolicyFixture;

const LONG: [u64; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

#[test]
fn conversation_stays_on_its_engine() {
    let mut setup = PolicyFixture::new(4).with_prompt(&LONG[..4]);
    let mut policy = CacheAwarePolicy::default();
    let first = setup.send(&mut policy);
    setup.set_pending_prefills(first, 20);
    setup.set_prompt(&LONG[..7]);
    assert_eq!(setup.send(&mut policy), first);
    // Half of the prompt is not enough.
    setup.set_prompt(&[1, 2, 3, 4, 50, 60, 70, 80]);
    assert_ne!(setup.send(&mut policy), first);
}

#[test]
fn unknown_prompts_go_to_fewest_requests_then_least_used() {
    let mut setup = PolicyFixture::new(3);
    let mut policy = CacheAwarePolicy::default();
    let turns: Vec<usize> = (0..6)
        .map(|number| {
            setup.set_prompt(&[100 + number]);
            setup.send(&mut policy)
        })
        .collect();
    assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    setup.set_pending_prefills(0, 1);
    setup.set_prompt(&[200]);
    assert_eq!(setup.send(&mut policy), 1);
}

/// Known failure: one engine with many requests ends affinity for conversations of all others.
#[test]
fn one_overloaded_engine_turns_affinity_off() {
    let mut setup = PolicyFixture::new(4).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    setup.set_pending_prefills(0, 1);
    setup.set_pending_prefills(2, 1);
    setup.set_pending_prefills(3, 1);
    assert_eq!(setup.send(&mut policy), 1);
    setup.set_pending_prefills(1, 2);
    assert_eq!(setup.send(&mut policy), 1);
    // 33 is not yet more than 32 above 1.
    setup.set_pending_prefills(0, 33);
    assert_eq!(setup.send(&mut policy), 1);
    setup.set_pending_prefills(0, 34);
    let decision = setup.decision(&mut policy);
    assert_eq!(
        (decision.route.prefill_instance().as_usize(), decision.explanation.reason),
        (2, "out of balance: fewest requests")
    );
    // Far apart, but not by a tenth.
    for prefill in 0..4 {
        setup.set_pending_prefills(prefill, 1000);
    }
    setup.set_pending_prefills(0, 1033);
    assert_eq!(setup.send(&mut policy), 1);
}

#[test]
fn prefix_on_unavailable_engine_goes_to_the_first() {
    let mut setup = PolicyFixture::new(3).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    setup.set_pending_prefills(0, 1);
    setup.set_pending_prefills(2, 1);
    assert_eq!(setup.send(&mut policy), 1);
    setup.loads[1].available = false;
    setup.set_pending_prefills(0, 30);
    assert_eq!(setup.send(&mut policy), 0);
}

#[test]
fn records_of_removed_engines_are_dropped() {
    let mut setup = PolicyFixture::new(3).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    assert_eq!(setup.send(&mut policy), 0);
    setup.remove(InstanceIndex(0));
    setup.now = TRIM_INTERVAL;
    setup.set_prompt(&[77]);
    assert_eq!(setup.send(&mut policy), 0);
    assert_eq!((policy.routed.record_count(), policy.processed.len()), (1, 1));
}

#[test]
fn records_are_bounded() {
    let mut setup = PolicyFixture::new(1);
    let mut policy = CacheAwarePolicy::default();
    let pages: Vec<u64> = (0..MAX_PAGES as u64 / 2 + 1).map(|number| 2 * number).collect();
    setup.prediction.pages = pages.clone().into();
    setup.send(&mut policy);
    let others: Vec<u64> = pages.iter().map(|page| page + 1).collect();
    setup.prediction.pages = others.into();
    setup.send(&mut policy);
    assert!(policy.routed.record_count() <= MAX_PAGES / 2);
}

//! What smg's rules lead to.

use super::*;
use crate::policy::fixture::PolicyFixture;

const LONG: [u64; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

#[test]
fn a_conversation_stays_where_it_began() {
    let mut scene = PolicyFixture::new(4).with_prompt(&LONG[..4]);
    let mut policy = CacheAwarePolicy::default();
    let first = scene.send(&mut policy);
    scene.set_pending_prefills(first, 20);
    scene.set_prompt(&LONG[..7]);
    assert_eq!(scene.send(&mut policy), first);
    // Half of the prompt is not enough.
    scene.set_prompt(&[1, 2, 3, 4, 50, 60, 70, 80]);
    assert_ne!(scene.send(&mut policy), first);
}

#[test]
fn unknown_prompts_go_to_fewest_requests_then_least_used() {
    let mut scene = PolicyFixture::new(3);
    let mut policy = CacheAwarePolicy::default();
    let turns: Vec<usize> = (0..6)
        .map(|at| {
            scene.set_prompt(&[100 + at]);
            scene.send(&mut policy)
        })
        .collect();
    assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    scene.set_pending_prefills(0, 1);
    scene.set_prompt(&[200]);
    assert_eq!(scene.send(&mut policy), 1);
}

/// The known failure: one engine with many requests ends affinity for conversations of all others.
#[test]
fn one_runaway_engine_turns_affinity_off() {
    let mut scene = PolicyFixture::new(4).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    scene.set_pending_prefills(0, 1);
    scene.set_pending_prefills(2, 1);
    scene.set_pending_prefills(3, 1);
    assert_eq!(scene.send(&mut policy), 1);
    scene.set_pending_prefills(1, 2);
    assert_eq!(scene.send(&mut policy), 1);
    // 33 is not yet more than 32 above 1.
    scene.set_pending_prefills(0, 33);
    assert_eq!(scene.send(&mut policy), 1);
    scene.set_pending_prefills(0, 34);
    let decision = scene.decision(&mut policy);
    assert_eq!(
        (decision.route.prefill_instance().as_usize(), decision.explanation.reason),
        (2, "out of balance: fewest requests")
    );
    // Far apart, but not by a tenth.
    for prefill in 0..4 {
        scene.set_pending_prefills(prefill, 1000);
    }
    scene.set_pending_prefills(0, 1033);
    assert_eq!(scene.send(&mut policy), 1);
}

#[test]
fn whose_engine_is_gone_goes_to_the_first() {
    let mut scene = PolicyFixture::new(3).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    scene.set_pending_prefills(0, 1);
    scene.set_pending_prefills(2, 1);
    assert_eq!(scene.send(&mut policy), 1);
    scene.loads[1].available = false;
    scene.set_pending_prefills(0, 30);
    assert_eq!(scene.send(&mut policy), 0);
}

#[test]
fn engines_that_left_the_fleet_are_forgotten() {
    let mut scene = PolicyFixture::new(3).with_prompt(&LONG);
    let mut policy = CacheAwarePolicy::default();
    assert_eq!(scene.send(&mut policy), 0);
    scene.remove(InstanceIndex(0));
    scene.now = TRIM_INTERVAL;
    scene.set_prompt(&[77]);
    assert_eq!(scene.send(&mut policy), 0);
    assert_eq!((policy.routed.record_count(), policy.processed.len()), (1, 1));
}

#[test]
fn the_picture_is_bounded() {
    let mut scene = PolicyFixture::new(1);
    let mut policy = CacheAwarePolicy::default();
    let pages: Vec<u64> = (0..MAX_PAGES as u64 / 2 + 1).map(|at| 2 * at).collect();
    scene.prediction.pages = pages.clone().into();
    scene.send(&mut policy);
    let others: Vec<u64> = pages.iter().map(|page| page + 1).collect();
    scene.prediction.pages = others.into();
    scene.send(&mut policy);
    assert!(policy.routed.record_count() <= MAX_PAGES / 2);
}

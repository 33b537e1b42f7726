//! Eviction on demand, least recently read objects first.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{GrantLeasePolicy, ProbePolicy};
use moongate_master_core::{MasterCoreOptions, RemoveCause, StateChange};

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, grouped, hard_pinned, replayed, soft_pinned,
};

/// Mooncake's master rejects thirteen of these puts.
#[test]
fn a_full_store_accepts_puts_while_objects_are_evictable() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[64 * MIB]);
    for number in 0..200 {
        world.now += 1;
        world.put(&format!("key{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    assert_eq!((world.keys().len(), world.used()), (64, 64 * MIB));
    let evicted = |change: &&StateChange<'_>| {
        matches!(change, StateChange::Removed { cause: RemoveCause::Evicted, .. })
    };
    assert_eq!(world.changes.iter().filter(evicted).count(), 136);
    assert!(world.has("key199") && world.has("key136") && !world.has("key135"));
}

#[test]
fn a_large_object_evicts_small_ones() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    for number in 0..1024 {
        world.now += 1;
        world.put(&format!("small{number}"), 4096, &TestReplicateConfig::default()).unwrap();
    }
    world.put("large", 2 * MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.has("large") && world.has("small1023") && !world.has("small0"));
}

#[test]
fn leased_objects_stay_and_the_oldest_lease_is_evicted_first() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
    }
    for key in ["c", "a", "d", "b"] {
        world.now += 1;
        assert!(world.exists(key));
    }
    assert_eq!(world.put("e", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    world.now += 10_000;
    for (new, evicted) in [("e", "c"), ("f", "a")] {
        world.put(new, MIB, &TestReplicateConfig::default()).unwrap();
        assert!(!world.has(evicted) && world.has("d") && world.has("b"), "{evicted}");
    }
}

#[test]
fn soft_pins_are_evicted_last_and_hard_pins_never() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("hard", MIB, &hard_pinned()).unwrap();
    world.put("soft", MIB, &soft_pinned(60_000)).unwrap();
    world.put("a", MIB, &TestReplicateConfig::default()).unwrap();
    world.put("b", MIB, &TestReplicateConfig::default()).unwrap();
    world.now += 1;
    for key in ["c", "d"] {
        world.put(key, MIB, &soft_pinned(60_000)).unwrap();
    }
    assert!(world.has("soft") && !world.has("a") && !world.has("b"));
    world.put("e", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(!world.has("soft") && world.has("hard") && world.has("c"));
    world.advance_with_heartbeats(100_000, &[1]);
    assert_eq!(world.master.soft_pinned_count(), 0);
}

#[test]
fn existing_objects_can_be_pinned_and_unpinned() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    for key in ["a", "b", "x", "y"] {
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
        world.now += 1;
    }
    let set = |world: &mut TestMasterCore, key, ttl_ms| {
        world.master.set_soft_pin(world.now, TENANT, key, ttl_ms, &mut world.changes)
    };
    let max = MasterCoreOptions::default().max_soft_pin_ttl_ms;
    assert_eq!(set(&mut world, "a", Some(max + 1)), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(set(&mut world, "", Some(1)), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(set(&mut world, "nothing", Some(1)), Err(ErrorCode::OBJECT_NOT_FOUND));
    set(&mut world, "a", Some(60_000)).unwrap();
    // The pin is part of the recorded state.
    let restored = replayed(&MasterCoreOptions::default(), &world.changes, world.now);
    assert_eq!((world.master.soft_pinned_count(), restored.soft_pinned_count()), (1, 1));
    // The oldest object is pinned, so the next one is evicted.
    world.put("c", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.has("a") && !world.has("b"));
    set(&mut world, "a", None).unwrap();
    assert_eq!(world.master.soft_pinned_count(), 0);
    world.now += 1;
    world.put("d", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(!world.has("a") && world.has("c") && world.has("x"));
}

#[test]
fn probes_lease_only_the_last_complete_group() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    let keys = ["k0", "k1", "k2", "k3", "k4", "k5"];
    for key in keys.iter().filter(|key| **key != "k4") {
        world.put(key, 10, &TestReplicateConfig::default()).unwrap();
    }
    let probe = |world: &TestMasterCore, policy, candidate_size| {
        world.master.batch_probe(world.now, TENANT, &keys, GrantLeasePolicy { policy, candidate_size })
    };
    let found = vec![true, true, true, true, false, true];
    assert_eq!(probe(&world, ProbePolicy::NONE, 0), Ok(found.clone()));
    for size in [0, 4, 7, u64::MAX] {
        assert_eq!(probe(&world, ProbePolicy::LAST_HIT_ONLY, size), Err(ErrorCode::INVALID_PARAMS));
    }
    assert_eq!(probe(&world, ProbePolicy(9), 1), Err(ErrorCode::INVALID_PARAMS));
    assert!(world.master.probe(TENANT, "k0") && !world.master.probe(TENANT, "k4"));
    assert_eq!(world.master.probe_replicas(TENANT, &["k0"])[0].as_ref().unwrap().replicas.len(), 1);
    assert_eq!(probe(&world, ProbePolicy::LAST_HIT_ONLY, 2), Ok(found));
    let leased = keys.iter().filter(|key| world.remove(key) == Err(ErrorCode::OBJECT_HAS_LEASE));
    assert_eq!(leased.collect::<Vec<_>>(), [&"k2", &"k3"]);
}

#[test]
fn soft_pins_are_not_evicted_if_disabled() {
    let settings = MasterCoreOptions { evict_soft_pinned: false, ..MasterCoreOptions::default() };
    let mut world = TestMasterCore::with_segments(settings, &[MIB]);
    world.put("soft", MIB, &soft_pinned(60_000)).unwrap();
    assert_eq!(world.put("k", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    world.advance_with_heartbeats(100_000, &[1]);
    world.put("k", MIB, &TestReplicateConfig::default()).unwrap();
}

#[test]
fn groups_are_evicted_as_a_whole() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("k", MIB, &grouped("page")).unwrap();
    world.put("single", MIB, &TestReplicateConfig::default()).unwrap();
    world.put("v", MIB, &grouped("page")).unwrap();
    world.put("other", MIB, &TestReplicateConfig::default()).unwrap();
    world.now += 1;
    assert!(world.exists("v"));
    world.now += 1;
    // The page was read, so unread objects are evicted first.
    world.put("new1", MIB, &TestReplicateConfig::default()).unwrap();
    world.put("new2", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.has("k") && world.has("v") && !world.has("single") && !world.has("other"));
    world.now += 20_000;
    for key in ["new1", "new2"] {
        assert!(world.exists(key));
    }
    world.put("new3", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(!world.has("k") && !world.has("v"));
    assert_eq!(world.used(), 3 * MIB);
}

#[test]
fn a_large_group_is_blocked_by_one_reader() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[16 * MIB]);
    for number in 0..16 {
        world.put(&format!("part{number}"), MIB, &grouped("all")).unwrap();
    }
    assert!(world.exists("part7"));
    let full = Err(ErrorCode::NO_AVAILABLE_HANDLE);
    assert_eq!(world.put("new", MIB, &TestReplicateConfig::default()), full);
    world.now += 20_000;
    world.put("new", MIB, &TestReplicateConfig::default()).unwrap();
    assert_eq!((world.keys().len(), world.used()), (1, MIB));
}

#[test]
fn above_the_watermark_a_share_of_objects_is_evicted() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[100 * MIB]);
    for number in 0..90 {
        world.put(&format!("key{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    world.tick(10);
    assert_eq!(world.keys().len(), 90);
    for number in 90..95 {
        world.put(&format!("key{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    // The share is 0.95 - 0.90 + 0.05.
    world.tick(10);
    assert_eq!(world.keys().len(), 85);
    assert_eq!(world.master.statistics().evicted_keys, 10);
}

#[test]
fn objects_on_silent_nodes_are_not_evicted() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB, 4 * MIB]);
    for number in 0..8 {
        world.put(&format!("old{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    world.master.client_disconnected(world.now, crate::harness::id(101), &mut world.changes);
    let silent = 8 - world.keys().iter().filter(|key| world.has(key)).count();
    assert_eq!(silent, 4);
    for number in 0..20 {
        world.put(&format!("new{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    assert_eq!(world.keys().iter().filter(|key| key.starts_with("old")).count(), 4);
}

/// The writer gets `NO_AVAILABLE_HANDLE` instead of success for an object that the next put evicts.
#[test]
fn objects_put_while_all_others_are_leased_stay() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[100 * MIB]);
    for number in 0..94 {
        world.now += 1;
        world.put(&format!("old{number}"), MIB, &TestReplicateConfig::default()).unwrap();
        assert!(world.exists(&format!("old{number}")));
    }
    let mut acknowledged = Vec::new();
    for number in 0..60 {
        let key = format!("new{number}");
        match world.put(&key, MIB, &TestReplicateConfig::default()) {
            Ok(()) => acknowledged.push(key),
            Err(error) => assert_eq!(error, ErrorCode::NO_AVAILABLE_HANDLE),
        }
        world.tick(10);
    }
    assert_eq!(acknowledged.len(), 6);
    assert!(acknowledged.iter().all(|key| world.has(key)));
    // After the leases expire, the others are evictable again.
    world.advance_with_heartbeats(10_000, &[1]);
    world.put("next", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.has("next") && world.keys().len() < 100);
}

/// If only a part of the pool is leased, puts use the rest, and the oldest writes are evicted.
#[test]
fn a_half_leased_pool_accepts_all_puts() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[100 * MIB]);
    for number in 0..50 {
        world.put(&format!("old{number}"), MIB, &TestReplicateConfig::default()).unwrap();
        assert!(world.exists(&format!("old{number}")));
    }
    for number in 0..500_u64 {
        world.now += 1;
        world.put(&format!("new{number}"), MIB, &TestReplicateConfig::default()).unwrap();
        world.tick(0);
        for recent in number.saturating_sub(14)..=number {
            assert!(world.has(&format!("new{recent}")), "{recent} after {number}");
        }
    }
    assert!((0..50).all(|number| world.has(&format!("old{number}"))));
}

//! Replaying state changes restores the state.

use moongate_master_core::{
    ClientCounts, MasterCore, MasterCoreOptions, ObjectCursor, SnapshotCursor, StateChange,
};

use crate::harness::{
    MIB, TestMasterCore, TestReplicateConfig, comparable_state, id, replayed, segment, snapshot, soft_pinned,
};

#[test]
fn a_standby_evicts_the_same_objects() {
    let settings = MasterCoreOptions::default();
    let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB]);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
    }
    world.remove("b").unwrap();
    world.put("b", MIB, &TestReplicateConfig::default()).unwrap();
    let mut standby = TestMasterCore::new(settings.clone());
    standby.master = replayed(&settings, &snapshot(&world.master, 1), world.now);
    standby.now = world.now;
    for key in ["e", "f", "g"] {
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
        standby.put(key, MIB, &TestReplicateConfig::default()).unwrap();
        assert_eq!(world.keys(), standby.keys());
    }
}

#[test]
fn state_changes_may_be_applied_twice() {
    let settings = MasterCoreOptions::default();
    let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB, 4 * MIB]);
    let two = TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() };
    world.put("a", MIB, &two).unwrap();
    world.put("b", MIB, &soft_pinned(1000)).unwrap();
    world.start("c", MIB, &TestReplicateConfig::default()).unwrap();
    world.remove("a").unwrap();
    world.put("a", MIB / 2, &TestReplicateConfig::default()).unwrap();
    let twice: Vec<StateChange<'static>> =
        world.changes.iter().flat_map(|it| [it.clone(), it.clone()]).collect();
    assert_eq!(comparable_state(&replayed(&settings, &twice, world.now)), comparable_state(&world.master));
    let again: Vec<StateChange<'static>> = [&world.changes[..], &world.changes[..]].concat();
    assert_eq!(comparable_state(&replayed(&settings, &again, world.now)), comparable_state(&world.master));
}

#[test]
fn silent_clients_are_silent_after_a_snapshot() {
    let settings = MasterCoreOptions::default();
    let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB, 4 * MIB]);
    for number in 0..10 {
        world.put(&format!("k{number}"), 10, &TestReplicateConfig::default()).unwrap();
    }
    world.master.client_disconnected(world.now, id(101), &mut world.changes);
    let standby = replayed(&settings, &snapshot(&world.master, 100), world.now);
    assert!(standby.is_silent(id(1)) && !standby.is_silent(id(2)));
    assert_eq!(standby.client_counts(), ClientCounts { active: 1, silent: 1 });
    standby.remount(world.now, &[segment(1, 4 * MIB)], id(101), &mut ()).unwrap();
    assert!(!standby.is_silent(id(1)));
}

/// Between two parts, the space of an object is reused by another.
#[test]
fn snapshot_in_parts_plus_concurrent_log_equals_the_state() {
    let settings = MasterCoreOptions { shards: 4, ..MasterCoreOptions::default() };
    let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB]);
    for number in 0..4 {
        world.put(&format!("a{number}"), MIB, &TestReplicateConfig::default()).unwrap();
    }
    world.changes.clear();
    let mut pieces = Vec::new();
    let mut cursor = Some(SnapshotCursor::default());
    let mut step = 0;
    while let Some(from) = cursor {
        cursor = world.master.snapshot(from, 1, &mut pieces);
        let _ = world.remove(&format!("a{step}"));
        let _ = world.put(&format!("b{step}"), MIB, &TestReplicateConfig::default());
        step += 1;
    }
    pieces.extend(world.changes.clone());
    assert_eq!(comparable_state(&replayed(&settings, &pieces, world.now)), comparable_state(&world.master));
}

/// State changes that contradict each other, which no master emits.
#[test]
fn overlapping_objects_of_a_bulk_replay_are_dropped() {
    let settings = MasterCoreOptions::default();
    let mut world = TestMasterCore::with_segments(settings.clone(), &[4 * MIB]);
    for key in ["a", "b", "c"] {
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
    }
    let mut changes = snapshot(&world.master, 1);
    for change in &mut changes {
        if let StateChange::ObjectStored { object, .. } = change
            && object.key == "b"
        {
            object.locations.to_mut()[0].offset = MIB / 2;
        }
    }
    let bulk = MasterCore::new(settings);
    bulk.begin_bulk_replay();
    changes.iter().for_each(|change| bulk.apply(change).unwrap());
    assert_eq!((bulk.end_bulk_replay(&()), bulk.end_bulk_replay(&())), (2, 0));
    bulk.finish_replay(world.now, &());
    let (mut keys, mut cursor) = (Vec::new(), Some(ObjectCursor::default()));
    while let Some(from) = cursor {
        cursor = bulk.keys(from, u32::MAX, |_, key| keys.push(key.to_owned()));
    }
    assert_eq!(keys, ["c"]);
    assert_eq!(bulk.segments_detail().segments[0].allocator_used_bytes, MIB);
}

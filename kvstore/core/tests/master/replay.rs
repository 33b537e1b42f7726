//! Facts make another master of the same state.

use moongate_kvcore::{Fact, Settings, SnapshotCursor};

use crate::world::{Config, MIB, World, id, known, replayed, segment, snapshot, soft_pinned};

#[test]
fn a_standby_evicts_what_the_first_would_have() {
    let settings = Settings::default();
    let mut world = World::with_segments(settings.clone(), &[4 * MIB]);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &Config::default()).unwrap();
    }
    world.remove("b").unwrap();
    world.put("b", MIB, &Config::default()).unwrap();
    let mut standby = World::new(settings.clone());
    standby.master = replayed(&settings, &snapshot(&world.master, 1), world.now);
    standby.now = world.now;
    for key in ["e", "f", "g"] {
        world.put(key, MIB, &Config::default()).unwrap();
        standby.put(key, MIB, &Config::default()).unwrap();
        assert_eq!(world.keys(), standby.keys());
    }
}

#[test]
fn facts_may_be_applied_twice() {
    let settings = Settings::default();
    let mut world = World::with_segments(settings.clone(), &[4 * MIB, 4 * MIB]);
    let two = Config { replica_num: 2, ..Config::default() };
    world.put("a", MIB, &two).unwrap();
    world.put("b", MIB, &soft_pinned(1000)).unwrap();
    world.start("c", MIB, &Config::default()).unwrap();
    world.remove("a").unwrap();
    world.put("a", MIB / 2, &Config::default()).unwrap();
    let twice: Vec<Fact<'static>> = world.facts.iter().flat_map(|it| [it.clone(), it.clone()]).collect();
    assert_eq!(known(&replayed(&settings, &twice, world.now)), known(&world.master));
    let again: Vec<Fact<'static>> = [&world.facts[..], &world.facts[..]].concat();
    assert_eq!(known(&replayed(&settings, &again, world.now)), known(&world.master));
}

#[test]
fn silence_survives_a_snapshot() {
    let settings = Settings::default();
    let mut world = World::with_segments(settings.clone(), &[4 * MIB, 4 * MIB]);
    for number in 0..10 {
        world.put(&format!("k{number}"), 10, &Config::default()).unwrap();
    }
    world.master.client_lost(world.now, id(101), &mut world.facts);
    let standby = replayed(&settings, &snapshot(&world.master, 100), world.now);
    assert!(standby.is_silent(id(1)) && !standby.is_silent(id(2)));
    assert_eq!(standby.client_counts(), (1, 1));
    standby.remount(world.now, &[segment(1, 4 * MIB)], id(101), &mut ()).unwrap();
    assert!(!standby.is_silent(id(1)));
}

/// Between two pieces the space of an object goes to another.
#[test]
fn a_snapshot_in_pieces_and_what_happened_meanwhile_are_the_state() {
    let settings = Settings { shards: 4, ..Settings::default() };
    let mut world = World::with_segments(settings.clone(), &[4 * MIB]);
    for number in 0..4 {
        world.put(&format!("a{number}"), MIB, &Config::default()).unwrap();
    }
    world.facts.clear();
    let mut pieces = Vec::new();
    let mut cursor = Some(SnapshotCursor::default());
    let mut step = 0;
    while let Some(from) = cursor {
        cursor = world.master.snapshot(from, 1, &mut pieces);
        let _ = world.remove(&format!("a{step}"));
        let _ = world.put(&format!("b{step}"), MIB, &Config::default());
        step += 1;
    }
    pieces.extend(world.facts.clone());
    assert_eq!(known(&replayed(&settings, &pieces, world.now)), known(&world.master));
}

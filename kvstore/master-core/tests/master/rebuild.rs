//! Restoring objects from inventories in a master without its log.

use std::collections::BTreeMap;

use mooncake_wire::ErrorCode;
use mooncake_wire::types::Uuid;
use moongate_master_core::{
    InventoryRecord, MasterCoreOptions, ObjectVersion, RestoreOutcome, SnapshotCursor, StateChange,
};
use proptest::prelude::*;

use crate::harness::{MIB, TENANT, TestMasterCore, TestReplicateConfig, client_segment, id};

const WINDOW: u64 = 60_000;

/// A master that has lost its log, and segments with pending inventories.
fn world(segments: u64) -> TestMasterCore {
    let mut world =
        TestMasterCore::new(MasterCoreOptions { lease_ttl_ms: 100, ..MasterCoreOptions::default() });
    world.master.open_rebuild(world.now, world.now + WINDOW);
    for number in 1..=segments {
        assert!(world.master.announce_inventory(world.now, id(number)));
        world.mount(number, MIB).unwrap();
    }
    world
}

fn record(key: &str, offset: u64, size: u64, sequence: u64) -> InventoryRecord<'_> {
    let version = ObjectVersion { epoch: 1, sequence };
    InventoryRecord { tenant: TENANT, key, offset, size, version, crc: sequence as u32, ..Default::default() }
}

fn restore(world: &mut TestMasterCore, segment: u64, records: &[InventoryRecord<'_>]) -> Vec<RestoreOutcome> {
    let client = id(100 + segment);
    world
        .master
        .restore_inventory(world.now, client_segment(id(segment), client), records, &mut world.changes)
        .unwrap()
}

/// All object and quarantined ranges by segment. Asserts that none overlap.
fn ranges(world: &TestMasterCore) -> BTreeMap<Uuid, Vec<(u64, u64)>> {
    let (mut changes, mut cursor) = (Vec::new(), Some(SnapshotCursor::default()));
    while let Some(from) = cursor {
        cursor = world.master.snapshot(from, 64, &mut changes);
    }
    let mut ranges: BTreeMap<Uuid, Vec<(u64, u64)>> = BTreeMap::new();
    for change in changes {
        match change {
            StateChange::ObjectStored { object, .. } | StateChange::ObjectStarted(object) => {
                for location in object.locations.iter() {
                    ranges
                        .entry(location.segment)
                        .or_default()
                        .push((location.offset, location.offset + object.size));
                }
            }
            StateChange::RangeQuarantined { segment, offset, size, .. } => {
                ranges.entry(segment).or_default().push((offset, offset + size));
            }
            _ => {}
        }
    }
    for list in ranges.values_mut() {
        list.sort_unstable();
        assert!(list.windows(2).all(|pair| pair[0].1 <= pair[1].0), "ranges overlap: {list:?}");
    }
    ranges
}

#[test]
fn valid_inventory_records_are_restored_and_others_rejected() {
    use RestoreOutcome::*;
    let mut world = world(2);
    let records = [
        record("a", 0, 100, 1),
        record("a", 0, 100, 1),
        record("b", 50, 100, 2),
        record("c", MIB - 10, 11, 3),
        record("d", u64::MAX, 2, 4),
        record("", 4096, 2, 5),
        record("e", MIB - 8, 8, 6),
    ];
    let expected = [Restored, Present, Overlapping, OutsideSegment, OutsideSegment, OutsideSegment, Restored];
    assert_eq!(restore(&mut world, 1, &records), expected);
    // The same bytes become another replica; of different bytes the later version is kept.
    let mut newer = record("e", 8192, 8, 7);
    newer.version.epoch = 2;
    let older = record("e", 0, 8, 5);
    assert_eq!(
        restore(&mut world, 2, &[record("a", 4096, 100, 1), older, newer]),
        [Merged, OlderVersion, Restored]
    );
    assert!(world.segments_of("a").len() == 2 && world.segments_of("e").len() == 1);
    assert_eq!(ranges(&world)[&id(1)], [(0, 100)]);
    let changes =
        world.changes.iter().filter(|change| matches!(change, StateChange::ObjectStored { .. })).count();
    assert_eq!(changes, 4, "each restored record must be logged");
}

#[test]
fn segment_allocates_nothing_before_inventory_or_deadline() {
    let mut world = world(1);
    assert_eq!(
        world.start("new", 100, &TestReplicateConfig::default()).unwrap_err(),
        ErrorCode::NO_AVAILABLE_HANDLE
    );
    assert_eq!(world.master.finish_inventory(client_segment(id(1), id(999))), Err(ErrorCode::ILLEGAL_CLIENT));
    world.master.finish_inventory(client_segment(id(1), id(101))).unwrap();
    world.start("new", 100, &TestReplicateConfig::default()).unwrap();
    // From here on ranges may have been reused.
    let late = [record("a", 4096, 100, 1)];
    let rejected = world.master.restore_inventory(world.now, client_segment(id(1), id(101)), &late, &mut ());
    assert_eq!(rejected, Err(ErrorCode::INVALID_PARAMS));
    assert!(!world.master.announce_inventory(world.now, id(1)));

    let mut world = self::world(1);
    world.now += 30_000;
    world.master.ping(world.now, id(101));
    world.master.tick(world.now, &mut world.changes);
    world.start("new", 100, &TestReplicateConfig::default()).unwrap();
    let rejected = world.master.restore_inventory(world.now, client_segment(id(1), id(101)), &late, &mut ());
    assert_eq!(rejected, Err(ErrorCode::INVALID_PARAMS));
    assert!(world.master.announce_inventory(world.now, id(9)));
    world.now += WINDOW;
    world.master.tick(world.now, &mut world.changes);
    assert!(!world.master.announce_inventory(world.now, id(8)) && !world.master.rebuild_is_open());
}

#[test]
fn client_writes_and_removals_take_precedence() {
    use RestoreOutcome::*;
    let mut world = world(2);
    world.master.finish_inventory(client_segment(id(2), id(102))).unwrap();
    let config = TestReplicateConfig::default();
    world.put("written", 100, &config).unwrap();
    world.start("started", 100, &config).unwrap();
    world.put("removed", 100, &config).unwrap();
    world.remove("removed").unwrap();
    assert_eq!(world.remove("unknown"), Err(ErrorCode::OBJECT_NOT_FOUND));
    let keys = ["written", "started", "removed", "unknown", "other"];
    let records: Vec<_> = (0..).zip(keys).map(|(slot, key)| record(key, slot * 4096, 100, 99)).collect();
    let expected = [WrittenSince, WrittenSince, RemovedSince, RemovedSince, Restored];
    assert_eq!(restore(&mut world, 1, &records), expected);
    world.remove("other").unwrap();
    assert_eq!(restore(&mut world, 1, &[record("other", 0, 100, 100)]), [RemovedSince]);
    // RemoveAll also covers records not received yet.
    world.master.remove_all(world.now, None, true, &mut world.changes);
    assert!(!world.master.rebuild_is_open());
    let rejected =
        world.master.restore_inventory(world.now, client_segment(id(1), id(101)), &records, &mut ());
    assert_eq!(rejected, Err(ErrorCode::INVALID_PARAMS));
}

#[test]
fn without_a_rebuild_nothing_is_restored() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    assert!(
        !world.master.announce_inventory(world.now, id(1))
            && !world.master.announce_inventory(world.now, id(2))
    );
    let records = [record("a", 0, 100, 1)];
    let rejected = world.master.restore_inventory(
        world.now,
        client_segment(id(1), id(101)),
        &records,
        &mut world.changes,
    );
    assert_eq!(rejected, Err(ErrorCode::INVALID_PARAMS));
}

#[test]
fn a_partial_state_is_completed_from_inventories() {
    use RestoreOutcome::*;
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("proven", 100, &TestReplicateConfig::default()).unwrap();
    world.master.open_rebuild(world.now, world.now + WINDOW);
    assert_eq!(
        world.start("new", 100, &TestReplicateConfig::default()).unwrap_err(),
        ErrorCode::NO_AVAILABLE_HANDLE
    );
    assert_eq!(
        world.master.check_inventory_complete(client_segment(id(1), id(101))),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert!(world.master.announce_inventory(world.now, id(1)));
    let records = [record("proven", 8192, 50, 9), record("other", 0, 100, 9), record("lost", 4096, 100, 3)];
    assert_eq!(restore(&mut world, 1, &records), [WrittenSince, Overlapping, Restored]);
    world.master.finish_inventory(client_segment(id(1), id(101))).unwrap();
    assert_eq!(world.master.check_inventory_complete(client_segment(id(1), id(101))), Ok(()));
    assert!(world.start("new", 100, &TestReplicateConfig::default()).is_ok() && world.has("lost"));
    ranges(&world);
}

#[derive(Clone, Debug)]
enum RebuildStep {
    Offer { segment: u64, key: u8, slot: u64, size: u64, sequence: u64 },
    Put { key: u8, size: u64 },
    Start { key: u8, size: u64 },
    Remove { key: u8 },
    Finish { segment: u64 },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = RebuildStep> {
    prop_oneof![
        6 => (1..4_u64, 0..12_u8, 0..40_u64, 1..9000_u64, 0..6_u64).prop_map(
            |(segment, key, slot, size, sequence)| RebuildStep::Offer { segment, key, slot, size, sequence }
        ),
        2 => (0..12_u8, 1..9000_u64).prop_map(|(key, size)| RebuildStep::Put { key, size }),
        1 => (0..12_u8, 1..9000_u64).prop_map(|(key, size)| RebuildStep::Start { key, size }),
        1 => (0..12_u8).prop_map(|key| RebuildStep::Remove { key }),
        1 => (1..4_u64).prop_map(|segment| RebuildStep::Finish { segment }),
        1 => (1..400_u64).prop_map(|ms| RebuildStep::Wait { ms }),
    ]
}

proptest! {
    /// For any interleaving: no two objects share a byte, and a key that was written or removed is never restored.
    #[test]
    fn ranges_never_overlap_and_clients_take_precedence(steps in proptest::collection::vec(step(), 1..80)) {
        let mut world = world(3);
        let mut touched = std::collections::BTreeSet::new();
        let mut finished = std::collections::BTreeSet::new();
        for step in steps {
            match step {
                RebuildStep::Offer { segment, key, slot, size, sequence } => {
                    let name = format!("key-{key}");
                    let records = [record(&name, slot * 4096, size, sequence)];
                    let client = id(100 + segment);
                    let outcome =
                        world.master.restore_inventory(world.now, client_segment(id(segment), client), &records, &mut world.changes);
                    prop_assert_eq!(outcome.is_err(), finished.contains(&segment));
                    if touched.contains(&key) && let Ok(outcomes) = outcome {
                        prop_assert!(!outcomes[0].is_accepted(), "{:?} of {}", outcomes, name);
                    }
                }
                RebuildStep::Put { key, size } => {
                    let result = world.put(&format!("key-{key}"), size, &TestReplicateConfig::default());
                    if result.is_ok() {
                        touched.insert(key);
                    }
                }
                RebuildStep::Start { key, size } => {
                    if world.start(&format!("key-{key}"), size, &TestReplicateConfig::default()).is_ok() {
                        touched.insert(key);
                    }
                }
                RebuildStep::Remove { key } => {
                    let removed = world.remove(&format!("key-{key}"));
                    if matches!(removed, Ok(()) | Err(ErrorCode::OBJECT_NOT_FOUND)) {
                        touched.insert(key);
                    }
                }
                RebuildStep::Finish { segment } => {
                    world.master.finish_inventory(client_segment(id(segment), id(100 + segment))).unwrap();
                    finished.insert(segment);
                }
                RebuildStep::Wait { ms } => {
                    world.now += ms;
                    (1..4).for_each(|number| _ = world.master.ping(world.now, id(100 + number)));
                    world.master.tick(world.now, &mut world.changes);
                }
            }
            ranges(&world);
        }
        // A follower that applies the state changes has the same objects.
        let follower = TestMasterCore::new(MasterCoreOptions::default());
        for change in &world.changes {
            let _ = follower.master.apply(change);
        }
        follower.master.finish_replay(world.now, &());
        prop_assert_eq!(ranges(&follower), ranges(&world));
    }
}

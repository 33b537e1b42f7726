//! Nodes mount segments, become silent, recover, and expire.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ClientStatus, ReplicaMedium, SegmentLocality, SegmentStatus};
use moongate_master_core::{
    IntactRanges, MasterCore, MasterCoreOptions, PlacementStrategy, RemoveCause, StateChange, UnmountCause,
};

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, client_segment, endpoints, id, replayed, segment,
};

fn status(world: &TestMasterCore, node: u64) -> ClientStatus {
    world.master.ping(world.now, id(100 + node)).client_status
}

#[test]
fn mounting_is_idempotent_and_unmounting_loses_keys() {
    let mut world = TestMasterCore::new(MasterCoreOptions::default());
    assert_eq!(status(&world, 1), ClientStatus::NEED_REMOUNT);
    assert_eq!(world.mount(1, 0), Err(ErrorCode::INVALID_PARAMS));
    world.mount(1, MIB).unwrap();
    world.mount(1, MIB).unwrap();
    assert_eq!(status(&world, 1), ClientStatus::OK);
    let detail = world.master.segments_detail();
    assert_eq!((detail.total_segments, detail.segments[0].status.as_str()), (1, "OK"));
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    let TestMasterCore { master, now, changes } = &mut world;
    assert_eq!(master.unmount(*now, client_segment(id(1), id(9)), changes), Err(ErrorCode::ILLEGAL_CLIENT));
    assert_eq!(master.unmount(*now, client_segment(id(1), id(101)), changes), Ok(()));
    assert_eq!(master.unmount(*now, client_segment(id(1), id(101)), changes), Ok(()));
    assert_eq!(world.start("k", 10, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert!(
        world
            .changes
            .iter()
            .any(|change| matches!(change, StateChange::Removed { cause: RemoveCause::SegmentLost, .. }))
    );
    assert_eq!(world.master.segments_detail().total_segments, 0);
}

#[test]
fn a_recovered_client_gets_all_its_objects_back() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    world.tick(9999);
    assert!(world.has("k"));
    world.tick(1);
    assert!(!world.has("k") && !world.exists("k"));
    assert_eq!(world.start("new", 10, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert_eq!(status(&world, 1), ClientStatus::NEED_REMOUNT);
    let TestMasterCore { master, now, changes } = &mut world;
    master.remount(*now, &[segment(1, 4 * MIB)], id(101), changes).unwrap();
    assert!(world.has("k"));
    assert_eq!(status(&world, 1), ClientStatus::OK);
    let emitted: Vec<_> = world
        .changes
        .iter()
        .filter(|change| {
            matches!(change, StateChange::ClientSilent { .. } | StateChange::ClientRecovered { .. })
        })
        .collect();
    assert_eq!(emitted.len(), 3);
}

#[test]
fn restarting_client_serves_reads_last_and_gets_no_writes() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB, 4 * MIB]);
    let both = TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() };
    world.put("both", 10, &both).unwrap();
    world.put("one", 10, &TestReplicateConfig::default()).unwrap();
    let holder = if world.segments_of("one") == world.segments_of("both")[..1] { 1 } else { 2 };
    let [holder_segments, all] = [world.segments_of("one"), world.segments_of("both")];
    assert_eq!(all.len(), 2);

    world.master.client_restarting(id(100 + holder));
    assert_eq!(world.segments_of("one"), holder_segments);
    assert_eq!(world.segments_of("both").len(), 1);
    assert_ne!(world.segments_of("both"), holder_segments);
    for number in 0..10 {
        let key = format!("new {number}");
        world.put(&key, 10, &TestReplicateConfig::default()).unwrap();
        assert_ne!(world.segments_of(&key), holder_segments);
    }
    // Its next process sends a heartbeat before the TTL expires.
    assert_eq!(status(&world, holder), ClientStatus::OK);
    assert_eq!(world.segments_of("both"), all);

    world.master.client_restarting(id(100 + holder));
    assert_eq!(world.mount(holder, 4 * MIB), Ok(()));
    assert_eq!(world.segments_of("both"), all);

    // Without a heartbeat the TTL applies.
    world.master.client_restarting(id(100 + holder));
    world.advance_with_heartbeats(10_000, &[3 - holder]);
    assert!(!world.has("one") && world.has("both"));
}

#[test]
fn replicas_have_the_locality_of_their_segment() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    let locality_of = |master: &MasterCore| match &master.peek(TENANT, &["k"])[0].as_ref().unwrap()[0].medium
    {
        ReplicaMedium::Memory(buffer) => buffer.locality.clone(),
        _ => None,
    };
    assert_eq!(locality_of(&world.master), None);
    let locality = |numa_node| SegmentLocality { numa_node, hca_names: vec!["mlx5_0".to_owned()] };
    let mut near = mooncake_wire::types::Segment { locality: Some(locality(-1)), ..segment(1, 4 * MIB) };
    let refused = world.master.mount(world.now, &near, id(101), &mut world.changes);
    assert_eq!(refused, Err(ErrorCode::INVALID_PARAMS));
    near.locality = Some(locality(1));
    world.master.mount(world.now, &near, id(101), &mut world.changes).unwrap();
    let restored = replayed(&MasterCoreOptions::default(), &world.changes, world.now);
    for master in [&world.master, &restored] {
        assert_eq!(locality_of(master).map(|it| (it.numa_node, it.hca_names.len())), Some((1, 1)));
    }
}

#[test]
fn a_restarted_client_with_the_same_memory_may_have_another_id() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    world.master.client_disconnected(world.now, id(101), &mut world.changes);
    assert!(!world.has("k"));
    let moved = mooncake_wire::types::Segment { te_endpoint: "10.0.0.1:9".to_owned(), ..segment(1, 4 * MIB) };
    world.master.mount(world.now, &moved, id(200), &mut world.changes).unwrap();
    assert_eq!(world.segments_of("k"), ["10.0.0.1:9"]);
    // The expiry of the former client has no effect.
    for _ in 0..100 {
        world.now += 1000;
        world.master.ping(world.now, id(200));
        world.master.tick(world.now, &mut world.changes);
    }
    assert!(world.has("k"));
}

#[test]
fn keys_of_a_silent_client_are_lost_after_the_grace_period() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB, 4 * MIB]);
    let two = TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() };
    world.put("both", 10, &two).unwrap();
    let on_first =
        TestReplicateConfig { preferred_segment: "10.0.0.1:12000", ..TestReplicateConfig::default() };
    world.put("first", 10, &on_first).unwrap();
    world.advance_with_heartbeats(69_000, &[2]);
    assert_eq!((world.keys().len(), world.has("first"), world.segments_of("both").len()), (2, false, 1));
    world.advance_with_heartbeats(2000, &[2]);
    assert_eq!((world.keys().len(), world.segments_of("both").len()), (1, 1));
    assert_eq!(world.master.segments_detail().total_segments, 1);
    assert!(world.changes.iter().any(|change| matches!(
        change,
        StateChange::SegmentUnmounted { cause: UnmountCause::ClientExpired, .. }
    )));
    assert_eq!(world.used(), 10);
}

#[test]
fn mounting_other_memory_loses_exactly_the_segments_keys() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB, 4 * MIB]);
    for number in 0..20 {
        world.put(&format!("key{number}"), 10, &TestReplicateConfig::default()).unwrap();
    }
    let on_first = |key: &String| world.segments_of(key) == ["10.0.0.1:12000"];
    let (lost, remaining): (Vec<String>, Vec<String>) = world.keys().into_iter().partition(on_first);
    assert!(!lost.is_empty() && !remaining.is_empty());
    let elsewhere = mooncake_wire::types::Segment { base: 0x1000, ..segment(1, 4 * MIB) };
    world.master.remount(world.now, &[elsewhere], id(101), &mut world.changes).unwrap();
    assert_eq!(world.keys().into_iter().collect::<Vec<_>>(), remaining);
    assert_eq!(world.used(), remaining.len() as u64 * 10);
    let another = mooncake_wire::types::Segment { id: id(77), ..segment(2, 4 * MIB) };
    world.master.mount(world.now, &another, id(300), &mut world.changes).unwrap();
    assert_eq!((world.keys().len(), world.used()), (0, 0));
}

#[test]
fn a_silent_client_with_one_remounted_segment_expires_again() {
    for wait_ms in [0, 9999] {
        let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
        world.put("k", 10, &TestReplicateConfig::default()).unwrap();
        world.master.client_disconnected(world.now, id(101), &mut world.changes);
        world.mount(1, MIB).unwrap();
        assert!(world.has("k"));
        // Until all of its segments are mounted again, heartbeats return NEED_REMOUNT.
        assert_eq!(status(&world, 1), ClientStatus::NEED_REMOUNT);
        world.tick(wait_ms);
        assert!(world.has("k"));
        if wait_ms == 0 {
            world.master.client_disconnected(world.now, id(101), &mut world.changes);
        } else {
            world.tick(1);
        }
        assert!(!world.has("k"));
        world.tick(59_999);
        assert_eq!(world.keys().len(), 1);
        world.tick(1);
        assert_eq!(world.keys().len(), 0);
    }
}

#[test]
fn segments_missing_from_a_remount_are_lost() {
    let mut world = TestMasterCore::new(MasterCoreOptions::default());
    for number in [1, 2] {
        world.master.mount(world.now, &segment(number, MIB), id(100), &mut world.changes).unwrap();
    }
    world.master.client_disconnected(world.now, id(100), &mut world.changes);
    world.master.remount(world.now, &[segment(2, MIB)], id(100), &mut world.changes).unwrap();
    let detail = world.master.segments_detail();
    assert_eq!((detail.total_segments, detail.segments[0].segment_id), (1, id(2)));
}

#[test]
fn a_key_on_silent_nodes_can_be_written_again() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB, 4 * MIB]);
    let on_first =
        TestReplicateConfig { preferred_segment: "10.0.0.1:12000", ..TestReplicateConfig::default() };
    world.put("k", 10, &on_first).unwrap();
    world.master.client_disconnected(world.now, id(101), &mut world.changes);
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    assert_eq!(world.segments_of("k"), ["10.0.0.2:12000"]);
}

#[test]
fn graceful_unmount_serves_reads_until_the_deadline() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[4 * MIB]);
    world.put("k", 10, &TestReplicateConfig::default()).unwrap();
    let TestMasterCore { master, now, changes } = &mut world;
    master.graceful_unmount(*now, client_segment(id(1), id(101)), 5000, changes).unwrap();
    assert_eq!(master.segment_status("10.0.0.1:12000"), Ok(SegmentStatus::GRACEFULLY_UNMOUNTING));
    assert_eq!(world.start("new", 10, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    world.tick(4999);
    assert!(world.has("k"));
    world.tick(1);
    assert!(!world.has("k"));
    assert_eq!(world.master.segment_status_by_id(id(1)), Err(ErrorCode::SEGMENT_NOT_FOUND));
}

/// Number of objects out of 1000 that the third node gets, `after_ms` after it joined.
fn share_of_a_new_node(placement: PlacementStrategy, after_ms: u64) -> usize {
    let settings = MasterCoreOptions { ramp_ms: 60_000, placement, ..MasterCoreOptions::default() };
    let mut world = TestMasterCore::new(MasterCoreOptions::default());
    world.master = MasterCore::new(settings);
    for number in [1, 2] {
        world.mount(number, 1 << 40).unwrap();
    }
    world.advance_with_heartbeats(100_000, &[1, 2]);
    for number in 0..1000 {
        world.put(&format!("old{number}"), 1 << 30, &TestReplicateConfig::default()).unwrap();
    }
    world.mount(3, 1 << 40).unwrap();
    world.advance_with_heartbeats(after_ms, &[1, 2, 3]);
    let placements = (0..1000)
        .map(|number| world.start(&format!("new{number}"), MIB, &TestReplicateConfig::default()).unwrap());
    placements.filter(|it| endpoints(it) == ["10.0.0.3:12000"]).count()
}

#[test]
fn a_new_node_gets_its_share_of_writes_gradually() {
    for placement in [PlacementStrategy::Random, PlacementStrategy::FreeRatioFirst] {
        let [at_once, half, full] = [0, 30_000, 70_000].map(|after| share_of_a_new_node(placement, after));
        assert!(at_once < 20, "{placement:?} {at_once}");
        assert!((100..250).contains(&half), "{placement:?} {half}");
        assert!(full > 280, "{placement:?} {full}");
    }
}

#[test]
fn local_first_placement_prefers_the_writers_host() {
    let settings =
        MasterCoreOptions { placement: PlacementStrategy::LocalFirst, ..MasterCoreOptions::default() };
    let mut world = TestMasterCore::with_segments(settings, &[4 * MIB, 4 * MIB, 4 * MIB]);
    let local = TestReplicateConfig { host_id: "host2", ..TestReplicateConfig::default() };
    for number in 0..4 {
        assert_eq!(endpoints(&world.start(&format!("k{number}"), MIB, &local).unwrap()), ["10.0.0.2:12000"]);
    }
    assert_ne!(endpoints(&world.start("k", MIB, &local).unwrap()), ["10.0.0.2:12000"]);
}

#[test]
fn query_ip_returns_hosts_of_known_clients() {
    let world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    let found = world.master.query_ip(&[id(101), id(5)]);
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [(id(101), vec!["10.0.0.1".to_owned()])]);
}

#[test]
fn replicas_outside_intact_ranges_are_lost_after_a_restart() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    for key in ["first", "second", "third"] {
        world.put(key, 4096, &TestReplicateConfig::default()).unwrap();
    }
    world.start("incomplete", 4096, &TestReplicateConfig::default()).unwrap();
    let used = world.used();
    let retain =
        |world: &mut TestMasterCore, client: u64, segment: u64, from: u64, starts: &[u64], ends: &[u64]| {
            let intact = IntactRanges { from, to: MIB, starts, ends };
            world.master.retain_intact(
                world.now,
                client_segment(id(segment), id(client)),
                intact,
                &mut world.changes,
            )
        };
    assert_eq!(retain(&mut world, 9, 1, 0, &[], &[]), Err(ErrorCode::ILLEGAL_CLIENT));
    assert_eq!(retain(&mut world, 101, 7, 0, &[], &[]), Err(ErrorCode::SEGMENT_NOT_FOUND));
    assert_eq!(retain(&mut world, 101, 1, 0, &[0], &[MIB]), Ok(0));
    assert_eq!(retain(&mut world, 101, 1, MIB - 1, &[], &[]), Ok(0), "no object starts there");
    // Two adjacent objects are intact, the third lacks its last byte.
    assert_eq!(retain(&mut world, 101, 1, 0, &[0, 8192], &[8192, 3 * 4096 - 1]), Ok(1));
    assert_eq!(world.keys().len(), 2);
    assert_eq!(retain(&mut world, 101, 1, 0, &[], &[]), Ok(2));
    assert!(world.keys().is_empty());
    assert_eq!(used - world.used(), 3 * 4096, "the space of lost objects must be freed");
    assert_eq!(world.end("incomplete"), Ok(()), "an object being written must stay");
}

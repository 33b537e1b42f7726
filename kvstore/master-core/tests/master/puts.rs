//! Puts, upserts, reads and removals of objects.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};
use moongate_master_core::{
    BatchPutStartRequest, MasterCoreOptions, PutStartRequest, RemoveCause, RemoveContext, ReplicaDescriptors,
    StateChange,
};

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, WRITER, caller, client_segment, endpoints, grouped,
    hard_pinned, id, soft_pinned,
};

#[test]
fn error_codes_are_those_of_mooncake() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    let config = TestReplicateConfig::default();
    assert_eq!(world.start("", 1, &config), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(world.start("k", 0, &config), Err(ErrorCode::INVALID_PARAMS));
    let none = TestReplicateConfig { replica_num: 0, ..TestReplicateConfig::default() };
    assert_eq!(world.start("k", 1, &none), Err(ErrorCode::INVALID_PARAMS));
    assert_eq!(world.start("k", 2 * MIB, &config), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert_eq!(world.end("k"), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(world.revoke("k"), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert_eq!(world.remove("k"), Err(ErrorCode::OBJECT_NOT_FOUND));
    assert!(!world.master.exist(0, TENANT, ""));

    assert_eq!(world.start("k", 1000, &config).unwrap().len(), 1);
    assert_eq!(world.start("k", 1000, &config), Err(ErrorCode::OBJECT_ALREADY_EXISTS));
    assert_eq!(world.master.replicas(world.now, TENANT, "k"), Err(ErrorCode::REPLICA_IS_NOT_READY));
    assert!(!world.exists("k"));
    let meta = ObjectMeta { key: "k", object_checksum: Some(42) };
    let end = |client, meta: &ObjectMeta<&str>| {
        world.master.put_end(caller(world.now, client), meta, ReplicaType::ALL, &mut ())
    };
    assert_eq!(end(id(9), &meta), Err(ErrorCode::ILLEGAL_CLIENT));
    assert_eq!((end(WRITER, &meta), end(WRITER, &meta)), (Ok(()), Ok(())));
    assert_eq!(world.start("k", 1000, &config), Err(ErrorCode::OBJECT_ALREADY_EXISTS));
    assert_eq!(world.revoke("k"), Err(ErrorCode::INVALID_WRITE));
    // PutEnd grants no lease.
    assert_eq!(world.remove("k"), Ok(()));
    assert_eq!(world.used(), 0);

    world.put("k", 1000, &config).unwrap();
    assert_eq!(world.used(), 1000);
    let list = world.master.replicas(world.now, TENANT, "k").unwrap();
    assert_eq!((list.replicas.len(), list.lease_ttl_ms, list.object_checksum), (1, 10_000, None));
    assert_eq!(world.remove("k"), Err(ErrorCode::OBJECT_HAS_LEASE));
    world.now += 10_000;
    assert_eq!(world.remove("k"), Ok(()));
}

#[test]
fn checksums_are_stored() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.start("k", 10, &TestReplicateConfig::default()).unwrap();
    let meta = ObjectMeta { key: "k", object_checksum: Some(42) };
    world.master.put_end(caller(world.now, WRITER), &meta, ReplicaType::ALL, &mut world.changes).unwrap();
    assert_eq!(world.master.replicas(world.now, TENANT, "k").unwrap().object_checksum, Some(42));
}

#[test]
fn space_of_a_replaced_incomplete_put_is_quarantined() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    let config = TestReplicateConfig::default();
    let first = world.start("k", 1000, &config).unwrap();
    world.advance_with_heartbeats(29_000, &[1]);
    assert_eq!(world.start("k", 1000, &config), Err(ErrorCode::OBJECT_ALREADY_EXISTS));
    world.advance_with_heartbeats(1000, &[1]);
    let second = world.start("k", 1000, &config).unwrap();
    assert_ne!(first[0].medium, second[0].medium);
    assert_eq!(world.used(), 2000);
    world.end("k").unwrap();
    world.advance_with_heartbeats(569_000, &[1]);
    assert_eq!(world.used(), 2000);
    world.advance_with_heartbeats(1000, &[1]);
    assert_eq!(world.used(), 1000);
}

#[test]
fn a_put_that_does_not_end_times_out() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.start("k", 1000, &TestReplicateConfig::default()).unwrap();
    world.advance_with_heartbeats(600_000, &[1]);
    assert_eq!((world.used(), world.end("k")), (0, Err(ErrorCode::OBJECT_NOT_FOUND)));
    assert!(
        world
            .changes
            .iter()
            .any(|change| matches!(change, StateChange::Removed { cause: RemoveCause::PutTimedOut, .. }))
    );
}

fn upsert(
    world: &mut TestMasterCore,
    client: Uuid,
    key: &str,
    size: u64,
) -> Result<ReplicaDescriptors, ErrorCode> {
    let TestMasterCore { master, now, changes } = world;
    master.upsert_start(
        caller(*now, client),
        &PutStartRequest { key, size, config: &TestReplicateConfig::default() },
        changes,
    )
}

/// The replicas of a key, without leasing it.
fn peek(world: &TestMasterCore, key: &str) -> Result<ReplicaDescriptors, ErrorCode> {
    world.master.peek(TENANT, &[key])[0].clone()
}

#[test]
fn a_failed_upsert_preserves_the_present_version() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("k", 1000, &TestReplicateConfig::default()).unwrap();
    let before = peek(&world, "k");
    for size in [1000, 5000] {
        // The writer revokes the upsert.
        let new = upsert(&mut world, WRITER, "k", size).unwrap();
        assert_ne!(new[0].medium, before.as_ref().unwrap()[0].medium);
        assert_eq!(
            (peek(&world, "k"), world.remove("k")),
            (before.clone(), Err(ErrorCode::REPLICA_IS_NOT_READY))
        );
        world.revoke("k").unwrap();
        assert_eq!((peek(&world, "k"), world.used()), (before.clone(), 1000));
        // The master restarts during the upsert, and the writer never ends it.
        upsert(&mut world, WRITER, "k", size).unwrap();
        let settings = world.master.settings().clone();
        world.master = crate::harness::replayed(&settings, &world.changes, world.now);
        assert_eq!(peek(&world, "k"), before);
        world.advance_with_heartbeats(600_000, &[1]);
        assert_eq!((peek(&world, "k"), world.used()), (before.clone(), 1000));
        // A late PutEnd must not match the present version: it would return success for a dropped version.
        assert_eq!(world.end("k"), Err(ErrorCode::ILLEGAL_CLIENT));
    }
}

#[test]
fn an_upsert_replaces_the_present_version_when_it_ends() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("k", 1000, &TestReplicateConfig::default()).unwrap();
    assert!(world.exists("k"));
    let new = upsert(&mut world, WRITER, "k", 5000).unwrap();
    world.end("k").unwrap();
    let now = peek(&world, "k").unwrap();
    assert_eq!((now[0].id, &now[0].medium), (new[0].id, &new[0].medium));
    // Readers with a lease may still read the former version.
    assert_eq!(world.used(), 6000);
    world.advance_with_heartbeats(10_000, &[1]);
    assert_eq!((world.used(), world.end("k")), (5000, Ok(())));
    // PutEnd by another client has no effect.
    upsert(&mut world, id(9), "k", 10).unwrap();
    assert_eq!(
        (world.end("k"), world.revoke("k")),
        (Err(ErrorCode::ILLEGAL_CLIENT), Err(ErrorCode::ILLEGAL_CLIENT))
    );
    world.put("pinned", 10, &hard_pinned()).unwrap();
    assert!(upsert(&mut world, WRITER, "pinned", 10).is_ok());
}

#[test]
fn an_upsert_evicts_other_objects_before_its_present_version() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[2 * MIB]);
    world.put("other", MIB, &TestReplicateConfig::default()).unwrap();
    world.now += 1;
    world.put("k", MIB, &TestReplicateConfig::default()).unwrap();
    let before = peek(&world, "k");
    upsert(&mut world, WRITER, "k", MIB).unwrap();
    assert_eq!((world.has("other"), peek(&world, "k")), (false, before));
    world.end("k").unwrap();
    // With space for one version only, the present version's space is reused.
    world.put("leased", MIB, &TestReplicateConfig::default()).unwrap();
    assert!(world.exists("leased"));
    let before = peek(&world, "k").unwrap();
    let again = upsert(&mut world, WRITER, "k", MIB).unwrap();
    assert_eq!((again[0].medium.clone(), world.has("k")), (before[0].medium.clone(), false));
    world.end("k").unwrap();
    // It is leased: its space must not be overwritten.
    assert!(world.exists("k"));
    assert_eq!(upsert(&mut world, WRITER, "k", MIB), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert!(world.has("k"));
}

/// Without space for both versions, even a hard-pinned object is overwritten in place, which is counted.
#[test]
fn an_upsert_without_space_overwrites_in_place() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("k", MIB, &hard_pinned()).unwrap();
    let before = peek(&world, "k").unwrap();
    let again = world
        .master
        .upsert_start(
            caller(world.now, WRITER),
            &PutStartRequest { key: "k", size: MIB, config: &hard_pinned() },
            &mut world.changes,
        )
        .unwrap();
    assert_eq!((again[0].medium.clone(), world.has("k")), (before[0].medium.clone(), false));
    assert_eq!(world.master.statistics().upserts_in_place, 1);
}

/// The present version is lost with its segment while a new one is written to another segment: the space of the new one is quarantined
/// until the put times out, also in a master that replays the log.
#[test]
fn replay_frees_the_space_of_an_abandoned_version() {
    let settings = MasterCoreOptions::default();
    let mut world = TestMasterCore::with_segments(settings.clone(), &[MIB / 2, MIB]);
    world.put("k", MIB, &TestReplicateConfig::default()).unwrap();
    upsert(&mut world, WRITER, "k", 1).unwrap();
    world.master.unmount(world.now, client_segment(id(2), id(102)), &mut world.changes).unwrap();
    let replayed = |world: &TestMasterCore| {
        crate::harness::replayed(&settings, &world.changes, world.now).space_usage().used
    };
    assert_eq!((world.used(), replayed(&world)), (1, 1));
    world.advance_with_heartbeats(600_000, &[1]);
    assert_eq!((world.used(), replayed(&world)), (0, 0));
}

#[test]
fn an_upsert_takes_over_a_key_being_written() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    let config = TestReplicateConfig::default();
    let first = world.start("k", 1000, &config).unwrap();
    // The first writer may still write: its space is quarantined, as for any put that has not ended.
    let second = upsert(&mut world, WRITER, "k", 500).unwrap();
    assert_ne!(second[0].medium, first[0].medium);
    assert_eq!(world.used(), 1500);
    let others = upsert(&mut world, id(9), "k", 500).unwrap();
    assert_ne!(others[0].medium, second[0].medium);
    assert_eq!((world.used(), world.end("k")), (2000, Err(ErrorCode::ILLEGAL_CLIENT)));
    upsert(&mut world, WRITER, "k", 500).unwrap();
    world.end("k").unwrap();
    world.advance_with_heartbeats(600_000, &[1]);
    assert_eq!((world.used(), world.has("k")), (500, true));
}

#[test]
fn operations_are_counted() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    let two = TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() };
    world.put("k", MIB / 2, &two).unwrap();
    world.master.replicas(world.now, TENANT, "k").unwrap();
    let found = world.master.batch_replicas(world.now, TENANT, &["k", "k", "nothing"]);
    assert_eq!(found.iter().filter(|it| it.is_ok()).count(), 2);
    // The object is leased, so eviction frees nothing.
    assert_eq!(world.start("l", MIB, &two), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    let counts = world.master.statistics();
    assert_eq!((counts.attempted_evictions, counts.eviction_rounds, counts.allocation_failures), (1, 0, 1));
    assert_eq!((counts.partial_allocations, counts.read_bytes), (1, 3 * MIB / 2));
    world.advance_with_heartbeats(20_000, &[1]);
    world.put("l", MIB, &TestReplicateConfig::default()).unwrap();
    let counts = world.master.statistics();
    assert_eq!((counts.attempted_evictions, counts.eviction_rounds, counts.evicted_keys), (2, 1, 1));
}

#[test]
fn replicas_are_placed_on_distinct_nodes() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB, MIB, MIB]);
    let three = TestReplicateConfig { replica_num: 3, ..TestReplicateConfig::default() };
    let mut nodes = endpoints(&world.start("k", 1000, &three).unwrap());
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes.len(), 3);
    let five = TestReplicateConfig { replica_num: 5, ..TestReplicateConfig::default() };
    assert_eq!(world.start("l", 1000, &five).unwrap().len(), 3);
    let preferred =
        TestReplicateConfig { preferred_segment: "10.0.0.2:12000", ..TestReplicateConfig::default() };
    for key in ["a", "b", "c", "d"] {
        assert_eq!(endpoints(&world.start(key, 1000, &preferred).unwrap()), ["10.0.0.2:12000"]);
    }
}

#[test]
fn batches_return_the_results_of_single_calls() {
    let settings = MasterCoreOptions::default();
    let mut single = TestMasterCore::with_segments(settings.clone(), &[MIB, MIB]);
    let batch = TestMasterCore::with_segments(settings, &[MIB, MIB]);
    let keys: Vec<String> = (0..300).map(|number| format!("key{}", number % 250)).collect();
    let sizes: Vec<u64> = (0..300).map(|number| number % 7 * 1000).collect();
    let config = TestReplicateConfig::default();
    let mut started = batch.master.batch_put_start(
        caller(batch.now, WRITER),
        &BatchPutStartRequest { keys: &keys, sizes: &sizes, config: &config },
        &mut (),
    );
    let metas: Vec<_> =
        keys.iter().map(|key| ObjectMeta { key: key.as_str(), object_checksum: None }).collect();
    let ended =
        batch.master.batch_put_end(caller(batch.now, WRITER), &metas[..200], ReplicaType::ALL, &mut ());
    for (key, size) in keys.iter().zip(&sizes) {
        assert_eq!(single.start(key, *size, &config), started.remove(0));
    }
    for (key, ended) in keys.iter().zip(&ended) {
        assert_eq!(single.end(key), *ended);
    }
    let queried: Vec<&str> = keys
        .iter()
        .map(String::as_str)
        .chain(["missing", ""])
        .chain(keys.iter().map(String::as_str))
        .collect();
    let mut found = Vec::new();
    batch.master.batch_exist(batch.now, TENANT, &queried, &mut found);
    for (key, found) in queried.iter().zip(&found) {
        assert_eq!(single.master.exist(single.now, TENANT, key), *found, "{key}");
    }
    let lists = batch.master.batch_replicas(batch.now, TENANT, &queried);
    for (key, list) in queried.iter().zip(lists) {
        assert_eq!(single.master.replicas(single.now, TENANT, key), list, "{key}");
    }
    let removed = batch.master.batch_remove(
        RemoveContext { now_ms: batch.now, tenant: TENANT, force: false },
        &keys,
        &mut (),
    );
    for (key, removed) in keys.iter().zip(removed) {
        assert_eq!(single.remove(key), removed, "{key}");
    }
    let wrong = batch.master.batch_put_start(
        caller(0, WRITER),
        &BatchPutStartRequest { keys: &keys, sizes: &sizes[1..], config: &config },
        &mut (),
    );
    assert!(wrong.iter().all(|it| *it == Err(ErrorCode::INVALID_PARAMS)));
}

#[test]
fn groups_are_leased_together() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("k", 10, &grouped("page")).unwrap();
    world.put("v", 10, &grouped("page")).unwrap();
    world.put("other", 10, &grouped("another")).unwrap();
    assert!(world.exists("k"));
    assert_eq!(world.remove("v"), Err(ErrorCode::OBJECT_HAS_LEASE));
    assert_eq!(world.remove("other"), Ok(()));
    world.now += 10_000;
    assert_eq!(world.remove("v"), Ok(()));
}

#[test]
fn remove_by_regex_and_remove_all_return_counts() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    for key in ["model_1", "model_2", "other_1"] {
        world.put(key, 10, &TestReplicateConfig::default()).unwrap();
    }
    let TestMasterCore { master, now, changes } = &mut world;
    assert_eq!(
        master.remove_by_regex(RemoveContext { now_ms: *now, tenant: TENANT, force: false }, "(", changes),
        Err(ErrorCode::INVALID_PARAMS)
    );
    assert_eq!(master.replicas_by_regex(*now, TENANT, "^model_1$").unwrap().len(), 1);
    assert_eq!(
        master.remove_by_regex(
            RemoveContext { now_ms: *now, tenant: TENANT, force: false },
            "^model",
            changes
        ),
        Ok(1)
    );
    assert_eq!(master.remove_all(*now, None, false, changes), 1);
    assert_eq!(master.remove_all(*now, None, true, changes), 1);
    assert_eq!((world.keys().len(), world.used()), (0, 0));
    let cleared = |change: &&StateChange<'_>| {
        matches!(change, StateChange::Removed { cause: RemoveCause::Cleared, .. })
    };
    assert_eq!(world.changes.iter().filter(cleared).count(), 3);
}

#[test]
fn statistics_are_per_prefix() {
    let mut world = TestMasterCore::with_segments(MasterCoreOptions::default(), &[MIB]);
    world.put("model_1", 10, &TestReplicateConfig::default()).unwrap();
    world.put("model_2", 20, &soft_pinned(1000)).unwrap();
    world.put("plain", 30, &TestReplicateConfig::default()).unwrap();
    assert!(world.exists("model_1") && world.exists("model_1"));
    let mut statistics: Vec<_> = world
        .master
        .prefix_statistics()
        .into_iter()
        .map(|it| (it.prefix.unwrap().to_string(), it.keys, it.bytes, it.hits))
        .collect();
    statistics.sort();
    assert_eq!(statistics, [(String::new(), 1, 30, 0), ("model".to_owned(), 2, 30, 2)]);
    assert_eq!(world.master.soft_pinned_count(), 1);
}

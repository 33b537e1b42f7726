//! Offloading to and promotion from nodes' disks.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{
    ObjectMeta, OffloadTask, OffloadTasks, ReplicaMedium, ReplicaType, StorageObjectMetadata,
};
use moongate_master_core::{
    CallContext, ClientCounts, DiskTierOptions, MasterCoreOptions, OffloadReport, PromotionRequest,
    PutStartRequest, RemoveCause, RemoveContext, StateChange, StoreCause,
};
use proptest::prelude::*;

use crate::harness::{
    MIB, TENANT, TestMasterCore, TestReplicateConfig, caller, client_segment, comparable_state, grouped, id,
    replayed, snapshot,
};

const NODE: mooncake_wire::types::Uuid = mooncake_wire::types::Uuid { first: 101, second: 1 };

fn settings(tier: DiskTierOptions) -> MasterCoreOptions {
    MasterCoreOptions {
        disks: Some(tier),
        shards: 4,
        client_ttl_ms: 1 << 40,
        ramp_ms: 0,
        ..MasterCoreOptions::default()
    }
}

fn on_evict() -> DiskTierOptions {
    DiskTierOptions { on_evict: true, ..DiskTierOptions::default() }
}

fn promoting() -> DiskTierOptions {
    DiskTierOptions { promote_on_hit: true, promotion_reads: 2, ..on_evict() }
}

/// A master with one node that has `size` bytes of memory and a disk.
fn world(tier: DiskTierOptions, size: u64) -> TestMasterCore {
    let mut world = TestMasterCore::with_segments(settings(tier), &[size]);
    world.master.mount_disk(world.now, NODE, true, &mut world.changes).unwrap();
    world
}

impl TestMasterCore {
    fn fetch(&mut self) -> Vec<String> {
        let OffloadTasks(tasks) =
            self.master.fetch_offloads(self.now, NODE, true, &mut self.changes).unwrap();
        tasks.into_iter().map(|it| it.key).collect()
    }

    fn notify(&mut self, objects: &[(&str, i64)]) -> Result<(), ErrorCode> {
        let task = |(key, size): &(&str, i64)| {
            let (tenant_id, key) = (TENANT.to_owned(), (*key).to_owned());
            OffloadTask { tenant_id, key, size: *size }
        };
        let stored = |(_, size): &(&str, i64)| StorageObjectMetadata {
            data_size: *size,
            transport_endpoint: "10.0.0.1:9".to_owned(),
            ..StorageObjectMetadata::default()
        };
        let tasks: Vec<_> = objects.iter().map(task).collect();
        let stored: Vec<_> = objects.iter().map(stored).collect();
        self.master.offloaded(
            self.now,
            NODE,
            &OffloadReport { tasks: &tasks, stored: &stored },
            &mut self.changes,
        )
    }

    /// Whether readers get a memory replica, and a disk copy.
    fn media(&self, key: &str) -> (bool, bool) {
        let found = self.master.peek(TENANT, &[key])[0].clone().unwrap_or_default();
        let is_memory = |it: &ReplicaMedium<_>| matches!(it, ReplicaMedium::Memory(_));
        (found.iter().any(|it| is_memory(&it.medium)), found.iter().any(|it| !is_memory(&it.medium)))
    }

    fn promotions(&self) -> Vec<String> {
        self.master.fetch_promotions(NODE).unwrap().0.into_iter().map(|it| it.key).collect()
    }

    fn read(&self, key: &str) {
        self.master.replicas(self.now, TENANT, key).unwrap();
    }
}

fn worker(now_ms: u64) -> CallContext<'static> {
    caller(now_ms, NODE)
}

#[test]
fn written_object_is_offloaded_at_once_and_evicted_on_demand() {
    let mut world = world(DiskTierOptions::default(), 4 * MIB);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
    }
    // All are being offloaded, so none is evictable.
    assert_eq!(world.put("e", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert_eq!(world.fetch(), ["a", "b", "c", "d"]);
    assert!(world.fetch().is_empty());
    world.notify(&[("c", MIB as i64), ("b", -1), ("a", MIB as i64), ("d", MIB as i64)]).unwrap();
    assert_eq!((world.media("a"), world.media("b")), ((true, true), (true, false)));
    assert_eq!(world.master.disk_usage().used, 3 * MIB);
    world.put("e", MIB, &TestReplicateConfig::default()).unwrap();
    world.put("f", MIB, &TestReplicateConfig::default()).unwrap();
    // Evicted in the order of writing, not in the order of offloading.
    assert_eq!((world.media("a"), world.has("b"), world.media("c")), ((false, true), false, (true, true)));
    assert_eq!(world.master.statistics().evicted_keys, 2);
}

#[test]
fn evicted_objects_are_offloaded_first() {
    let mut world = world(on_evict(), 4 * MIB);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &TestReplicateConfig::default()).unwrap();
    }
    assert!(world.fetch().is_empty());
    assert_eq!(world.put("e", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    let fetched = world.fetch();
    assert_eq!(fetched, ["a"]);
    // Enough bytes are being offloaded.
    assert_eq!(world.put("e", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert!(world.fetch().is_empty());
    world.notify(&[("a", MIB as i64)]).unwrap();
    world.put("e", MIB, &TestReplicateConfig::default()).unwrap();
    assert_eq!(world.media("a"), (false, true));
    assert_eq!(world.keys().len(), 5);
    let left = world
        .changes
        .iter()
        .any(|change| matches!(change, StateChange::ObjectStored { cause: StoreCause::MemoryEvicted, .. }));
    assert!(left && !world.changes.iter().any(|change| matches!(change, StateChange::Removed { .. })));
}

#[test]
fn a_full_queue_blocks_eviction_unless_forced() {
    for force_evict in [false, true] {
        let mut world = world(DiskTierOptions { force_evict, queue_limit: 1, ..on_evict() }, 2 * MIB);
        world.put("a", MIB, &TestReplicateConfig::default()).unwrap();
        world.put("b", MIB, &TestReplicateConfig::default()).unwrap();
        let large = world.put("c", 2 * MIB, &TestReplicateConfig::default());
        assert_eq!(large, Err(ErrorCode::NO_AVAILABLE_HANDLE));
        assert_eq!(world.fetch().len(), 1);
        assert_eq!(world.keys().len(), if force_evict { 1 } else { 2 });
    }
}

#[test]
fn nothing_is_evicted_if_offloading_has_no_disk() {
    let mut world = TestMasterCore::with_segments(settings(on_evict()), &[MIB]);
    world.put("a", MIB, &TestReplicateConfig::default()).unwrap();
    assert_eq!(world.put("b", MIB, &TestReplicateConfig::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    world.now += 1000;
    world.remove("a").unwrap();
    assert_eq!(
        world.master.fetch_offloads(world.now, NODE, true, &mut ()),
        Err(ErrorCode::SEGMENT_NOT_FOUND)
    );
}

#[test]
fn stale_offload_reports_are_not_used_for_a_new_object() {
    let mut world = world(DiskTierOptions::default(), 4 * MIB);
    world.put("a", 100, &TestReplicateConfig::default()).unwrap();
    assert_eq!(world.fetch(), ["a"]);
    world.remove("a").unwrap();
    world.put("a", 100, &TestReplicateConfig::default()).unwrap();
    // The node reports the first object, whose task it fetched.
    world.notify(&[("a", 100)]).unwrap();
    assert_eq!(world.media("a"), (true, false));
    assert_eq!(world.fetch(), ["a"]);
    world.notify(&[("a", 100)]).unwrap();
    assert_eq!(world.media("a"), (true, true));
    // A new version drops the disk copy of the old one.
    world
        .master
        .upsert_start(
            caller(world.now, NODE),
            &PutStartRequest { key: "a", size: 100, config: &TestReplicateConfig::default() },
            &mut world.changes,
        )
        .unwrap();
    assert_eq!(world.master.disk_usage().copies, 1);
    let object = ObjectMeta { key: "a", object_checksum: None };
    world.master.put_end(caller(world.now, NODE), &object, ReplicaType::ALL, &mut world.changes).unwrap();
    assert_eq!((world.master.disk_usage().copies, world.media("a")), (0, (true, false)));
}

#[test]
fn disk_copy_outlives_memory_and_is_lost_with_the_disk() {
    let mut world = world(DiskTierOptions::default(), 4 * MIB);
    world.put("a", 100, &TestReplicateConfig::default()).unwrap();
    world.put("b", 100, &TestReplicateConfig::default()).unwrap();
    world.fetch();
    world.notify(&[("a", 100), ("b", -1)]).unwrap();
    world.master.unmount(world.now, client_segment(id(1), NODE), &mut world.changes).unwrap();
    assert_eq!((world.media("a"), world.has("b")), ((false, true), false));
    world.master.client_disconnected(world.now, NODE, &mut world.changes);
    assert!(!world.has("a") && world.keys().contains("a"));
    // Its disk copies are readable again after its next heartbeat.
    world.fetch();
    assert!(world.has("a"));
    world.master.unmount_disk(world.now, NODE, &mut world.changes).unwrap();
    assert!(world.keys().is_empty());
    let lost = StateChange::Removed {
        tenant: TENANT.into(),
        key: "a".into(),
        group: None,
        tiers: moongate_master_core::StorageTiers { memory: false, disk: true },
        cause: RemoveCause::SegmentLost,
    };
    assert_eq!(world.changes.last(), Some(&lost));
}

#[test]
fn a_silent_disk_is_dropped_after_the_grace_period() {
    let settings = MasterCoreOptions { client_ttl_ms: 10_000, ..settings(DiskTierOptions::default()) };
    let mut world = TestMasterCore::new(settings);
    world.master.mount_disk(world.now, NODE, true, &mut world.changes).unwrap();
    world.notify(&[("a", 100)]).unwrap();
    world.tick(10_000);
    assert!(!world.has("a") && world.keys().contains("a"));
    world.tick(60_000);
    assert!(world.keys().is_empty());
    assert_eq!(world.master.client_counts(), ClientCounts { active: 0, silent: 0 });
    assert_eq!(world.notify(&[("a", 100)]), Err(ErrorCode::SEGMENT_NOT_FOUND));
}

#[test]
fn objects_read_twice_are_promoted() {
    let mut world = world(promoting(), 4 * MIB);
    world.notify(&[("a", 100), ("b", 100)]).unwrap();
    world.read("a");
    assert!(world.promotions().is_empty());
    world.read("a");
    world.read("b");
    world.read("b");
    assert_eq!(
        (world.promotions(), world.promotions(), world.promotions()),
        (vec!["a".to_owned()], vec!["b".to_owned()], vec![])
    );
    let no_names: [&str; 0] = [];
    for key in ["a", "b"] {
        world
            .master
            .promotion_start(
                worker(world.now),
                &PromotionRequest { key, size: 100, preferred: &no_names },
                &mut world.changes,
            )
            .unwrap();
    }
    assert_eq!(world.media("a"), (false, true));
    world.master.promotion_end(worker(world.now), "a", &mut world.changes).unwrap();
    world.master.promotion_revoke(worker(world.now), "b", &mut world.changes).unwrap();
    assert_eq!((world.media("a"), world.media("b")), ((true, true), (false, true)));
    assert_eq!((world.used(), world.master.disk_usage().promoting), (100, 0));
    let counts = world.master.statistics();
    assert_eq!((counts.promotions, counts.promoted_keys, counts.promotions_failed), (2, 1, 1));
}

#[test]
fn promotions_time_out() {
    let mut world = world(promoting(), 4 * MIB);
    world.notify(&[("a", 100)]).unwrap();
    world.read("a");
    world.read("a");
    let no_names: [&str; 0] = [];
    world
        .master
        .promotion_start(
            worker(world.now),
            &PromotionRequest { key: "a", size: 100, preferred: &no_names },
            &mut world.changes,
        )
        .unwrap();
    world.tick(600_000);
    assert_eq!((world.used(), world.master.statistics().promotions_expired), (0, 1));
    assert_eq!(
        world.master.promotion_end(worker(world.now), "a", &mut world.changes),
        Err(ErrorCode::REPLICA_IS_NOT_READY)
    );
}

#[test]
fn state_changes_include_group_names() {
    let mut world = world(DiskTierOptions::default(), 4 * MIB);
    world.put("a", 100, &grouped("sglang-hicache:x")).unwrap();
    let groups_of = |changes: &[StateChange<'static>]| {
        changes
            .iter()
            .filter_map(|it| match it {
                StateChange::ObjectStored { object, .. } => object.group.clone(),
                StateChange::Removed { group, .. } => group.clone(),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(groups_of(&snapshot(&world.master, 10)), ["sglang-hicache:x"]);
    world.changes.clear();
    world.remove("a").unwrap();
    assert_eq!(groups_of(&world.changes), ["sglang-hicache:x"]);
}

#[derive(Clone, Debug)]
enum DiskStep {
    Put(usize, u64, &'static str),
    Upsert(usize, u64),
    Read(usize),
    Remove(usize, bool),
    RemoveAll,
    Fetch(bool),
    Notify(usize, bool),
    Evict(usize),
    Promotions,
    Promote(usize),
    Promoted(usize, bool),
    Tick(u64),
    Mount(bool),
    MountDisk(bool),
    Lost,
}

const KEYS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

fn step() -> impl Strategy<Value = DiskStep> {
    let key = || 0..KEYS.len();
    let size = || prop_oneof![Just(MIB), Just(MIB / 2)];
    let group = prop_oneof![4 => Just(""), 1 => Just("x")];
    prop_oneof![
        6 => (key(), size(), group).prop_map(|(key, size, group)| DiskStep::Put(key, size, group)),
        1 => (key(), size()).prop_map(|(key, size)| DiskStep::Upsert(key, size)),
        4 => key().prop_map(DiskStep::Read),
        1 => (key(), any::<bool>()).prop_map(|(key, force)| DiskStep::Remove(key, force)),
        1 => Just(DiskStep::RemoveAll),
        3 => prop::bool::weighted(0.9).prop_map(DiskStep::Fetch),
        6 => (key(), prop::bool::weighted(0.8)).prop_map(|(key, done)| DiskStep::Notify(key, done)),
        1 => key().prop_map(DiskStep::Evict),
        2 => Just(DiskStep::Promotions),
        2 => key().prop_map(DiskStep::Promote),
        2 => (key(), any::<bool>()).prop_map(|(key, done)| DiskStep::Promoted(key, done)),
        3 => prop_oneof![0..30_000_u64, Just(600_000)].prop_map(DiskStep::Tick),
        1 => any::<bool>().prop_map(DiskStep::Mount),
        1 => prop::bool::weighted(0.7).prop_map(DiskStep::MountDisk),
        1 => Just(DiskStep::Lost),
    ]
}

fn run(world: &mut TestMasterCore, step: &DiskStep) {
    let no_names: [&str; 0] = [];
    match *step {
        DiskStep::Put(key, size, group) => _ = world.put(KEYS[key], size, &grouped(group)),
        DiskStep::Upsert(key, size) => {
            let TestMasterCore { master, now, changes } = world;
            if master
                .upsert_start(
                    caller(*now, crate::harness::WRITER),
                    &PutStartRequest { key: KEYS[key], size, config: &TestReplicateConfig::default() },
                    changes,
                )
                .is_ok()
            {
                world.end(KEYS[key]).unwrap();
            }
        }
        DiskStep::Read(key) => _ = world.master.replicas(world.now, TENANT, KEYS[key]),
        DiskStep::Remove(key, force) => {
            _ = world.master.remove(
                RemoveContext { now_ms: world.now, tenant: TENANT, force },
                KEYS[key],
                &mut world.changes,
            );
        }
        DiskStep::RemoveAll => _ = world.master.remove_all(world.now, None, false, &mut world.changes),
        DiskStep::Fetch(offloading) => {
            _ = world.master.fetch_offloads(world.now, NODE, offloading, &mut world.changes);
        }
        DiskStep::Notify(key, done) => {
            let size = world.master.peek(TENANT, &[KEYS[key]])[0].as_ref().map_or(MIB as i64, |it| {
                it.first().map_or(MIB as i64, |it| match &it.medium {
                    ReplicaMedium::Memory(it) => it.size as i64,
                    ReplicaMedium::LocalDisk(it) => it.object_size as i64,
                    _ => 0,
                })
            });
            _ = world.notify(&[(KEYS[key], if done { size } else { -1 })]);
        }
        DiskStep::Evict(key) => {
            let (now, changes) = (world.now, &mut world.changes);
            _ = world.master.evict_disk_copy(caller(now, NODE), KEYS[key], ReplicaType::LOCAL_DISK, changes);
        }
        DiskStep::Promotions => _ = world.master.fetch_promotions(NODE),
        DiskStep::Promote(key) => {
            for size in [MIB, MIB / 2] {
                let (now, changes) = (world.now, &mut world.changes);
                _ = world.master.promotion_start(
                    worker(now),
                    &PromotionRequest { key: KEYS[key], size, preferred: &no_names },
                    changes,
                );
            }
        }
        DiskStep::Promoted(key, true) => {
            _ = world.master.promotion_end(worker(world.now), KEYS[key], &mut world.changes);
        }
        DiskStep::Promoted(key, false) => {
            _ = world.master.promotion_revoke(worker(world.now), KEYS[key], &mut world.changes);
        }
        DiskStep::Tick(ms) => world.tick(ms),
        DiskStep::Mount(true) => world.mount(1, 3 * MIB).unwrap(),
        DiskStep::Mount(false) => {
            world.master.unmount(world.now, client_segment(id(1), NODE), &mut world.changes).unwrap();
        }
        DiskStep::MountDisk(true) => {
            world.master.mount_disk(world.now, NODE, true, &mut world.changes).unwrap();
        }
        DiskStep::MountDisk(false) => world.master.unmount_disk(world.now, NODE, &mut world.changes).unwrap(),
        DiskStep::Lost => world.master.client_disconnected(world.now, NODE, &mut world.changes),
    }
}

/// Checks that space and disk usage equal the sums over a snapshot.
fn check(world: &TestMasterCore) {
    let (mut used, mut copies, mut bytes) = (0, 0, 0);
    for change in snapshot(&world.master, 3) {
        match change {
            StateChange::ObjectStored { object, .. } => {
                assert!(object.disk_copy.is_some() || !object.locations.is_empty());
                used += object.size * object.locations.len() as u64;
                copies += u64::from(object.disk_copy.is_some());
                bytes += object.disk_copy.map_or(0, |it| it.size);
            }
            StateChange::ObjectStarted(object) => used += object.size * object.locations.len() as u64,
            StateChange::RangeQuarantined { size, .. } => used += size,
            _ => {}
        }
    }
    let disks = world.master.disk_usage();
    assert_eq!((world.used(), disks.copies, disks.used), (used, copies, bytes));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_space_leaks_and_replay_restores_the_state(
        steps in proptest::collection::vec(step(), 1..150),
        on_evict: bool,
        force_evict: bool,
    ) {
        let tier = DiskTierOptions { on_evict, force_evict, queue_limit: 4, ..promoting() };
        let mut world = world(tier, 3 * MIB);
        for step in &steps {
            run(&mut world, step);
            check(&world);
        }
        let settings = settings(tier);
        prop_assert_eq!(comparable_state(&replayed(&settings, &world.changes, world.now)), comparable_state(&world.master));
        let copy = replayed(&settings, &snapshot(&world.master, 2), world.now);
        prop_assert_eq!(comparable_state(&copy), comparable_state(&world.master));
        // After all tasks have timed out, all space is free again.
        world.master.mount_disk(world.now, NODE, true, &mut world.changes).unwrap();
        world.tick(1_200_000);
        world.master.remove_all(world.now, None, true, &mut world.changes);
        world.tick(1_200_000);
        prop_assert_eq!((world.used(), world.keys().len()), (0, 0));
        let disks = world.master.disk_usage();
        prop_assert_eq!((disks.copies, disks.used, disks.promoting), (0, 0, 0));
    }
}

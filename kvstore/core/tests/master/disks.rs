//! Objects on nodes' disks.

use mooncake_wire::ErrorCode;
use mooncake_wire::types::{ObjectMeta, OffloadTask, OffloadTasks, ReplicaMedium, ReplicaType, StoredObject};
use moongate_kvcore::{DiskTier, Fact, RemoveCause, Settings, StoreCause, Work};
use proptest::prelude::*;

use crate::world::{Config, MIB, TENANT, World, grouped, id, known, replayed, snapshot};

const NODE: mooncake_wire::types::Uuid = mooncake_wire::types::Uuid { first: 101, second: 1 };

fn settings(tier: DiskTier) -> Settings {
    Settings { disks: Some(tier), shards: 4, client_ttl_ms: 1 << 40, ramp_ms: 0, ..Settings::default() }
}

fn on_evict() -> DiskTier {
    DiskTier { on_evict: true, ..DiskTier::default() }
}

fn promoting() -> DiskTier {
    DiskTier { promote_on_hit: true, promotion_reads: 2, ..on_evict() }
}

/// One node with so much memory, and a disk.
fn world(tier: DiskTier, size: u64) -> World {
    let mut world = World::with_segments(settings(tier), &[size]);
    world.master.mount_disk(world.now, NODE, true, &mut world.facts).unwrap();
    world
}

impl World {
    fn fetch(&mut self) -> Vec<String> {
        let OffloadTasks(tasks) = self.master.fetch_offloads(self.now, NODE, true, &mut self.facts).unwrap();
        tasks.into_iter().map(|it| it.key).collect()
    }

    fn notify(&mut self, objects: &[(&str, i64)]) -> Result<(), ErrorCode> {
        let task = |(key, size): &(&str, i64)| {
            let (tenant_id, key) = (TENANT.to_owned(), (*key).to_owned());
            OffloadTask { tenant_id, key, size: *size }
        };
        let stored = |(_, size): &(&str, i64)| StoredObject {
            data_size: *size,
            transport_endpoint: "10.0.0.1:9".to_owned(),
            ..StoredObject::default()
        };
        let tasks: Vec<_> = objects.iter().map(task).collect();
        let stored: Vec<_> = objects.iter().map(stored).collect();
        self.master.offloaded(self.now, NODE, &tasks, &stored, &mut self.facts)
    }

    /// In memory, and on a disk, as readers see it.
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

fn work(key: &str) -> Work<'_> {
    Work { client: NODE, tenant: TENANT, key }
}

#[test]
fn what_is_written_goes_to_the_disk_at_once_and_then_leaves_memory_when_room_is_needed() {
    let mut world = world(DiskTier::default(), 4 * MIB);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &Config::default()).unwrap();
    }
    // All are being put on the disk, so none can go.
    assert_eq!(world.put("e", MIB, &Config::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert_eq!(world.fetch(), ["a", "b", "c", "d"]);
    assert!(world.fetch().is_empty());
    world.notify(&[("c", MIB as i64), ("b", -1), ("a", MIB as i64), ("d", MIB as i64)]).unwrap();
    assert_eq!((world.media("a"), world.media("b")), ((true, true), (true, false)));
    assert_eq!(world.master.disk_fill().used, 3 * MIB);
    world.put("e", MIB, &Config::default()).unwrap();
    world.put("f", MIB, &Config::default()).unwrap();
    // In the order in which they were written, whatever the order in which they came to the disk.
    assert_eq!((world.media("a"), world.has("b"), world.media("c")), ((false, true), false, (true, true)));
    assert_eq!(world.master.counts().evicted_keys, 2);
}

#[test]
fn what_is_evicted_goes_to_the_disk_first() {
    let mut world = world(on_evict(), 4 * MIB);
    for key in ["a", "b", "c", "d"] {
        world.now += 1;
        world.put(key, MIB, &Config::default()).unwrap();
    }
    assert!(world.fetch().is_empty());
    assert_eq!(world.put("e", MIB, &Config::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    let fetched = world.fetch();
    assert_eq!(fetched, ["a"]);
    // Enough is on its way.
    assert_eq!(world.put("e", MIB, &Config::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    assert!(world.fetch().is_empty());
    world.notify(&[("a", MIB as i64)]).unwrap();
    world.put("e", MIB, &Config::default()).unwrap();
    assert_eq!(world.media("a"), (false, true));
    assert_eq!(world.keys().len(), 5);
    let left = world.facts.iter().any(|it| matches!(it, Fact::Stored { cause: StoreCause::OnlyOnDisk, .. }));
    assert!(left && !world.facts.iter().any(|it| matches!(it, Fact::Removed { .. })));
}

#[test]
fn a_full_queue_keeps_objects_unless_told_otherwise() {
    for force_evict in [false, true] {
        let mut world = world(DiskTier { force_evict, queue_limit: 1, ..on_evict() }, 2 * MIB);
        world.put("a", MIB, &Config::default()).unwrap();
        world.put("b", MIB, &Config::default()).unwrap();
        let large = world.put("c", 2 * MIB, &Config::default());
        assert_eq!(large, Err(ErrorCode::NO_AVAILABLE_HANDLE));
        assert_eq!(world.fetch().len(), 1);
        assert_eq!(world.keys().len(), if force_evict { 1 } else { 2 });
    }
}

#[test]
fn without_a_disk_nothing_is_evicted_that_would_be_offloaded() {
    let mut world = World::with_segments(settings(on_evict()), &[MIB]);
    world.put("a", MIB, &Config::default()).unwrap();
    assert_eq!(world.put("b", MIB, &Config::default()), Err(ErrorCode::NO_AVAILABLE_HANDLE));
    world.now += 1000;
    world.remove("a").unwrap();
    assert_eq!(
        world.master.fetch_offloads(world.now, NODE, true, &mut ()),
        Err(ErrorCode::SEGMENT_NOT_FOUND)
    );
}

#[test]
fn bytes_of_an_object_that_is_gone_are_not_taken_for_the_next_one() {
    let mut world = world(DiskTier::default(), 4 * MIB);
    world.put("a", 100, &Config::default()).unwrap();
    assert_eq!(world.fetch(), ["a"]);
    world.remove("a").unwrap();
    world.put("a", 100, &Config::default()).unwrap();
    // The node tells of the first one, which it has been told to put on its disk.
    world.notify(&[("a", 100)]).unwrap();
    assert_eq!(world.media("a"), (true, false));
    assert_eq!(world.fetch(), ["a"]);
    world.notify(&[("a", 100)]).unwrap();
    assert_eq!(world.media("a"), (true, true));
    // Nor is a copy kept when the object is written anew.
    world
        .master
        .upsert_start(world.now, NODE, TENANT, "a", 100, &Config::default(), &mut world.facts)
        .unwrap();
    assert_eq!(world.master.disk_fill().copies, 1);
    let object = ObjectMeta { key: "a", object_checksum: None };
    world.master.put_end(world.now, NODE, TENANT, &object, ReplicaType::ALL, &mut world.facts).unwrap();
    assert_eq!((world.master.disk_fill().copies, world.media("a")), (0, (true, false)));
}

#[test]
fn an_object_is_on_the_disk_when_its_memory_is_gone_and_gone_with_the_disk() {
    let mut world = world(DiskTier::default(), 4 * MIB);
    world.put("a", 100, &Config::default()).unwrap();
    world.put("b", 100, &Config::default()).unwrap();
    world.fetch();
    world.notify(&[("a", 100), ("b", -1)]).unwrap();
    world.master.unmount(world.now, id(1), NODE, &mut world.facts).unwrap();
    assert_eq!((world.media("a"), world.has("b")), ((false, true), false));
    world.master.client_lost(world.now, NODE, &mut world.facts);
    assert!(!world.has("a") && world.keys().contains("a"));
    // What it still has, is back as soon as it is heard of.
    world.fetch();
    assert!(world.has("a"));
    world.master.unmount_disk(world.now, NODE, &mut world.facts).unwrap();
    assert!(world.keys().is_empty());
    let lost = Fact::Removed {
        tenant: TENANT.into(),
        key: "a".into(),
        group: None,
        was: moongate_kvcore::Media { memory: false, disk: true },
        cause: RemoveCause::SegmentLost,
    };
    assert_eq!(world.facts.last(), Some(&lost));
}

#[test]
fn a_silent_disk_is_dropped_after_the_grace_period() {
    let settings = Settings { client_ttl_ms: 10_000, ..settings(DiskTier::default()) };
    let mut world = World::new(settings);
    world.master.mount_disk(world.now, NODE, true, &mut world.facts).unwrap();
    world.notify(&[("a", 100)]).unwrap();
    world.tick(10_000);
    assert!(!world.has("a") && world.keys().contains("a"));
    world.tick(60_000);
    assert!(world.keys().is_empty());
    assert_eq!(world.master.client_counts(), (0, 0));
    assert_eq!(world.notify(&[("a", 100)]), Err(ErrorCode::SEGMENT_NOT_FOUND));
}

#[test]
fn what_is_read_comes_back() {
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
        world.master.promotion_start(world.now, work(key), 100, &no_names, &mut world.facts).unwrap();
    }
    assert_eq!(world.media("a"), (false, true));
    world.master.promotion_end(world.now, work("a"), &mut world.facts).unwrap();
    world.master.promotion_revoke(world.now, work("b"), &mut world.facts).unwrap();
    assert_eq!((world.media("a"), world.media("b")), ((true, true), (false, true)));
    assert_eq!((world.used(), world.master.disk_fill().promoting), (100, 0));
    let counts = world.master.counts();
    assert_eq!((counts.promotions, counts.promoted_keys, counts.promotions_failed), (2, 1, 1));
}

#[test]
fn what_takes_too_long_is_given_up() {
    let mut world = world(promoting(), 4 * MIB);
    world.notify(&[("a", 100)]).unwrap();
    world.read("a");
    world.read("a");
    let no_names: [&str; 0] = [];
    world.master.promotion_start(world.now, work("a"), 100, &no_names, &mut world.facts).unwrap();
    world.tick(600_000);
    assert_eq!((world.used(), world.master.counts().promotions_expired), (0, 1));
    assert_eq!(
        world.master.promotion_end(world.now, work("a"), &mut world.facts),
        Err(ErrorCode::REPLICA_IS_NOT_READY)
    );
}

#[test]
fn the_names_of_groups_are_told() {
    let mut world = world(DiskTier::default(), 4 * MIB);
    world.put("a", 100, &grouped("sglang-hicache:x")).unwrap();
    let known = |facts: &[Fact<'static>]| {
        facts
            .iter()
            .filter_map(|it| match it {
                Fact::Stored { object, .. } => object.group.clone(),
                Fact::Removed { group, .. } => group.clone(),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(known(&snapshot(&world.master, 10)), ["sglang-hicache:x"]);
    world.facts.clear();
    world.remove("a").unwrap();
    assert_eq!(known(&world.facts), ["sglang-hicache:x"]);
}

#[derive(Clone, Debug)]
enum Step {
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

fn step() -> impl Strategy<Value = Step> {
    let key = || 0..KEYS.len();
    let size = || prop_oneof![Just(MIB), Just(MIB / 2)];
    let group = prop_oneof![4 => Just(""), 1 => Just("x")];
    prop_oneof![
        6 => (key(), size(), group).prop_map(|(key, size, group)| Step::Put(key, size, group)),
        1 => (key(), size()).prop_map(|(key, size)| Step::Upsert(key, size)),
        4 => key().prop_map(Step::Read),
        1 => (key(), any::<bool>()).prop_map(|(key, force)| Step::Remove(key, force)),
        1 => Just(Step::RemoveAll),
        3 => prop::bool::weighted(0.9).prop_map(Step::Fetch),
        6 => (key(), prop::bool::weighted(0.8)).prop_map(|(key, done)| Step::Notify(key, done)),
        1 => key().prop_map(Step::Evict),
        2 => Just(Step::Promotions),
        2 => key().prop_map(Step::Promote),
        2 => (key(), any::<bool>()).prop_map(|(key, done)| Step::Promoted(key, done)),
        3 => prop_oneof![0..30_000_u64, Just(600_000)].prop_map(Step::Tick),
        1 => any::<bool>().prop_map(Step::Mount),
        1 => prop::bool::weighted(0.7).prop_map(Step::MountDisk),
        1 => Just(Step::Lost),
    ]
}

fn run(world: &mut World, step: &Step) {
    let no_names: [&str; 0] = [];
    match *step {
        Step::Put(key, size, group) => _ = world.put(KEYS[key], size, &grouped(group)),
        Step::Upsert(key, size) => {
            let World { master, now, facts } = world;
            if master
                .upsert_start(*now, crate::world::WRITER, TENANT, KEYS[key], size, &Config::default(), facts)
                .is_ok()
            {
                world.end(KEYS[key]).unwrap();
            }
        }
        Step::Read(key) => _ = world.master.replicas(world.now, TENANT, KEYS[key]),
        Step::Remove(key, force) => {
            _ = world.master.remove(world.now, TENANT, KEYS[key], force, &mut world.facts);
        }
        Step::RemoveAll => _ = world.master.remove_all(world.now, None, false, &mut world.facts),
        Step::Fetch(wants) => _ = world.master.fetch_offloads(world.now, NODE, wants, &mut world.facts),
        Step::Notify(key, done) => {
            let size = world.master.peek(TENANT, &[KEYS[key]])[0].as_ref().map_or(MIB as i64, |it| {
                it.first().map_or(MIB as i64, |it| match &it.medium {
                    ReplicaMedium::Memory(it) => it.size as i64,
                    ReplicaMedium::LocalDisk(it) => it.object_size as i64,
                    _ => 0,
                })
            });
            _ = world.notify(&[(KEYS[key], if done { size } else { -1 })]);
        }
        Step::Evict(key) => {
            let (now, facts) = (world.now, &mut world.facts);
            _ = world.master.evict_disk_copy(now, NODE, TENANT, KEYS[key], ReplicaType::LOCAL_DISK, facts);
        }
        Step::Promotions => _ = world.master.fetch_promotions(NODE),
        Step::Promote(key) => {
            for size in [MIB, MIB / 2] {
                let (now, facts) = (world.now, &mut world.facts);
                _ = world.master.promotion_start(now, work(KEYS[key]), size, &no_names, facts);
            }
        }
        Step::Promoted(key, true) => {
            _ = world.master.promotion_end(world.now, work(KEYS[key]), &mut world.facts);
        }
        Step::Promoted(key, false) => {
            _ = world.master.promotion_revoke(world.now, work(KEYS[key]), &mut world.facts);
        }
        Step::Tick(ms) => world.tick(ms),
        Step::Mount(true) => world.mount(1, 3 * MIB).unwrap(),
        Step::Mount(false) => world.master.unmount(world.now, id(1), NODE, &mut world.facts).unwrap(),
        Step::MountDisk(true) => world.master.mount_disk(world.now, NODE, true, &mut world.facts).unwrap(),
        Step::MountDisk(false) => world.master.unmount_disk(world.now, NODE, &mut world.facts).unwrap(),
        Step::Lost => world.master.client_lost(world.now, NODE, &mut world.facts),
    }
}

/// Space, copies and what is told of them fit together.
fn check(world: &World) {
    let (mut used, mut copies, mut bytes) = (0, 0, 0);
    for fact in snapshot(&world.master, 3) {
        match fact {
            Fact::Stored { object, .. } => {
                assert!(object.on_disk.is_some() || !object.places.is_empty());
                used += object.size * object.places.len() as u64;
                copies += u64::from(object.on_disk.is_some());
                bytes += object.on_disk.map_or(0, |it| it.size);
            }
            Fact::Started(object) => used += object.size * object.places.len() as u64,
            Fact::Held { size, .. } => used += size,
            _ => {}
        }
    }
    let disks = world.master.disk_fill();
    assert_eq!((world.used(), disks.copies, disks.used), (used, copies, bytes));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_on_the_way_and_facts_rebuild_the_state(
        steps in proptest::collection::vec(step(), 1..150),
        on_evict: bool,
        force_evict: bool,
    ) {
        let tier = DiskTier { on_evict, force_evict, queue_limit: 4, ..promoting() };
        let mut world = world(tier, 3 * MIB);
        for step in &steps {
            run(&mut world, step);
            check(&world);
        }
        let settings = settings(tier);
        prop_assert_eq!(known(&replayed(&settings, &world.facts, world.now)), known(&world.master));
        let copy = replayed(&settings, &snapshot(&world.master, 2), world.now);
        prop_assert_eq!(known(&copy), known(&world.master));
        // When all that is under way has ended, all space can be had again.
        world.master.mount_disk(world.now, NODE, true, &mut world.facts).unwrap();
        world.tick(1_200_000);
        world.master.remove_all(world.now, None, true, &mut world.facts);
        world.tick(1_200_000);
        prop_assert_eq!((world.used(), world.keys().len()), (0, 0));
        let disks = world.master.disk_fill();
        prop_assert_eq!((disks.copies, disks.used, disks.promoting), (0, 0, 0));
    }
}

//! A master that is killed again and again, in a world where every byte of the nodes' memory is known.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod caller;
#[allow(dead_code, reason = "another test uses the rest of it")]
#[path = "../../oplog/tests/memory_disk/mod.rs"]
mod memory_disk;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use caller::{LIMIT, TestRpcConnection};
use fastrand::Rng;
use memory_disk::{FileContents, MemoryDisk};
use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{BatchRemove, BatchRemoveArguments, ClientArguments, Ping};
use mooncake_wire::types::{
    DEFAULT_TENANT, ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment, Uuid,
};
use moongate_master::durable::{
    DurableJournal, PersistenceSchedule, RecoveryOutcome, RestoreReport, StatePersister,
};
use moongate_master::journal::FactRecorder;
use moongate_master::{
    AuxServices, AuxServicesOptions, AuxState, LeadershipStatus, MasterServer, MasterServerOptions,
    MasterState, MonotonicUnixClock, rpc,
};
use moongate_master_core::{MasterCore, MasterCoreOptions, ObjectCursor, StateChange, StateChangeSink};
use moongate_oplog::{LogDirectory, OplogOptions};
use moongate_runtime::Supervisor;
use tempfile::TempDir;

const CLIENT: Uuid = Uuid { first: 7, second: 7 };
const KEYS: u64 = 300;
const SEGMENT: u64 = 64 << 10;

fn settings() -> MasterCoreOptions {
    MasterCoreOptions {
        shards: 8,
        seed: 3,
        put_discard_ms: 50,
        put_release_ms: 100,
        lease_ttl_ms: 20,
        ramp_ms: 0,
        ..MasterCoreOptions::default()
    }
}

/// Small files, so that there are many of them, and two names of a machine's start.
fn options(boot: &str) -> OplogOptions {
    OplogOptions { file_bytes: 4000, boot_id: boot.to_owned(), ..OplogOptions::default() }
}

fn segment(number: u64) -> Segment<String> {
    Segment {
        id: Uuid { first: 1, second: number },
        name: format!("node-{number}"),
        base: number << 40,
        size: SEGMENT,
        te_endpoint: format!("node-{number}"),
        protocol: "tcp".to_owned(),
        host_id: String::new(),
    }
}

/// Records facts, and what they amount to.
struct StoredKeyRecorder<'a> {
    recorder: FactRecorder,
    stored: &'a mut BTreeSet<String>,
}

impl StateChangeSink for StoredKeyRecorder<'_> {
    fn record(&mut self, fact: StateChange<'_>) {
        match &fact {
            StateChange::ObjectStored { object, .. } => _ = self.stored.insert(object.key.to_string()),
            StateChange::Removed { key, .. } => _ = self.stored.remove(&**key),
            _ => {}
        }
        self.recorder.record(fact);
    }
}

struct DurabilitySimulation {
    folder: TempDir,
    durable: Arc<DurableJournal>,
    master: Box<MasterCore>,
    aux: Arc<AuxState>,
    now_ms: u64,
    rng: Rng,
    /// What was answered for, and not taken back.
    stored: BTreeSet<String>,
    /// The writes in progress: the key, and where its bytes are.
    writing: BTreeMap<String, Vec<u64>>,
    /// What lies at an address: a key. Writers write as soon as they have been given the space.
    memory: BTreeMap<u64, String>,
}

impl DurabilitySimulation {
    fn new(seed: u64) -> Self {
        let folder = TempDir::new().unwrap();
        let (durable, MasterState { master, aux: beside, .. }, restored) =
            DurableJournal::open(folder.path(), options("a"), &settings(), 1000).unwrap();
        assert_eq!(restored, RestoreReport::default());
        let mut world = Self {
            folder,
            durable: Arc::new(durable),
            master,
            aux: beside,
            now_ms: 1000,
            rng: Rng::with_seed(seed),
            stored: BTreeSet::new(),
            writing: BTreeMap::new(),
            memory: BTreeMap::new(),
        };
        for number in 1..=3 {
            world.commit_action(|master, now, fx| master.mount(now, &segment(number), CLIENT, fx).unwrap());
        }
        world
    }

    /// Does something and waits for its commit, as the server does before it answers.
    fn commit_action<T>(
        &mut self,
        action: impl FnOnce(&MasterCore, u64, &mut dyn StateChangeSink) -> T,
    ) -> T {
        let recorder = FactRecorder::new(self.durable.clone());
        let mut witness = StoredKeyRecorder { recorder, stored: &mut self.stored };
        let done = action(&self.master, self.now_ms, &mut witness);
        witness.recorder.commit().unwrap();
        done
    }

    fn step(&mut self) {
        self.now_ms += self.rng.u64(0..5);
        let key = format!("key-{}", self.rng.u64(0..KEYS));
        match self.rng.u32(0..100) {
            0..50 => self.begin(key),
            50..80 => self.end(),
            80..84 => {
                if let Some((key, _)) = self.writing.pop_first() {
                    _ = self.commit_action(|master, _, fx| {
                        master.put_revoke(CLIENT, "default", &key, ReplicaType::ALL, fx)
                    });
                }
            }
            84..90 => {
                let force = self.rng.bool();
                _ = self.commit_action(|master, now, fx| master.remove(now, "default", &key, force, fx));
            }
            90..95 => _ = self.master.exist(self.now_ms, "default", &key),
            95..99 => self.commit_action(|master, now, fx| master.tick(now, fx)),
            _ => {
                let keeper = StatePersister::new(
                    &self.durable,
                    &self.master,
                    &self.aux,
                    PersistenceSchedule::default(),
                );
                keeper.snapshot().unwrap();
            }
        }
    }

    fn begin(&mut self, key: String) {
        let size = self.rng.u64(1..4000);
        let config =
            ReplicateConfig { replica_num: self.rng.u64(1..3), ..ReplicateConfig::<String>::default() };
        let upsert = self.rng.u32(0..4) == 0;
        let replicas = self.commit_action(|master, now, fx| match upsert {
            true => master.upsert_start(now, CLIENT, "default", &key, size, &config, fx),
            false => master.put_start(now, CLIENT, "default", &key, size, &config, fx),
        });
        let Ok(replicas) = replicas else { return };
        let mut addresses = Vec::new();
        for replica in &replicas {
            let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
            // Whatever lay there is gone.
            let end = buffer.address + buffer.size;
            self.memory.retain(|address, _| !(buffer.address..end).contains(address));
            self.memory.insert(buffer.address, key.clone());
            addresses.push(buffer.address);
        }
        self.writing.insert(key, addresses);
    }

    fn end(&mut self) {
        let Some(nth) = self.writing.len().checked_sub(1).map(|most| self.rng.usize(0..=most)) else {
            return;
        };
        let key = self.writing.keys().nth(nth).unwrap().clone();
        self.writing.remove(&key);
        let object = ObjectMeta { key, object_checksum: None };
        _ = self.commit_action(|master, now, fx| {
            master.put_end(now, CLIENT, "default", &object, ReplicaType::ALL, fx)
        });
    }

    /// The process dies: what is in its memory is gone, and a record may have been written in part.
    fn kill(&mut self, boot: &str) -> RestoreReport {
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        // What a killed process leaves of its last write is its beginning.
        let torn = self.rng.usize(0..40);
        let next = self.durable.log().written() + 1;
        let header = [&1000_u32.to_le_bytes()[..], &[0xa5; 4], &next.to_le_bytes()].concat();
        let newest = newest_log(copy.path());
        let mut bytes = fs::read(&newest).unwrap();
        bytes.extend(header.into_iter().chain(std::iter::repeat_with(|| self.rng.u8(..))).take(torn));
        fs::write(&newest, bytes).unwrap();
        let (durable, MasterState { master, aux: beside, .. }, restored) =
            DurableJournal::open(copy.path(), options(boot), &settings(), self.now_ms).unwrap();
        (self.folder, self.durable, self.master, self.aux) = (copy, Arc::new(durable), master, beside);
        restored
    }

    /// Every key that was answered for is there, no other is, and each is where its own bytes are.
    fn check(&mut self) {
        let mut there = BTreeSet::new();
        let mut cursor = Some(ObjectCursor::default());
        while let Some(from) = cursor {
            cursor = self.master.keys(from, 64, |_, key| _ = there.insert(key.to_owned()));
        }
        there.retain(|key| self.master.peek("default", &[key])[0].is_ok());
        assert_eq!(there, self.stored);
        let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
        for key in &there {
            for replica in self.master.peek("default", &[key]).pop().unwrap().unwrap() {
                let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
                assert_eq!(self.memory.get(&buffer.address), Some(key), "at {:#x}", buffer.address);
                taken.insert(buffer.address, buffer.size);
            }
        }
        let ranges: Vec<_> = taken.into_iter().collect();
        for pair in ranges.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "two objects overlap");
        }
    }
}

fn newest_log(folder: &Path) -> PathBuf {
    let mut logs: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    logs.retain(|path| path.extension().is_some_and(|suffix| suffix == "log"));
    logs.sort();
    logs.pop().unwrap()
}

#[test]
fn kills_lose_nothing_that_was_answered_for() {
    let mut kills = 0;
    for seed in 0..25 {
        let mut world = DurabilitySimulation::new(seed);
        for _ in 0..10 {
            for _ in 0..world.rng.u32(1..400) {
                world.step();
            }
            world.check();
            let restored = world.kill("a");
            assert!(restored.recovery.is_complete(), "{restored}");
            world.check();
            kills += 1;
        }
    }
    assert_eq!(kills, 250);
}

#[test]
fn objects_are_not_trusted_when_the_machine_died() {
    let mut world = DurabilitySimulation::new(1);
    (0..500).for_each(|_| world.step());
    let restored = world.kill("b");
    assert!(restored.recovery == RecoveryOutcome::MachineDied && restored.keys == 0, "{restored}");
    // It goes on, and is trusted again.
    (world.stored, world.writing, world.memory) = Default::default();
    for number in 1..=3 {
        world.commit_action(|master, now, fx| master.mount(now, &segment(number), CLIENT, fx).unwrap());
    }
    (0..500).for_each(|_| world.step());
    assert!(world.kill("b").recovery.is_complete());
    world.check();
}

#[test]
fn a_master_that_was_closed_is_trusted_everywhere() {
    let mut world = DurabilitySimulation::new(2);
    (0..500).for_each(|_| world.step());
    world.durable.log().close().unwrap();
    let restored = world.kill("c");
    assert!(restored.recovery.is_complete(), "{restored}");
    world.check();
}

#[test]
fn a_damaged_snapshot_is_passed_over() {
    let mut world = DurabilitySimulation::new(5);
    for _ in 0..2 {
        (0..300).for_each(|_| world.step());
        StatePersister::new(&world.durable, &world.master, &world.aux, PersistenceSchedule::default())
            .snapshot()
            .unwrap();
    }
    let mut snapshots: Vec<PathBuf> =
        fs::read_dir(world.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    snapshots.retain(|path| path.extension().is_some_and(|suffix| suffix == "snap"));
    snapshots.sort();
    assert_eq!(snapshots.len(), 2);
    let newest = snapshots.pop().unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let restored = world.kill("a");
    assert!(
        restored.snapshot.is_some() && matches!(restored.recovery, RecoveryOutcome::IntactDespiteDamage(_)),
        "{restored:?}"
    );
    world.check();
    // Without any snapshot the log does not go back far enough.
    for entry in fs::read_dir(world.folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "snap") {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(matches!(world.kill("a").recovery, RecoveryOutcome::Damaged(_)));
}

/// The history of a master with 100 keys that were put and removed, and 100 others that got their space.
#[test]
fn a_flipped_bit_never_makes_one_object_of_another() {
    let mut world = DurabilitySimulation::new(9);
    let put = |world: &mut DurabilitySimulation, key: String| {
        let config = ReplicateConfig::<String>::default();
        let replicas = world
            .commit_action(|master, now, fx| {
                master.put_start(now, CLIENT, "default", &key, 1000, &config, fx)
            })
            .unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        world.memory.insert(buffer.address, key.clone());
        let object = ObjectMeta { key, object_checksum: None };
        world
            .commit_action(|master, now, fx| {
                master.put_end(now, CLIENT, "default", &object, ReplicaType::ALL, fx)
            })
            .unwrap();
    };
    (0..100).for_each(|number| put(&mut world, format!("old-{number}")));
    for number in 0..100 {
        let key = format!("old-{number}");
        world.commit_action(|master, now, fx| master.remove(now, "default", &key, true, fx)).unwrap();
    }
    (0..100).for_each(|number| put(&mut world, format!("new-{number}")));
    let intact: Vec<(PathBuf, Vec<u8>)> = logs(world.folder.path());
    let (mut proven, mut absent) = (0, 0);
    for (nth, (path, bytes)) in intact.iter().enumerate() {
        let copy = TempDir::new().unwrap();
        for (path, bytes) in &intact {
            fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        }
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 1 << (nth % 8);
        fs::write(copy.path().join(path.file_name().unwrap()), &damaged).unwrap();
        let (durable, MasterState { master, .. }, restored) =
            DurableJournal::open(copy.path(), options("a"), &settings(), world.now_ms).unwrap();
        let RecoveryOutcome::Damaged(damage) = &restored.recovery else { panic!("{restored}") };
        assert!(damage.missing_records > 0 && damage.unreadable_bytes > 0, "{restored}");
        // The damaged files are preserved.
        let kept = damage.preserved_at.clone().unwrap().join(path.file_name().unwrap());
        assert_eq!(fs::read(kept).unwrap(), damaged);
        // Readers are not sent to a node before it has mounted its memory.
        assert!((0..100).all(|number| master.peek("default", &[format!("new-{number}")])[0].is_err()));
        let segments: Vec<_> = (1..=3).map(segment).collect();
        master.remount(world.now_ms, &segments, CLIENT, &mut ()).unwrap();
        for number in 0..100 {
            assert!(master.peek("default", &[format!("old-{number}")])[0].is_err(), "removed");
            let key = format!("new-{number}");
            let Ok(replicas) = &master.peek("default", &[&key])[0] else {
                absent += 1;
                continue;
            };
            let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
            assert_eq!(world.memory.get(&buffer.address), Some(&key));
            proven += 1;
        }
        drop((durable, master));
        // The next start finds all in order.
        let (_, _, again) =
            DurableJournal::open(copy.path(), options("a"), &settings(), world.now_ms).unwrap();
        assert_eq!((&again.recovery, again.keys), (&RecoveryOutcome::Intact, restored.keys));
    }
    assert!(proven > 0 && absent > 0, "{proven} proven, {absent} absent");
}

fn logs(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let logs = paths.filter(|path| path.extension().is_some_and(|suffix| suffix == "log"));
    logs.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// A disk without room, and one with room again, as clients and operators see them.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_changes_and_answers_reads() {
    let disk = MemoryDisk::default();
    let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), Path::new("/data")).unwrap());
    let (durable, MasterState { master, aux: beside, .. }, _) =
        DurableJournal::open_in(folder, options("a"), &settings(), 1000).unwrap();
    let durable = Arc::new(durable);
    let nowhere = "127.0.0.1:0".parse().unwrap();
    let mut faces =
        AuxServices::new(AuxServicesOptions { admin: nowhere, metadata: None, events: None, quotas: None });
    let journal = faces.observe(durable.clone(), &beside);
    let server = Arc::new(MasterServer::with_state(
        MasterServerOptions::default(),
        *master,
        MonotonicUnixClock::start(),
        journal,
    ));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let supervisor = Supervisor::new();
    let rpc = rpc::serve(&server, nowhere, 1, &supervisor).unwrap();
    let admin = faces.start(&server, &supervisor).await.unwrap().admin;
    let get =
        async |path: &str| reqwest::get(format!("http://{admin}{path}")).await.unwrap().text().await.unwrap();
    let (stop, stopped) = std::sync::mpsc::channel();
    let (kept, used) = (durable.clone(), server.clone());
    let keeper = std::thread::spawn(move || {
        let pace =
            PersistenceSchedule { flush_every: Duration::from_millis(5), ..PersistenceSchedule::default() };
        StatePersister::new(&kept, &used.master, &beside, pace).run(&stopped);
    });

    let mut client = TestRpcConnection::connect(&rpc.address().to_string()).await;
    client.mount(CLIENT, 1 << 24).await;
    client.put(CLIENT, "before", 1000).await;
    assert!(get("/health").await.contains(r#""status":"ok""#));
    assert!(!get("/health").await.contains("problems"));
    disk.set_free_bytes(Some(10));
    // The first is applied before its commit fails; the others are refused.
    for name in ["a", "b", "c"] {
        assert_eq!(client.try_begin(CLIENT, name, 1000).await, Err(ErrorCode::PERSISTENT_FAIL));
    }
    let batch = BatchRemoveArguments { keys: vec!["x", "y"], force: true, tenant: DEFAULT_TENANT };
    assert_eq!(client.call::<BatchRemove>(&batch).await, [Err(ErrorCode::PERSISTENT_FAIL); 2]);
    assert!(client.replicas("before").await.is_ok(), "reads go on");
    assert!(client.call::<Ping>(&ClientArguments { client_id: CLIENT }).await.is_ok(), "heartbeats go on");
    let health = get("/health").await;
    assert!(health.contains(r#""status":"degraded""#) && health.contains("cannot be saved"), "{health}");
    let metrics = get("/metrics").await;
    for line in ["moongate_master_data_failing 1", "moongate_master_refused_writes_total 5"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(metrics.contains("moongate_master_data_free_bytes "));

    disk.set_free_bytes(Some(1 << 20));
    let recovered = async {
        while !get("/health").await.contains(r#""status":"ok""#) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, recovered).await.expect("it recovers by itself");
    client.put(CLIENT, "after", 1000).await;
    drop(stop);
    keeper.join().unwrap();
    let (master, _) = {
        let files = MemoryDisk::with(disk.files());
        let folder = Arc::new(LogDirectory::lock_on(Arc::new(files), Path::new("/data")).unwrap());
        let (_, state, restored) = DurableJournal::open_in(folder, options("a"), &settings(), 2000).unwrap();
        assert_eq!(restored.recovery, RecoveryOutcome::Intact);
        (state.master, restored)
    };
    assert!(["before", "after"].iter().all(|key| master.peek("default", &[*key])[0].is_ok()));
    supervisor.shutdown(LIMIT).await.unwrap();
}

/// Every fault of a disk under a master's files: no key is ever anywhere but where its own bytes are, and no loss is silent.
#[test]
fn no_fault_of_a_disk_makes_one_object_of_another() {
    let disk = MemoryDisk::default();
    let path = Path::new("/data");
    let open = |disk: &MemoryDisk, now_ms| {
        let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), path).unwrap());
        let small = OplogOptions { file_bytes: 400, ..options("a") };
        DurableJournal::open_in(folder, small, &settings(), now_ms).unwrap()
    };
    let (durable, state, _) = open(&disk, 1000);
    let durable = Arc::new(durable);
    let mut recorder = FactRecorder::new(durable.clone());
    let (master, config) = (&state.master, ReplicateConfig::<String>::default());
    // Room for two objects, so that space goes from one to another.
    let small = Segment { size: 2 << 10, ..segment(1) };
    master.mount(1000, &small, CLIENT, &mut recorder).unwrap();
    let mut memory: BTreeMap<u64, String> = BTreeMap::new();
    let mut stored = BTreeSet::new();
    for number in 0..8 {
        let key = format!("key-{number}");
        if number >= 2 {
            let old = format!("key-{}", number - 2);
            master.remove(1000, "default", &old, true, &mut recorder).unwrap();
            stored.remove(&old);
        }
        let replicas = master.put_start(1000, CLIENT, "default", &key, 1000, &config, &mut recorder).unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        memory.insert(buffer.address, key.clone());
        let object = ObjectMeta { key: key.clone(), object_checksum: None };
        master.put_end(1000, CLIENT, "default", &object, ReplicaType::ALL, &mut recorder).unwrap();
        recorder.commit().unwrap();
        stored.insert(key);
        if number == 4 {
            StatePersister::new(&durable, master, &state.aux, PersistenceSchedule::default())
                .snapshot()
                .unwrap();
        }
    }
    durable.log().flush().unwrap();
    let files = disk.files();
    let mut proven = 0;
    let mut check = |files: FileContents, fault: &str| {
        let disk = MemoryDisk::with(files);
        let (durable, state, restored) = open(&disk, 2000);
        let mut recorder = FactRecorder::new(Arc::new(durable));
        state.master.remount(2000, std::slice::from_ref(&small), CLIENT, &mut recorder).unwrap();
        let mut there = BTreeSet::new();
        for number in 0..8 {
            let key = format!("key-{number}");
            let Ok(replicas) = &state.master.peek("default", &[&key])[0] else { continue };
            let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
            assert_eq!(memory.get(&buffer.address), Some(&key), "{fault}: {restored}");
            there.insert(key);
        }
        assert!(there.is_subset(&stored), "{fault}: {there:?} {restored}");
        assert!(there == stored || !restored.recovery.is_complete(), "{fault}: {there:?} {restored}");
        proven += usize::from(!there.is_empty() && !restored.recovery.is_complete());
        // It continues, and the next start finds the state intact.
        let _ = state.master.put_start(2000, CLIENT, "default", "late", 10, &config, &mut recorder);
        recorder.commit().unwrap();
        drop(recorder);
        let (_, again_state, again) = open(&disk, 2000);
        let keys = [&state, &again_state].map(|it| it.master.key_count());
        assert_eq!((&again.recovery, keys[1]), (&RecoveryOutcome::Intact, keys[0]), "{fault}");
    };
    check(files.clone(), "none");
    for (path, bytes) in &files {
        let name = path.display();
        for bit in (0..bytes.len() * 8).step_by(5) {
            let mut files = files.clone();
            files.get_mut(path).unwrap()[bit / 8] ^= 1 << (bit % 8);
            check(files, &format!("bit {bit} of {name}"));
        }
        for length in 0..bytes.len() {
            let mut files = files.clone();
            files.get_mut(path).unwrap().truncate(length);
            check(files, &format!("{name} cut at {length}"));
        }
        let mut files = files.clone();
        files.remove(path);
        check(files, &format!("{name} gone"));
    }
    assert!(proven > 100, "{proven}");
}

//! Kills a master repeatedly and checks its restored state against a model of the nodes' memory.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "another test uses the rest of it")]
#[path = "../../oplog/tests/memory_disk/mod.rs"]
mod memory_disk;
mod test_master;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use memory_disk::{FileContents, MemoryDisk};
use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{BatchRemove, BatchRemoveArguments, ClientArguments, Ping};
use mooncake_wire::types::{
    DEFAULT_TENANT, ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment, Uuid,
};
use moongate_master::durable::{DurableJournal, PersistenceSchedule, RestoreReport, StatePersister};
use moongate_master::recorder::FactRecorder;
use moongate_master::recovery::RecoveryOutcome;
use moongate_master::{
    AuxServices, AuxServicesOptions, AuxState, LeadershipStatus, MasterServer, MasterServerOptions,
    MasterState, MonotonicUnixClock, rpc,
};
use moongate_master_core::{MasterCore, MasterCoreOptions, ObjectCursor, StateChange, StateChangeSink};
use moongate_oplog::{LogDirectory, OplogOptions};
use moongate_runtime::Supervisor;
use tempfile::TempDir;
use test_master::{LIMIT, TestRpcConnection};

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

/// Options with many small log files. `boot` identifies the boot of the machine.
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

/// Records changes, and tracks the stored keys that result.
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
    /// Confirmed keys that were not removed.
    stored: BTreeSet<String>,
    /// Unfinished writes: the key, and the addresses of its replicas.
    writing: BTreeMap<String, Vec<u64>>,
    /// The key whose bytes are at each address. Writers write as soon as they have the space.
    memory: BTreeMap<u64, String>,
}

impl DurabilitySimulation {
    fn new(seed: u64) -> Self {
        let folder = TempDir::new().unwrap();
        let (durable, MasterState { master, aux, .. }, restored) =
            DurableJournal::open(folder.path(), options("a"), &settings(), 1000).unwrap();
        assert_eq!(restored, RestoreReport::default());
        let mut simulation = Self {
            folder,
            durable: Arc::new(durable),
            master,
            aux,
            now_ms: 1000,
            rng: Rng::with_seed(seed),
            stored: BTreeSet::new(),
            writing: BTreeMap::new(),
            memory: BTreeMap::new(),
        };
        for number in 1..=3 {
            simulation.commit_action(|master, now, sink| {
                master.mount(now, &segment(number), CLIENT, sink).unwrap();
            });
        }
        simulation
    }

    /// Runs an action and commits it, as the server does before the reply.
    fn commit_action<T>(
        &mut self,
        action: impl FnOnce(&MasterCore, u64, &mut dyn StateChangeSink) -> T,
    ) -> T {
        let fact_recorder = FactRecorder::new(self.durable.clone());
        let mut recorder = StoredKeyRecorder { recorder: fact_recorder, stored: &mut self.stored };
        let result = action(&self.master, self.now_ms, &mut recorder);
        recorder.recorder.commit().unwrap();
        result
    }

    fn step(&mut self) {
        self.now_ms += self.rng.u64(0..5);
        let key = format!("key-{}", self.rng.u64(0..KEYS));
        match self.rng.u32(0..100) {
            0..50 => self.begin(key),
            50..80 => self.end(),
            80..84 => {
                if let Some((key, _)) = self.writing.pop_first() {
                    _ = self.commit_action(|master, _, sink| {
                        master.put_revoke(CLIENT, "default", &key, ReplicaType::ALL, sink)
                    });
                }
            }
            84..90 => {
                let force = self.rng.bool();
                _ = self.commit_action(|master, now, sink| master.remove(now, "default", &key, force, sink));
            }
            90..95 => _ = self.master.exist(self.now_ms, "default", &key),
            95..99 => self.commit_action(|master, now, sink| master.tick(now, sink)),
            _ => {
                let persister = StatePersister::new(
                    &self.durable,
                    &self.master,
                    &self.aux,
                    PersistenceSchedule::default(),
                );
                persister.snapshot().unwrap();
            }
        }
    }

    fn begin(&mut self, key: String) {
        let size = self.rng.u64(1..4000);
        let config =
            ReplicateConfig { replica_num: self.rng.u64(1..3), ..ReplicateConfig::<String>::default() };
        let upsert = self.rng.u32(0..4) == 0;
        let replicas = self.commit_action(|master, now, sink| match upsert {
            true => master.upsert_start(now, CLIENT, "default", &key, size, &config, sink),
            false => master.put_start(now, CLIENT, "default", &key, size, &config, sink),
        });
        let Ok(replicas) = replicas else { return };
        let mut addresses = Vec::new();
        for replica in &replicas {
            let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
            // The new object overwrites everything in its range.
            let end = buffer.address + buffer.size;
            self.memory.retain(|address, _| !(buffer.address..end).contains(address));
            self.memory.insert(buffer.address, key.clone());
            addresses.push(buffer.address);
        }
        self.writing.insert(key, addresses);
    }

    fn end(&mut self) {
        let Some(nth) = self.writing.len().checked_sub(1).map(|max| self.rng.usize(0..=max)) else {
            return;
        };
        let key = self.writing.keys().nth(nth).unwrap().clone();
        self.writing.remove(&key);
        let object = ObjectMeta { key, object_checksum: None };
        _ = self.commit_action(|master, now, sink| {
            master.put_end(now, CLIENT, "default", &object, ReplicaType::ALL, sink)
        });
    }

    /// The process is killed: its memory is lost, and the last record may be torn.
    fn kill(&mut self, boot: &str) -> RestoreReport {
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        // A killed process leaves the beginning of its last write.
        let torn = self.rng.usize(0..40);
        let next = self.durable.log().written() + 1;
        let header = [&1000_u32.to_le_bytes()[..], &[0xa5; 4], &next.to_le_bytes()].concat();
        let newest = newest_log(copy.path());
        let mut bytes = fs::read(&newest).unwrap();
        bytes.extend(header.into_iter().chain(std::iter::repeat_with(|| self.rng.u8(..))).take(torn));
        fs::write(&newest, bytes).unwrap();
        let (durable, MasterState { master, aux, .. }, restored) =
            DurableJournal::open(copy.path(), options(boot), &settings(), self.now_ms).unwrap();
        (self.folder, self.durable, self.master, self.aux) = (copy, Arc::new(durable), master, aux);
        restored
    }

    /// Every confirmed key is present, no other is, and each one is at the address of its own bytes.
    fn check(&mut self) {
        let mut present = BTreeSet::new();
        let mut cursor = Some(ObjectCursor::default());
        while let Some(from) = cursor {
            cursor = self.master.keys(from, 64, |_, key| _ = present.insert(key.to_owned()));
        }
        present.retain(|key| self.master.peek("default", &[key])[0].is_ok());
        assert_eq!(present, self.stored);
        let mut used_ranges: BTreeMap<u64, u64> = BTreeMap::new();
        for key in &present {
            for replica in self.master.peek("default", &[key]).pop().unwrap().unwrap() {
                let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
                assert_eq!(self.memory.get(&buffer.address), Some(key), "at {:#x}", buffer.address);
                used_ranges.insert(buffer.address, buffer.size);
            }
        }
        let ranges: Vec<_> = used_ranges.into_iter().collect();
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
fn kills_lose_no_confirmed_change() {
    let mut kills = 0;
    for seed in 0..25 {
        let mut simulation = DurabilitySimulation::new(seed);
        for _ in 0..10 {
            for _ in 0..simulation.rng.u32(1..400) {
                simulation.step();
            }
            simulation.check();
            let restored = simulation.kill("a");
            assert!(restored.recovery.is_complete(), "{restored}");
            simulation.check();
            kills += 1;
        }
    }
    assert_eq!(kills, 250);
}

#[test]
fn a_machine_crash_drops_all_objects() {
    let mut simulation = DurabilitySimulation::new(1);
    (0..500).for_each(|_| simulation.step());
    let restored = simulation.kill("b");
    assert!(restored.recovery == RecoveryOutcome::MachineDied && restored.keys == 0, "{restored}");
    // The new state is trusted after the next kill.
    (simulation.stored, simulation.writing, simulation.memory) = Default::default();
    for number in 1..=3 {
        simulation
            .commit_action(|master, now, sink| master.mount(now, &segment(number), CLIENT, sink).unwrap());
    }
    (0..500).for_each(|_| simulation.step());
    assert!(simulation.kill("b").recovery.is_complete());
    simulation.check();
}

#[test]
fn a_closed_log_is_trusted_after_a_reboot() {
    let mut simulation = DurabilitySimulation::new(2);
    (0..500).for_each(|_| simulation.step());
    simulation.durable.log().close().unwrap();
    let restored = simulation.kill("c");
    assert!(restored.recovery.is_complete(), "{restored}");
    simulation.check();
}

#[test]
fn a_damaged_snapshot_is_skipped() {
    let mut simulation = DurabilitySimulation::new(5);
    for _ in 0..2 {
        (0..300).for_each(|_| simulation.step());
        StatePersister::new(
            &simulation.durable,
            &simulation.master,
            &simulation.aux,
            PersistenceSchedule::default(),
        )
        .snapshot()
        .unwrap();
    }
    let mut snapshots: Vec<PathBuf> =
        fs::read_dir(simulation.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    snapshots.retain(|path| path.extension().is_some_and(|suffix| suffix == "snap"));
    snapshots.sort();
    assert_eq!(snapshots.len(), 2);
    let newest = snapshots.pop().unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let restored = simulation.kill("a");
    assert!(
        restored.snapshot.is_some() && matches!(restored.recovery, RecoveryOutcome::IntactDespiteDamage(_)),
        "{restored:?}"
    );
    simulation.check();
    // Without any snapshot the start of the log is missing.
    for entry in fs::read_dir(simulation.folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "snap") {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(matches!(simulation.kill("a").recovery, RecoveryOutcome::Damaged(_)));
}

/// 100 keys are put and removed, then 100 others get their space. Bits of each log file are flipped.
#[test]
fn a_flipped_bit_never_returns_another_objects_bytes() {
    let mut simulation = DurabilitySimulation::new(9);
    let put = |simulation: &mut DurabilitySimulation, key: String| {
        let config = ReplicateConfig::<String>::default();
        let replicas = simulation
            .commit_action(|master, now, sink| {
                master.put_start(now, CLIENT, "default", &key, 1000, &config, sink)
            })
            .unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        simulation.memory.insert(buffer.address, key.clone());
        let object = ObjectMeta { key, object_checksum: None };
        simulation
            .commit_action(|master, now, sink| {
                master.put_end(now, CLIENT, "default", &object, ReplicaType::ALL, sink)
            })
            .unwrap();
    };
    (0..100).for_each(|number| put(&mut simulation, format!("old-{number}")));
    for number in 0..100 {
        let key = format!("old-{number}");
        simulation
            .commit_action(|master, now, sink| master.remove(now, "default", &key, true, sink))
            .unwrap();
    }
    (0..100).for_each(|number| put(&mut simulation, format!("new-{number}")));
    let intact: Vec<(PathBuf, Vec<u8>)> = logs(simulation.folder.path());
    let (mut verified, mut absent) = (0, 0);
    for (nth, (path, bytes)) in intact.iter().enumerate() {
        let copy = TempDir::new().unwrap();
        for (path, bytes) in &intact {
            fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        }
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 1 << (nth % 8);
        fs::write(copy.path().join(path.file_name().unwrap()), &damaged).unwrap();
        let (durable, MasterState { master, .. }, restored) =
            DurableJournal::open(copy.path(), options("a"), &settings(), simulation.now_ms).unwrap();
        let RecoveryOutcome::Damaged(damage) = &restored.recovery else { panic!("{restored}") };
        assert!(damage.missing_records > 0 && damage.unreadable_bytes > 0, "{restored}");
        // The damaged files were moved away.
        let preserved = damage.preserved_at.clone().unwrap().join(path.file_name().unwrap());
        assert_eq!(fs::read(preserved).unwrap(), damaged);
        // Readers are not directed to a node before it has mounted its memory again.
        assert!((0..100).all(|number| master.peek("default", &[format!("new-{number}")])[0].is_err()));
        let segments: Vec<_> = (1..=3).map(segment).collect();
        master.remount(simulation.now_ms, &segments, CLIENT, &mut ()).unwrap();
        for number in 0..100 {
            assert!(master.peek("default", &[format!("old-{number}")])[0].is_err(), "removed");
            let key = format!("new-{number}");
            let Ok(replicas) = &master.peek("default", &[&key])[0] else {
                absent += 1;
                continue;
            };
            let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
            assert_eq!(simulation.memory.get(&buffer.address), Some(&key));
            verified += 1;
        }
        drop((durable, master));
        // The next start finds a complete state.
        let (_, _, again) =
            DurableJournal::open(copy.path(), options("a"), &settings(), simulation.now_ms).unwrap();
        assert_eq!((&again.recovery, again.keys), (&RecoveryOutcome::Intact, restored.keys));
    }
    assert!(verified > 0 && absent > 0, "{verified} verified, {absent} absent");
}

fn logs(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let logs = paths.filter(|path| path.extension().is_some_and(|suffix| suffix == "log"));
    logs.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// A disk that is full and then has space again, as observed by clients and operators.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_rejects_changes_and_serves_reads() {
    let disk = MemoryDisk::default();
    let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), Path::new("/data")).unwrap());
    let (durable, MasterState { master, aux, .. }, _) =
        DurableJournal::open_in(folder, options("a"), &settings(), 1000).unwrap();
    let durable = Arc::new(durable);
    let loopback = "127.0.0.1:0".parse().unwrap();
    let mut services =
        AuxServices::new(AuxServicesOptions { admin: loopback, metadata: None, events: None, quotas: None });
    let journal = services.observe(durable.clone(), &aux);
    let server = Arc::new(MasterServer::with_state(
        MasterServerOptions::default(),
        *master,
        MonotonicUnixClock::start(),
        journal,
    ));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let supervisor = Supervisor::new();
    let rpc = rpc::serve(&server, loopback, 1, &supervisor).unwrap();
    let admin = services.start(&server, &supervisor).await.unwrap().admin;
    let get =
        async |path: &str| reqwest::get(format!("http://{admin}{path}")).await.unwrap().text().await.unwrap();
    let (stop, stopped) = std::sync::mpsc::channel();
    let (persisted, persisted_server) = (durable.clone(), server.clone());
    let persister = std::thread::spawn(move || {
        let schedule =
            PersistenceSchedule { flush_every: Duration::from_millis(5), ..PersistenceSchedule::default() };
        StatePersister::new(&persisted, &persisted_server.master, &aux, schedule).run(&stopped);
    });

    let mut client = TestRpcConnection::connect(&rpc.address().to_string()).await;
    client.mount(CLIENT, 1 << 24).await;
    client.put(CLIENT, "before", 1000).await;
    assert!(get("/health").await.contains(r#""status":"ok""#));
    assert!(!get("/health").await.contains("problems"));
    disk.set_free_bytes(Some(10));
    // The first change is applied before its commit fails; the others are rejected.
    for name in ["a", "b", "c"] {
        assert_eq!(client.try_begin(CLIENT, name, 1000).await, Err(ErrorCode::PERSISTENT_FAIL));
    }
    let batch = BatchRemoveArguments { keys: vec!["x", "y"], force: true, tenant: DEFAULT_TENANT };
    assert_eq!(client.call::<BatchRemove>(&batch).await, [Err(ErrorCode::PERSISTENT_FAIL); 2]);
    assert!(client.replicas("before").await.is_ok(), "reads continue");
    assert!(client.call::<Ping>(&ClientArguments { client_id: CLIENT }).await.is_ok(), "heartbeats continue");
    let health = get("/health").await;
    assert!(health.contains(r#""status":"degraded""#) && health.contains("cannot write the log"), "{health}");
    let metrics = get("/metrics").await;
    for line in ["moongate_master_data_write_failing 1", "moongate_master_refused_writes_total 5"] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    assert!(metrics.contains("moongate_master_data_free_bytes "));

    disk.set_free_bytes(Some(1 << 20));
    let recovered = async {
        while !get("/health").await.contains(r#""status":"ok""#) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, recovered).await.expect("it recovers without a restart");
    client.put(CLIENT, "after", 1000).await;
    drop(stop);
    persister.join().unwrap();
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

/// Every single fault of the disk under a master's files: no key returns other bytes than its own, and no loss is unreported.
#[test]
fn no_disk_fault_returns_another_objects_bytes() {
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
    // Space for two objects, so that space is reused.
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
    let mut verified = 0;
    let mut check = |files: FileContents, fault: &str| {
        let disk = MemoryDisk::with(files);
        let (durable, state, restored) = open(&disk, 2000);
        let mut recorder = FactRecorder::new(Arc::new(durable));
        state.master.remount(2000, std::slice::from_ref(&small), CLIENT, &mut recorder).unwrap();
        let mut present = BTreeSet::new();
        for number in 0..8 {
            let key = format!("key-{number}");
            let Ok(replicas) = &state.master.peek("default", &[&key])[0] else { continue };
            let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
            assert_eq!(memory.get(&buffer.address), Some(&key), "{fault}: {restored}");
            present.insert(key);
        }
        assert!(present.is_subset(&stored), "{fault}: {present:?} {restored}");
        assert!(present == stored || !restored.recovery.is_complete(), "{fault}: {present:?} {restored}");
        verified += usize::from(!present.is_empty() && !restored.recovery.is_complete());
        // It continues, and the next start finds a complete state.
        let _ = state.master.put_start(2000, CLIENT, "default", "late", 10, &config, &mut recorder);
        recorder.commit().unwrap();
        drop(recorder);
        let (_, again_state, again) = open(&disk, 2000);
        let keys = [&state, &again_state].map(|state| state.master.key_count());
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
    assert!(verified > 100, "{verified}");
}

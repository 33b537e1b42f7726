//! Kills a master repeatedly and checks its restored state against a model of the nodes' memory.

mod disk_faults;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fastrand::Rng;
use mooncake_wire::types::{ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_master::durable::{
    DurableJournal, PersistenceSchedule, RestoreReport, RestoredJournal, StatePersister,
};
use moongate_master::recorder::FactRecorder;
use moongate_master::recovery::RecoveryOutcome;
use moongate_master::{AuxState, MasterState};
use moongate_master_core::{
    CallContext, MasterCore, MasterCoreOptions, ObjectCursor, PutStartRequest, RemoveContext, StateChange,
    StateChangeSink,
};
use moongate_oplog::OplogOptions;
use tempfile::TempDir;

const CLIENT: Uuid = Uuid { first: 7, second: 7 };
const KEYS: u64 = 300;
const SEGMENT: u64 = 64 << 10;

fn caller(now_ms: u64) -> CallContext<'static> {
    CallContext { now_ms, client: CLIENT, tenant: "default" }
}

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
        locality: None,
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
        let RestoredJournal { journal: durable, state, report: restored } =
            DurableJournal::open(folder.path(), options("a"), &settings(), 1000).unwrap();
        assert_eq!(restored, RestoreReport::default());
        let MasterState { master, aux, .. } = state;
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
                        master.put_revoke(caller(0), &key, ReplicaType::ALL, sink)
                    });
                }
            }
            84..90 => {
                let force = self.rng.bool();
                _ = self.commit_action(|master, now, sink| {
                    master.remove(RemoveContext { now_ms: now, tenant: "default", force }, &key, sink)
                });
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
            true => {
                master.upsert_start(caller(now), &PutStartRequest { key: &key, size, config: &config }, sink)
            }
            false => {
                master.put_start(caller(now), &PutStartRequest { key: &key, size, config: &config }, sink)
            }
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
        _ = self
            .commit_action(|master, now, sink| master.put_end(caller(now), &object, ReplicaType::ALL, sink));
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
        let RestoredJournal { journal: durable, state, report: restored } =
            DurableJournal::open(copy.path(), options(boot), &settings(), self.now_ms).unwrap();
        let MasterState { master, aux, .. } = state;
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
                master.put_start(
                    caller(now),
                    &PutStartRequest { key: &key, size: 1000, config: &config },
                    sink,
                )
            })
            .unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        simulation.memory.insert(buffer.address, key.clone());
        let object = ObjectMeta { key, object_checksum: None };
        simulation
            .commit_action(|master, now, sink| master.put_end(caller(now), &object, ReplicaType::ALL, sink))
            .unwrap();
    };
    (0..100).for_each(|number| put(&mut simulation, format!("old-{number}")));
    for number in 0..100 {
        let key = format!("old-{number}");
        simulation
            .commit_action(|master, now, sink| {
                master.remove(RemoveContext { now_ms: now, tenant: "default", force: true }, &key, sink)
            })
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
        let RestoredJournal { journal: durable, state: MasterState { master, .. }, report: restored } =
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
        // A process that another test is starting may still hold the lock, as it has the descriptors of this one for a moment.
        fs::remove_file(copy.path().join("lock")).unwrap();
        // The next start finds a complete state.
        let RestoredJournal { report: again, .. } =
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

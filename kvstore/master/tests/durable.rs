//! A master that is killed again and again, in a world where every byte of the nodes' memory is known.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fastrand::Rng;
use mooncake_wire::types::{ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment, Uuid};
use moongate_kvcore::{Cursor, Effects, Fact, Master, Settings};
use moongate_master::durable::{Durable, Keeper, Pace, Restored};
use moongate_master::journal::Recorder;
use moongate_master::{Beside, State};
use moongate_oplog::Options;
use tempfile::TempDir;

const CLIENT: Uuid = Uuid { first: 7, second: 7 };
const KEYS: u64 = 300;
const SEGMENT: u64 = 64 << 10;

fn settings() -> Settings {
    Settings {
        shards: 8,
        seed: 3,
        put_discard_ms: 50,
        put_release_ms: 100,
        lease_ttl_ms: 20,
        ramp_ms: 0,
        ..Settings::default()
    }
}

/// Small files, so that there are many of them, and two names of a machine's start.
fn options(boot: &str) -> Options {
    Options { file_bytes: 4000, boot_id: boot.to_owned(), ..Options::default() }
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
struct Witness<'a> {
    recorder: Recorder,
    stored: &'a mut BTreeSet<String>,
}

impl Effects for Witness<'_> {
    fn fact(&mut self, fact: Fact<'_>) {
        match &fact {
            Fact::Stored { object, .. } => _ = self.stored.insert(object.key.to_string()),
            Fact::Removed { key, .. } => _ = self.stored.remove(&**key),
            _ => {}
        }
        self.recorder.fact(fact);
    }
}

struct World {
    folder: TempDir,
    durable: Arc<Durable>,
    master: Box<Master>,
    beside: Arc<Beside>,
    now_ms: u64,
    rng: Rng,
    /// What was answered for, and not taken back.
    stored: BTreeSet<String>,
    /// The writes in progress: the key, and where its bytes are.
    writing: BTreeMap<String, Vec<u64>>,
    /// What lies at an address: a key. Writers write as soon as they have been given the space.
    memory: BTreeMap<u64, String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let folder = TempDir::new().unwrap();
        let (durable, State { master, beside, .. }, restored) =
            Durable::open(folder.path(), options("a"), &settings(), 1000).unwrap();
        assert_eq!(restored, Restored::default());
        let mut world = Self {
            folder,
            durable: Arc::new(durable),
            master,
            beside,
            now_ms: 1000,
            rng: Rng::with_seed(seed),
            stored: BTreeSet::new(),
            writing: BTreeMap::new(),
            memory: BTreeMap::new(),
        };
        for number in 1..=3 {
            world.act(|master, now, fx| master.mount(now, &segment(number), CLIENT, fx).unwrap());
        }
        world
    }

    /// Does something and waits for its commit, as the server does before it answers.
    fn act<T>(&mut self, action: impl FnOnce(&Master, u64, &mut dyn Effects) -> T) -> T {
        let recorder = Recorder::new(self.durable.clone());
        let mut witness = Witness { recorder, stored: &mut self.stored };
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
                    _ = self.act(|master, _, fx| {
                        master.put_revoke(CLIENT, "default", &key, ReplicaType::ALL, fx)
                    });
                }
            }
            84..90 => {
                let force = self.rng.bool();
                _ = self.act(|master, now, fx| master.remove(now, "default", &key, force, fx));
            }
            90..95 => _ = self.master.exist(self.now_ms, "default", &key),
            95..99 => self.act(|master, now, fx| master.tick(now, fx)),
            _ => {
                let keeper = Keeper::new(&self.durable, &self.master, &self.beside, Pace::default());
                keeper.snapshot().unwrap();
            }
        }
    }

    fn begin(&mut self, key: String) {
        let size = self.rng.u64(1..4000);
        let config =
            ReplicateConfig { replica_num: self.rng.u64(1..3), ..ReplicateConfig::<String>::default() };
        let upsert = self.rng.u32(0..4) == 0;
        let replicas = self.act(|master, now, fx| match upsert {
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
        _ = self.act(|master, now, fx| master.put_end(now, CLIENT, "default", &object, ReplicaType::ALL, fx));
    }

    /// The process dies: what is in its memory is gone, and a record may have been written in part.
    fn kill(&mut self, boot: &str) -> Restored {
        let copy = TempDir::new().unwrap();
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
        let torn = self.rng.usize(0..40);
        let newest = newest_log(copy.path());
        let mut bytes = fs::read(&newest).unwrap();
        bytes.extend(std::iter::repeat_with(|| self.rng.u8(..)).take(torn));
        fs::write(&newest, bytes).unwrap();
        let (durable, State { master, beside, .. }, restored) =
            Durable::open(copy.path(), options(boot), &settings(), self.now_ms).unwrap();
        (self.folder, self.durable, self.master, self.beside) = (copy, Arc::new(durable), master, beside);
        restored
    }

    /// Every key that was answered for is there, no other is, and each is where its own bytes are.
    fn check(&mut self) {
        let mut there = BTreeSet::new();
        let mut cursor = Some(Cursor::default());
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
        let mut world = World::new(seed);
        for _ in 0..10 {
            for _ in 0..world.rng.u32(1..400) {
                world.step();
            }
            world.check();
            let restored = world.kill("a");
            assert_eq!(restored.began_empty, None);
            world.check();
            kills += 1;
        }
    }
    assert_eq!(kills, 250);
}

#[test]
fn objects_are_not_trusted_when_the_machine_died() {
    let mut world = World::new(1);
    (0..500).for_each(|_| world.step());
    let restored = world.kill("b");
    assert!(restored.began_empty.is_some() && restored.keys == 0, "{restored}");
    // It goes on, and is trusted again.
    (world.stored, world.writing, world.memory) = Default::default();
    for number in 1..=3 {
        world.act(|master, now, fx| master.mount(now, &segment(number), CLIENT, fx).unwrap());
    }
    (0..500).for_each(|_| world.step());
    assert_eq!(world.kill("b").began_empty, None);
    world.check();
}

#[test]
fn a_master_that_was_closed_is_trusted_everywhere() {
    let mut world = World::new(2);
    (0..500).for_each(|_| world.step());
    world.durable.log().close().unwrap();
    let restored = world.kill("c");
    assert_eq!(restored.began_empty, None);
    world.check();
}

#[test]
fn a_damaged_snapshot_is_passed_over() {
    let mut world = World::new(5);
    for _ in 0..2 {
        (0..300).for_each(|_| world.step());
        Keeper::new(&world.durable, &world.master, &world.beside, Pace::default()).snapshot().unwrap();
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
    assert!(restored.snapshot.is_some() && restored.began_empty.is_none(), "{restored:?}");
    world.check();
    // Without any snapshot the log does not go back far enough.
    for entry in fs::read_dir(world.folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|suffix| suffix == "snap") {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(world.kill("a").began_empty.is_some());
}

//! Kills shards at random moments of random calls, and checks every reply against what the replies before it allow.

mod shard;

use std::collections::{BTreeMap, BTreeSet};

use bytes::{Bytes, BytesMut};
use fastrand::Rng;
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader};
use mooncake_wire::pack::Unpack;
use mooncake_wire::rpc::{
    BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutEndArguments, BatchPutRevoke,
    BatchPutRevokeArguments, BatchPutStart, BatchPutStartArguments, BatchUpsertEnd, BatchUpsertEndArguments,
    BatchUpsertStart, ClientArguments, GetReplicaList, KeyArguments, KeysArguments, MasterResult,
    MountArguments, MountSegment, Ping, PutEnd, PutEndArguments, PutStart, PutStartArguments, ReMountSegment,
    RemountArguments, Remove, RemoveArguments, RemoveByRegex, Request, RpcDefinition, decode_reply,
};
use mooncake_wire::shards::ShardIdentity;
use mooncake_wire::types::{
    ClientStatus, DEFAULT_TENANT, ObjectMeta, ReplicaDescriptor, ReplicaList, ReplicaMedium, ReplicaType,
    ReplicateConfig, Segment, Uuid,
};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_store_shards::{ShardCount, SplitRequest};
use tempfile::TempDir;

use shard::{KillMoment, KillableShard, ShardDefect};

const SHARDS: usize = 4;
const CLIENTS: usize = 3;
const KEYS: u64 = 120;
const NODES: u64 = 3;
/// Large enough that nothing is evicted.
const SEGMENT: u64 = 8 << 20;
const MAX_OBJECT: u64 = 4000;

fn node(number: u64) -> Uuid {
    Uuid { first: 100, second: number }
}

fn segment(number: u64) -> Segment<&'static str> {
    let name = ["node-0", "node-1", "node-2"][usize::try_from(number).unwrap()];
    Segment {
        id: Uuid { first: 1, second: number },
        name,
        base: (number + 1) << 40,
        size: SEGMENT,
        te_endpoint: name,
        protocol: "tcp",
        host_id: "",
        locality: None,
    }
}

/// A version of an object: the number of the put that wrote it.
type Version = u64;

/// What a key may have as its value, as far as replies have shown: `None` if it may be absent.
type PossibleValues = BTreeSet<Option<Version>>;

/// A started put of a client.
struct StartedPut {
    key: String,
    version: Version,
    upsert: bool,
}

struct ShardedSimulation {
    shards: Vec<KillableShard>,
    count: ShardCount,
    rng: Rng,
    /// Whether shards are killed.
    kills_shards: bool,
    kills: usize,
    versions: Version,
    possible: BTreeMap<String, PossibleValues>,
    /// Keys of which a put was started that may be unfinished: they may not be readable.
    unfinished: BTreeSet<String>,
    started: Vec<Vec<StartedPut>>,
    /// What is in the nodes' memory at each address: the size, the key, and its version.
    memory: BTreeMap<u64, (u64, String, Version)>,
    checked_reads: usize,
    defect: ShardDefect,
}

fn key_name(number: u64) -> String {
    format!("key-{number}")
}

impl ShardedSimulation {
    fn new(seed: u64, defect: ShardDefect) -> Self {
        let open = |index| {
            let identity = ShardIdentity { index, count: SHARDS as u64 };
            KillableShard::open(TempDir::new().unwrap(), identity, defect)
        };
        let mut simulation = Self {
            shards: (0..SHARDS as u64).map(open).collect(),
            count: ShardCount::new(SHARDS).unwrap(),
            rng: Rng::with_seed(seed),
            kills_shards: false,
            kills: 0,
            versions: 0,
            possible: (0..KEYS).map(|key| (key_name(key), BTreeSet::from([None]))).collect(),
            unfinished: BTreeSet::new(),
            started: (0..CLIENTS).map(|_| Vec::new()).collect(),
            memory: BTreeMap::new(),
            checked_reads: 0,
            defect,
        };
        for number in 0..NODES {
            let arguments = MountArguments { segment: segment(number), client_id: node(number) };
            assert_eq!(simulation.call::<MountSegment>(0, Request::MountSegment(arguments)), Ok(()));
        }
        simulation.kills_shards = true;
        simulation
    }

    /// A call through a router. `None` if it was rejected as a whole.
    fn call<M: RpcDefinition>(&mut self, client: usize, request: Request<&str>) -> M::Reply<String>
    where
        M::Reply<String>: for<'a> Unpack<'a>,
    {
        let dialect = Dialect::NEWEST;
        let (split, mut frames) = SplitRequest::new(request.clone(), dialect, &[], self.count).unwrap();
        if self.defect == ShardDefect::SharedSegments && matches!(request, Request::MountSegment(_)) {
            for (_, frame) in &mut frames {
                frame.clear();
                request.encode(0, dialect, frame).unwrap();
            }
        }
        let mut responses = Vec::new();
        for (shard, frame) in frames {
            let kill = (self.kills_shards && self.rng.u32(0..12) == 0).then(|| {
                [KillMoment::Arrived, KillMoment::Executed, KillMoment::Committed][self.rng.usize(0..3)]
            });
            let is_up = self.shards[shard].down_for == 0;
            self.kills += usize::from(kill.is_some() && is_up);
            responses.push(self.shards[shard].call(client, &frame, kill, &mut self.rng));
        }
        let mut output = BytesMut::new();
        split.merge(1, dialect, &responses, &mut output);
        let FrameParseResult::Frame(reply) = frame::take::<ResponseHeader>(&mut output, 1 << 20).unwrap()
        else {
            panic!("no reply")
        };
        assert_eq!(reply.header.error, 0, "{:?}", M::METHOD);
        decode_reply::<M, String>(&Bytes::clone(&reply.body)).unwrap().0
    }

    fn step(&mut self) {
        let client = self.rng.usize(0..CLIENTS);
        match self.rng.u32(0..100) {
            0..30 => self.start(client),
            30..55 => self.end(client),
            55..58 => self.revoke(client),
            58..64 => self.remove(client),
            64..65 => self.remove_matching(client),
            65..88 => self.read(client),
            88..93 => self.exist(client),
            93..98 => self.heartbeat(),
            _ => {
                let shard = self.rng.usize(0..SHARDS);
                self.shards[shard].snapshot();
            }
        }
    }

    fn random_keys(&mut self) -> Vec<String> {
        let count = self.rng.usize(1..8);
        let mut keys: Vec<String> = (0..count).map(|_| key_name(self.rng.u64(0..KEYS))).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    fn start(&mut self, client: usize) {
        let keys = self.random_keys();
        let (upsert, client_id) = (self.rng.u32(0..4) == 0, Uuid { first: 7, second: client as u64 });
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let sizes: Vec<u64> = names.iter().map(|_| self.rng.u64(1..MAX_OBJECT)).collect();
        let config = ReplicateConfig { replica_num: self.rng.u64(1..3), ..ReplicateConfig::default() };
        let tenant = DEFAULT_TENANT;
        let results = if names.len() == 1 && !upsert {
            let arguments = PutStartArguments { client_id, key: names[0], size: sizes[0], config, tenant };
            vec![self.call::<PutStart>(client, Request::PutStart(arguments))]
        } else {
            let arguments = BatchPutStartArguments {
                client_id,
                keys: names.clone(),
                sizes: sizes.clone(),
                config,
                tenant,
            };
            match upsert {
                true => self.call::<BatchUpsertStart>(client, Request::BatchUpsertStart(arguments)),
                false => self.call::<BatchPutStart>(client, Request::BatchPutStart(arguments)),
            }
        };
        assert_eq!(results.len(), keys.len());
        for ((key, size), result) in keys.into_iter().zip(sizes).zip(results) {
            match result {
                Ok(replicas) => self.write(client, key, size, upsert, &replicas),
                Err(ErrorCode::OBJECT_ALREADY_EXISTS) => {
                    let possible = &self.possible[&key];
                    let exists = possible.iter().any(Option::is_some) || self.unfinished.contains(&key);
                    assert!(exists && !upsert, "{key}: {possible:?}");
                }
                // The shard has died. The put may have been started, and an upsert makes the old version unreadable.
                Err(ErrorCode::RPC_FAIL) => {
                    if upsert {
                        self.possible.get_mut(&key).unwrap().insert(None);
                    }
                    // Its own earlier put may have been replaced. A client does not end one that it has started again.
                    self.started[client].retain(|put| put.key != key);
                    self.unfinished.insert(key);
                }
                // Another client is writing it.
                Err(code) => assert!(self.unfinished.contains(&key), "{key}: {code}"),
            }
        }
    }

    /// The client writes its bytes as soon as it has the space.
    fn write(
        &mut self,
        client: usize,
        key: String,
        size: u64,
        upsert: bool,
        replicas: &[ReplicaDescriptor<String>],
    ) {
        self.versions += 1;
        let version = self.versions;
        for replica in replicas {
            let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
            assert_eq!(buffer.size, size, "{key}");
            let end = buffer.address + size;
            self.memory.retain(|start, (size, ..)| *start >= end || *start + *size <= buffer.address);
            self.memory.insert(buffer.address, (size, key.clone(), version));
        }
        let possible = self.possible.get_mut(&key).unwrap();
        if upsert {
            possible.insert(None);
        } else {
            assert!(possible.contains(&None), "{key}: put although it exists: {possible:?}");
            *possible = BTreeSet::from([None]);
        }
        self.unfinished.insert(key.clone());
        self.started.iter_mut().for_each(|puts| puts.retain(|put| put.key != key));
        self.started[client].push(StartedPut { key, version, upsert });
    }

    fn end(&mut self, client: usize) {
        let upsert = self.rng.u32(0..4) == 0;
        let (ended, kept): (Vec<_>, Vec<_>) =
            self.started[client].drain(..).partition(|put| put.upsert == upsert && self.rng.u32(0..4) > 0);
        self.started[client] = kept;
        if ended.is_empty() {
            return;
        }
        let client_id = Uuid { first: 7, second: client as u64 };
        let objects: Vec<_> =
            ended.iter().map(|put| ObjectMeta { key: put.key.as_str(), object_checksum: None }).collect();
        let tenant = DEFAULT_TENANT;
        let results: Vec<MasterResult<()>> = if upsert {
            let arguments = BatchUpsertEndArguments { client_id, objects, tenant };
            self.call::<BatchUpsertEnd>(client, Request::BatchUpsertEnd(arguments))
        } else if let [object] = &objects[..] {
            let object = object.clone();
            let arguments = PutEndArguments { client_id, object, replica_type: ReplicaType::ALL, tenant };
            vec![self.call::<PutEnd>(client, Request::PutEnd(arguments))]
        } else {
            let arguments =
                BatchPutEndArguments { client_id, objects, replica_type: ReplicaType::ALL, tenant };
            self.call::<BatchPutEnd>(client, Request::BatchPutEnd(arguments))
        };
        assert_eq!(results.len(), ended.len());
        for (put, result) in ended.into_iter().zip(results) {
            let possible = self.possible.get_mut(&put.key).unwrap();
            match result {
                // Acknowledged: from now on it is the value.
                Ok(()) => {
                    *possible = BTreeSet::from([Some(put.version)]);
                    self.unfinished.remove(&put.key);
                }
                Err(ErrorCode::RPC_FAIL) => _ = possible.insert(Some(put.version)),
                Err(_) => {}
            }
        }
    }

    fn revoke(&mut self, client: usize) {
        let Some(put) = self.started[client].pop().filter(|put| !put.upsert) else { return };
        let client_id = Uuid { first: 7, second: client as u64 };
        let (keys, tenant) = (vec![put.key.as_str()], DEFAULT_TENANT);
        let arguments = BatchPutRevokeArguments { client_id, keys, replica_type: ReplicaType::ALL, tenant };
        let results = self.call::<BatchPutRevoke>(client, Request::BatchPutRevoke(arguments));
        assert_eq!(results.len(), 1);
    }

    fn remove(&mut self, client: usize) {
        let key = key_name(self.rng.u64(0..KEYS));
        let arguments = RemoveArguments { key: key.as_str(), force: true, tenant: DEFAULT_TENANT };
        let removed = self.call::<Remove>(client, Request::Remove(arguments));
        self.after_removal(&key, removed);
    }

    fn after_removal(&mut self, key: &str, removed: MasterResult<()>) {
        let possible = self.possible.get_mut(key).unwrap();
        match removed {
            Ok(()) => *possible = BTreeSet::from([None]),
            Err(ErrorCode::OBJECT_NOT_FOUND) => {
                assert!(possible.contains(&None), "{key} is lost: {possible:?}");
                *possible = BTreeSet::from([None]);
                self.unfinished.remove(key);
            }
            Err(ErrorCode::RPC_FAIL) => _ = possible.insert(None),
            Err(code) => assert!(self.unfinished.contains(key), "{key}: {code}"),
        }
    }

    /// Removes the keys of a suffix, which are in several shards. If a shard dies, some may be left.
    fn remove_matching(&mut self, client: usize) {
        let suffix = self.rng.u64(0..10);
        let regex = format!("^key-.*{suffix}$");
        let arguments = RemoveArguments { key: regex.as_str(), force: true, tenant: DEFAULT_TENANT };
        let removed = self.call::<RemoveByRegex>(client, Request::RemoveByRegex(arguments));
        for key in (0..KEYS).filter(|key| key % 10 == suffix).map(key_name) {
            let possible = self.possible.get_mut(&key).unwrap();
            match removed {
                Ok(_) if !self.unfinished.contains(&key) => *possible = BTreeSet::from([None]),
                _ => _ = possible.insert(None),
            }
        }
    }

    fn read(&mut self, client: usize) {
        let keys = self.random_keys();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let tenant = DEFAULT_TENANT;
        let found: Vec<MasterResult<ReplicaList<String>>> = if let [key] = names[..] {
            vec![self.call::<GetReplicaList>(client, Request::GetReplicaList(KeyArguments { key, tenant }))]
        } else {
            let arguments = KeysArguments { keys: names, tenant };
            self.call::<BatchGetReplicaList>(client, Request::BatchGetReplicaList(arguments))
        };
        assert_eq!(found.len(), keys.len());
        keys.iter().zip(found).for_each(|(key, found)| self.check_read(key, found));
    }

    /// A read returns the bytes of a possible value, which is then the value.
    fn check_read(&mut self, key: &str, found: MasterResult<ReplicaList<String>>) {
        let found = found.map_err(|code| match code {
            ErrorCode::RPC_FAIL if self.defect == ShardDefect::DamageAsAbsence => ErrorCode::OBJECT_NOT_FOUND,
            code => code,
        });
        let possible = self.possible.get_mut(key).unwrap();
        match found {
            Ok(list) => {
                assert!(!list.replicas.is_empty(), "{key}");
                for replica in &list.replicas {
                    let ReplicaMedium::Memory(buffer) = &replica.medium else { panic!("{replica:?}") };
                    let Some((size, written, version)) = self.memory.get(&buffer.address) else {
                        panic!("{key}: its bytes at {:#x} were overwritten", buffer.address)
                    };
                    assert_eq!((written.as_str(), *size), (key, buffer.size), "at {:#x}", buffer.address);
                    assert!(possible.contains(&Some(*version)), "{key}: {version} is none of {possible:?}");
                    *possible = BTreeSet::from([Some(*version)]);
                }
                self.checked_reads += 1;
            }
            Err(ErrorCode::OBJECT_NOT_FOUND) => {
                assert!(possible.contains(&None), "{key} is lost: {possible:?}");
                if !self.unfinished.contains(key) {
                    *possible = BTreeSet::from([None]);
                }
            }
            Err(ErrorCode::REPLICA_IS_NOT_READY) => {
                assert!(self.unfinished.contains(key), "{key} is lost: it is not readable");
            }
            Err(code) => assert_eq!(code, ErrorCode::RPC_FAIL, "{key}"),
        }
    }

    fn exist(&mut self, client: usize) {
        let keys = self.random_keys();
        let names = keys.iter().map(String::as_str).collect();
        let arguments = KeysArguments { keys: names, tenant: DEFAULT_TENANT };
        let found = self.call::<BatchExistKey>(client, Request::BatchExistKey(arguments));
        for (key, found) in keys.iter().zip(found) {
            let possible = &self.possible[key];
            match found {
                Ok(true) => assert!(possible.iter().any(Option::is_some), "{key}"),
                Ok(false) => {
                    assert!(possible.contains(&None) || self.unfinished.contains(key), "{key} is lost");
                }
                Err(code) => assert_eq!(code, ErrorCode::RPC_FAIL, "{key}"),
            }
        }
    }

    fn heartbeat(&mut self) {
        for number in 0..NODES {
            let client_id = node(number);
            let ping = self.call::<Ping>(0, Request::Ping(ClientArguments { client_id }));
            if ping.is_ok_and(|ping| ping.client_status == ClientStatus::NEED_REMOUNT) {
                let arguments = RemountArguments { segments: vec![segment(number)], client_id };
                let _ = self.call::<ReMountSegment>(0, Request::ReMountSegment(arguments));
            }
        }
    }

    /// Without further kills, each key has one of its possible values, and can be written.
    fn check_all(&mut self) {
        self.kills_shards = false;
        self.shards.iter_mut().for_each(|shard| shard.down_for = 0);
        self.heartbeat();
        for key in (0..KEYS).map(key_name) {
            let arguments = KeyArguments { key: key.as_str(), tenant: DEFAULT_TENANT };
            let found = self.call::<GetReplicaList>(0, Request::GetReplicaList(arguments));
            assert_ne!(found.as_ref().err(), Some(&ErrorCode::RPC_FAIL));
            self.check_read(&key, found);
        }
        self.kills_shards = true;
    }
}

/// Runs until this number of kills. Returns the number of reads whose bytes were compared.
fn run(seed: u64, kills: usize, defect: ShardDefect) -> usize {
    let mut simulation = ShardedSimulation::new(seed, defect);
    while simulation.kills < kills {
        let until = simulation.kills + 50;
        while simulation.kills < until {
            simulation.step();
        }
        simulation.check_all();
    }
    simulation.checked_reads
}

#[test]
fn kills_of_shards_lose_no_acknowledged_object() {
    let reads: usize = (0..5).map(|seed| run(seed, 200, ShardDefect::None)).sum();
    assert!(reads > 1000, "{reads}");
}

#[test]
#[should_panic(expected = "is lost")]
fn a_shard_that_replies_before_its_commit_is_detected() {
    run(1, 200, ShardDefect::RepliesBeforeCommit);
}

#[test]
#[should_panic(expected = "at 0x")]
fn shards_that_allocate_in_the_same_memory_are_detected() {
    run(1, 200, ShardDefect::SharedSegments);
}

#[test]
#[should_panic(expected = "is lost")]
fn a_silent_shard_taken_for_an_empty_one_is_detected() {
    run(1, 200, ShardDefect::DamageAsAbsence);
}

/// As above; takes a minute.
#[test]
#[ignore = "takes a minute"]
fn ten_thousand_kills_of_shards_lose_nothing() {
    let reads: usize = (100..150).map(|seed| run(seed, 200, ShardDefect::None)).sum();
    assert!(reads > 10_000, "{reads}");
}

//! A master's files on a disk that is full, and with every single fault.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::{BatchRemove, BatchRemoveArguments, ClientArguments, Ping};
use mooncake_wire::types::{
    DEFAULT_TENANT, ObjectMeta, ReplicaMedium, ReplicaType, ReplicateConfig, Segment,
};
use moongate_master::durable::{DurableJournal, PersistenceSchedule, RestoredJournal, StatePersister};
use moongate_master::recorder::FactRecorder;
use moongate_master::recovery::RecoveryOutcome;
use moongate_master::{
    AuxServices, AuxServicesOptions, LeadershipStatus, MasterServer, MasterServerOptions, MasterState,
    MonotonicUnixClock, rpc,
};
use moongate_master_core::{PutStartRequest, RemoveContext};
use moongate_oplog::{LogDirectory, OplogOptions};
use moongate_runtime::Supervisor;
use moongate_store_testkit::LIMIT;
use moongate_store_testkit::memory_disk::{FileContents, MemoryDisk};
use moongate_store_testkit::test_master::TestRpcConnection;

use super::{CLIENT, caller, options, segment, settings};

/// A disk that is full and then has space again, as observed by clients and operators.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_rejects_changes_and_serves_reads() {
    let disk = MemoryDisk::default();
    let folder = Arc::new(LogDirectory::lock_on(Arc::new(disk.clone()), Path::new("/data")).unwrap());
    let RestoredJournal { journal: durable, state: MasterState { master, aux, .. }, .. } =
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
        let RestoredJournal { state, report: restored, .. } =
            DurableJournal::open_in(folder, options("a"), &settings(), 2000).unwrap();
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
    let RestoredJournal { journal: durable, state, .. } = open(&disk, 1000);
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
            master
                .remove(RemoveContext { now_ms: 1000, tenant: "default", force: true }, &old, &mut recorder)
                .unwrap();
            stored.remove(&old);
        }
        let replicas = master
            .put_start(
                caller(1000),
                &PutStartRequest { key: &key, size: 1000, config: &config },
                &mut recorder,
            )
            .unwrap();
        let ReplicaMedium::Memory(buffer) = &replicas[0].medium else { panic!("{replicas:?}") };
        memory.insert(buffer.address, key.clone());
        let object = ObjectMeta { key: key.clone(), object_checksum: None };
        master.put_end(caller(1000), &object, ReplicaType::ALL, &mut recorder).unwrap();
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
        let RestoredJournal { journal: durable, state, report: restored } = open(&disk, 2000);
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
        let _ = state.master.put_start(
            caller(2000),
            &PutStartRequest { key: "late", size: 10, config: &config },
            &mut recorder,
        );
        recorder.commit().unwrap();
        drop(recorder);
        let RestoredJournal { state: again_state, report: again, .. } = open(&disk, 2000);
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

//! Concurrent threads: no deadlock, no lost space, and the state changes in the order of emission rebuild the same state.

use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};
use moongate_master_core::{
    CopyRequest, MasterCore, MasterCoreOptions, MoveRequest, PutStartRequest, RemoveContext, StateChange,
    StateChangeSink,
};
use parking_lot::Mutex;

use crate::harness::{
    MIB, TENANT, TestReplicateConfig, caller, client_segment, comparable_state, grouped, id, replayed,
    segment, soft_pinned,
};

const THREADS: u64 = 4;
const STEPS: u64 = 4000;
const NODES: u64 = 3;

struct SharedChangeLog<'a>(&'a Mutex<Vec<StateChange<'static>>>);

impl StateChangeSink for SharedChangeLog<'_> {
    fn record(&mut self, change: StateChange<'_>) {
        self.0.lock().push(change.into_owned());
    }
}

fn config(random: &mut fastrand::Rng) -> TestReplicateConfig {
    match random.u8(..4) {
        0 => TestReplicateConfig { replica_num: 2, ..TestReplicateConfig::default() },
        1 => soft_pinned(5000),
        2 => grouped(["x", "y", "z"][random.usize(..3)]),
        _ => TestReplicateConfig::default(),
    }
}

fn node(random: &mut fastrand::Rng) -> u64 {
    random.u64(1..=NODES)
}

fn step(
    master: &MasterCore,
    now: u64,
    random: &mut fastrand::Rng,
    client: Uuid,
    fx: &mut SharedChangeLog<'_>,
) {
    let key = format!("key{}", random.u8(..60));
    let key = key.as_str();
    let named = |number: u64| segment(number, 4 * MIB).name;
    match random.u8(..40) {
        0..15 => {
            let size = random.u64(1..MIB);
            let config = config(random);
            let started = if random.bool() {
                master.put_start(caller(now, client), &PutStartRequest { key, size, config: &config }, fx)
            } else {
                master.upsert_start(caller(now, client), &PutStartRequest { key, size, config: &config }, fx)
            };
            if started.is_ok() && random.u8(..8) > 0 {
                let meta = ObjectMeta { key, object_checksum: None };
                let _ = master.put_end(caller(now, client), &meta, ReplicaType::ALL, fx);
            }
        }
        15..24 => {
            let _ = master.exist(now, TENANT, key);
        }
        24..27 => drop(master.batch_replicas(now, TENANT, &[key, "key1", "key2"])),
        27..30 => {
            _ = master.remove(RemoveContext { now_ms: now, tenant: TENANT, force: random.bool() }, key, fx);
        }
        30..32 => {
            _ = master.copy_start(
                caller(now, client),
                &CopyRequest {
                    key,
                    source: &named(node(random)),
                    targets: &[named(node(random))],
                    lease: None,
                },
                fx,
            );
        }
        32 => _ = master.copy_end(caller(now, client), key, None, fx),
        33 => {
            _ = master.move_start(
                caller(now, client),
                MoveRequest { key, source: &named(node(random)), target: &named(node(random)) },
                fx,
            );
        }
        34 => _ = master.move_end(caller(now, client), key, fx),
        35 => _ = master.put_revoke(caller(now, client), key, ReplicaType::ALL, fx),
        36 => {
            let number = node(random);
            let _ = master.remount(now, &[segment(number, 4 * MIB)], id(100 + number), fx);
        }
        37 if random.u8(..8) == 0 => {
            let number = node(random);
            let _ = master.unmount(now, client_segment(id(number), id(100 + number)), fx);
        }
        38 if random.u8(..4) == 0 => master.client_disconnected(now, id(100 + node(random)), fx),
        _ => master.tick(now, fx),
    }
}

#[test]
fn concurrent_changes_replay_to_the_same_state() {
    let settings = MasterCoreOptions { shards: 8, ramp_ms: 0, ..MasterCoreOptions::default() };
    let master = MasterCore::new(settings.clone());
    let log = Mutex::new(Vec::new());
    for number in 1..=NODES {
        master.mount(0, &segment(number, 4 * MIB), id(100 + number), &mut SharedChangeLog(&log)).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (master, log) = (&master, &log);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for now in 0..STEPS {
                    step(master, now * 20, &mut random, id(500 + thread), &mut SharedChangeLog(log));
                }
            });
        }
    });
    let changes = log.into_inner();
    assert!(changes.len() > 1000);
    assert_eq!(comparable_state(&replayed(&settings, &changes, STEPS * 20)), comparable_state(&master));
    // All space can be freed.
    let now = STEPS * 20 + 10_000_000;
    for _ in 0..3 {
        for number in 1..=NODES {
            master.remount(now, &[segment(number, 4 * MIB)], id(100 + number), &mut ()).unwrap();
        }
        master.tick(now, &mut ());
    }
    master.remove_all(now, None, true, &mut ());
    assert_eq!((master.key_count(), master.space_usage().used), (0, 0));
}

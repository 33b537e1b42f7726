//! Many threads at once: nothing locks up, nothing is lost, and the facts in the order in which they were told make the
//! same state.

use mooncake_wire::types::{ObjectMeta, ReplicaType, Uuid};
use moongate_kvcore::{Effects, Fact, Master, Settings, Work};
use parking_lot::Mutex;

use crate::world::{Config, MIB, TENANT, grouped, id, known, replayed, segment, soft_pinned};

const THREADS: u64 = 4;
const STEPS: u64 = 4000;
const NODES: u64 = 3;

struct Log<'a>(&'a Mutex<Vec<Fact<'static>>>);

impl Effects for Log<'_> {
    fn fact(&mut self, fact: Fact<'_>) {
        self.0.lock().push(fact.into_owned());
    }
}

fn config(random: &mut fastrand::Rng) -> Config {
    match random.u8(..4) {
        0 => Config { replica_num: 2, ..Config::default() },
        1 => soft_pinned(5000),
        2 => grouped(["x", "y", "z"][random.usize(..3)]),
        _ => Config::default(),
    }
}

fn node(random: &mut fastrand::Rng) -> u64 {
    random.u64(1..=NODES)
}

fn step(master: &Master, now: u64, random: &mut fastrand::Rng, client: Uuid, fx: &mut Log<'_>) {
    let key = format!("key{}", random.u8(..60));
    let key = key.as_str();
    let work = Work { client, tenant: TENANT, key };
    let named = |number: u64| segment(number, 4 * MIB).name;
    match random.u8(..40) {
        0..15 => {
            let size = random.u64(1..MIB);
            let config = config(random);
            let started = if random.bool() {
                master.put_start(now, client, TENANT, key, size, &config, fx)
            } else {
                master.upsert_start(now, client, TENANT, key, size, &config, fx)
            };
            if started.is_ok() && random.u8(..8) > 0 {
                let meta = ObjectMeta { key, object_checksum: None };
                let _ = master.put_end(now, client, TENANT, &meta, ReplicaType::ALL, fx);
            }
        }
        15..24 => {
            let _ = master.exist(now, TENANT, key);
        }
        24..27 => drop(master.batch_replicas(now, TENANT, &[key, "key1", "key2"])),
        27..30 => _ = master.remove(now, TENANT, key, random.bool(), fx),
        30..32 => _ = master.copy_start(now, work, &named(node(random)), &[named(node(random))], None, fx),
        32 => _ = master.copy_end(now, work, None, fx),
        33 => _ = master.move_start(now, work, &named(node(random)), &named(node(random)), fx),
        34 => _ = master.move_end(now, work, fx),
        35 => _ = master.put_revoke(client, TENANT, key, ReplicaType::ALL, fx),
        36 => {
            let number = node(random);
            let _ = master.remount(now, &[segment(number, 4 * MIB)], id(100 + number), fx);
        }
        37 if random.u8(..8) == 0 => {
            let number = node(random);
            let _ = master.unmount(now, id(number), id(100 + number), fx);
        }
        38 if random.u8(..4) == 0 => master.client_lost(now, id(100 + node(random)), fx),
        _ => master.tick(now, fx),
    }
}

#[test]
fn threads_together_leave_a_state_that_their_facts_explain() {
    let settings = Settings { shards: 8, ramp_ms: 0, ..Settings::default() };
    let master = Master::new(settings.clone());
    let log = Mutex::new(Vec::new());
    for number in 1..=NODES {
        master.mount(0, &segment(number, 4 * MIB), id(100 + number), &mut Log(&log)).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (master, log) = (&master, &log);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for now in 0..STEPS {
                    step(master, now * 20, &mut random, id(500 + thread), &mut Log(log));
                }
            });
        }
    });
    let facts = log.into_inner();
    assert!(facts.len() > 1000);
    assert_eq!(known(&replayed(&settings, &facts, STEPS * 20)), known(&master));
    // Everything can be given back.
    let now = STEPS * 20 + 10_000_000;
    for _ in 0..3 {
        for number in 1..=NODES {
            master.remount(now, &[segment(number, 4 * MIB)], id(100 + number), &mut ()).unwrap();
        }
        master.tick(now, &mut ());
    }
    master.remove_all(now, None, true, &mut ());
    assert_eq!((master.key_count(), master.fill().used), (0, 0));
}

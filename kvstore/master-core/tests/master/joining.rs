//! A node that joins a pool whose other nodes are full: it must not get all new objects.

use moongate_master_core::{MasterCore, MasterCoreOptions, PlacementStrategy};

use crate::harness::{MIB, TestMasterCore, TestReplicateConfig, endpoints};

const RAMP_MS: u64 = 60_000;
const OLD_NODES: u64 = 4;
const OLD_SIZE: u64 = 32 * MIB;
const OBJECT: u64 = 64 << 10;
/// The joining node's number.
const NEW: u64 = 100;

/// A pool of full nodes, and one that has just joined.
struct JoinedPool {
    world: TestMasterCore,
    next_key: u64,
    new_size: u64,
}

impl JoinedPool {
    fn new(placement: PlacementStrategy, new_size: u64) -> Self {
        let settings = MasterCoreOptions { ramp_ms: RAMP_MS, placement, ..MasterCoreOptions::default() };
        let mut world = TestMasterCore::new(MasterCoreOptions::default());
        world.master = MasterCore::new(settings);
        for number in 1..=OLD_NODES {
            world.mount(number, OLD_SIZE).unwrap();
        }
        let mut pool = Self { world, next_key: 0, new_size };
        pool.advance(2 * RAMP_MS);
        // Twice what fits.
        pool.bytes_on_new_node(2 * OLD_NODES * OLD_SIZE / OBJECT);
        pool.world.mount(NEW, new_size).unwrap();
        pool
    }

    fn advance(&mut self, ms: u64) {
        let nodes: Vec<u64> = (1..=OLD_NODES).chain([NEW]).collect();
        self.world.advance_with_heartbeats(ms, &nodes);
    }

    /// Puts objects, a hundred per 10 ms. Returns how many bytes of them the joined node got.
    fn bytes_on_new_node(&mut self, objects: u64) -> u64 {
        let endpoint = format!("10.0.0.{NEW}:12000");
        let mut bytes = 0;
        for number in 0..objects {
            if number % 100 == 0 {
                self.world.tick(10);
            }
            let key = format!("key{}", self.next_key);
            self.next_key += 1;
            let replicas = self.world.start(&key, OBJECT, &TestReplicateConfig::default()).unwrap();
            self.world.end(&key).unwrap();
            bytes += if endpoints(&replicas) == [endpoint.as_str()] { OBJECT } else { 0 };
        }
        bytes
    }

    /// The joined node's share of the next writes, in multiples of its share of the capacity. The writes are half as many as it can
    /// get without becoming full.
    fn share_of_writes(&mut self) -> f64 {
        let capacity = OLD_NODES * OLD_SIZE + self.new_size;
        let objects = capacity / OBJECT / 4;
        let share = self.bytes_on_new_node(objects) as f64 / (objects * OBJECT) as f64;
        share * capacity as f64 / self.new_size as f64
    }
}

#[test]
fn a_joining_node_gets_at_most_twice_its_share_of_writes() {
    for placement in [PlacementStrategy::Random, PlacementStrategy::FreeRatioFirst] {
        for new_size in [OLD_SIZE / 4, OLD_SIZE, 2 * OLD_SIZE] {
            let mut pool = JoinedPool::new(placement, new_size);
            let at_once = pool.share_of_writes();
            pool.advance(2 * RAMP_MS);
            let later = pool.share_of_writes();
            let shares = format!("{placement:?}, {} MiB: {at_once}, then {later}", new_size / MIB);
            assert!(at_once <= 2.0 && later <= 2.0, "{shares}");
            assert!(later > 0.5, "it has to be filled: {shares}");
        }
    }
}

/// No write fails while the new node has space.
#[test]
fn a_joining_node_is_used_if_nothing_can_be_evicted() {
    let mut pool = JoinedPool::new(PlacementStrategy::Random, OLD_SIZE);
    let keys: Vec<String> = pool.world.keys().into_iter().collect();
    assert!(keys.iter().all(|key| pool.world.exists(key)), "all are leased");
    // The free space of the full nodes, 10 % of their memory, is used as well.
    let written = OLD_NODES * OLD_SIZE / 10 + OLD_SIZE / 2;
    let on_new_node = pool.bytes_on_new_node(written / OBJECT);
    assert!(on_new_node > OLD_SIZE / 4, "{on_new_node}");
    assert!(keys.iter().all(|key| pool.world.has(key)));
}

//! Masters that elect, replicate, crash, sleep and are cut off from each other, in a world whose chance comes from a seed.
//!
//! The masters' decisions are those of the real thing: the elector, the quorum and the follower. The world is the store, the
//! network, the clocks and the callers.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

#[path = "ha_simulation/coordinator.rs"]
mod coordinator;
#[path = "ha_simulation/faults.rs"]
mod faults;
#[path = "ha_simulation/master.rs"]
mod master;
#[path = "ha_simulation/network.rs"]
mod network;
#[path = "ha_simulation/simulation.rs"]
mod simulation;

use simulation::{HaFaultPlan, HaSimulation};

#[derive(Default)]
struct HaSimulationTotals {
    acknowledged: usize,
    leaders: usize,
    crashes: usize,
    listed: usize,
    copied: usize,
    resumed: usize,
}

fn run(seeds: std::ops::Range<u64>, trouble: HaFaultPlan) -> HaSimulationTotals {
    let mut sum = HaSimulationTotals::default();
    for seed in seeds {
        let mut world = HaSimulation::new(seed, trouble);
        world.run();
        sum.acknowledged += world.acknowledged.len();
        sum.leaders += world.elected;
        sum.crashes += world.crashes;
        sum.listed += world.store.max_in_sync;
        sum.copied += world.copied;
        sum.resumed += world.resumed;
    }
    sum
}

#[test]
fn nothing_acknowledged_is_lost_and_no_two_lead() {
    const SEEDS: u64 = 1000;
    let sum = run(0..SEEDS, HaFaultPlan::default());
    // It was not peace that kept it.
    let seeds = SEEDS as usize;
    assert!(sum.leaders > 3 * seeds, "{}", sum.leaders);
    assert!(sum.crashes > 2 * seeds, "{}", sum.crashes);
    assert!(sum.acknowledged > 50 * seeds, "{}", sum.acknowledged);
    assert!(sum.listed > 2 * seeds, "{}", sum.listed);
    assert!(sum.copied > seeds && sum.resumed > seeds, "{} {}", sum.copied, sum.resumed);
}

#[test]
fn a_world_without_trouble_is_served_throughout() {
    for seed in 0..100 {
        let mut world = HaSimulation::new(seed, HaFaultPlan::NONE);
        world.run();
        assert_eq!((world.elected, world.refused), (1, 0), "seed {seed}");
        assert_eq!(world.store.max_in_sync, 3, "seed {seed}");
        assert!(world.acknowledged.len() > 500, "seed {seed}: {}", world.acknowledged.len());
    }
}

/// The simulation would see it: a leader that answers without its followers, and one that trusts its lease for too long.
#[test]
#[should_panic(expected = "is missing")]
fn answering_without_followers_is_seen() {
    run(0..200, HaFaultPlan { skips_follower_acks: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "lead at once")]
fn serving_past_the_lease_is_seen() {
    run(0..200, HaFaultPlan { slow_clocks: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "is missing")]
fn acknowledging_what_is_not_written_is_seen() {
    run(0..200, HaFaultPlan { acks_before_write: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "never had")]
fn going_on_with_other_records_is_seen() {
    run(0..200, HaFaultPlan { skips_epoch_check: true, ..HaFaultPlan::default() });
}

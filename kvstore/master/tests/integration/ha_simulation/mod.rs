//! Deterministic simulation of masters that elect, replicate, crash, pause and are partitioned; all randomness comes from a seed.
//!
//! The masters run the real decision code: the elector, the in-sync tracker and the follower. The coordinator, the network, the clocks
//! and the callers are simulated.

mod coordinator;
mod faults;
mod master;
mod network;
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

fn run(seeds: std::ops::Range<u64>, faults: HaFaultPlan) -> HaSimulationTotals {
    let mut sum = HaSimulationTotals::default();
    for seed in seeds {
        let mut simulation = HaSimulation::new(seed, faults);
        simulation.run();
        sum.acknowledged += simulation.acknowledged.len();
        sum.leaders += simulation.elected;
        sum.crashes += simulation.crashes;
        sum.listed += simulation.store.max_in_sync;
        sum.copied += simulation.copied;
        sum.resumed += simulation.resumed;
    }
    sum
}

#[test]
fn no_acknowledged_change_is_lost_and_no_two_masters_lead() {
    const SEEDS: u64 = 1000;
    let sum = run(0..SEEDS, HaFaultPlan::default());
    // Enough faults happened for the result to mean something.
    let seeds = SEEDS as usize;
    assert!(sum.leaders > 3 * seeds, "{}", sum.leaders);
    assert!(sum.crashes > 2 * seeds, "{}", sum.crashes);
    assert!(sum.acknowledged > 50 * seeds, "{}", sum.acknowledged);
    assert!(sum.listed > 2 * seeds, "{}", sum.listed);
    assert!(sum.copied > seeds && sum.resumed > seeds, "{} {}", sum.copied, sum.resumed);
}

#[test]
fn without_faults_every_call_is_served() {
    for seed in 0..100 {
        let mut simulation = HaSimulation::new(seed, HaFaultPlan::NONE);
        simulation.run();
        assert_eq!((simulation.elected, simulation.refused), (1, 0), "seed {seed}");
        assert_eq!(simulation.store.max_in_sync, 3, "seed {seed}");
        assert!(simulation.acknowledged.len() > 500, "seed {seed}: {}", simulation.acknowledged.len());
    }
}

/// The following tests check that the simulation detects defects, such as a leader that replies without its followers.
#[test]
#[should_panic(expected = "is missing")]
fn replies_without_followers_are_detected() {
    run(0..200, HaFaultPlan { skips_follower_acks: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "lead at once")]
fn serving_past_the_lease_is_detected() {
    run(0..200, HaFaultPlan { slow_clocks: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "is missing")]
fn acknowledging_unwritten_records_is_detected() {
    run(0..200, HaFaultPlan { acks_before_write: true, ..HaFaultPlan::default() });
}

#[test]
#[should_panic(expected = "never had")]
fn resuming_with_other_records_is_detected() {
    run(0..200, HaFaultPlan { skips_epoch_check: true, ..HaFaultPlan::default() });
}

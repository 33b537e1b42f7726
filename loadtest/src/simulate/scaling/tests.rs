//! Short days.

use std::sync::atomic::AtomicBool;

use super::comparison::{Contender, compare, scaling_options};
use super::fleet::WantedReplicas;
use super::run::{DayResult, FixedReplicas, run_day};
use super::tune::ComparedDay;
use super::workload::{DayOptions, synthetic_day};

const DAY_S: f64 = 10_800.0;

#[test]
fn the_planner_needs_less_than_a_fleet_for_the_peak() {
    let options = scaling_options(DAY_S, 30.0);
    let requests = synthetic_day(DayOptions { day_s: DAY_S, mean_rate: 8.0, seed: 1 });
    let stop = AtomicBool::new(false);
    let day = ComparedDay {
        options: &options,
        requests: &requests,
        initial: WantedReplicas::new(2, 1),
        stop: &stop,
    };
    let result = |contender| -> DayResult {
        compare(contender, day, &[]).expect("valid settings").result.expect("reaches the share")
    };
    let (fixed, planned) = (result(Contender::FixedPeak), result(Contender::Planner));
    let figures = format!("{fixed:?} {planned:?}");
    assert!(fixed.within_both >= 0.95, "{figures}");
    assert!(planned.within_both >= 0.90, "{figures}");
    assert!(planned.gpu_hours < 0.75 * fixed.gpu_hours, "{figures}");
}

#[test]
fn an_idle_fleet_costs_its_replicas_and_serves_nothing() {
    let options = scaling_options(3_600.0, 30.0);
    let requests = synthetic_day(DayOptions { day_s: 3_600.0, mean_rate: 0.01, seed: 1 });
    let result = run_day(&options, &requests, WantedReplicas::new(2, 1), &mut FixedReplicas, None);
    let result = result.expect("not ended early");
    assert!(result.gpu_hours <= 12.0 && result.within_both > 0.9, "{result:?}");
}

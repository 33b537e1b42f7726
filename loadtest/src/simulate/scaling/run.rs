//! Runs a day with a controller.

use std::sync::atomic::{AtomicU64, Ordering};

use super::fleet::{ReplicaFleet, ScalingOptions, WantedReplicas};
use super::observation::FleetObservation;
use super::workload::DayRequest;

/// Requests that have not ended so long after the day are not waited for, in seconds.
const AFTERMATH_S: f64 = 1_800.0;

/// Decides how many replicas there are.
pub(crate) trait ScalingController {
    /// Seconds between two decisions.
    fn interval_s(&self) -> f64;
    fn decide(&mut self, observation: &FleetObservation) -> WantedReplicas;
}

/// Never changes anything.
#[derive(Debug)]
pub(crate) struct FixedReplicas;

impl ScalingController for FixedReplicas {
    fn interval_s(&self) -> f64 {
        f64::INFINITY
    }

    fn decide(&mut self, _: &FleetObservation) -> WantedReplicas {
        WantedReplicas::default()
    }
}

/// Result of a day.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct DayResult {
    pub(crate) gpu_hours: f64,
    /// Shares of all requests of the day.
    pub(crate) within_both: f64,
    pub(crate) within_ttft: f64,
    pub(crate) within_tpot: f64,
    /// Replicas that were created during the day.
    pub(crate) created: usize,
}

/// When a run is ended early, because its result cannot be used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EarlyEnd<'a> {
    /// Ends a run as soon as it cannot reach this share.
    pub(crate) share: f64,
    /// Ends a run as soon as it exceeds these GPU-seconds; reduced by a run that reaches the share with fewer.
    pub(crate) cheapest_gpu_s: &'a AtomicU64,
}

/// Runs the day. Returns `None` if it was ended early.
pub(crate) fn run_day(
    options: &ScalingOptions,
    requests: &[DayRequest],
    initial: WantedReplicas,
    controller: &mut dyn ScalingController,
    early_end: Option<EarlyEnd<'_>>,
) -> Option<DayResult> {
    let mut fleet = ReplicaFleet::new(options, requests, initial);
    let gpus = f64::from(options.gpus_per_replica);
    let total = requests.len().max(1) as f64;
    let interval_s = controller.interval_s();
    let mut next_step_s = interval_s;
    let mut arrivals = requests.iter().enumerate().peekable();
    loop {
        let arrival_s = arrivals.peek().map_or(f64::INFINITY, |(_, request)| request.at_s);
        let event_s = fleet.next_event_s();
        let now = arrival_s.min(event_s).min(next_step_s);
        if now > options.day_s + AFTERMATH_S || (arrival_s.is_infinite() && event_s.is_infinite()) {
            break;
        }
        if next_step_s <= now {
            let observation = fleet.observe(now);
            let wanted = controller.decide(&observation);
            fleet.apply(now, wanted);
            next_step_s += interval_s;
            if let Some(EarlyEnd { share, cheapest_gpu_s }) = early_end {
                let missed = (fleet.ended - fleet.within_both) as f64 + fleet.overdue(now);
                let gpu_s = (gpus * fleet.replica_s) as u64;
                if missed > (1.0 - share) * total || gpu_s > cheapest_gpu_s.load(Ordering::Relaxed) {
                    return None;
                }
            }
        } else if let Some((request, _)) = arrivals.next_if(|(_, request)| request.at_s <= event_s) {
            fleet.on_arrival(now, request);
        } else {
            fleet.on_next_event();
        }
    }
    let share = |count: u64| count as f64 / total;
    let result = DayResult {
        gpu_hours: gpus * fleet.replica_s / 3_600.0,
        within_both: share(fleet.within_both),
        within_ttft: share(fleet.within_ttft),
        within_tpot: share(fleet.within_tpot),
        created: fleet.prefill.replicas.len() + fleet.decode.replicas.len()
            - (initial.prefill + initial.decode) as usize,
    };
    if let Some(EarlyEnd { share, cheapest_gpu_s }) = early_end
        && result.within_both >= share
    {
        cheapest_gpu_s.fetch_min((gpus * fleet.replica_s) as u64, Ordering::Relaxed);
    }
    Some(result)
}

//! How the distance between a policy and a lower bound divides: limits of the system are removed one after the other.

use std::fmt::Write as _;
use std::sync::atomic::AtomicBool;

use super::ideal::IdealOrder;
use super::lower_bound::lower_bound_s;
use super::outcome::SimulationResult;
use super::settings::SimulationOptions;
use super::store_cache::StoreRetention;
use super::sweep::{PolicyExperiment, PolicyVariant, PolicyVariantKind, run_experiment, run_variant};

/// A store in tokens that evicts nothing of the standard experiments.
const LARGE_STORE_TOKENS: u64 = 40_000_000;
/// Seconds between two load reports, or predictions of hits, that are practically immediate.
const IMMEDIATE_POLL_S: f64 = 0.05;

/// A limit of the system and how to remove it. Each is removed in addition to those before it.
struct RemovedLimit {
    column: &'static str,
    remove: fn(&mut SimulationOptions),
}

const LIMITS: [RemovedLimit; 4] = [
    RemovedLimit {
        column: "evictions (Belady)",
        remove: |settings| settings.retention = StoreRetention::Belady,
    },
    RemovedLimit {
        column: "capacity (40 M tokens)",
        remove: |settings| settings.l3_tokens = settings.l3_tokens.max(LARGE_STORE_TOKENS),
    },
    RemovedLimit {
        column: "duplicates and fetches (one cache)",
        remove: |settings| settings.shared_cache = true,
    },
    RemovedLimit {
        column: "information",
        remove: |settings| {
            settings.gateways = 1;
            settings.exact_information = true;
            settings.index_lag_s = 0.0;
            settings.refresh_s = IMMEDIATE_POLL_S;
            settings.poll_s = IMMEDIATE_POLL_S;
        },
    },
];

/// Mean times to first token in seconds, over the seeds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BoundGap {
    setting: String,
    /// Of the policy: as it is, and after the removal of each limit.
    policy_s: Vec<f64>,
    /// The best order of one queue in front of one cache.
    best_order_s: f64,
    bound_s: f64,
}

impl BoundGap {
    /// Measures the first variant of the experiment.
    pub(crate) fn measure(setting: &str, case: &PolicyExperiment, stop: &AtomicBool) -> Self {
        let mut case = case.clone();
        case.variants.truncate(1);
        let mean = |case: &PolicyExperiment| {
            run_experiment(case, stop).first().map_or(0.0, |result| result.summary.ttft_mean_s)
        };
        let mut policy_s = vec![mean(&case)];
        for limit in &LIMITS {
            (limit.remove)(&mut case.settings);
            policy_s.push(mean(&case));
        }
        let (mut best_order_s, mut bound_s) = (0.0, 0.0);
        let seeds = case.seeds.clone().count().max(1) as f64;
        for seed in case.seeds.clone() {
            let workload = case.load.workload(seed);
            let best = run_variant(&case, &PolicyVariant::ideal_best(), &workload, seed, stop);
            best_order_s += best.summary().ttft_mean_s / seeds;
            bound_s += lower_bound_s(&case.settings, &workload, seed, &best) / seeds;
        }
        Self { setting: setting.to_owned(), policy_s, best_order_s, bound_s }
    }

    /// Cells of the table's row: the policy, the parts, and the bound.
    fn cells(&self) -> Vec<String> {
        let seconds = |value: f64| format!("{value:.2}");
        let policy_s = self.policy_s.first().copied().unwrap_or(0.0);
        let gap_s = (policy_s - self.bound_s).max(f64::MIN_POSITIVE);
        let part = |part_s: f64| format!("{part_s:.2} ({:.0} %)", 100.0 * part_s / gap_s);
        let relaxed_s = self.policy_s.last().copied().unwrap_or(0.0);
        let mut cells = vec![self.setting.clone(), seconds(policy_s)];
        cells.extend(self.policy_s.windows(2).map(|pair| part(pair[0] - pair[1])));
        cells.push(part(relaxed_s - self.best_order_s));
        cells.push(seconds(self.best_order_s));
        cells.push(part(self.best_order_s - self.bound_s));
        cells.push(seconds(self.bound_s));
        cells
    }
}

/// The gaps as a Markdown table.
pub(crate) fn table(policy: &str, gaps: &[BoundGap]) -> String {
    let mut heads = vec!["setting", policy];
    heads.extend(LIMITS.iter().map(|limit| limit.column));
    heads.extend(["order", "best order", "unknown", "lower bound"]);
    let mut table = format!("| {} |\n|---|{}\n", heads.join(" | "), "---:|".repeat(heads.len() - 1));
    for gap in gaps {
        let _ = writeln!(table, "| {} |", gap.cells().join(" | "));
    }
    table
}

impl PolicyVariant {
    /// The best of several orders of one queue.
    pub(crate) fn ideal_best() -> Self {
        Self { name: "ideal_best".to_owned(), kind: PolicyVariantKind::IdealBest, overrides: Vec::new() }
    }
}

/// The run with the smallest mean time to first token over all orders of one queue.
pub(crate) fn best_order(mut run: impl FnMut(IdealOrder) -> SimulationResult) -> SimulationResult {
    let mut best = run(IdealOrder::Shortest);
    for order in IdealOrder::OTHERS {
        let result = run(order);
        if result.summary().ttft_mean_s < best.summary().ttft_mean_s {
            best = result;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use moongate_scheduler::{PolicyName, SchedulerOptions};

    use super::*;
    use crate::simulate::agents::AgentTrafficOptions;
    use crate::simulate::sweep::ExperimentLoad;
    use crate::simulate::tide::ArrivalTide;
    use crate::simulate::workload::ReplayOptions;

    #[test]
    fn no_policy_is_below_the_bound() {
        // With one turn, nothing waits for a response, so all policies have the same arrivals.
        let traffic = AgentTrafficOptions { requests: 600, turns: 1.0, ..AgentTrafficOptions::default() };
        let replay = ReplayOptions {
            speed: 2.0,
            jitter_s: 0.0,
            output_scale: 1.0,
            tide: ArrivalTide::CONSTANT,
            seed: 1,
        };
        let case = PolicyExperiment {
            settings: SimulationOptions::eight_plus_four(),
            scheduling: SchedulerOptions::default(),
            load: ExperimentLoad::Agents(traffic, replay),
            variants: vec![PolicyName::Predictive.into()],
            seeds: 1..=1,
        };
        let gap = BoundGap::measure("agents", &case, &AtomicBool::new(false));
        assert!(gap.policy_s.iter().all(|&mean_s| mean_s >= gap.bound_s), "{gap:?}");
        assert!((0.5..=1.0).contains(&(gap.bound_s / gap.best_order_s)), "{gap:?}");
    }

    #[test]
    fn parts_add_up_to_the_distance() {
        let gap = BoundGap {
            setting: "x".to_owned(),
            policy_s: vec![3.0, 2.5, 2.25, 2.0, 1.9],
            best_order_s: 1.5,
            bound_s: 1.0,
        };
        assert_eq!(
            gap.cells(),
            [
                "x",
                "3.00",
                "0.50 (25 %)",
                "0.25 (12 %)",
                "0.25 (12 %)",
                "0.10 (5 %)",
                "0.40 (20 %)",
                "1.50",
                "0.50 (25 %)",
                "1.00"
            ]
        );
        let table = table("predictive", &[gap]);
        let columns: Vec<usize> = table.lines().map(|line| line.matches('|').count()).collect();
        assert_eq!(columns, [11; 3], "{table}");
    }
}

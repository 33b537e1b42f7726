//! Runs of several seeds and several policies on the same load.

use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use moongate_scheduler::{PolicyName, SchedulerOptions, UnknownPolicyError};
use parking_lot::Mutex;

use super::agents::{AgentTrafficOptions, generate_agent_traffic};
use super::bound_gap::best_order;
use super::fairness::{ClassSummary, class_summaries};
use super::gateway::SimulatedGateways;
use super::ideal::{IdealOrder, IdealRouter};
use super::multiturn::{MultiTurnOptions, MultiTurnSender};
use super::outcome::{SimulationResult, SimulationSummary};
use super::request_class::assign_classes;
use super::run::run_simulation;
use super::settings::SimulationOptions;
use super::workload::{ReplayOptions, SimulatedWorkload};

/// A policy with its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyVariant {
    /// The name in flags and tables.
    pub name: String,
    pub kind: PolicyVariantKind,
    /// Overrides of the experiment's scheduler settings, as NAME=VALUE.
    pub overrides: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyVariantKind {
    Policy(PolicyName),
    /// One queue in front of engines that share an unbounded cache.
    Ideal(IdealOrder),
    /// The best of several orders of that queue, for each seed.
    IdealBest,
}

impl From<PolicyName> for PolicyVariant {
    fn from(policy: PolicyName) -> Self {
        Self {
            name: policy.as_str().to_owned(),
            kind: PolicyVariantKind::Policy(policy),
            overrides: Vec::new(),
        }
    }
}

impl From<IdealOrder> for PolicyVariant {
    fn from(order: IdealOrder) -> Self {
        let name = match order {
            IdealOrder::Fcfs => "ideal_fcfs",
            IdealOrder::Shortest => "ideal",
            IdealOrder::Aged(_) => "ideal_aged",
        };
        Self { name: name.to_owned(), kind: PolicyVariantKind::Ideal(order), overrides: Vec::new() }
    }
}

/// The text is not a policy with settings.
#[derive(Debug, thiserror::Error)]
pub enum PolicyVariantError {
    #[error("{0}; ideal, ideal_fcfs, ideal_aged and ideal_best are comparisons, not policies")]
    Policy(#[from] UnknownPolicyError),
    #[error(transparent)]
    Override(#[from] SettingOverrideError),
}

impl FromStr for PolicyVariant {
    type Err = PolicyVariantError;

    /// A policy's name, `ideal`, `ideal_fcfs`, `ideal_aged`, `ideal_best`, or a policy with other settings:
    /// `predictive:slack=0.5+length_price=0`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, changes) = text.split_once(':').unwrap_or((text, ""));
        let variant = match name {
            "ideal" => IdealOrder::Shortest.into(),
            "ideal_fcfs" => IdealOrder::Fcfs.into(),
            "ideal_aged" => IdealOrder::AGED.into(),
            "ideal_best" => PolicyVariant::ideal_best(),
            name => PolicyVariant::from(PolicyName::from_str(name)?),
        };
        let changes: Vec<String> =
            changes.split('+').filter(|change| !change.is_empty()).map(str::to_owned).collect();
        // Reports an invalid setting before any run starts.
        with_overrides(&SchedulerOptions::default(), &changes)?;
        Ok(PolicyVariant { name: text.to_owned(), overrides: changes, ..variant })
    }
}

/// Why a scheduler's settings cannot be overridden.
#[derive(Debug, thiserror::Error)]
pub enum SettingOverrideError {
    /// The text is not NAME=VALUE.
    #[error("{0:?} is not an override: give NAME=VALUE")]
    Form(String),
    /// The setting does not exist.
    #[error("the scheduler has no setting {name}; available: {known}")]
    Name {
        name: String,
        /// Names of the existing settings.
        known: String,
    },
    /// The value has the wrong type.
    #[error("{change}: {source}")]
    Value { change: String, source: serde_json::Error },
}

/// `settings` with some of them overridden, each given as NAME=VALUE with a JSON value; a dot selects a nested member.
///
/// # Errors
/// A setting does not exist, or its value has another type.
pub fn with_overrides(
    settings: &SchedulerOptions,
    changes: &[String],
) -> Result<SchedulerOptions, SettingOverrideError> {
    let mut settings = settings.clone();
    for change in changes {
        let (name, text) =
            change.split_once('=').ok_or_else(|| SettingOverrideError::Form(change.clone()))?;
        let wrong = |source| SettingOverrideError::Value { change: change.clone(), source };
        let mut all = serde_json::to_value(&settings).map_err(wrong)?;
        let known = || {
            let names = all.as_object().map(|all| all.keys().cloned().collect::<Vec<_>>());
            names.unwrap_or_default().join(", ")
        };
        let missing = SettingOverrideError::Name { name: name.to_owned(), known: known() };
        let pointer = format!("/{}", name.replace('.', "/"));
        let value = all.pointer_mut(&pointer).ok_or(missing)?;
        *value = serde_json::from_str(text).map_err(wrong)?;
        settings = serde_json::from_value(all).map_err(wrong)?;
    }
    Ok(settings)
}

#[derive(Debug, Clone)]
pub enum ExperimentLoad {
    /// Requests at given times; the seed determines the jitter.
    Open(SimulatedWorkload, ReplayOptions),
    /// Generated agents, determined by the seed.
    Agents(AgentTrafficOptions, ReplayOptions),
    /// Clients that wait for responses.
    MultiTurn(MultiTurnOptions),
}

impl ExperimentLoad {
    /// Generates the workload of this seed.
    pub(crate) fn workload(&self, seed: u64) -> SimulatedWorkload {
        match self {
            ExperimentLoad::Open(workload, replay) => workload.with_replay(ReplayOptions { seed, ..*replay }),
            ExperimentLoad::Agents(settings, replay) => {
                generate_agent_traffic(settings, seed).with_replay(ReplayOptions { seed, ..*replay })
            }
            ExperimentLoad::MultiTurn(settings) => MultiTurnSender::workload(*settings, seed),
        }
    }
}

#[derive(Debug, Clone)]
pub struct PolicyExperiment {
    pub settings: SimulationOptions,
    /// Scheduler settings before each variant's overrides.
    pub scheduling: SchedulerOptions,
    pub load: ExperimentLoad,
    /// Policies to run, one after the other.
    pub variants: Vec<PolicyVariant>,
    pub seeds: RangeInclusive<u64>,
}

#[derive(Debug, Clone)]
pub struct PolicyResult {
    pub variant: PolicyVariant,
    pub summary: SimulationSummary,
    /// Results of each tenant and priority; empty unless they are simulated.
    pub classes: Vec<ClassSummary>,
    /// The complete run of the first seed.
    pub first_run: SimulationResult,
}

/// Runs every contender with every seed, on as many threads as there are processors. Setting `stop` ends the runs
/// early, with meaningless results.
#[must_use]
pub fn run_experiment(case: &PolicyExperiment, stop: &AtomicBool) -> Vec<PolicyResult> {
    let workloads: Vec<(u64, SimulatedWorkload)> =
        case.seeds.clone().map(|seed| (seed, workload(case, seed))).collect();
    let jobs: Vec<(usize, usize)> = (0..workloads.len())
        .flat_map(|run| (0..case.variants.len()).map(move |index| (index, run)))
        .collect();
    let done: Vec<Mutex<Option<SimulationResult>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(index, run)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (seed, workload) = &workloads[run];
                    let outcome = run_variant(case, &case.variants[index], workload, *seed, stop);
                    *done[run * case.variants.len() + index].lock() = Some(outcome);
                }
            });
        }
    });
    let outcomes: Vec<SimulationResult> = done.into_iter().filter_map(Mutex::into_inner).collect();
    let standing = |(index, contender): (usize, &PolicyVariant)| {
        let of_contender = || outcomes.iter().skip(index).step_by(case.variants.len());
        let summaries: Vec<SimulationSummary> = of_contender().map(SimulationResult::summary).collect();
        let classes: Vec<Vec<ClassSummary>> = of_contender().map(class_summaries).collect();
        let first = of_contender().next()?.clone();
        Some(PolicyResult {
            variant: contender.clone(),
            summary: SimulationSummary::mean(&summaries),
            classes: ClassSummary::means(&classes),
            first_run: first,
        })
    };
    case.variants.iter().enumerate().filter_map(standing).collect()
}

fn workload(case: &PolicyExperiment, seed: u64) -> SimulatedWorkload {
    let mut workload = case.load.workload(seed);
    assign_classes(&mut workload, &case.settings, seed);
    workload
}

/// Runs one variant with one seed.
pub(crate) fn run_variant(
    case: &PolicyExperiment,
    contender: &PolicyVariant,
    workload: &SimulatedWorkload,
    seed: u64,
    stop: &AtomicBool,
) -> SimulationResult {
    let run_ideal = |order| {
        let settings = SimulationOptions { shared_cache: true, ..case.settings.clone() };
        run_simulation(&settings, workload, seed, &mut IdealRouter::new(order), stop)
    };
    match contender.kind {
        PolicyVariantKind::Policy(policy) => {
            // Contenders with invalid settings are rejected when they are parsed.
            let scheduling = with_overrides(&case.scheduling, &contender.overrides)
                .unwrap_or_else(|_| case.scheduling.clone());
            let mut gateways = SimulatedGateways::new(policy, &scheduling, &case.settings, seed);
            run_simulation(&case.settings, workload, seed, &mut gateways, stop)
        }
        PolicyVariantKind::Ideal(order) => run_ideal(order),
        PolicyVariantKind::IdealBest => best_order(run_ideal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_variant_parses_its_settings() {
        let contender: PolicyVariant = "predictive:slack=0.5+duplicate_price=0".parse().expect("known");
        assert_eq!(contender.kind, PolicyVariantKind::Policy(PolicyName::Predictive));
        let settings = with_overrides(&SchedulerOptions::default(), &contender.overrides).expect("fit");
        assert_eq!((settings.slack, settings.duplicate_price), (0.5, 0.0));
        assert_eq!("ideal".parse::<PolicyVariant>().expect("known"), IdealOrder::Shortest.into());
    }

    #[test]
    fn invalid_override_names_the_valid_settings() {
        let wrong = |text: &str| text.parse::<PolicyVariant>().expect_err("wrong").to_string();
        assert!(wrong("predictiv").contains("predictive"));
        assert!(wrong("predictive:slak=1").contains("slack"));
        assert!(wrong("predictive:slack").contains("NAME=VALUE"));
        assert!(wrong("predictive:slack=much").contains("slack=much"));
        let target = [r#"ttft_target={"base":2,"cold_factor":3}"#.to_owned()];
        assert!(with_overrides(&SchedulerOptions::default(), &target).expect("fits").ttft_target.is_some());
    }
}

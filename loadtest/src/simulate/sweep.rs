//! Runs of several seeds and several policies on the same load.

use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use moongate_scheduler::{PolicyName, Settings as SchedulerSettings};
use parking_lot::Mutex;

use super::agents::{AgentSettings, agents};
use super::gateway::Gateways;
use super::ideal::{Ideal, IdealOrder};
use super::multiturn::{MultiTurn, MultiTurnSettings};
use super::outcome::{Outcome, Summary};
use super::run::play;
use super::settings::Settings;
use super::workload::{Replay, Workload};

/// Who decides.
#[derive(Debug, Clone, PartialEq)]
pub struct Contender {
    /// The name in flags and tables.
    pub name: String,
    /// Which algorithm.
    pub kind: ContenderKind,
    /// Settings of the scheduler that differ from the experiment's, as NAME=VALUE.
    pub changes: Vec<String>,
}

/// Which algorithm decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContenderKind {
    /// A policy of the scheduler.
    Policy(PolicyName),
    /// One queue before engines that share a cache without bounds: what no policy reaches.
    Ideal(IdealOrder),
}

impl From<PolicyName> for Contender {
    fn from(policy: PolicyName) -> Self {
        Self { name: policy.as_str().to_owned(), kind: ContenderKind::Policy(policy), changes: Vec::new() }
    }
}

impl From<IdealOrder> for Contender {
    fn from(order: IdealOrder) -> Self {
        let name = match order {
            IdealOrder::Fcfs => "ideal_fcfs",
            IdealOrder::Shortest => "ideal",
        };
        Self { name: name.to_owned(), kind: ContenderKind::Ideal(order), changes: Vec::new() }
    }
}

impl FromStr for Contender {
    type Err = String;

    /// A policy's name, `ideal`, `ideal_fcfs`, or a policy with other settings: `predictive:slack=0.5+aged_share=0`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, changes) = text.split_once(':').unwrap_or((text, ""));
        let known = match name {
            "ideal" => IdealOrder::Shortest.into(),
            "ideal_fcfs" => IdealOrder::Fcfs.into(),
            name => Contender::from(
                PolicyName::from_str(name)
                    .map_err(|error| format!("{error}; ideal and ideal_fcfs are bounds, not policies"))?,
            ),
        };
        let changes: Vec<String> =
            changes.split('+').filter(|change| !change.is_empty()).map(str::to_owned).collect();
        // A wrong setting is told now, not in the middle of the runs.
        changed(&SchedulerSettings::default(), &changes).map_err(|error| error.to_string())?;
        Ok(Contender { name: text.to_owned(), changes, ..known })
    }
}

/// A scheduler's settings cannot be changed like this.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Not NAME=VALUE.
    #[error("{0:?} changes no setting: give NAME=VALUE")]
    Form(String),
    /// No such setting.
    #[error("the scheduler has no setting {name}; it has {known}")]
    Name {
        /// The name that was given.
        name: String,
        /// Those that exist.
        known: String,
    },
    /// The value does not fit.
    #[error("{change}: {what}")]
    Value {
        /// What was given.
        change: String,
        /// What is wrong with it.
        what: String,
    },
}

/// `settings` with some of them changed, each given as NAME=VALUE with a JSON value; a dot leads into a group.
///
/// # Errors
/// A setting does not exist, or its value is of another kind.
pub fn changed(settings: &SchedulerSettings, changes: &[String]) -> Result<SchedulerSettings, ChangeError> {
    let mut settings = settings.clone();
    for change in changes {
        let (name, text) = change.split_once('=').ok_or_else(|| ChangeError::Form(change.clone()))?;
        let wrong =
            |what: serde_json::Error| ChangeError::Value { change: change.clone(), what: what.to_string() };
        let mut all = serde_json::to_value(&settings).map_err(wrong)?;
        let known = || {
            let names = all.as_object().map(|all| all.keys().cloned().collect::<Vec<_>>());
            names.unwrap_or_default().join(", ")
        };
        let missing = ChangeError::Name { name: name.to_owned(), known: known() };
        let pointer = format!("/{}", name.replace('.', "/"));
        let place = all.pointer_mut(&pointer).ok_or(missing)?;
        *place = serde_json::from_str(text).map_err(wrong)?;
        settings = serde_json::from_value(all).map_err(wrong)?;
    }
    Ok(settings)
}

/// What arrives.
#[derive(Debug, Clone)]
pub enum Load {
    /// Requests at given times; the seed makes the jitter.
    Open(Workload, Replay),
    /// Generated agents; the seed makes them.
    Agents(AgentSettings, Replay),
    /// Clients that wait for answers.
    MultiTurn(MultiTurnSettings),
}

impl Load {
    /// What arrives with this seed.
    pub(crate) fn workload(&self, seed: u64) -> Workload {
        match self {
            Load::Open(workload, replay) => workload.replayed(Replay { seed, ..*replay }),
            Load::Agents(settings, replay) => agents(settings, seed).replayed(Replay { seed, ..*replay }),
            Load::MultiTurn(settings) => MultiTurn::workload(*settings, seed),
        }
    }
}

/// One experiment.
#[derive(Debug, Clone)]
pub struct Case {
    /// The fleet.
    pub settings: Settings,
    /// The schedulers.
    pub scheduling: SchedulerSettings,
    /// What arrives.
    pub load: Load,
    /// Who decides, one after the other.
    pub contenders: Vec<Contender>,
    /// One run each.
    pub seeds: RangeInclusive<u64>,
}

/// What one contender achieved.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Who.
    pub contender: Contender,
    /// The mean over the seeds.
    pub summary: Summary,
    /// The run of the first seed, in full.
    pub first: Outcome,
}

/// Runs every contender with every seed, on as many threads as there are processors. Setting `stop` ends the runs early, with
/// figures of no worth.
#[must_use]
pub fn run_case(case: &Case, stop: &AtomicBool) -> Vec<Standing> {
    let workloads: Vec<(u64, Workload)> =
        case.seeds.clone().map(|seed| (seed, case.load.workload(seed))).collect();
    let jobs: Vec<(usize, usize)> =
        (0..workloads.len()).flat_map(|run| (0..case.contenders.len()).map(move |at| (at, run))).collect();
    let done: Vec<Mutex<Option<Outcome>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(at, run)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (seed, workload) = &workloads[run];
                    let outcome = run_one(case, &case.contenders[at], workload, *seed, stop);
                    *done[run * case.contenders.len() + at].lock() = Some(outcome);
                }
            });
        }
    });
    let outcomes: Vec<Outcome> = done.into_iter().filter_map(Mutex::into_inner).collect();
    let standing = |(at, contender): (usize, &Contender)| {
        let of_contender = || outcomes.iter().skip(at).step_by(case.contenders.len());
        let summaries: Vec<Summary> = of_contender().map(Outcome::summary).collect();
        let first = of_contender().next()?.clone();
        Some(Standing { contender: contender.clone(), summary: Summary::mean(&summaries), first })
    };
    case.contenders.iter().enumerate().filter_map(standing).collect()
}

fn run_one(case: &Case, contender: &Contender, workload: &Workload, seed: u64, stop: &AtomicBool) -> Outcome {
    match contender.kind {
        ContenderKind::Policy(policy) => {
            // Contenders with settings that do not fit are refused when they are named.
            let scheduling =
                changed(&case.scheduling, &contender.changes).unwrap_or_else(|_| case.scheduling.clone());
            let mut gateways = Gateways::new(policy, &scheduling, &case.settings, seed);
            play(&case.settings, workload, seed, &mut gateways, stop)
        }
        ContenderKind::Ideal(order) => {
            let settings = Settings { shared_cache: true, ..case.settings.clone() };
            play(&settings, workload, seed, &mut Ideal::new(order), stop)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contender_may_have_settings_of_its_own() {
        let contender: Contender = "predictive:slack=0.5+duplicate_price=0".parse().expect("known");
        assert_eq!(contender.kind, ContenderKind::Policy(PolicyName::Predictive));
        let settings = changed(&SchedulerSettings::default(), &contender.changes).expect("fit");
        assert_eq!((settings.slack, settings.duplicate_price), (0.5, 0.0));
        assert_eq!("ideal".parse::<Contender>().expect("known"), IdealOrder::Shortest.into());
    }

    #[test]
    fn a_wrong_change_is_told_with_what_would_be_right() {
        let wrong = |text: &str| text.parse::<Contender>().expect_err("wrong");
        assert!(wrong("predictiv").contains("predictive"));
        assert!(wrong("predictive:slak=1").contains("slack"));
        assert!(wrong("predictive:slack").contains("NAME=VALUE"));
        assert!(wrong("predictive:slack=much").contains("slack=much"));
        let target = [r#"ttft_target={"base":2,"cold_factor":3}"#.to_owned()];
        assert!(changed(&SchedulerSettings::default(), &target).expect("fits").ttft_target.is_some());
    }
}

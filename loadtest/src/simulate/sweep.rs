//! Runs of several seeds and several policies on the same load.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use moongate_scheduler::{PolicyName, Settings as SchedulerSettings};
use parking_lot::Mutex;

use super::agents::{AgentSettings, agents};
use super::gateway::Gateways;
use super::ideal::{Ideal, IdealOrder};
use super::multiturn::{MultiTurn, MultiTurnSettings};
use super::outcome::{Outcome, Summary};
use super::run::{Control, play};
use super::settings::Settings;
use super::workload::{Replay, Workload};

/// Who decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// A policy of the scheduler.
    Policy(PolicyName),
    /// One queue before engines that share a cache without bounds: what no policy reaches.
    Ideal(IdealOrder),
}

impl Contender {
    /// The name in flags and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Contender::Policy(policy) => policy.as_str(),
            Contender::Ideal(IdealOrder::Fcfs) => "ideal_fcfs",
            Contender::Ideal(IdealOrder::Shortest) => "ideal",
        }
    }
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
    fn workload(&self, seed: u64) -> Workload {
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
    /// Seeds 1 to this.
    pub seeds: u64,
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

/// Runs every contender with every seed, on as many threads as there are processors.
#[must_use]
pub fn run_case(case: &Case) -> Vec<Standing> {
    let seeds = case.seeds.max(1);
    let jobs: Vec<(usize, u64)> =
        (1..=seeds).flat_map(|seed| (0..case.contenders.len()).map(move |at| (at, seed))).collect();
    let workloads: Vec<Workload> = (1..=seeds).map(|seed| case.load.workload(seed)).collect();
    let done: Vec<Mutex<Option<Outcome>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(at, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let workload = &workloads[usize::try_from(seed - 1).unwrap_or(0)];
                    let outcome = run_one(case, case.contenders[at], workload, seed);
                    let position = usize::try_from(seed - 1).unwrap_or(0) * case.contenders.len() + at;
                    *done[position].lock() = Some(outcome);
                }
            });
        }
    });
    let outcomes: Vec<Outcome> = done.into_iter().filter_map(Mutex::into_inner).collect();
    let standing = |(at, &contender): (usize, &Contender)| {
        let of_contender = || outcomes.iter().skip(at).step_by(case.contenders.len());
        let summaries: Vec<Summary> = of_contender().map(Outcome::summary).collect();
        let first = of_contender().next()?.clone();
        Some(Standing { contender, summary: Summary::mean(&summaries), first })
    };
    case.contenders.iter().enumerate().filter_map(standing).collect()
}

fn run_one(case: &Case, contender: Contender, workload: &Workload, seed: u64) -> Outcome {
    match contender {
        Contender::Policy(policy) => {
            let mut gateways = Gateways::new(policy, &case.scheduling, &case.settings, seed);
            play(&case.settings, workload, seed, &mut gateways)
        }
        Contender::Ideal(order) => {
            let settings = Settings { shared_cache: true, ..case.settings.clone() };
            let mut ideal: Box<dyn Control> = Box::new(Ideal::new(order));
            play(&settings, workload, seed, ideal.as_mut())
        }
    }
}

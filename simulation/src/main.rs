//! Runs the whole system on a simulated network, one process per seed.
//!
//! | module | subject |
//! |---|---|
//! | `plan` | values derived from a seed: protocol, delays, load, faults |
//! | `hosts` | the programs: gateway, engines, master, nodes |
//! | `clients` | requests to the gateway, and checks of responses |
//! | `objects` | puts and gets of the store, and checks of gets |
//! | `cluster` | the operator's plans on API objects in memory, during a rolling update |
//! | `run` | one seed from its start to the last check |
//! | `batch` | many seeds in processes of their own |

mod batch;
mod clients;
mod cluster;
mod hosts;
mod objects;
mod plan;
mod report;
mod run;

use std::process::ExitCode;

use clap::Parser;

/// Runs the whole system on a simulated network with time, delays and faults derived from a seed.
#[derive(Debug, Clone, Parser)]
struct SimulationArgs {
    /// Run only this seed, in this process
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
    /// Number of seeds to run, each in a process of its own
    #[arg(long, value_name = "N", default_value_t = 32)]
    seeds: u64,
    /// First seed of the range
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    first: u64,
    /// Number of concurrent processes; default: the number of cores
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Run each seed twice and compare the hashes of the traces
    #[arg(long)]
    check_determinism: bool,
    /// Print the plans of the seeds without running them
    #[arg(long)]
    plan: bool,
    /// Print every event of the trace
    #[arg(long)]
    trace: bool,
    /// Print logs with this filter, in the syntax of RUST_LOG
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,
}

fn main() -> ExitCode {
    let flags = SimulationArgs::parse();
    if flags.plan {
        let seeds =
            flags.seed.map_or(flags.first..flags.first.saturating_add(flags.seeds), |seed| seed..seed + 1);
        seeds.for_each(|seed| batch::print(&plan::SeedPlan::new(seed).to_string()));
        return ExitCode::SUCCESS;
    }
    match flags.seed {
        Some(seed) => run::main(seed, flags.trace, flags.log),
        None => batch::main(&flags),
    }
}

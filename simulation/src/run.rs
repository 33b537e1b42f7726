//! One seed, from its start to the last check.

use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use mad_turmoil::time::SimClocksGuard;
use moongate_loadtest::engine::{EngineFault, EngineFaultPlan};
use moongate_runtime::net::simulated::{
    capture_trace, inject_disconnects, injected_disconnects, record, trace_hash,
};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use turmoil::{Builder, Sim};

use crate::batch::print;
use crate::cluster::SimulatedCluster;
use crate::plan::{CRASHABLE_HOSTS, FaultWindow, NODES, PAIRS, SeedPlan, SimulatedFault, SimulatedHost};
use crate::report::{counts, violation, violations};
use crate::{clients, hosts, objects};

/// Scheduling interval of hosts, and so the minimum message delay.
const TICK: Duration = Duration::from_millis(5);
/// Maximum simulated duration of a run.
const MAX_DURATION: Duration = Duration::from_secs(300);
/// Time for gateway and engines to end the requests of disconnected clients.
const DRAIN_TIME: Duration = Duration::from_secs(8);

/// Runs a seed in this process, and only this one: its clocks and random numbers are those of the seed.
pub(crate) fn main(seed: u64, traced: bool, log: Option<String>) -> ExitCode {
    mad_turmoil::rand::set_rng(StdRng::seed_from_u64(seed));
    // Hash maps of this thread have received their keys already.
    let run = std::thread::Builder::new().stack_size(16 << 20).spawn(move || {
        fastrand::seed(seed);
        if traced {
            capture_trace(print);
        }
        if let Some(log) = log {
            tracing_subscriber::fmt()
                .with_env_filter(log)
                .with_ansi(false)
                .with_writer(std::io::stderr)
                .init();
        }
        run(seed)
    });
    let is_well = run.is_ok_and(|run| run.join().unwrap_or(false));
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(seed: u64) -> bool {
    let plan = Rc::new(SeedPlan::new(seed));
    let folder = match folder() {
        Ok(folder) => folder,
        Err(error) => {
            print(&format!("no folder for files: {error}"));
            return false;
        }
    };
    let _clocks = SimClocksGuard::init();
    let mut simulation = SimulationRun::new(Rc::clone(&plan), folder.path().to_owned());
    let ended = simulation.run();
    if let Err(error) = &ended {
        violation("run completes", &error.to_string());
    }
    drop(simulation);
    let panics = moongate_runtime::task_panics();
    if panics > 0 {
        violation("panics", &format!("{panics} tasks have panicked"));
    }
    let violations = violations();
    let line = format!("seed={seed} trace={:016x} cut={} {}", trace_hash(), injected_disconnects(), counts());
    if !violations.is_empty() {
        print(&format!("{plan}"));
        violations.iter().for_each(|violation| print(&format!("seed {seed}: VIOLATED {violation}")));
    }
    print(&line);
    violations.is_empty()
}

/// In memory if possible, because files are flushed often.
fn folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::TempDir::with_prefix_in("moongate-simulation-", "/dev/shm")
        .or_else(|_| tempfile::TempDir::new())
}

struct SimulationRun {
    plan: Rc<SeedPlan>,
    sim: Sim<'static>,
    cluster: Option<SimulatedCluster>,
    /// Whether each fault has started.
    fault_started: Vec<bool>,
    fault_ended: Vec<bool>,
}

impl SimulationRun {
    fn new(plan: Rc<SeedPlan>, folder: PathBuf) -> Self {
        let mut sim = Builder::new()
            .rng_seed(plan.seed)
            .enable_random_order()
            .tick_duration(TICK)
            .simulation_duration(MAX_DURATION)
            .min_message_latency(plan.latency.0)
            .max_message_latency(plan.latency.1)
            .tcp_capacity(1 << 14)
            .build();
        let state = folder.join("master");
        sim.host(SimulatedHost::Master.name(), move || {
            let state = state.clone();
            async move { hosts::master(&state).await }
        });
        for number in 0..NODES {
            let host = SimulatedHost::Node(number);
            let memory = plan.persistent_memory.then(|| folder.join(host.name()));
            if let Some(Err(error)) = memory.as_ref().map(std::fs::create_dir_all) {
                violation(
                    "run completes",
                    &format!("cannot create the memory folder of {}: {error}", host.name()),
                );
            }
            sim.host(host.name(), move || {
                let memory = memory.clone();
                async move { hosts::node(host, memory.as_deref()).await }
            });
        }
        for host in engines() {
            let plan = Rc::clone(&plan);
            sim.host(host.name(), move || hosts::engine(host, Rc::clone(&plan)));
        }
        sim.host(SimulatedHost::Gateway.name(), hosts::gateway);
        sim.client("clients", clients::run(Rc::clone(&plan)));
        sim.client("objects", objects::run(Rc::clone(&plan)));
        let faults = plan.faults.len();
        let cluster = plan.updates.then(|| SimulatedCluster::new(plan.seed));
        Self { plan, sim, cluster, fault_started: vec![false; faults], fault_ended: vec![false; faults] }
    }

    fn run(&mut self) -> turmoil::Result {
        record(format_args!("{}", self.plan));
        while !self.step()? {}
        let until = self.sim.elapsed() + DRAIN_TIME;
        while self.sim.elapsed() < until {
            self.step()?;
        }
        check_nothing_in_flight();
        if let Some(cluster) = &mut self.cluster {
            cluster.finish();
        }
        Ok(())
    }

    fn step(&mut self) -> turmoil::Result<bool> {
        let now = self.sim.elapsed();
        for (number, incident) in self.plan.clone().faults.iter().enumerate() {
            if !self.fault_started[number] && now >= incident.start {
                self.fault_started[number] = true;
                self.start_fault(*incident);
            }
            if !self.fault_ended[number] && now >= incident.end {
                self.fault_ended[number] = true;
                self.end(*incident);
            }
        }
        if let Some(cluster) = &mut self.cluster {
            cluster.step(now);
        }
        self.start_and_stop();
        self.sim.step()
    }

    /// Crashes hosts that must not run, and starts those that must.
    fn start_and_stop(&mut self) {
        for host in CRASHABLE_HOSTS {
            let is_crashed = self.plan.faults.iter().enumerate().any(|(number, incident)| {
                incident.fault == SimulatedFault::Crash(host)
                    && self.fault_started[number]
                    && !self.fault_ended[number]
            });
            let is_down =
                host.is_engine() && self.cluster.as_ref().is_some_and(|cluster| cluster.is_down(host));
            let (runs, should_run) = (self.sim.is_host_running(host.name()), !is_crashed && !is_down);
            if runs && !should_run {
                record(format_args!("{} crashes", host.name()));
                self.sim.crash(host.name());
            } else if !runs && should_run {
                record(format_args!("{} starts", host.name()));
                self.sim.bounce(host.name());
            }
        }
    }

    fn start_fault(&mut self, incident: FaultWindow) {
        record(format_args!("starts: {:?}", incident.fault));
        match incident.fault {
            SimulatedFault::Crash(_) => {}
            SimulatedFault::Partition(one, other) => self.sim.hold(one.name(), other.name()),
            SimulatedFault::Slow(host, factor) => {
                engine_fault(host, EngineFault::Slow { factor: f64::from(factor) });
            }
            SimulatedFault::Hang(host) => engine_fault(host, EngineFault::Hang),
            SimulatedFault::BreakStreams(host, tokens) => {
                engine_fault(host, EngineFault::DisconnectMidStream { tokens: u64::from(tokens) });
            }
            SimulatedFault::CutConnections(per_million) => inject_disconnects(self.plan.seed, per_million),
        }
    }

    fn end(&mut self, incident: FaultWindow) {
        record(format_args!("ends: {:?}", incident.fault));
        match incident.fault {
            SimulatedFault::Crash(_) => {}
            SimulatedFault::Partition(one, other) => self.sim.release(one.name(), other.name()),
            SimulatedFault::Slow(host, _)
            | SimulatedFault::Hang(host)
            | SimulatedFault::BreakStreams(host, _) => {
                engine_fault(host, EngineFault::None);
            }
            SimulatedFault::CutConnections(_) => inject_disconnects(self.plan.seed, 0),
        }
    }
}

fn engine_fault(host: SimulatedHost, fault: EngineFault) {
    hosts::set_fault(host, EngineFaultPlan::from(fault));
}

pub(crate) fn engines() -> impl Iterator<Item = SimulatedHost> {
    (0..PAIRS).flat_map(|number| [SimulatedHost::Prefill(number), SimulatedHost::Decode(number)])
}

/// Checks that nothing is in flight when no client is left.
fn check_nothing_in_flight() {
    match hosts::in_flight() {
        Some(0) => {}
        Some(left) => {
            violation("nothing in flight", &format!("the gateway counts {left} requests in flight"));
        }
        None => violation("nothing in flight", "the gateway does not run"),
    }
    for host in engines() {
        let Some(stats) = hosts::stats(host) else {
            violation("nothing in flight", &format!("{} does not run", host.name()));
            continue;
        };
        record(format_args!("{}: {stats:?}", host.name()));
        if stats.active + stats.running + stats.waiting > 0 {
            violation("nothing in flight", &format!("{} still has requests: {stats:?}", host.name()));
        }
        if stats.prompt_mismatches > 0 {
            violation("answer consistency", &format!("{} decoded with another prompt's cache", host.name()));
        }
        if stats.store_corrupt > 0 {
            violation("read integrity", &format!("{} read a page other than was put", host.name()));
        }
    }
}

//! Many seeds, each in a process of its own, because clocks and random numbers are replaced for a whole process.

use std::collections::VecDeque;
use std::io::Write as _;
use std::num::NonZero;
use std::process::{Child, Command, ExitCode, Stdio};

use crate::SimulationArgs;

struct SeedJob {
    seed: u64,
    /// One process, or two to compare.
    children: Vec<Child>,
}

/// Runs the seeds, and prints those that fail.
pub(crate) fn main(flags: &SimulationArgs) -> ExitCode {
    let (mut jobs, mut failed, mut traces) = (VecDeque::new(), Vec::new(), Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let at_once = flags.jobs.unwrap_or(cores).max(1);
    let last = flags.first.saturating_add(flags.seeds);
    for seed in flags.first..last {
        if jobs.len() >= at_once
            && let Some(job) = jobs.pop_front()
        {
            finish(job, &mut failed, &mut traces);
        }
        match start(seed, flags.check_determinism) {
            Ok(job) => jobs.push_back(job),
            Err(error) => {
                print(&format!("cannot start a process for seed {seed}: {error}"));
                return ExitCode::FAILURE;
            }
        }
    }
    for job in jobs {
        finish(job, &mut failed, &mut traces);
    }
    print(&format!("{} seeds from {}: {} failed", flags.seeds, flags.first, failed.len()));
    for seed in &failed {
        print(&format!("  failed: seed {seed}; replay it with: scripts/simulate --seed {seed}"));
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn start(seed: u64, check_determinism: bool) -> std::io::Result<SeedJob> {
    let program = std::env::current_exe()?;
    let run = || {
        let mut command = Command::new(&program);
        command.args(["--seed", &seed.to_string()]).stdin(Stdio::null());
        // No simulated host uses TLS, and reading the system's certificates takes longer than a simulated second.
        command.env("SSL_CERT_FILE", "/dev/null").env_remove("SSL_CERT_DIR");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let children = (0..if check_determinism { 2 } else { 1 }).map(|_| run()).collect::<Result<_, _>>()?;
    Ok(SeedJob { seed, children })
}

/// Waits for a seed. `traces` collects the hashes of successful runs.
fn finish(job: SeedJob, failed: &mut Vec<u64>, traces: &mut Vec<String>) {
    let mut lines = Vec::new();
    let mut is_well = true;
    for child in job.children {
        let Ok(output) = child.wait_with_output() else {
            is_well = false;
            continue;
        };
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !output.status.success() {
            is_well = false;
            print(&format!("{text}\n{}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        lines.push(text);
    }
    if is_well && lines.windows(2).any(|pair| pair.first() != pair.last()) {
        is_well = false;
        print(&format!("seed {} differs from run to run:\n{}", job.seed, lines.join("\n")));
    }
    if is_well {
        lines.truncate(1);
        lines.iter().for_each(|line| print(line));
        traces.extend(lines);
    } else {
        failed.push(job.seed);
    }
}

/// Prints a line. Errors are ignored, because they mean that stdout was closed.
pub(crate) fn print(line: &str) {
    let mut output = std::io::stdout().lock();
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

//! CPU time and memory of processes, from /proc.

use std::fs;

use anyhow::{Context as _, ensure};

/// Maximum number of processes in one tree.
const MAX_TREE: usize = 256;

/// USER_HZ, the unit of `/proc/stat`, is 100 on all common Linux systems.
const NS_PER_TICK: u64 = 10_000_000;

/// A process and its current descendants: a gateway may use child processes.
pub(crate) fn process_tree(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut tree = vec![pid];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        next += 1;
        let tasks = fs::read_dir(format!("/proc/{parent}/task"));
        let Ok(tasks) = tasks else {
            ensure!(parent != pid, "process {pid} does not exist");
            continue;
        };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            tree.extend(children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
        ensure!(tree.len() <= MAX_TREE, "process {pid} has more than {MAX_TREE} descendants");
    }
    Ok(tree)
}

/// CPU time in nanoseconds of the process and its descendants, to a tick of 10 ms. It includes threads that have ended: the thread that
/// loaded a tokenizer ends some seconds later, and its time would be missing at the end of a measurement.
pub(crate) fn cpu_ns(pid: u32) -> anyhow::Result<u64> {
    let mut ticks = 0;
    for member in process_tree(pid)? {
        // Processes may exit in the meantime.
        let stat = fs::read_to_string(format!("/proc/{member}/stat")).unwrap_or_default();
        // The name may contain anything. `utime` and `stime` are the 12th and 13th member after it.
        let members = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
        ticks += members.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>();
    }
    Ok(ticks * NS_PER_TICK)
}

/// Resident memory of the process and its descendants, in KiB.
pub(crate) fn rss_kib(pid: u32) -> anyhow::Result<u64> {
    let mut total = 0;
    for member in process_tree(pid)? {
        let status = fs::read_to_string(format!("/proc/{member}/status")).unwrap_or_default();
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        total += rss.and_then(|rss| rss.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(total)
}

/// Nanoseconds of busy time of all CPUs since boot, including time stolen by the host.
pub(crate) fn machine_busy_ns() -> anyhow::Result<u64> {
    let stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = stat.lines().next().unwrap_or_default();
    let ticks: Vec<u64> =
        line.split_ascii_whitespace().skip(1).filter_map(|tick| tick.parse().ok()).collect();
    ensure!(ticks.len() >= 8, "/proc/stat starts with {line:?}");
    // user nice system (idle iowait) irq softirq steal
    Ok((ticks[..3].iter().sum::<u64>() + ticks[5..8].iter().sum::<u64>()) * NS_PER_TICK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_cpu_and_memory() {
        let pid = std::process::id();
        let before = cpu_ns(pid).unwrap();
        let mut sum = 0_u64;
        while cpu_ns(pid).unwrap() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(rss_kib(pid).unwrap() > 500);
        assert!(machine_busy_ns().unwrap() > 0);
        assert!(cpu_ns(u32::MAX - 1).is_err());
    }
}

//! The operator's process: its resource usage and its metrics.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};

/// Names of histograms of reconciliation durations: ours, ours without writes, and controller-runtime's.
const HISTOGRAMS: [(&str, &str); 3] = [
    ("reconciles", "moongate_operator_reconcile_seconds_bucket"),
    ("plans", "moongate_operator_plan_seconds_bucket"),
    ("reconciles", "controller_runtime_reconcile_time_seconds_bucket"),
];

/// The process is killed on drop.
pub(crate) struct OperatorChild(Child);

impl OperatorChild {
    /// Waits for the exit of the process, which is not expected.
    pub(crate) async fn wait(&mut self) -> ExitStatus {
        self.0.wait().await.unwrap()
    }
}

pub(crate) struct ProcessStats(u32);

impl ProcessStats {
    pub(crate) fn start(program: &[String], kubeconfig: &Path, log: &Path) -> (OperatorChild, Self) {
        let log = File::create(log).unwrap();
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).env("KUBECONFIG", kubeconfig).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log).kill_on_drop(true);
        let child = command.spawn().unwrap();
        let process = Self(child.id().unwrap());
        (OperatorChild(child), process)
    }

    /// CPU time of all threads so far.
    pub(crate) fn cpu(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0)).unwrap();
        let of_task = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0)
        };
        Duration::from_nanos(tasks.flatten().map(of_task).sum())
    }

    /// Resident memory, present and peak, in MB.
    pub(crate) fn memory(&self) -> (f64, f64) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap();
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() * 1024.0 / 1e6
        };
        (kib("VmRSS:"), kib("VmHWM:"))
    }
}

pub(crate) fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Summarises histograms: bounds of the median and the 99th percentile, by kind or controller.
pub(crate) fn durations(text: &str) -> String {
    let mut all: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for line in text.lines() {
        let Some((what, _)) = HISTOGRAMS.iter().find(|(_, name)| line.starts_with(name)) else { continue };
        let label = |name: &str| line.split(&format!("{name}=\"")).nth(1)?.split('"').next();
        let bound = label("le").unwrap().parse().unwrap_or(f64::INFINITY);
        let below: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        for kind in [label("kind").or_else(|| label("controller")).unwrap(), "all"] {
            let bounds = all.entry((what, kind)).or_default();
            match bounds.iter_mut().find(|(other, _)| bound.total_cmp(other).is_eq()) {
                Some((_, count)) => *count += below,
                None => bounds.push((bound, below)),
            }
        }
    }
    let tell = |((what, kind), mut bounds): ((&str, &str), Vec<(f64, f64)>)| {
        bounds.sort_by(|one, other| one.0.total_cmp(&other.0));
        let count = bounds.last().map_or(0.0, |(_, count)| *count);
        let within = |share: f64| {
            let enough = bounds.iter().find(|(_, below)| *below >= count * share);
            enough.map_or(0.0, |(bound, _)| bound * 1000.0)
        };
        let [half, most] = [0.5, 0.99].map(within);
        format!("  {what} of {kind}: {count}, p50 within {half} ms, p99 within {most} ms\n")
    };
    all.into_iter().map(tell).collect()
}

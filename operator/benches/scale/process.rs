//! The operator's process: what it takes of the machine, and what it says of itself.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Histograms of how long reconciles take: ours, and what controller-runtime calls it.
const HISTOGRAMS: [&str; 2] =
    ["moongate_operator_reconcile_seconds_bucket", "controller_runtime_reconcile_time_seconds_bucket"];

pub(crate) struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    pub(crate) fn start(program: &[String], kubeconfig: &Path, log: &Path) -> Self {
        let log = File::create(log).unwrap();
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).env("KUBECONFIG", kubeconfig).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().unwrap())
    }

    /// On a CPU until now, all threads.
    pub(crate) fn cpu(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        let of_task = |task: fs::DirEntry| {
            let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0)
        };
        Duration::from_nanos(tasks.flatten().map(of_task).sum())
    }

    /// Resident memory now and at most, MB.
    pub(crate) fn memory(&self) -> (f64, f64) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
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

/// Below which of the histogram's bounds are 99 % of reconciles, of all kinds together.
pub(crate) fn slowest(text: &str) -> String {
    let mut below: BTreeMap<u64, u64> = BTreeMap::new();
    for line in text.lines().filter(|line| HISTOGRAMS.iter().any(|name| line.starts_with(name))) {
        let bound = line.split("le=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let bound = bound.parse::<f64>().unwrap_or(f64::INFINITY).min(1e9);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
        let micros = (bound * 1e6) as u64;
        *below.entry(micros).or_default() += line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    }
    let all = below.values().last().copied().unwrap_or(0);
    let bound = below.iter().find(|(_, count)| **count * 100 >= all * 99).map_or(0, |(bound, _)| *bound);
    format!("{all}, 99 % of them within {} ms", bound / 1000)
}

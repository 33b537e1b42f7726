//! A program in a process of its own that is killed, stopped and started again. It writes its log to a file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A `moongate` process that can be started again. Killed when dropped.
pub(crate) struct ChaosProcess {
    args: Vec<String>,
    variables: Vec<(&'static str, String)>,
    log: PathBuf,
    child: Option<Child>,
    stopped: bool,
}

/// Memory of its own in bytes, and open descriptors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessUsage {
    pub(crate) memory: u64,
    pub(crate) descriptors: u64,
}

impl ChaosProcess {
    pub(crate) fn start(log: &Path, args: Vec<String>, variables: Vec<(&'static str, String)>) -> Self {
        let mut process = Self { args, variables, log: log.to_owned(), child: None, stopped: false };
        process.restart();
        process
    }

    /// Does nothing if it runs.
    pub(crate) fn restart(&mut self) {
        if self.child.is_some() {
            return;
        }
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_moongate"));
        command.args(&self.args).env_clear().envs(self.variables.iter().map(|(name, value)| (name, value)));
        let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.child = Some(command.spawn().unwrap());
        self.stopped = false;
    }

    /// Kills the process, as by `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// SIGSTOP or SIGCONT. Does nothing to a process that is gone.
    pub(crate) fn stop(&mut self, stop: bool) {
        let Some(child) = self.child.as_ref().filter(|_| stop != self.stopped) else { return };
        let signal = if stop { "-STOP" } else { "-CONT" };
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success(), "{:?}", self.args);
        self.stopped = stop;
    }

    /// Whether it ended by itself, which no fault here makes a program do.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some())
    }

    pub(crate) fn usage(&self) -> ProcessUsage {
        let id = self.child.as_ref().expect("it runs").id();
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        let memory = line.trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10;
        let descriptors = std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count() as u64;
        ProcessUsage { memory, descriptors }
    }

    /// The end of its log, for messages.
    pub(crate) fn log(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("{:?}\n{}", self.args, lines[lines.len().saturating_sub(30)..].join("\n"))
    }
}

impl Drop for ChaosProcess {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Already gone is fine.
            let _gone = child.kill();
            let _gone = child.wait();
        }
    }
}

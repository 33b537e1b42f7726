//! Child processes: pinned to a core, with their output captured for error messages, killed on drop.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Time limit for a killed process to exit.
const REAP_LIMIT: Duration = Duration::from_secs(10);

/// Working folder and placement of processes.
#[derive(Debug)]
pub(super) struct BenchEnvironment {
    /// `None` if processes are not pinned.
    pub(super) taskset: Option<PathBuf>,
    pub(super) gateway_cpu: u32,
    pub(super) load_cpu: u32,
    /// Whether engines and load generator busy-poll instead of sleeping.
    pub(super) busy_poll: bool,
    pub(super) scratch: TempDir,
}

impl BenchEnvironment {
    /// A command that will run on `cpu` and be killed when its handle is dropped.
    pub(super) fn command(&self, cpu: u32, program: &Path) -> Command {
        let mut command = match &self.taskset {
            Some(taskset) => {
                let mut command = Command::new(taskset);
                command.args(["-c", &cpu.to_string()]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.kill_on_drop(true).stdin(Stdio::null());
        command
    }
}

#[derive(Debug)]
pub(super) struct GatewayProcess {
    child: Child,
    log: PathBuf,
}

impl GatewayProcess {
    pub(super) fn start(environment: &BenchEnvironment, mut command: Command) -> anyhow::Result<Self> {
        let file =
            tempfile::Builder::new().prefix("gateway-").suffix(".log").tempfile_in(&environment.scratch);
        let (file, log) = file.and_then(|file| Ok(file.keep()?)).context("log of the gateway")?;
        command.stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        Ok(Self { child, log })
    }

    pub(super) fn pid(&self) -> anyhow::Result<u32> {
        self.child.id().context("the gateway has ended")
    }

    /// Returns an error if the process has exited.
    pub(super) fn ensure_running(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the gateway exited ({status}): {}", self.log_tail()),
            None => Ok(()),
        }
    }

    /// The last lines of its output.
    pub(super) fn log_tail(&self) -> String {
        const LONGEST: usize = 1500;
        let text = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(LONGEST)..]).trim().to_owned()
    }

    /// Kills the process and waits for its exit, so that the next one has the core to itself.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        match timeout(REAP_LIMIT, self.child.kill()).await {
            Ok(outcome) => Ok(outcome?),
            Err(_) => bail!("a killed gateway did not exit within {REAP_LIMIT:?}"),
        }
    }
}

/// Runs a command to its end and returns its output.
pub(super) async fn output(mut command: Command, limit: Duration) -> anyhow::Result<Output> {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{command:?}"))?;
    match timeout(limit, child.wait_with_output()).await {
        Ok(output) => Ok(output?),
        Err(_) => bail!("{command:?} did not exit within {limit:?}"),
    }
}

/// Finds a program by name on PATH, as a shell does.
pub(super) fn find_on_path(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    let mut found = env::split_paths(&folders).map(|folder| folder.join(name.as_ref()));
    found.find(|file| file.is_file())
}

//! `moongate master`

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};

use clap::Args;
use moongate_master::flags::{self, MasterInvocation, MasterOptions};
use moongate_master::ha::{LeaseReporter, wait_for_exit};
use moongate_runtime::{Supervisor, terminated};

use crate::output::{print, print_error};

/// The command line of `moongate master`, passed through unparsed: its flags have the syntax of Mooncake's master (gflags), which
/// clap does not support.
#[derive(Debug, Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct MasterArgs {
    /// Flags of Mooncake's master, and additional ones; `moongate master --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    flags: Vec<OsString>,
}

impl MasterArgs {
    /// The options to serve with, or the exit code if the command ends at once, such as after `--help`.
    pub(crate) fn options(&self) -> Result<MasterOptions, ExitCode> {
        match flags::read(self.flags.iter().cloned(), |name| std::env::var(name).ok()) {
            Ok(MasterInvocation::Serve(options)) => Ok(*options),
            Ok(MasterInvocation::PrintText(text)) => {
                Err(print(text.trim_end()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS))
            }
            Err(error) => {
                print_error(error);
                Err(ExitCode::from(2))
            }
        }
    }

    /// Starts the process that releases this master's lease if it dies.
    fn start_exit_watcher(&self) -> io::Result<LeaseReporter> {
        let mut watcher = Command::new(std::env::current_exe()?);
        watcher.arg("master-exit-watcher").args(&self.flags).stdin(Stdio::piped()).stdout(Stdio::null());
        // Signals for the group of this process, such as Ctrl-C, must not end the watcher first.
        let pipe = watcher.process_group(0).spawn()?.stdin.take();
        Ok(pipe.map(LeaseReporter::new).unwrap_or_default())
    }
}

/// Waits until the master that started this process has ended, and releases the lease that it held.
pub(crate) async fn watch_exit(options: MasterOptions) -> anyhow::Result<ExitCode> {
    if let Some(held) = wait_for_exit(io::stdin().lock())?
        && let Some(ha) = options.ha
    {
        moongate_master::release_lease_after_exit(ha, held).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves until SIGTERM or Ctrl-C, then completes calls in progress.
pub(crate) async fn run(
    options: MasterOptions,
    arguments: MasterArgs,
    supervisor: Supervisor,
) -> anyhow::Result<ExitCode> {
    let grace = options.shutdown_grace;
    if let Some(ha) = options.ha.clone() {
        let lease_reporter = arguments.start_exit_watcher().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot start the exit watcher: if this master dies, its lease has to expire");
            LeaseReporter::default()
        });
        let _master = moongate_master::start_ha(ha, options, lease_reporter, &supervisor).await?;
        terminated().await;
        if let Err(still) = supervisor.shutdown(grace).await {
            tracing::warn!("{still}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let master = moongate_master::start(options, &supervisor).await?;
    terminated().await;
    master.stop();
    tokio::select! {
        ended = supervisor.shutdown(grace) => if let Err(still) = ended {
            tracing::warn!("{still}");
        },
        () = terminated() => tracing::warn!("second signal: stopping without waiting for calls in progress"),
    }
    master.finish();
    Ok(ExitCode::SUCCESS)
}

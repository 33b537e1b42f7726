//! `moongate master`

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use moongate_master::flags::{self, MasterInvocation, MasterOptions};
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
    pub(crate) fn options(self) -> Result<MasterOptions, ExitCode> {
        match flags::read(self.flags, |name| std::env::var(name).ok()) {
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
}

/// Serves until SIGTERM or Ctrl-C, then completes calls in progress.
pub(crate) async fn run(options: MasterOptions, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let grace = options.shutdown_grace;
    if let Some(ha) = options.ha.clone() {
        let _master = moongate_master::start_ha(ha, options, &supervisor).await?;
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

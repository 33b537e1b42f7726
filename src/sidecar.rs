//! `moongate sidecar`

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use moongate_runtime::{Supervisor, terminated};
use moongate_sidecar::{DrainOptions, SidecarOptions, SidecarStartError};
use moongate_telemetry::LoggingArgs;

use crate::settings::start_error;

/// Time limit for deregistering the engine from gateways.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Flags of `moongate sidecar`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SidecarArgs {
    /// Another task than to run next to the engine.
    #[command(subcommand)]
    task: Option<SidecarTask>,
    #[command(flatten)]
    options: SidecarOptions,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

#[derive(Debug, Subcommand)]
enum SidecarTask {
    /// Drain the engine, and wait until it is idle: for the preStop hook of its container.
    Drain(DrainOptions),
}

/// Runs until SIGTERM or Ctrl-C, then deregisters the engine.
pub(crate) async fn run(command: SidecarArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    if let Some(SidecarTask::Drain(options)) = &command.task {
        moongate_sidecar::drain(options).await?;
        return Ok(ExitCode::SUCCESS);
    }
    moongate_sidecar::start(command.options, &supervisor).map_err(|error| {
        let is_invalid = matches!(error, SidecarStartError::Tls(_));
        start_error(error, is_invalid)
    })?;
    terminated().await;
    if let Err(still) = supervisor.shutdown(SHUTDOWN_GRACE).await {
        tracing::warn!("{still}");
    }
    Ok(ExitCode::SUCCESS)
}

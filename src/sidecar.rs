//! `moongate sidecar`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_runtime::{Supervisor, terminated};
use moongate_sidecar::{SidecarOptions, SidecarStartError};
use moongate_telemetry::LoggingArgs;

use crate::settings::start_error;

/// Time limit for deregistering the engine from gateways.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Flags of `moongate sidecar`.
#[derive(Debug, Args)]
pub(crate) struct SidecarArgs {
    #[command(flatten)]
    options: SidecarOptions,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Runs until SIGTERM or Ctrl-C, then deregisters the engine.
pub(crate) async fn run(command: SidecarArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
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

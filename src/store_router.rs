//! `moongate store-router`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_runtime::{Supervisor, terminated};
use moongate_store_router::RouterOptions;
use moongate_telemetry::LoggingArgs;

use crate::settings::start_error;

/// Time for calls in progress at shutdown.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Flags of `moongate store-router`.
#[derive(Debug, Args)]
pub(crate) struct StoreRouterArgs {
    #[command(flatten)]
    options: RouterOptions,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Serves until SIGTERM or Ctrl-C, then completes calls in progress.
pub(crate) async fn run(command: StoreRouterArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let router = moongate_store_router::start(&command.options, &supervisor).map_err(|error| {
        let is_invalid = error.is_invalid_setting();
        start_error(error, is_invalid)
    })?;
    terminated().await;
    router.stop();
    if let Err(still) = supervisor.shutdown(SHUTDOWN_GRACE).await {
        tracing::warn!("{still}");
    }
    Ok(ExitCode::SUCCESS)
}

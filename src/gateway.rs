//! `moongate gateway`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_gateway::{GatewayOptions, RunningGateway};
use moongate_runtime::{Supervisor, raise_open_file_limit, terminated};
use moongate_telemetry::{LoggingArgs, TelemetryArgs, Tracer};

use crate::settings::{invalid_settings, start_error};

/// Time limit for exporting the last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Flags of `moongate gateway`.
#[derive(Debug, Args)]
pub(crate) struct GatewayArgs {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Serves until SIGTERM or Ctrl-C, then drains; a second signal stops at once.
pub(crate) async fn run(command: GatewayArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    raise_open_file_limit();
    let traces = Tracer::start(&command.telemetry, "moongate-gateway").map_err(invalid_settings)?;
    let started = moongate_gateway::start(&command.options, traces.clone(), &supervisor).await;
    let gateway = started.map_err(|error| {
        let is_invalid = error.is_invalid_setting();
        start_error(error, is_invalid)
    })?;
    serve_until_terminated(gateway, traces).await;
    Ok(ExitCode::SUCCESS)
}

/// Serves until SIGTERM or Ctrl-C, then drains; a second signal stops at once. Exports the last spans.
pub(crate) async fn serve_until_terminated(gateway: RunningGateway, traces: Tracer) {
    terminated().await;
    tokio::select! {
        () = gateway.stop() => {}
        () = terminated() => tracing::warn!("second signal: stopping without waiting for open requests"),
    }
    if let Err(lost) = traces.shutdown(FLUSH_TIMEOUT).await {
        tracing::warn!(%lost, "spans were not exported before the shutdown");
    }
}

//! `moongate gateway`

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use moongate_gateway::GatewayOptions;
use moongate_runtime::{Supervisor, terminated};
use moongate_telemetry::{LogOptions, TelemetryOptions, Traces};

/// Time to hand the last spans over.
const FLUSH: Duration = Duration::from_secs(3);

/// Flags of `moongate gateway`.
#[derive(Debug, Args)]
pub(crate) struct GatewayCommand {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    telemetry: TelemetryOptions,
    #[command(flatten)]
    pub(crate) logs: LogOptions,
}

/// Serves until asked to stop, then drains.
pub(crate) async fn run(command: GatewayCommand, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let traces = Traces::start(&command.telemetry, "moongate-gateway")?;
    let gateway = moongate_gateway::start(&command.options, traces.clone(), &supervisor).await?;
    terminated().await;
    tokio::select! {
        () = gateway.stop() => {}
        () = terminated() => tracing::warn!("asked again: stopping without waiting for open requests"),
    }
    if let Err(lost) = traces.shutdown(FLUSH).await {
        tracing::warn!(%lost, "spans were lost");
    }
    Ok(ExitCode::SUCCESS)
}

//! `moongate epp`

use std::process::ExitCode;

use clap::Args;
use moongate_epp::EppOptions;
use moongate_runtime::{Supervisor, raise_open_file_limit};
use moongate_telemetry::{LoggingArgs, TelemetryArgs, Tracer};

use crate::gateway::serve_until_terminated;
use crate::settings::{invalid_settings, start_error};

/// Flags of `moongate epp`.
#[derive(Debug, Args)]
pub(crate) struct EppArgs {
    #[command(flatten)]
    options: EppOptions,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Serves until SIGTERM or Ctrl-C, then drains; a second signal stops at once.
pub(crate) async fn run(command: EppArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    raise_open_file_limit();
    let traces = Tracer::start(&command.telemetry, "moongate-epp").map_err(invalid_settings)?;
    let started = moongate_epp::start(&command.options, traces.clone(), &supervisor).await;
    let picker = started.map_err(|error| {
        let is_invalid = error.is_invalid_setting();
        start_error(error, is_invalid)
    })?;
    serve_until_terminated(picker, traces).await;
    Ok(ExitCode::SUCCESS)
}

//! `moongate config check`: validates the settings of a gateway without starting one.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use moongate_discovery::{DiscoveryError, count_instances};
use moongate_gateway::{DiscoverySource, GatewayOptions, check_model_folders, check_shared_queue, exposures};
use moongate_telemetry::{LoggingArgs, TelemetryArgs, Tracer};

use crate::output::{print, print_error};
use crate::settings::INVALID_SETTINGS;

/// Tools for settings.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigSubcommand {
    /// Validate the settings of `moongate gateway` and all files that they name, and list what would be unprotected. Opens no port and
    /// connects to no engine.
    Check(Box<ConfigCheckArgs>),
}

/// Flags of `moongate config check`: those of the gateway.
#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    telemetry: TelemetryArgs,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Checks the files and the combination of settings. The caller has already parsed flags, variables and the config file.
pub(crate) async fn check(command: ConfigCheckArgs) -> anyhow::Result<ExitCode> {
    let mut lines = Vec::new();
    let mut problems = Vec::new();
    match exposures(&command.options) {
        Ok(exposures) => lines.extend(exposures),
        Err(error) => problems.push(error.to_string()),
    }
    if let Some(file) = &command.options.engines.instances_file {
        match count_instances(file).await {
            Ok(count) => lines.push(format!("{}: {count} engines", file.display())),
            Err(error) => problems.push(format!("--instances-file {}: {error}", file.display())),
        }
    }
    let options = &command.options.engines;
    if options.static_instances().is_empty()
        && options.instances_file.is_none()
        && options.discovery == DiscoverySource::Static
        && !options.registration
    {
        problems.push(DiscoveryError::NoSource.to_string());
    }
    if options.discovery == DiscoverySource::Rbg
        && let Err(error) = std::fs::File::open(&options.rbg_config)
    {
        problems.push(format!("--rbg-config {}: {error}", options.rbg_config.display()));
    }
    if let Err(error) = command.options.store_tls.load() {
        problems.push(error.to_string());
    }
    if let Err(error) = check_model_folders(&command.options) {
        problems.push(error.to_string());
    }
    if let Err(error) = command.options.model_aliases.check() {
        problems.push(error.to_string());
    }
    if let Err(error) = command.options.lora_adapters.check() {
        problems.push(error.to_string());
    }
    if let Err(error) = check_shared_queue(&command.options) {
        problems.push(error.to_string());
    }
    if let Err(error) = Tracer::start(&command.telemetry, "moongate-gateway") {
        problems.push(error.to_string());
    }
    for problem in &problems {
        print_error(problem);
    }
    if !problems.is_empty() {
        return Ok(ExitCode::from(INVALID_SETTINGS));
    }
    lines.insert(0, "The settings are valid.".to_owned());
    print(lines.join("\n  "))?;
    Ok(ExitCode::SUCCESS)
}

//! `moongate config check`: whether a gateway would start with these settings, without starting one.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use moongate_discovery::instances_in;
use moongate_gateway::{GatewayOptions, exposures};
use moongate_telemetry::{LogOptions, TelemetryOptions};

/// The settings are wrong: as for those that cannot be read at all.
const WRONG: u8 = 2;

/// Tools for settings.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Read the settings of `moongate gateway` and all files that they name, and say what is wrong, or what would be open. Opens no port and
    /// asks no engine.
    Check(Box<Check>),
}

/// Flags of `moongate config check`: those of the gateway.
#[derive(Debug, Args)]
pub(crate) struct Check {
    #[command(flatten)]
    options: GatewayOptions,
    #[command(flatten)]
    _telemetry: TelemetryOptions,
    #[command(flatten)]
    pub(crate) logs: LogOptions,
}

/// Flags, variables and the config file have been checked when this is called.
pub(crate) async fn check(command: Check) -> ExitCode {
    let mut lines = Vec::new();
    let mut problems = Vec::new();
    match exposures(&command.options) {
        Ok(exposures) => lines.extend(exposures),
        Err(error) => problems.push(error.to_string()),
    }
    if let Some(file) = &command.options.engines.instances_file {
        match instances_in(file).await {
            Ok(count) => lines.push(format!("{}: {count} engines", file.display())),
            Err(error) => problems.push(format!("--instances-file {}: {error}", file.display())),
        }
    }
    for source in &command.options.model {
        if !source.folder.join("tokenizer.json").is_file() {
            problems.push(format!(
                "--model {}: there is no tokenizer.json in {}",
                source.model,
                source.folder.display()
            ));
        }
    }
    tell(&lines, &problems);
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(WRONG) }
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the findings are what the person asked for")]
fn tell(lines: &[String], problems: &[String]) {
    for problem in problems {
        eprintln!("error: {problem}");
    }
    if problems.is_empty() {
        println!("The settings are valid.");
        for line in lines {
            println!("  {line}");
        }
    }
}

//! `moongate store`

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Parser as _};
use moongate_runtime::{Supervisor, terminated};
use moongate_store_node::{NodeArgs, NodeConfig, PageModeArg};

use crate::output::print_error;
use crate::settings::start_error;

/// The command line of `moongate store`, parsed separately: its `--config` is Mooncake's JSON file, not the TOML config file of the
/// other commands.
#[derive(Debug, Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct StoreNodeArgs {
    /// Flags of Mooncake's store service, and additional ones; `moongate store --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    flags: Vec<OsString>,
}

impl StoreNodeArgs {
    /// The settings to run with, or the exit code if the command ends at once, such as after `--help`.
    pub(crate) fn settings(self) -> Result<(NodeArgs, NodeConfig), ExitCode> {
        let name = OsString::from("moongate store");
        let flags = NodeArgs::try_parse_from(std::iter::once(name).chain(self.flags)).map_err(|error| {
            // Standard error may be closed; the exit code still reports the error.
            let _ = error.print();
            u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
        })?;
        let config =
            NodeConfig::read(flags.config.as_deref(), &flags.define, |name| std::env::var(name).ok());
        match config {
            Ok(config) => Ok((flags, config)),
            Err(error) => {
                print_error(error);
                Err(ExitCode::from(2))
            }
        }
    }
}

/// Disables transparent huge pages for the process: they would grow its heap of a few megabytes to tens of megabytes.
pub(crate) fn disable_huge_pages(flags: &NodeArgs) {
    // The setting also affects the segments, which need transparent huge pages with `--pages transparent`.
    if flags.pages != PageModeArg::Transparent {
        // A failure only increases memory use.
        let _ = rustix::thread::disable_transparent_huge_pages(true);
    }
}

/// Serves until SIGTERM or Ctrl-C, then completes transfers in progress.
pub(crate) async fn run(
    flags: NodeArgs,
    config: NodeConfig,
    supervisor: Supervisor,
) -> anyhow::Result<ExitCode> {
    let grace = flags.drain_timeout;
    let starting = moongate_store_node::start(flags, config, &supervisor);
    let store = tokio::select! {
        started = starting => started.map_err(|error| {
            let is_invalid = error.is_invalid_setting();
            start_error(error, is_invalid)
        })?,
        () = terminated() => return Ok(ExitCode::SUCCESS),
    };
    terminated().await;
    tokio::select! {
        () = store.stop() => {}
        () = terminated() => tracing::warn!("second signal: stopping without waiting for transfers in progress"),
    }
    if let Err(still) = supervisor.shutdown(grace).await {
        tracing::warn!("{still}");
    }
    Ok(ExitCode::SUCCESS)
}

//! `moongate store-holder`: holds a store node's memory while the node is restarted or replaced.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use moongate_memory::holder::HolderServer;
use moongate_runtime::terminated;
use moongate_telemetry::LoggingArgs;

use crate::settings::start_error;

/// Flags of `moongate store-holder`.
#[derive(Debug, Args)]
pub(crate) struct StoreHolderArgs {
    /// Unix socket through which the store node gets its memory. Only processes of the same user are accepted.
    #[arg(long, value_name = "PATH", env = "MOONGATE_HOLDER_SOCKET")]
    socket: PathBuf,

    /// Maximum memory to hold, in bytes. Pages are allocated when the store first writes to them.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_HOLDER_MAX_BYTES", default_value_t = 1 << 42)]
    max_bytes: u64,

    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Holds the memory until SIGTERM or Ctrl-C; the memory is freed once the store has unmapped it too.
pub(crate) async fn run(command: StoreHolderArgs) -> anyhow::Result<ExitCode> {
    let socket = command.socket.display();
    let holder =
        HolderServer::bind(&command.socket, command.max_bytes).with_context(|| format!("--socket {socket}"));
    let folder = command.socket.parent().filter(|folder| !folder.as_os_str().is_empty());
    let holder = holder.map_err(|error| start_error(error, folder.is_some_and(|folder| !folder.is_dir())))?;
    let stopper = holder.stopper();
    tracing::info!("holding the store's memory; listening on {}", command.socket.display());
    let mut server = tokio::task::spawn_blocking(move || holder.run());
    tokio::select! {
        ended = &mut server => ended?,
        () = terminated() => {
            stopper.stop();
            server.await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

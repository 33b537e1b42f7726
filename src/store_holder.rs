//! `moongate store-holder`: keeps a store's memory while the store itself is away.

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
    /// Where the store asks for its memory: a Unix socket. Only processes of the same user are answered.
    #[arg(long, value_name = "PATH", env = "MOONGATE_HOLDER_SOCKET")]
    socket: PathBuf,

    /// Most memory to keep, in bytes. It is taken from the machine when the store first writes to it.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_HOLDER_MAX_BYTES", default_value_t = 1 << 42)]
    max_bytes: u64,

    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Keeps until asked to stop; then the memory is freed, as soon as the store lets go of it too.
pub(crate) async fn run(command: StoreHolderArgs) -> anyhow::Result<ExitCode> {
    let socket = command.socket.display();
    let keeper =
        HolderServer::bind(&command.socket, command.max_bytes).with_context(|| format!("--socket {socket}"));
    let folder = command.socket.parent().filter(|folder| !folder.as_os_str().is_empty());
    let keeper = keeper.map_err(|error| start_error(error, folder.is_some_and(|folder| !folder.is_dir())))?;
    let stopper = keeper.stopper();
    tracing::info!("keeping the store's memory; it is asked for at {}", command.socket.display());
    let mut keeping = tokio::task::spawn_blocking(move || keeper.run());
    tokio::select! {
        ended = &mut keeping => ended?,
        () = terminated() => {
            stopper.stop();
            keeping.await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

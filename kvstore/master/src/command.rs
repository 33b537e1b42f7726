//! Running a master until it is asked to stop.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Instant;

use moongate_oplog::Options;
use moongate_runtime::Supervisor;

use crate::durable::{Durable, Keeper, Pace};
use crate::flags::{DataOptions, MasterOptions};
use crate::journal::MemoryJournal;
use crate::rpc::{self, Rpc, RpcError};
use crate::server::{HaState, Server, ServerOptions, Standing};
use crate::{Clock, summary, ticker};

/// A master that serves.
#[derive(Debug)]
pub struct RunningMaster {
    server: Arc<Server>,
    rpc: Rpc,
    kept: Option<Kept>,
}

/// Why a master does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its port cannot be had.
    #[error(transparent)]
    Rpc(#[from] RpcError),
    /// Its folder cannot be used.
    #[error("the state cannot be kept (--data_dir): {0}")]
    Data(#[from] moongate_oplog::Error),
    /// There is no thread for it.
    #[error("no thread for the log of changes: {0}")]
    Thread(std::io::Error),
}

/// Starts a master. It stops with the supervisor; after that, [`RunningMaster::finish`].
///
/// # Errors
/// [`StartError`].
pub fn start(options: MasterOptions, supervisor: &Supervisor) -> Result<RunningMaster, StartError> {
    let MasterOptions { server, rpc, report, data, journal_bytes, unused, missing, .. } = options;
    if !unused.is_empty() {
        tracing::debug!(flags = unused.join(" "), "these change nothing here");
    }
    if !missing.is_empty() {
        tracing::warn!(flags = missing.join(" "), "these ask for something that this master does not do");
    }
    let threads = server.threads;
    let (server, kept) = match data {
        Some(data) => Kept::open(&data, server)?,
        None => {
            tracing::info!("the state is kept in memory only; --data_dir lets it outlive this process");
            (Arc::new(Server::new(server, Arc::new(MemoryJournal::new(journal_bytes)))), None)
        }
    };
    let rpc = rpc::serve(&server, rpc, threads, supervisor)?;
    server.standing.store(Arc::new(Standing::alone()));
    ticker::start(&server, supervisor);
    if report {
        summary::start(&server, supervisor);
    }
    tracing::info!(rpc = %rpc.address(), threads, "serving Mooncake clients");
    Ok(RunningMaster { server, rpc, kept })
}

/// A state in a folder, and the thread that looks after it.
#[derive(Debug)]
struct Kept {
    stop: Sender<()>,
    keeper: JoinHandle<Result<(), moongate_oplog::Error>>,
}

impl Kept {
    fn open(data: &DataOptions, server: ServerOptions) -> Result<(Arc<Server>, Option<Self>), StartError> {
        let (clock, begun) = (Clock::start(), Instant::now());
        let options = Options { flush_always: data.flush_always, ..Options::default() };
        let (durable, master, restored) = Durable::open(&data.folder, options, &server.core, clock.now_ms())?;
        tracing::info!(folder = %data.folder.display(), took = ?begun.elapsed(), "the state: {restored}");
        let durable = Arc::new(durable);
        let server = Arc::new(Server::with_state(server, master, clock, durable.clone()));
        let pace = Pace { snapshot_every: data.snapshot_every, ..Pace::default() };
        let (stop, stopped) = std::sync::mpsc::channel();
        let kept = Arc::clone(&server);
        let run = move || Keeper::new(&durable, &kept.master, pace).run(&stopped);
        let keeper =
            std::thread::Builder::new().name("data".to_owned()).spawn(run).map_err(StartError::Thread)?;
        Ok((server, Some(Self { stop, keeper })))
    }

    fn close(self) {
        drop(self.stop);
        match self.keeper.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "the last changes may not be saved"),
            Err(_) => {
                tracing::error!("the last changes may not be saved: the thread that saves them has failed");
            }
        }
    }
}

impl RunningMaster {
    /// The server.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Where RPCs are served.
    pub fn rpc_address(&self) -> std::net::SocketAddr {
        self.rpc.address()
    }

    /// Takes no more calls. Those in progress are answered; the supervisor's shutdown waits for that.
    pub fn stop(&self) {
        let standing = Standing { state: HaState::Stopping, ..Standing::clone(&self.server.standing.load()) };
        self.server.standing.store(Arc::new(standing));
        self.rpc.stop();
    }

    /// Saves what is left to be saved. To be called when nothing is served any more.
    pub fn finish(self) {
        if let Some(kept) = self.kept {
            kept.close();
        }
    }
}

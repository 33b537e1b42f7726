//! Running a master until it is asked to stop.

use std::sync::Arc;

use moongate_runtime::Supervisor;

use crate::flags::MasterOptions;
use crate::journal::MemoryJournal;
use crate::rpc::{self, Rpc, RpcError};
use crate::server::{HaState, Server, Standing};
use crate::{summary, ticker};

/// A master that serves.
#[derive(Debug)]
pub struct RunningMaster {
    server: Arc<Server>,
    rpc: Rpc,
}

/// Starts a master. It stops with the supervisor.
///
/// # Errors
/// [`RpcError`].
pub fn start(options: MasterOptions, supervisor: &Supervisor) -> Result<RunningMaster, RpcError> {
    let MasterOptions { server, rpc, report, journal_bytes, unused, missing, .. } = options;
    if !unused.is_empty() {
        tracing::debug!(flags = unused.join(" "), "these change nothing here");
    }
    if !missing.is_empty() {
        tracing::warn!(flags = missing.join(" "), "these ask for something that this master does not do");
    }
    let threads = server.threads;
    let server = Arc::new(Server::new(server, Arc::new(MemoryJournal::new(journal_bytes))));
    let rpc = rpc::serve(&server, rpc, threads, supervisor)?;
    server.standing.store(Arc::new(Standing::alone()));
    ticker::start(&server, supervisor);
    if report {
        summary::start(&server, supervisor);
    }
    tracing::info!(rpc = %rpc.address(), threads, "serving Mooncake clients");
    Ok(RunningMaster { server, rpc })
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
}

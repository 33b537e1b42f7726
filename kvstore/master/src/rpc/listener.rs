//! Accepting connections.

use std::io;
use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::busy_poll::BusyPoll;
use moongate_runtime::net::{DetachedStream, TcpListener, TcpStream, detach};
use moongate_runtime::{BindError, LogRateLimiter, Supervisor, bind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::budget::BufferBudget;
use super::busy_poll::{RpcThread, RpcThreadPool};
use super::worker::{AcceptedConnection, RpcWorker};
use crate::server::MasterServer;

/// Pause after an accept that failed for want of something.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The RPC port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum RpcServerError {
    /// The port cannot be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A thread cannot be had.
    #[error("cannot start a thread for RPCs: {0}")]
    Thread(#[from] io::Error),
}

/// A served RPC port.
#[derive(Debug)]
pub struct RpcServer {
    address: SocketAddr,
    stop: CancellationToken,
}

impl RpcServer {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts nothing more and closes every connection after the replies that are due. The supervisor's shutdown waits
    /// for that.
    pub fn stop(&self) {
        self.stop.cancel();
    }
}

/// Serves RPCs on `address` with so many threads, at most one per core, until the supervisor's shutdown.
///
/// # Errors
/// [`RpcServerError`].
pub fn serve(
    server: &Arc<MasterServer>,
    address: SocketAddr,
    threads: usize,
    supervisor: &Supervisor,
) -> Result<RpcServer, RpcServerError> {
    let listener = bind(address)?;
    let address = listener.local_addr()?;
    let stop = supervisor.token().child_token();
    let budget = BufferBudget::new(server.limits.buffer_bytes);
    // More threads than cores would only take turns.
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let together = RpcThreadPool::new(server.limits.busy_poll, BusyPoll::new(cores));
    let workers: io::Result<Vec<_>> = (0..threads.clamp(1, cores.get()))
        .map(|lane| {
            RpcWorker {
                server: Arc::clone(server),
                budget: Arc::clone(&budget),
                thread: RpcThread::new(&together),
                supervisor: supervisor.clone(),
                stop: stop.child_token(),
                lane,
            }
            .start()
        })
        .collect();
    let accepting = RpcAcceptor {
        listener,
        slots: Arc::new(Semaphore::new(server.limits.connections.clamp(1, Semaphore::MAX_PERMITS))),
        connections: server.limits.connections,
        no_delay: server.limits.no_delay,
        workers: workers?,
        warnings: LogRateLimiter::new(),
    };
    let until = stop.clone();
    supervisor.spawn_essential("rpc listener", async move {
        tokio::select! {
            () = accepting.run() => {}
            () = until.cancelled() => {}
        }
    });
    Ok(RpcServer { address, stop })
}

struct RpcAcceptor {
    listener: TcpListener,
    slots: Arc<Semaphore>,
    connections: usize,
    no_delay: bool,
    workers: Vec<mpsc::Sender<AcceptedConnection>>,
    warnings: LogRateLimiter,
}

impl RpcAcceptor {
    async fn run(self) {
        for turn in 0.. {
            let Some(slot) = self.slot().await else { return };
            let (stream, peer) = accept(&self.listener).await;
            let accepted = match self.prepare(stream) {
                Ok(stream) => AcceptedConnection { stream, host: peer.ip().to_canonical(), slot },
                Err(error) => {
                    tracing::debug!(%peer, %error, "a connection was gone before it was set up");
                    continue;
                }
            };
            let Some(worker) = self.workers.get(turn % self.workers.len()) else { return };
            if worker.send(accepted).await.is_err() {
                return;
            }
        }
    }

    /// A place for one more connection.
    async fn slot(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Some(slot);
        }
        if self.warnings.is_due() {
            tracing::warn!(
                connections = self.connections,
                "as many RPC connections as allowed are open: others wait until one ends. Raise --rpc_max_connections"
            );
        }
        Arc::clone(&self.slots).acquire_owned().await.ok()
    }

    fn prepare(&self, stream: TcpStream) -> io::Result<DetachedStream> {
        stream.set_nodelay(self.no_delay)?;
        // The thread that serves it registers it with its own runtime.
        detach(stream)
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept RPC connections; trying again after a pause");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

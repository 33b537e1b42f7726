//! Accepts RPC connections and distributes them over the threads.

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

/// Pause after a failed accept, such as one without free file descriptors.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The RPC server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum RpcServerError {
    /// The port cannot be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A thread could not be started.
    #[error("cannot start an RPC thread: {0}")]
    Thread(#[from] io::Error),
}

/// Handle of a running RPC server.
#[derive(Debug)]
pub struct RpcServer {
    address: SocketAddr,
    stop: CancellationToken,
}

impl RpcServer {
    /// Bound address of the RPC port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more connections and closes every connection after its pending replies. The supervisor's shutdown waits for that.
    pub fn stop(&self) {
        self.stop.cancel();
    }
}

/// Serves RPCs on `address` with this number of threads, at most one per core, until the supervisor's shutdown.
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
    // More threads than cores would only add context switches.
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let thread_pool = RpcThreadPool::new(server.limits.busy_poll, BusyPoll::new(cores));
    let workers: io::Result<Vec<_>> = (0..threads.clamp(1, cores.get()))
        .map(|lane| {
            RpcWorker {
                server: Arc::clone(server),
                budget: Arc::clone(&budget),
                thread: RpcThread::new(&thread_pool),
                supervisor: supervisor.clone(),
                stop: stop.child_token(),
                lane,
            }
            .start()
        })
        .collect();
    let acceptor = RpcAcceptor {
        listener,
        slots: Arc::new(Semaphore::new(server.limits.connections.clamp(1, Semaphore::MAX_PERMITS))),
        connections: server.limits.connections,
        no_delay: server.limits.no_delay,
        workers: workers?,
        warnings: LogRateLimiter::new(),
    };
    let stopped = stop.clone();
    supervisor.spawn_essential("rpc listener", async move {
        tokio::select! {
            () = acceptor.run() => {}
            () = stopped.cancelled() => {}
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
                    tracing::debug!(%peer, %error, "a connection closed before its setup");
                    continue;
                }
            };
            let Some(worker) = self.workers.get(turn % self.workers.len()) else { return };
            if worker.send(accepted).await.is_err() {
                return;
            }
        }
    }

    /// Waits for a permit for one more connection.
    async fn slot(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
            return Some(slot);
        }
        if self.warnings.is_due() {
            tracing::warn!(
                connections = self.connections,
                "the limit of RPC connections is reached, new ones have to wait; raise --rpc_max_connections"
            );
        }
        Arc::clone(&self.slots).acquire_owned().await.ok()
    }

    fn prepare(&self, stream: TcpStream) -> io::Result<DetachedStream> {
        stream.set_nodelay(self.no_delay)?;
        // The serving thread registers it with its own runtime.
        detach(stream)
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept RPC connections; retrying");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

//! Accept loop and connection threads of the data plane.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use moongate_runtime::net::TcpListener;
use moongate_runtime::{LogRateLimiter, Supervisor};
use parking_lot::Mutex;
use rustix::net::{SocketFlags, acceptfrom_with};
use tokio_util::sync::CancellationToken;

use super::barrier::ReadBarrier;
use super::connection::PlainConnection;
use super::counts::TransferCounters;
use super::registry::{AdmittedConnection, ConnectionGuard, ConnectionRegistry};
use super::secured::SecuredConnection;
use super::transfer_target::TransferTarget;
use super::{TransferAuthentication, TransferServerOptions};

/// Stack bytes of a connection thread, which keeps no large buffers on it.
const STACK_BYTES: usize = 256 << 10;
/// Pause after a failed accept, which mostly means that the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Interval of the check for overdue transfers.
const WATCHDOG_PERIOD: Duration = Duration::from_millis(250);

/// Handle of a running data plane server; dropping it closes all connections.
#[derive(Debug)]
pub struct TransferServer {
    registry: Arc<ConnectionRegistry>,
    counts: Arc<TransferCounters>,
    /// Cancelled to stop accepting connections.
    stop: CancellationToken,
    /// Cancelled to close all connections.
    ended: CancellationToken,
}

/// Serves `target` until [`TransferServer::drain`]. A shutdown of the supervisor closes all connections at once.
///
/// # Errors
/// When the process has no file descriptors left.
pub fn listen(
    listener: TcpListener,
    target: Arc<dyn TransferTarget>,
    options: TransferServerOptions,
    supervisor: &Supervisor,
) -> io::Result<TransferServer> {
    let ended = supervisor.token().child_token();
    let acceptor = Arc::new(TransferAcceptor {
        barrier: Arc::new(ReadBarrier::new(&listener)?),
        listener: Mutex::new(Some(listener)),
        target,
        options,
        registry: Arc::new(ConnectionRegistry::new()),
        counts: Arc::default(),
        refusals: LogRateLimiter::new(),
    });
    let (registry, counts) = (Arc::clone(&acceptor.registry), Arc::clone(&acceptor.counts));
    let server = TransferServer { registry, counts, stop: ended.child_token(), ended };
    let registry = Arc::clone(&server.registry);
    let ended = server.ended.clone();
    supervisor.spawn_essential("transfer-watchdog", async move {
        ended.run_until_cancelled(run_watchdog(&registry)).await;
        registry.close_all();
    });
    let stop = server.stop.clone();
    supervisor.spawn_essential("transfer-listener", async move {
        stop.run_until_cancelled(Arc::clone(&acceptor).run()).await;
        acceptor.close();
    });
    Ok(server)
}

impl TransferServer {
    #[must_use]
    pub fn counts(&self) -> &TransferCounters {
        &self.counts
    }

    #[must_use]
    pub fn open(&self) -> usize {
        self.registry.len()
    }

    /// Stops accepting transfers and waits up to `limit` for those in progress; then it closes their connections. Returns how many
    /// connections it had to close.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.stop.cancel();
        self.registry.drain();
        if tokio::time::timeout(limit, self.registry.wait_empty()).await.is_ok() {
            return 0;
        }
        let remaining = self.registry.len();
        self.registry.close_all();
        self.registry.wait_empty().await;
        remaining
    }
}

impl Drop for TransferServer {
    fn drop(&mut self) {
        self.ended.cancel();
        self.registry.close_all();
    }
}

/// Closes connections with overdue transfers. Socket timeouts limit single calls, and a slow peer can make many of them succeed.
async fn run_watchdog(registry: &ConnectionRegistry) {
    loop {
        tokio::time::sleep(WATCHDOG_PERIOD).await;
        registry.end_overdue();
    }
}

/// Accepts connections and holds the state that all of them share.
pub(super) struct TransferAcceptor {
    /// Locked from before a connection leaves the accept queue until the barrier tracks it.
    listener: Mutex<Option<TcpListener>>,
    pub(super) barrier: Arc<ReadBarrier>,
    pub(super) target: Arc<dyn TransferTarget>,
    pub(super) options: TransferServerOptions,
    pub(super) counts: Arc<TransferCounters>,
    registry: Arc<ConnectionRegistry>,
    /// Rate limit for log lines about rejected peers and transfers.
    pub(super) refusals: LogRateLimiter,
}

impl TransferAcceptor {
    async fn run(self: Arc<Self>) {
        while let Err(error) = poll_fn(|context| self.poll_accept(context)).await {
            tracing::warn!(%error, "cannot accept a transfer connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }

    /// Accepts connections until that fails, then returns the error. Returns `Ok` when the listener is closed.
    fn poll_accept(self: &Arc<Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let listener = self.listener.lock();
        let Some(listener) = listener.as_ref() else { return Poll::Ready(Ok(())) };
        let _accepting = self.barrier.begin_accept();
        loop {
            let (stream, peer) = std::task::ready!(listener.poll_accept(context))?;
            self.start_connection(stream.into_std()?, peer);
        }
    }

    /// Accepts the connections in the accept queue.
    pub(super) fn accept_queued(self: &Arc<Self>) {
        let listener = self.listener.lock();
        let Some(listener) = listener.as_ref() else { return };
        let _accepting = self.barrier.begin_accept();
        // An error here recurs in `poll_accept`, which logs it.
        while let Ok((socket, Some(peer))) = acceptfrom_with(listener, SocketFlags::CLOEXEC) {
            if let Ok(peer) = peer.try_into() {
                self.start_connection(socket.into(), peer);
            }
        }
    }

    fn close(&self) {
        self.listener.lock().take();
    }

    fn start_connection(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let options = &self.options;
        if !options.peers.allow(peer.ip()) {
            self.counts.not_allowed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%peer, allowed = %options.peers, "connection rejected: address not allowed");
            return;
        }
        let (stream, ip) = (Arc::new(stream), peer.ip().to_canonical());
        let admitted = self.registry.admit(&stream, ip, options.connections, options.connections_per_peer);
        let Ok(AdmittedConnection { guard, has_evicted }) = admitted else {
            self.counts.over_limit.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%peer, open = self.registry.len(), "connection rejected: too many open connections");
            return;
        };
        self.counts.evicted.fetch_add(u64::from(has_evicted), Ordering::Relaxed);
        if let Some(authentication) = &options.authentication {
            return self.start_secured(stream, peer, guard, authentication.clone());
        }
        let tracked = match self.barrier.track(guard.id(), &stream) {
            Ok(tracked) => tracked,
            Err(error) => {
                tracing::warn!(%peer, %error, "cannot accept a transfer connection");
                return;
            }
        };
        let started = {
            let tracked = Arc::clone(&tracked);
            let connection = PlainConnection { stream, peer, acceptor: Arc::clone(self), tracked, guard };
            self.start(move || connection.run())
        };
        if let Err(error) = started {
            self.barrier.untrack(&tracked);
            self.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "cannot start a thread for a connection; it is closed");
        }
    }

    /// Writes on TLS connections are always acknowledged, so reads need no ordering against them.
    fn start_secured(
        self: &Arc<Self>,
        stream: Arc<TcpStream>,
        peer: SocketAddr,
        guard: ConnectionGuard,
        authentication: TransferAuthentication,
    ) {
        let connection =
            SecuredConnection { stream, peer, acceptor: Arc::clone(self), guard, authentication };
        if let Err(error) = self.start(move || connection.run()) {
            self.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "cannot start a thread for a connection; it is closed");
        }
    }

    fn start(&self, serve: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let counts = Arc::clone(&self.counts);
        counts.opened.fetch_add(1, Ordering::Relaxed);
        let started =
            thread::Builder::new().name("transfer".to_owned()).stack_size(STACK_BYTES).spawn(move || {
                serve();
                counts.closed.fetch_add(1, Ordering::Relaxed);
            });
        started.map(drop)
    }
}

//! Taking connections.

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
use super::counts::Counts;
use super::registry::{AdmittedConnection, ConnectionGuard, ConnectionRegistry};
use super::secured::SecuredConnection;
use super::transfer_target::TransferTarget;
use super::{TransferAuthentication, TransferServerOptions};

/// Bytes of a thread's stack. A connection keeps nothing large on it.
const STACK_BYTES: usize = 256 << 10;
/// Pause after a failed accept, which mostly means that the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two looks for transfers that take too long.
const WATCHDOG_PERIOD: Duration = Duration::from_millis(250);

/// A data plane that is served.
#[derive(Debug)]
pub struct TransferServer {
    registry: Arc<ConnectionRegistry>,
    counts: Arc<Counts>,
    /// No further connections.
    stop: CancellationToken,
    /// Nothing at all.
    ended: CancellationToken,
}

/// Serves `target` until [`TransferServer::drain`]. When the supervisor shuts down, everything is cut.
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
    let serving = TransferServer { registry, counts, stop: ended.child_token(), ended };
    let registry = Arc::clone(&serving.registry);
    let ended = serving.ended.clone();
    supervisor.spawn_essential("transfer-watch", async move {
        ended.run_until_cancelled(run_watchdog(&registry)).await;
        registry.close_all();
    });
    let stop = serving.stop.clone();
    supervisor.spawn_essential("transfer-listener", async move {
        stop.run_until_cancelled(Arc::clone(&acceptor).run()).await;
        acceptor.close();
    });
    Ok(serving)
}

impl TransferServer {
    /// What has been done.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Connections that are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.registry.len()
    }

    /// Takes no more transfers, and waits until those in progress have ended, but no longer than `limit`: then they
    /// are cut. Returns how many had to be.
    pub async fn drain(&self, limit: Duration) -> usize {
        self.stop.cancel();
        self.registry.drain();
        if tokio::time::timeout(limit, self.registry.wait_empty()).await.is_ok() {
            return 0;
        }
        let left = self.registry.len();
        self.registry.close_all();
        self.registry.wait_empty().await;
        left
    }
}

impl Drop for TransferServer {
    fn drop(&mut self) {
        self.ended.cancel();
        self.registry.close_all();
    }
}

/// Ends what takes too long. The kernel's limits are for single calls, which a peer can make many of.
async fn run_watchdog(registry: &ConnectionRegistry) {
    loop {
        tokio::time::sleep(WATCHDOG_PERIOD).await;
        registry.end_overdue();
    }
}

/// Accepts connections, and has what all of them share.
pub(super) struct TransferAcceptor {
    /// Locked from before a connection leaves the kernel's queue until its writes can be waited for.
    listener: Mutex<Option<TcpListener>>,
    pub(super) barrier: Arc<ReadBarrier>,
    pub(super) target: Arc<dyn TransferTarget>,
    pub(super) options: TransferServerOptions,
    pub(super) counts: Arc<Counts>,
    registry: Arc<ConnectionRegistry>,
    /// For peers and transfers that are refused.
    pub(super) refusals: LogRateLimiter,
}

impl TransferAcceptor {
    async fn run(self: Arc<Self>) {
        while let Err(error) = poll_fn(|context| self.poll_accept(context)).await {
            tracing::warn!(%error, "cannot take a connection for transfers");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }

    /// Accepts connections while there are any. Ready when that fails, or nothing is listened to any more.
    fn poll_accept(self: &Arc<Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let listener = self.listener.lock();
        let Some(listener) = listener.as_ref() else { return Poll::Ready(Ok(())) };
        let _accepting = self.barrier.begin_accept();
        loop {
            let (stream, peer) = std::task::ready!(listener.poll_accept(context))?;
            self.start_connection(stream.into_std()?, peer);
        }
    }

    /// Accepts the connections that are in the kernel's queue.
    pub(super) fn accept_queued(self: &Arc<Self>) {
        let listener = self.listener.lock();
        let Some(listener) = listener.as_ref() else { return };
        let _accepting = self.barrier.begin_accept();
        // What fails here fails again where it is logged.
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
            tracing::debug!(%peer, allowed = %options.peers, "a connection from elsewhere is refused");
            return;
        }
        let (stream, ip) = (Arc::new(stream), peer.ip().to_canonical());
        let entered = self.registry.admit(&stream, ip, options.connections, options.connections_per_peer);
        let Ok(AdmittedConnection { guard: place, has_evicted }) = entered else {
            self.counts.over_limit.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(%peer, open = self.registry.len(), "a connection too many is refused");
            return;
        };
        self.counts.evicted.fetch_add(u64::from(has_evicted), Ordering::Relaxed);
        if let Some(authentication) = &options.authentication {
            return self.start_secured(stream, peer, place, authentication.clone());
        }
        let tracked = match self.barrier.track(place.id(), &stream) {
            Ok(tracked) => tracked,
            Err(error) => {
                tracing::warn!(%peer, %error, "cannot take a connection for transfers");
                return;
            }
        };
        let started = {
            let tracked = Arc::clone(&tracked);
            let connection =
                PlainConnection { stream, peer, acceptor: Arc::clone(self), tracked, guard: place };
            self.start(move || connection.run())
        };
        if let Err(error) = started {
            self.barrier.untrack(&tracked);
            self.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "no thread for a connection: it is closed");
        }
    }

    /// Writes on these connections are always acknowledged, so reads need not be ordered behind them.
    fn start_secured(
        self: &Arc<Self>,
        stream: Arc<TcpStream>,
        peer: SocketAddr,
        place: ConnectionGuard,
        authentication: TransferAuthentication,
    ) {
        let connection =
            SecuredConnection { stream, peer, acceptor: Arc::clone(self), guard: place, authentication };
        if let Err(error) = self.start(move || connection.run()) {
            self.counts.closed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "no thread for a connection: it is closed");
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

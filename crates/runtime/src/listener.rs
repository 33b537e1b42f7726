//! HTTP listeners with limits and a drain.
//!
//! `axum::serve` builds its connections without a timer, so its request head timeout never fires; it has no connection limit and no drain
//! deadline. This loop has all three, for any tower service. The first bytes of a connection distinguish HTTP/1.1 from HTTP/2 with prior
//! knowledge (h2c), at no cost per request.

mod connection;
mod prefixed_stream;
mod rejection;
mod response_stream;
#[cfg(test)]
mod tests;
mod tls;
#[cfg(test)]
mod tls_tests;

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use moongate_backoff::{Backoff, BackoffPolicy};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use self::rejection::ConnectionRejector;
use crate::Supervisor;
use crate::net::{self, TcpListener, TcpStream};

pub use rejection::ConnectionRejection;
pub use response_stream::RequestRead;
pub(crate) use tls::certificates;
pub use tls::{ClientCertificate, ServerTls, ServerTlsFiles, TlsConfigError};

/// Pauses after failed accepts.
const ACCEPT_BACKOFF: BackoffPolicy =
    BackoffPolicy { initial: Duration::from_millis(5), max: Duration::from_secs(1) };

/// The client's address, in the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// A listening socket, optionally with TLS.
#[derive(Debug)]
pub struct ListenerSocket {
    /// The socket that accepts connections.
    pub listener: TcpListener,
    /// If set, clients must use TLS.
    pub tls: Option<ServerTls>,
}

impl From<TcpListener> for ListenerSocket {
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

#[derive(Debug, Clone)]
pub struct ListenerLimits {
    /// Maximum number of open connections.
    pub connections: usize,
    /// Response to connections beyond the limit. Without it they wait in the kernel's backlog.
    pub rejection: Option<ConnectionRejection>,
    /// Time for a request head, so also the maximum idle time between two requests.
    pub header_read_timeout: Duration,
    /// Maximum size of a request head in bytes. Larger: 431.
    pub header_bytes: usize,
    /// Maximum number of header fields. More: 431. `None` is hyper's default of 100, which needs no allocation.
    pub headers: Option<usize>,
    /// Maximum number of concurrent requests per HTTP/2 connection.
    pub streams: u32,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            rejection: None,
            header_read_timeout: Duration::from_secs(30),
            header_bytes: 64 * 1024,
            headers: None,
            streams: 256,
        }
    }
}

/// A listening socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; {}", bind_error_hint(.source.kind()))]
pub struct BindError {
    /// The address that was requested.
    pub address: SocketAddr,
    /// Error of the operating system.
    pub source: io::Error,
}

fn bind_error_hint(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::AddrInUse => {
            "stop the process that uses the port (`ss -ltnp` shows it) or choose another port"
        }
        ErrorKind::AddrNotAvailable => {
            "no interface of this host has that address; use 0.0.0.0 or [::] for all interfaces"
        }
        ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE; choose a higher port",
        _ => "check the address and the limits of the process",
    }
}

/// Opens a listening socket. With port 0 the kernel chooses the port; see `local_addr()`.
///
/// The address can be reused while connections of a previous process linger (`SO_REUSEADDR`). Must be called inside a tokio runtime with
/// I/O enabled.
///
/// # Errors
/// [`BindError`] with the address and a hint.
pub fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    net::listen(address).map_err(|source| BindError { address, source })
}

/// Error type of services and bodies: anything that can be boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Serves `service` on `socket` until `drain` is cancelled or `supervisor` shuts down.
///
/// Each connection is one task of the supervisor and uses a clone of the service; an HTTP/1.1 request starts no task and boxes nothing
/// here. When draining starts, the socket and idle connections are closed, and busy connections end after the response in progress.
/// [`ListenerHandle`] waits for that and closes the rest.
///
/// A request that is not HTTP is rejected on its own connection. A failed accept (such as no file descriptors left) is logged and retried
/// after a pause.
pub fn serve<S, B>(
    socket: impl Into<ListenerSocket>,
    service: S,
    limits: ListenerLimits,
    drain: CancellationToken,
    supervisor: &Supervisor,
) -> ListenerHandle
where
    S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let shared = Arc::new(ListenerState::default());
    let accept = AcceptLoop {
        socket: socket.into(),
        slots: Arc::new(Semaphore::new(limits.connections.clamp(1, Semaphore::MAX_PERMITS))),
        protocols: Arc::new(connection::HttpProtocols::new(&limits, supervisor)),
        rejector: limits.rejection.map(|rejection| ConnectionRejector::new(rejection, supervisor.clone())),
        accept_loop_guard: AcceptLoopGuard::new(Arc::clone(&shared)),
        supervisor: supervisor.clone(),
    };
    supervisor.spawn_essential("listener", accept.run(service, drain));
    ListenerHandle { state: shared }
}

/// Handle of a running listener. Clones refer to the same listener.
#[derive(Clone)]
pub struct ListenerHandle {
    state: Arc<ListenerState>,
}

impl ListenerHandle {
    #[must_use]
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Acquire)
    }

    /// Waits up to `deadline` until the listener has stopped accepting and no connection is open. Returns whether that happened; it cannot
    /// before draining has started.
    pub async fn wait_idle(&self, deadline: Duration) -> bool {
        let idle = async {
            loop {
                let mut notified = std::pin::pin!(self.state.idle.notified());
                notified.as_mut().enable();
                if self.state.is_idle() {
                    return;
                }
                notified.await;
            }
        };
        tokio::time::timeout(deadline, idle).await.is_ok()
    }

    /// Stops accepting and closes every open connection, also busy ones.
    pub fn close(&self) {
        self.state.advance_to(ListenerPhase::Closing);
    }

    /// [`ListenerHandle::wait_idle`], then [`ListenerHandle::close`]. Returns the number of connections closed by force.
    pub async fn drain_then_close(&self, deadline: Duration) -> usize {
        if self.wait_idle(deadline).await {
            return 0;
        }
        let remaining = self.connections();
        self.close();
        remaining
    }
}

impl std::fmt::Debug for ListenerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListenerHandle").field("connections", &self.connections()).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ListenerPhase {
    Serving = 0,
    Draining = 1,
    Closing = 2,
}

/// State shared by the accept loop, its connections and the handle.
#[derive(Default)]
struct ListenerState {
    phase: AtomicU8,
    drain: Notify,
    close: Notify,
    accepting: AtomicBool,
    connections: AtomicUsize,
    idle: Notify,
}

impl ListenerState {
    fn phase(&self) -> ListenerPhase {
        match self.phase.load(Ordering::Acquire) {
            0 => ListenerPhase::Serving,
            1 => ListenerPhase::Draining,
            _ => ListenerPhase::Closing,
        }
    }

    fn advance_to(&self, phase: ListenerPhase) {
        // Only ever forward: a late drain must not undo a close.
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.drain.notify_waiters();
        if phase == ListenerPhase::Closing {
            self.close.notify_waiters();
        }
    }

    async fn drain_requested(&self) {
        let mut notified = std::pin::pin!(self.drain.notified());
        notified.as_mut().enable();
        if self.phase() == ListenerPhase::Serving {
            notified.await;
        }
    }

    fn is_idle(&self) -> bool {
        !self.accepting.load(Ordering::Acquire) && self.connections.load(Ordering::Acquire) == 0
    }
}

/// Held while the accept loop runs.
struct AcceptLoopGuard(Arc<ListenerState>);

impl AcceptLoopGuard {
    fn new(shared: Arc<ListenerState>) -> Self {
        shared.accepting.store(true, Ordering::Release);
        Self(shared)
    }
}

impl Drop for AcceptLoopGuard {
    fn drop(&mut self) {
        self.0.advance_to(ListenerPhase::Draining);
        self.0.accepting.store(false, Ordering::Release);
        self.0.idle.notify_waiters();
    }
}

/// Held by each open connection.
struct OpenConnectionGuard {
    state: Arc<ListenerState>,
    _slot: OwnedSemaphorePermit,
}

impl OpenConnectionGuard {
    fn new(shared: &Arc<ListenerState>, slot: OwnedSemaphorePermit) -> Self {
        shared.connections.fetch_add(1, Ordering::AcqRel);
        Self { state: Arc::clone(shared), _slot: slot }
    }
}

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        if self.state.connections.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.state.idle.notify_waiters();
        }
    }
}

struct AcceptLoop {
    socket: ListenerSocket,
    slots: Arc<Semaphore>,
    protocols: Arc<connection::HttpProtocols>,
    rejector: Option<ConnectionRejector>,
    accept_loop_guard: AcceptLoopGuard,
    supervisor: Supervisor,
}

impl AcceptLoop {
    async fn run<S, B>(self, service: S, drain: CancellationToken)
    where
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let shutdown = self.supervisor.token();
        tokio::select! {
            biased;
            () = drain.cancelled() => {}
            () = shutdown.cancelled() => {}
            () = self.accept_loop_guard.0.drain_requested() => {}
            () = self.accept_all(service) => {}
        }
        // Close the socket first, so that new connections are refused by the kernel instead of accepted and dropped.
        drop(self.socket);
        drop(self.accept_loop_guard);
    }

    async fn accept_all<S, B>(&self, service: S)
    where
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        loop {
            let (stream, peer, slot) = self.accept_with_slot().await;
            let protocol = Arc::clone(&self.protocols);
            let open = OpenConnectionGuard::new(&self.accept_loop_guard.0, slot);
            let service = connection::PeerAddrService::new(service.clone(), PeerAddr(peer));
            let tls = self.socket.tls.clone();
            self.supervisor.spawn("connection", async move {
                match tls {
                    None => protocol.run(stream, service, &open.state).await,
                    // Boxed, to keep the future of connections without TLS small.
                    Some(tls) => Box::pin(protocol.run_tls(stream, &tls, service, &open.state)).await,
                }
            });
        }
    }
}

impl AcceptLoop {
    /// The next connection with a free slot.
    async fn accept_with_slot(&self) -> (TcpStream, SocketAddr, OwnedSemaphorePermit) {
        loop {
            let slots = Arc::clone(&self.slots);
            // The semaphore is never closed.
            let Some(rejector) = &self.rejector else {
                let Ok(slot) = slots.acquire_owned().await else { continue };
                let (stream, peer) = accept_one(&self.socket.listener).await;
                return (stream, peer, slot);
            };
            let (stream, peer) = accept_one(&self.socket.listener).await;
            match slots.try_acquire_owned() {
                Ok(slot) => return (stream, peer, slot),
                Err(_) => rejector.reject(stream, self.socket.tls.is_some()).await,
            }
        }
    }
}

async fn accept_one(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let mut backoff = Backoff::new(ACCEPT_BACKOFF);
    loop {
        let error = match listener.accept().await {
            Ok((stream, peer)) => {
                // With Nagle's algorithm, a small event waits for the acknowledgement of the previous one.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%peer, %error, "connection closed before it was set up");
                    continue;
                }
                return (stream, peer);
            }
            Err(error) => error,
        };
        if is_connection_error(error.kind()) {
            continue;
        }
        backoff.record_failure();
        let pause = backoff.pause();
        tracing::warn!(%error, ?pause, "cannot accept connections; retrying after a pause");
        tokio::time::sleep(pause).await;
    }
}

/// Whether the failed accept concerns only that client, so that the next accept can follow at once.
fn is_connection_error(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused)
}

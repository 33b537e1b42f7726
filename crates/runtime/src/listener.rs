//! HTTP listeners with limits and a drain.
//!
//! `axum::serve` builds its connections without a timer, so that the time limit for a request head never
//! runs; it has no limit for connections and no deadline for a drain. This loop has them, for any tower
//! service. HTTP/1.1 and HTTP/2 with prior knowledge (h2c) are told apart by the first bytes of a
//! connection, which costs a request nothing.

mod connection;
mod rejection;
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
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use self::rejection::ConnectionRejector;
use crate::Supervisor;
use crate::net::{self, TcpListener, TcpStream};

pub use rejection::ConnectionRejection;
pub(crate) use tls::certificates;
pub use tls::{ClientCertificate, ServerTls, ServerTlsFiles, TlsConfigError};

/// Pause after a failed accept: doubled from the first to the last while accepts keep failing.
const ACCEPT_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The address of the client, in the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Where connections come from.
#[derive(Debug)]
pub struct ListenerSocket {
    /// Accepts them.
    pub listener: TcpListener,
    /// With it, clients must speak TLS.
    pub tls: Option<ServerTls>,
}

impl From<TcpListener> for ListenerSocket {
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }
}

/// What one listener accepts.
#[derive(Debug, Clone)]
pub struct ListenerLimits {
    /// Connections open at once.
    pub connections: usize,
    /// What connections beyond that get. Without it they wait in the kernel's backlog.
    pub rejection: Option<ConnectionRejection>,
    /// Time for the head of a request, and so also for how long a connection may idle between two.
    pub header_read_timeout: Duration,
    /// Size of a request head in bytes. Larger: 431.
    pub header_bytes: usize,
    /// Number of header fields. More: 431. `None` is hyper's 100, which costs no allocation.
    pub headers: Option<usize>,
    /// Requests at once on one HTTP/2 connection.
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

/// A listening socket could not be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; {}", bind_error_hint(.source.kind()))]
pub struct BindError {
    /// The address asked for.
    pub address: SocketAddr,
    /// What the kernel said.
    pub source: io::Error,
}

fn bind_error_hint(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::AddrInUse => {
            "stop the process that uses the port (`ss -ltnp` shows it) or choose another port"
        }
        ErrorKind::AddrNotAvailable => {
            "no interface of this host has that address; 0.0.0.0 or [::] takes all"
        }
        ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE; choose a higher port",
        _ => "check the address and the limits of the process",
    }
}

/// Opens a listening socket. Port 0 lets the kernel choose; ask `local_addr()` for its choice.
///
/// The address can be taken again while connections of a previous process linger (`SO_REUSEADDR`).
/// Must be called inside a tokio runtime with I/O enabled.
///
/// # Errors
/// [`BindError`], which names the address and says how to mend it.
pub fn bind(address: SocketAddr) -> Result<TcpListener, BindError> {
    net::listen(address).map_err(|source| BindError { address, source })
}

/// The error a service or a body may have: anything that can be boxed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Serves `service` on `socket` until `drain` is cancelled or `supervisor` shuts down.
///
/// Each connection is one task of the supervisor and works on a clone of the service; an HTTP/1.1 request
/// starts no task and boxes nothing here. When draining begins, the socket is closed, idle connections are
/// closed, and busy ones end after the response in progress. [`ListenerHandle`] waits for that and cuts what is left.
///
/// A request that is not HTTP is answered or cut by its own connection. A failing accept (out of file
/// descriptors, say) is logged and tried again after a pause.
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
        rejector: limits.rejection.map(|refusal| ConnectionRejector::new(refusal, supervisor.clone())),
        accept_loop_guard: AcceptLoopGuard::new(Arc::clone(&shared)),
        supervisor: supervisor.clone(),
    };
    supervisor.spawn_essential("listener", accept.run(service, drain));
    ListenerHandle { state: shared }
}

/// A running listener. Clones are the same listener.
#[derive(Clone)]
pub struct ListenerHandle {
    state: Arc<ListenerState>,
}

impl ListenerHandle {
    /// Number of open connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::Acquire)
    }

    /// Waits until nothing is accepted any more and no connection is open, at most for `deadline`; says
    /// whether that came true. It cannot before draining has begun.
    pub async fn wait_idle(&self, deadline: Duration) -> bool {
        let idle = async {
            loop {
                let mut told = std::pin::pin!(self.state.idle.notified());
                told.as_mut().enable();
                if self.state.is_idle() {
                    return;
                }
                told.await;
            }
        };
        tokio::time::timeout(deadline, idle).await.is_ok()
    }

    /// Cuts every open connection, whatever it is doing, and accepts no more.
    pub fn close(&self) {
        self.state.advance_to(ListenerPhase::Closing);
    }

    /// [`ListenerHandle::wait_idle`], then [`ListenerHandle::close`]. Returns how many connections had to be cut.
    pub async fn drain_then_close(&self, deadline: Duration) -> usize {
        if self.wait_idle(deadline).await {
            return 0;
        }
        let cut = self.connections();
        self.close();
        cut
    }
}

impl std::fmt::Debug for ListenerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serving").field("connections", &self.connections()).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ListenerPhase {
    Serving = 0,
    Draining = 1,
    Closing = 2,
}

/// What the loop, its connections and the handle know of each other.
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
        // Only ever forward: a drain that is noticed late must not undo a close.
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.drain.notify_waiters();
        if phase == ListenerPhase::Closing {
            self.close.notify_waiters();
        }
    }

    async fn drain_requested(&self) {
        let mut told = std::pin::pin!(self.drain.notified());
        told.as_mut().enable();
        if self.phase() == ListenerPhase::Serving {
            told.await;
        }
    }

    fn is_idle(&self) -> bool {
        !self.accepting.load(Ordering::Acquire) && self.connections.load(Ordering::Acquire) == 0
    }
}

/// Held while the loop may still accept.
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

/// Held by an open connection.
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
        // The socket goes first, so that a new connection is refused rather than accepted and forgotten.
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
                    // In a box, so that connections without TLS are small.
                    Some(tls) => Box::pin(protocol.run_tls(stream, &tls, service, &open.state)).await,
                }
            });
        }
    }
}

impl AcceptLoop {
    /// The next connection for which there is a slot.
    async fn accept_with_slot(&self) -> (TcpStream, SocketAddr, OwnedSemaphorePermit) {
        loop {
            let slots = Arc::clone(&self.slots);
            // The semaphore is never closed.
            let Some(refuser) = &self.rejector else {
                let Ok(slot) = slots.acquire_owned().await else { continue };
                let (stream, peer) = accept_one(&self.socket.listener).await;
                return (stream, peer, slot);
            };
            let (stream, peer) = accept_one(&self.socket.listener).await;
            match slots.try_acquire_owned() {
                Ok(slot) => return (stream, peer, slot),
                Err(_) => refuser.reject(stream, self.socket.tls.is_some()).await,
            }
        }
    }
}

async fn accept_one(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let (mut pause, longest) = ACCEPT_PAUSE;
    loop {
        let error = match listener.accept().await {
            Ok((stream, peer)) => {
                // Without it a small event waits for the acknowledgement of the one before.
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%peer, %error, "connection gone before it was set up");
                    continue;
                }
                return (stream, peer);
            }
            Err(error) => error,
        };
        if is_connection_error(error.kind()) {
            continue;
        }
        tracing::warn!(%error, ?pause, "cannot accept connections; trying again after a pause");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Whether the failed accept says something of that client only, so that the next can be tried at once.
fn is_connection_error(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused)
}

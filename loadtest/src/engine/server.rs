//! Sockets: one accept loop per port and one HTTP/1.1 connection per task, so that faults can close, reset or corrupt a
//! connection at an exact point.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Collected, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use moongate_runtime::net::{TcpListener, TcpStream};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{Notify, watch};

use super::config::SimEngineError;
use super::response::SimResponse;
use super::stats::SimGaugeGuard;
use super::{SimEngineState, bootstrap, serve};

/// Bytes that no HTTP parser accepts as a response.
const GARBAGE: &[u8] = b"\x00\xff\xfeSSH-2.0-not-http\r\n\x13\x37\r\n\r\n";
/// Delay after a failed accept (out of file descriptors).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// One of an engine's two ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SimEnginePort {
    Main,
    Bootstrap,
}

/// How a connection is ended by a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConnectionFaultKind {
    Close,
    /// Closed after bytes that are not HTTP.
    Garbage,
}

/// Ends the connection from inside a handler.
#[derive(Debug, Default)]
pub(crate) struct ConnectionFault {
    kind: Mutex<Option<ConnectionFaultKind>>,
    triggered: Notify,
}

impl ConnectionFault {
    /// Ends the connection; never returns to the handler.
    pub(crate) async fn trigger(&self, how: ConnectionFaultKind) -> SimResponse {
        *self.kind.lock() = Some(how);
        self.triggered.notify_one();
        std::future::pending().await
    }

    async fn wait(&self) -> ConnectionFaultKind {
        loop {
            self.triggered.notified().await;
            if let Some(fault) = *self.kind.lock() {
                return fault;
            }
        }
    }
}

pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener, SimEngineError> {
    TcpListener::bind(address).await.map_err(|source| SimEngineError::Listen { address, source })
}

pub(crate) fn local_addr(listener: &TcpListener, address: SocketAddr) -> Result<SocketAddr, SimEngineError> {
    listener.local_addr().map_err(|source| SimEngineError::Listen { address, source })
}

/// Serves a port until the engine stops.
pub(crate) fn serve(
    engine: &Arc<SimEngineState>,
    listener: TcpListener,
    address: SocketAddr,
    port: SimEnginePort,
) {
    let (engine, stop) = (Arc::clone(engine), engine.supervisor.token());
    engine.clone().supervisor.spawn("sim-engine-listener", async move {
        tokio::select! {
            () = listen(engine, listener, address, port) => {}
            () = stop.cancelled() => {}
        }
    });
}

async fn listen(engine: Arc<SimEngineState>, first: TcpListener, address: SocketAddr, port: SimEnginePort) {
    let mut refusing = engine.refuse_connections.subscribe();
    let mut listener = Some(first);
    loop {
        if *refusing.borrow_and_update() {
            // With the listener closed, the system refuses connections.
            listener = None;
            if refusing.changed().await.is_err() {
                return;
            }
            continue;
        }
        let Some(open) = &listener else {
            listener = match bind(address).await {
                Ok(bound) => Some(bound),
                Err(error) => {
                    tracing::warn!(%error, "cannot bind the port again; retrying");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    None
                }
            };
            continue;
        };
        tokio::select! {
            biased;
            changed = refusing.changed() => if changed.is_err() { return },
            accepted = open.accept() => match accepted {
                Ok((stream, _)) => start_connection(&engine, stream, port),
                Err(error) => {
                    tracing::warn!(%error, "a simulated engine cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            },
        }
    }
}

fn start_connection(engine: &Arc<SimEngineState>, stream: TcpStream, port: SimEnginePort) {
    // Tokens are sent one by one; without this they would wait for acknowledgements.
    let _ = stream.set_nodelay(true);
    let connection = connection(Arc::clone(engine), stream, port);
    let stop = engine.supervisor.token();
    engine.supervisor.spawn("sim-engine-connection", async move {
        tokio::select! {
            () = connection => {}
            () = stop.cancelled() => {}
        }
    });
}

async fn connection(engine: Arc<SimEngineState>, stream: TcpStream, port: SimEnginePort) {
    let _open = (port == SimEnginePort::Main).then(|| {
        SimGaugeGuard::new(&engine.stats, 1, |stats, by| {
            stats.open_connections = stats.open_connections.saturating_add_signed(by);
        })
    });
    let connection_fault = Arc::new(ConnectionFault::default());
    let service = service_fn({
        let (engine, connection_fault) = (Arc::clone(&engine), Arc::clone(&connection_fault));
        move |request: Request<Incoming>| {
            respond(Arc::clone(&engine), Arc::clone(&connection_fault), port, request)
        }
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(true)
        .serve_connection(TokioIo::new(stream), service);
    let mut refusing = engine.refuse_connections.subscribe();
    let fault = tokio::select! {
        served = &mut connection => {
            if let Err(error) = served {
                tracing::debug!(%error, "a connection to a simulated engine ended early");
            }
            return;
        }
        fault = connection_fault.wait() => Some(fault),
        () = until_refusing(&mut refusing) => None,
    };
    let mut stream = connection.into_parts().io.into_inner();
    match fault {
        Some(ConnectionFaultKind::Close) => {}
        Some(ConnectionFaultKind::Garbage) => {
            // Errors are irrelevant: the client may have disconnected.
            let _ = stream.write_all(GARBAGE).await;
            let _ = stream.shutdown().await;
        }
        // A killed process leaves reset connections.
        None => {
            let _ = stream.set_zero_linger();
        }
    }
}

async fn until_refusing(refusing: &mut watch::Receiver<bool>) {
    if refusing.wait_for(|refusing| *refusing).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn respond(
    engine: Arc<SimEngineState>,
    connection_fault: Arc<ConnectionFault>,
    port: SimEnginePort,
    request: Request<Incoming>,
) -> Result<SimResponse, Infallible> {
    let reply = match port {
        SimEnginePort::Main => serve::handle(&engine, &connection_fault, request).await,
        SimEnginePort::Bootstrap => bootstrap::handle(&engine, request).await,
    };
    Ok(with_server_name(&engine, reply))
}

fn with_server_name(engine: &SimEngineState, mut reply: SimResponse) -> SimResponse {
    // Both engines run on uvicorn.
    reply.headers_mut().insert(http::header::SERVER, http::HeaderValue::from_static("uvicorn"));
    if engine.supervisor.token().is_cancelled() {
        reply.headers_mut().insert(http::header::CONNECTION, http::HeaderValue::from_static("close"));
    }
    reply
}

/// Reads a whole body. `None` if it exceeds `limit` bytes or is truncated.
pub(crate) async fn read_body(body: Incoming, limit: usize) -> Option<Bytes> {
    Limited::new(body, limit).collect().await.ok().map(Collected::to_bytes)
}

//! Pool of connections to one engine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Response};
use moongate_runtime::ClientTls;
use moongate_runtime::net::TcpStream;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::connection::{EngineConnection, EngineConnectionGuard, EngineResponseBody};
use super::leg::LegError;
use crate::request_body::SplicedBody;

/// Limits of a connection pool.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionPoolLimits {
    /// Time limit for DNS and the handshakes of TCP and TLS.
    pub(crate) connect_timeout: Duration,
    /// Most idle connections per engine.
    pub(crate) max_idle: usize,
    /// Idle connections older than this are closed. Shorter than the limit of engines' servers (uvicorn: 5 s), so that the gateway
    /// closes first and a request rarely hits a closing connection.
    pub(crate) idle_timeout: Duration,
    /// Permits for connections to all engines together.
    pub(crate) connections: Arc<Semaphore>,
    /// Trusted CAs for engines with `https://` URLs.
    pub(crate) trust: ClientTls,
}

#[derive(Debug)]
pub(crate) struct ConnectionPool {
    authority: String,
    /// The authority as a `Host` header; `None` if it is not a valid header value.
    host: Option<HeaderValue>,
    tls: bool,
    limits: ConnectionPoolLimits,
    idle: Mutex<Vec<EngineConnection>>,
    open: Arc<AtomicUsize>,
}

impl ConnectionPool {
    /// `url` is `http://host:port` or `https://host:port`.
    pub(crate) fn new(url: &str, limits: ConnectionPoolLimits) -> Self {
        let (tls, authority) = split_url(url);
        Self {
            authority: authority.to_owned(),
            host: HeaderValue::from_str(authority).ok(),
            tls,
            limits,
            idle: Mutex::new(Vec::new()),
            open: Arc::default(),
        }
    }

    /// Whether the pool connects to `url`.
    pub(crate) fn goes_to(&self, url: &str) -> bool {
        (self.tls, self.authority()) == split_url(url)
    }

    /// Open connections now, in use or idle.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    pub(crate) fn idle(&self) -> usize {
        self.idle.lock().len()
    }

    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Sends a request on an idle or new connection. An idle connection that turns out closed before any response is replaced once
    /// by a new one: the peer closed it before it got the request.
    pub(super) async fn exchange(
        &self,
        request: PreparedRequest,
    ) -> Result<(Response<()>, EngineResponseBody), LegError> {
        let host = self.host.as_ref();
        if let Some(connection) = self.checkout() {
            match connection.exchange(&request, host).await {
                Ok(response) => return Ok(response),
                Err(error) if error.never_arrived() => {}
                Err(error) => return Err(LegError::from(error.error)),
            }
        }
        let connection = self.connect().await?;
        connection.exchange(&request, host).await.map_err(|error| LegError::from(error.error))
    }

    /// Returns a connection to the pool.
    pub(super) fn checkin(&self, connection: EngineConnection) {
        // Without a free permit, another engine may be waiting for this connection's.
        let is_needed = self.limits.connections.available_permits() == 0;
        let mut idle = self.idle.lock();
        if idle.len() < self.limits.max_idle && !is_needed {
            idle.push(connection);
        }
    }

    /// Closes idle connections that are too old or that the peer has closed.
    pub(crate) fn sweep(&self) {
        let oldest = Instant::now() - self.limits.idle_timeout;
        self.idle.lock().retain_mut(|connection| connection.idle_since > oldest && connection.is_reusable());
    }

    pub(crate) fn clear(&self) {
        self.idle.lock().clear();
    }

    fn checkout(&self) -> Option<EngineConnection> {
        loop {
            let mut connection = self.idle.lock().pop()?;
            if connection.idle_since.elapsed() < self.limits.idle_timeout && connection.is_reusable() {
                return Some(connection);
            }
        }
    }

    async fn connect(&self) -> Result<EngineConnection, LegError> {
        let started = Instant::now();
        let permit = timeout(self.limits.connect_timeout, self.limits.connections.clone().acquire_owned());
        let Ok(Ok(permit)) = permit.await else { return Err(LegError::NoConnectionLeft) };
        let open = EngineConnectionGuard::new(&self.open, permit);
        let timed_out = |what| LegError::Connect(io::Error::new(io::ErrorKind::TimedOut, what));
        let stream = timeout(self.limits.connect_timeout, TcpStream::connect(&self.authority)).await;
        let stream = stream.map_err(|_| timed_out("TCP connection timed out"))?.map_err(connect_error)?;
        stream.set_nodelay(true).map_err(LegError::Connect)?;
        if !self.tls {
            return Ok(EngineConnection::new(stream, open));
        }
        let host = self.authority.rsplit_once(':').map_or(&*self.authority, |(host, _)| host);
        let handshake = self.limits.trust.connect(host.trim_matches(['[', ']']), stream);
        let remaining = self.limits.connect_timeout.saturating_sub(started.elapsed());
        let stream = timeout(remaining, handshake).await.map_err(|_| timed_out("TLS handshake timed out"))?;
        Ok(EngineConnection::new(stream.map_err(LegError::Connect)?, open))
    }
}

/// Maps an error of opening a connection: caused by this process, or by the engine.
fn connect_error(error: io::Error) -> LegError {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    match error.raw_os_error() {
        Some(ENFILE | EMFILE) => LegError::NoConnectionLeft,
        _ => LegError::Connect(error),
    }
}

/// Whether a URL uses TLS, and its `host:port`.
pub(crate) fn split_url(url: &str) -> (bool, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    (scheme == "https", rest.trim_end_matches('/'))
}

/// A request that can be sent more than once, because a pooled connection may be stale.
#[derive(Debug, Clone)]
pub(crate) struct PreparedRequest {
    pub(crate) method: http::Method,
    /// Path and query.
    pub(crate) uri: http::Uri,
    /// Headers shared with other legs of the request.
    pub(crate) headers: Arc<HeaderMap>,
    /// Headers of this leg, which replace shared ones of the same name. The pool adds `host`.
    pub(crate) extra_headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: SplicedBody,
}

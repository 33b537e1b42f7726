//! Idle connections of one engine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::header::HOST;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use moongate_runtime::ClientTls;
use moongate_runtime::net::TcpStream;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::connection::{EngineConnection, EngineConnectionGuard, EngineResponseBody, ExchangeError};
use super::leg::LegError;
use crate::request_body::SplicedBody;

/// Bounds of a pool.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionPoolLimits {
    /// Time for DNS and the handshakes of TCP and TLS.
    pub(crate) connect_timeout: Duration,
    /// Idle connections kept per engine.
    pub(crate) max_idle: usize,
    /// Idle connections older than this are closed. Shorter than what engines' servers allow (uvicorn: 5 s), so that we close
    /// first and a request rarely meets a closing connection.
    pub(crate) idle_timeout: Duration,
    /// Connections to all engines together.
    pub(crate) connections: Arc<Semaphore>,
    /// Whom engines with `https://` URLs are known by.
    pub(crate) trust: ClientTls,
}

/// Connections to one engine.
#[derive(Debug)]
pub(crate) struct ConnectionPool {
    authority: String,
    /// The authority as a header; `None` if it cannot be one.
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

    /// Whether this is where its connections go.
    pub(crate) fn goes_to(&self, url: &str) -> bool {
        (self.tls, self.authority()) == split_url(url)
    }

    /// Connections that exist now, in use or idle.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Idle connections now.
    pub(crate) fn idle(&self) -> usize {
        self.idle.lock().len()
    }

    /// `host:port`.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Sends a request on an idle or new connection. An idle connection that turns out closed before any answer
    /// is replaced once by a new one: the peer closed it before it saw the request.
    pub(super) async fn exchange(
        &self,
        request: PreparedRequest,
    ) -> Result<(Response<()>, EngineResponseBody), LegError> {
        if let Some(connection) = self.checkout() {
            match connection.exchange(request.to(self.host.as_ref())).await {
                Ok(answer) => return Ok(answer),
                Err(ExchangeError { reused: true, error })
                    if error.as_ref().is_none_or(closed_before_answer) => {}
                Err(broken) => return Err(LegError::from(broken)),
            }
        }
        let connection = self.connect().await?;
        Ok(connection.exchange(request.to(self.host.as_ref())).await?)
    }

    /// Takes back a connection.
    pub(super) fn checkin(&self, connection: EngineConnection) {
        // With none left, another engine may be waiting for this one's.
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

    /// Closes all idle connections.
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
        let begun = Instant::now();
        let permit = timeout(self.limits.connect_timeout, self.limits.connections.clone().acquire_owned());
        let Ok(Ok(permit)) = permit.await else { return Err(LegError::NoConnectionLeft) };
        let open = EngineConnectionGuard::new(&self.open, permit);
        let late = |what| LegError::Connect(io::Error::new(io::ErrorKind::TimedOut, what));
        let stream = timeout(self.limits.connect_timeout, TcpStream::connect(&self.authority)).await;
        let stream = stream.map_err(|_| late("no TCP connection in time"))?.map_err(connect_error)?;
        stream.set_nodelay(true).map_err(LegError::Connect)?;
        if !self.tls {
            return EngineConnection::handshake(stream, open).await.map_err(LegError::Transport);
        }
        let host = self.authority.rsplit_once(':').map_or(&*self.authority, |(host, _)| host);
        let shaking = self.limits.trust.connect(host.trim_matches(['[', ']']), stream);
        let left = self.limits.connect_timeout.saturating_sub(begun.elapsed());
        let stream = timeout(left, shaking).await.map_err(|_| late("no TLS handshake in time"))?;
        let stream = stream.map_err(LegError::Connect)?;
        EngineConnection::handshake(stream, open).await.map_err(LegError::Transport)
    }
}

/// A connection that could not be opened: by this process, or at the engine.
fn connect_error(error: io::Error) -> LegError {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    match error.raw_os_error() {
        Some(ENFILE | EMFILE) => LegError::NoConnectionLeft,
        _ => LegError::Connect(error),
    }
}

/// Whether a URL asks for TLS, and its `host:port`.
pub(crate) fn split_url(url: &str) -> (bool, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    (scheme == "https", rest.trim_end_matches('/'))
}

/// Everything needed to send a request, more than once if a pooled connection was stale.
#[derive(Debug, Clone)]
pub(crate) struct PreparedRequest {
    pub(crate) method: http::Method,
    /// Path and query.
    pub(crate) uri: http::Uri,
    /// What it has in common with other legs of its request.
    pub(crate) headers: Arc<HeaderMap>,
    /// Headers of its own, which replace those of the same name. The pool adds `host`.
    pub(crate) extra_headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: SplicedBody,
}

impl PreparedRequest {
    fn to(&self, host: Option<&HeaderValue>) -> Request<SplicedBody> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        let mut headers = HeaderMap::clone(&self.headers);
        let host = host.map(|host| (HOST, host.clone()));
        for (name, value) in self.extra_headers.iter().cloned().chain(host) {
            headers.insert(name, value);
        }
        *request.headers_mut() = headers;
        request
    }
}

fn closed_before_answer(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_closed() || error.is_canceled() || {
        let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|io| {
            matches!(
                io.kind(),
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected
            )
        })
    }
}

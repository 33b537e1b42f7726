//! One connection: which protocol it speaks, and its end.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tower::ServiceExt as _;
use tower::util::Oneshot;

use super::tls::{self, ClientCertificate, ServerTls};
use super::{BoxError, ListenerLimits, ListenerPhase, ListenerState, PeerAddr};
use crate::Supervisor;
use crate::net::TcpStream;

/// hyper's default, which it keeps on the stack.
const HEADERS_WITHOUT_ALLOCATION: usize = 100;
/// Most bytes that are read at once from an HTTP/1 connection, unless heads may be larger.
const READ_BUFFER: usize = 64 << 10;
/// How often an HTTP/2 connection is asked whether its client is still there, and how long it may take to say so.
const HTTP2_PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// The first bytes of the HTTP/2 preface; no HTTP/1 method begins with them.
const HTTP2_PREFACE_START: &[u8] = b"PRI ";

/// The configured protocols, shared by every connection of a listener.
pub(super) struct HttpProtocols {
    http1: http1::Builder,
    http2: http2::Builder<SupervisedExecutor>,
    first_byte_timeout: Duration,
}

impl HttpProtocols {
    pub(super) fn new(limits: &ListenerLimits, supervisor: &Supervisor) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_read_timeout)
            // Many connections may receive large bodies at once: hyper's own bound is six times as high.
            .max_buf_size(limits.header_bytes.max(READ_BUFFER))
            .max_header_size(limits.header_bytes);
        if let Some(headers) = limits.headers.filter(|headers| *headers != HEADERS_WITHOUT_ALLOCATION) {
            http1.max_headers(headers);
        }
        let (interval, timeout) = HTTP2_PING;
        let mut http2 = http2::Builder::new(SupervisedExecutor(supervisor.clone()));
        http2
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX))
            .max_concurrent_streams(limits.streams)
            .keep_alive_interval(interval)
            .keep_alive_timeout(timeout);
        Self { http1, http2, first_byte_timeout: limits.header_read_timeout }
    }

    /// Runs the connection to its end.
    pub(super) async fn run<S, B>(
        &self,
        stream: TcpStream,
        service: PeerAddrService<S>,
        shared: &ListenerState,
    ) where
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let mut start = [0; HTTP2_PREFACE_START.len()];
        let read = tokio::select! {
            // A client that has sent nothing has nothing to wait for.
            () = shared.drain_requested() => return,
            read = tokio::time::timeout(self.first_byte_timeout, stream.peek(&mut start)) => read,
        };
        // Nothing in time, end of stream, or a broken connection: there is nobody to answer.
        let Ok(Ok(1..)) = read else { return };
        self.serve(stream, start == HTTP2_PREFACE_START, service, shared).await;
    }

    /// The same for a client that speaks TLS.
    pub(super) async fn run_tls<S, B>(
        &self,
        stream: TcpStream,
        tls: &ServerTls,
        mut service: PeerAddrService<S>,
        shared: &ListenerState,
    ) where
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let peer = service.peer.0;
        let stream = tokio::select! {
            () = shared.drain_requested() => return,
            shaken = tokio::time::timeout(self.first_byte_timeout, tls.accept(stream)) => match shaken {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return tracing::debug!(%peer, %error, "no TLS with this client"),
                Err(_) => return,
            },
        };
        let (is_http2, certificate) = tls::negotiated(&stream);
        service.certificate = certificate;
        self.serve(stream, is_http2, service, shared).await;
    }

    async fn serve<I, S, B>(
        &self,
        stream: I,
        is_http2: bool,
        service: PeerAddrService<S>,
        shared: &ListenerState,
    ) where
        I: AsyncStream,
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let peer = service.peer.0;
        let io = TokioIo::new(stream);
        // Each in a box of its own: a task is as large as the largest it may become, and most connections are idle or HTTP/1.
        let ended = if is_http2 {
            drive(Box::pin(self.http2.serve_connection(io, service)), shared).await
        } else {
            drive(Box::pin(self.http1.serve_connection(io, service)), shared).await
        };
        match ended {
            HttpConnectionOutcome::Completed => {}
            HttpConnectionOutcome::Failed(error) => tracing::debug!(%peer, %error, "connection ended"),
            HttpConnectionOutcome::Aborted => {
                tracing::debug!(%peer, "connection cut: it was still open at the drain deadline");
            }
        }
    }
}

enum HttpConnectionOutcome {
    Completed,
    Failed(hyper::Error),
    Aborted,
}

/// A connection that can be told to end after the response in progress.
trait GracefulShutdown: Future<Output = hyper::Result<()>> {
    fn begin_graceful_shutdown(self: Pin<&mut Self>);
}

/// What a connection is read from and written to.
pub(super) trait AsyncStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncStream for I {}

impl<I, S, B> GracefulShutdown for http1::Connection<TokioIo<I>, S>
where
    I: AsyncStream,
    S: hyper::service::HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    B: Body + 'static,
    B::Error: Into<BoxError>,
{
    fn begin_graceful_shutdown(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<I, S, B> GracefulShutdown for http2::Connection<TokioIo<I>, S, SupervisedExecutor>
where
    I: AsyncStream,
    S: hyper::service::HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    fn begin_graceful_shutdown(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

/// Polls the connection, and between polls looks at the phase: one atomic read. Awaiting a token beside the
/// connection would take a lock at every wake-up, which for a relayed stream is every event.
async fn drive<C: GracefulShutdown>(
    mut connection: Pin<Box<C>>,
    shared: &ListenerState,
) -> HttpConnectionOutcome {
    let mut drain = pin!(shared.drain.notified());
    let mut close = pin!(shared.close.notified());
    let mut enlisted = false;
    let mut told = false;
    poll_fn(|cx| {
        if !enlisted {
            // Once is enough: a task keeps its waker. What they answer is in the phase, read after enlisting.
            let _ = drain.as_mut().poll(cx);
            let _ = close.as_mut().poll(cx);
            enlisted = true;
        }
        match shared.phase() {
            ListenerPhase::Serving => {}
            ListenerPhase::Closing => return Poll::Ready(HttpConnectionOutcome::Aborted),
            ListenerPhase::Draining if told => {}
            ListenerPhase::Draining => {
                told = true;
                connection.as_mut().begin_graceful_shutdown();
            }
        }
        connection.as_mut().poll(cx).map(|ended| match ended {
            Ok(()) => HttpConnectionOutcome::Completed,
            Err(error) => HttpConnectionOutcome::Failed(error),
        })
    })
    .await
}

/// The service of one connection: puts the client's address into each request, and whether it has shown a certificate.
#[derive(Clone)]
pub(super) struct PeerAddrService<S> {
    service: S,
    peer: PeerAddr,
    certificate: Option<ClientCertificate>,
}

impl<S> PeerAddrService<S> {
    pub(super) fn new(service: S, peer: PeerAddr) -> Self {
        Self { service, peer, certificate: None }
    }
}

impl<S> hyper::service::Service<Request<Incoming>> for PeerAddrService<S>
where
    S: tower::Service<Request<Incoming>> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Oneshot<S, Request<Incoming>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.peer);
        if let Some(certificate) = self.certificate {
            request.extensions_mut().insert(certificate);
        }
        self.service.clone().oneshot(request)
    }
}

/// HTTP/2 needs a task for each stream; they are counted like all others.
#[derive(Clone)]
struct SupervisedExecutor(Supervisor);

impl<F> hyper::rt::Executor<F> for SupervisedExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn("http2 stream", future);
    }
}

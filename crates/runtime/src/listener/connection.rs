//! One connection: protocol detection, serving and shutdown.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tower::ServiceExt as _;
use tower::util::Oneshot;

use super::prefixed_stream::PrefixedStream;
use super::response_stream::{
    ResponseStreamError, ResponseWriter, StreamedResponse, StreamedResponseSlot, StreamingService,
};
use super::tls::{self, ClientCertificate, ServerTls};
use super::{BoxError, ListenerLimits, ListenerPhase, ListenerState, PeerAddr};
use crate::Supervisor;
use crate::net::TcpStream;

/// hyper's default, which it stores without an allocation.
const HEADERS_WITHOUT_ALLOCATION: usize = 100;
/// Read buffer limit of an HTTP/1 connection in bytes, unless request heads may be larger.
const READ_BUFFER: usize = 64 << 10;
/// Interval of HTTP/2 keepalive pings, and the time allowed for their acknowledgement.
const HTTP2_PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(20));
/// First bytes of the HTTP/2 preface; no HTTP/1 method starts with them.
const HTTP2_PREFACE_START: &[u8] = b"PRI ";

/// The configured protocols, shared by all connections of a listener.
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
            // Many connections may receive large bodies at the same time: hyper's own limit is six times as high.
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

    /// Serves a plaintext connection to its end.
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
            // A client that has sent nothing does not wait for a response.
            () = shared.drain_requested() => return,
            read = tokio::time::timeout(self.first_byte_timeout, stream.peek(&mut start)) => read,
        };
        // Timeout, end of stream, or a broken connection: no request to respond to.
        let Ok(Ok(1..)) = read else { return };
        self.serve(stream, start == HTTP2_PREFACE_START, service, shared).await;
    }

    /// Serves a TLS connection to its end.
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
            handshake = tokio::time::timeout(self.first_byte_timeout, tls.accept(stream)) => match handshake {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return tracing::debug!(%peer, %error, "TLS handshake failed"),
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
        // Boxed separately: a task is as large as its largest variant, and most connections are idle or HTTP/1.
        let outcome = if is_http2 {
            Box::pin(self.serve_http2(stream, service, shared)).await
        } else {
            self.serve_http1(stream, service, shared).await
        };
        match outcome {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!(%peer, %error, "connection ended"),
            None => tracing::debug!(%peer, "connection closed: it was still busy at the drain deadline"),
        }
    }

    async fn serve_http2<I, S, B>(
        &self,
        stream: I,
        service: PeerAddrService<S>,
        shared: &ListenerState,
    ) -> Option<Result<(), BoxError>>
    where
        I: AsyncStream,
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let mut connection = pin!(self.http2.serve_connection(TokioIo::new(stream), service));
        drive(shared, |cx, begins_to_drain| {
            if begins_to_drain {
                connection.as_mut().graceful_shutdown();
            }
            connection.as_mut().poll(cx).map_err(BoxError::from)
        })
        .await
    }

    /// hyper serves the connection, except for the time in which a long response streams.
    async fn serve_http1<I, S, B>(
        &self,
        stream: I,
        service: PeerAddrService<S>,
        shared: &ListenerState,
    ) -> Option<Result<(), BoxError>>
    where
        I: AsyncStream,
        S: tower::Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        let mut stream = PrefixedStream::new(stream);
        loop {
            let slot = StreamedResponseSlot::new();
            let service = StreamingService::new(service.clone(), &slot);
            let mut connection = Box::new(self.http1.serve_connection(TokioIo::new(stream), service));
            let response = drive(shared, |cx, begins_to_drain| {
                if begins_to_drain {
                    Pin::new(&mut *connection).graceful_shutdown();
                }
                match Pin::new(&mut *connection).poll(cx) {
                    Poll::Ready(ended) => Poll::Ready(Err(ended)),
                    Poll::Pending => slot.take().map_or(Poll::Pending, |response| Poll::Ready(Ok(response))),
                }
            })
            .await?;
            let response = match response {
                Ok(response) => response,
                Err(ended) => return Some(ended.map_err(BoxError::from)),
            };
            let parts = connection.into_parts();
            stream = parts.io.into_inner();
            stream.put_back(&parts.read_buf);
            drop((parts.service, parts.read_buf));
            let keep_alive = response.keep_alive;
            if let Err(error) = send(&mut stream, response, shared).await? {
                return Some(Err(error.into()));
            }
            if !keep_alive {
                let mut stream = pin!(stream);
                let ended = drive(shared, |cx, _| stream.as_mut().poll_shutdown(cx)).await?;
                return Some(ended.map_err(BoxError::from));
            }
        }
    }
}

async fn send<I, B>(
    stream: &mut PrefixedStream<I>,
    response: StreamedResponse<B>,
    shared: &ListenerState,
) -> Option<Result<(), ResponseStreamError>>
where
    I: AsyncStream,
    B: Body,
    B::Error: Into<BoxError>,
{
    let (head, body) = response.into_parts();
    let body = pin!(body);
    let mut writer = ResponseWriter::new(stream, head, body);
    drive(shared, |cx, _| writer.poll(cx)).await
}

/// Byte stream of a connection.
pub(super) trait AsyncStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<I: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncStream for I {}

/// Polls a connection, and checks the phase between polls: one atomic read. Awaiting a token together with the connection would take a
/// lock at every wake-up, which for a relayed stream is every event. `poll` is called once with `true`, when the listener begins to
/// drain. `None` when the listener closes.
async fn drive<T>(
    shared: &ListenerState,
    mut poll: impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
) -> Option<T> {
    let mut drain = pin!(shared.drain.notified());
    let mut close = pin!(shared.close.notified());
    let mut registered = false;
    let mut draining = false;
    poll_fn(|cx| {
        if !registered {
            // Once is enough: a task keeps its waker. The result is in the phase, which is read after registering.
            let _ = drain.as_mut().poll(cx);
            let _ = close.as_mut().poll(cx);
            registered = true;
        }
        let phase = shared.phase();
        if phase == ListenerPhase::Closing {
            return Poll::Ready(None);
        }
        let begins_to_drain = phase == ListenerPhase::Draining && !draining;
        draining |= begins_to_drain;
        poll(cx, begins_to_drain).map(Some)
    })
    .await
}

/// The service of one connection: adds the client's address and certificate to each request's extensions.
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

/// HTTP/2 needs a task per stream; these are supervised too.
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

//! One HTTP/1.1 connection to an engine and one exchange on it.
//!
//! hyper's client holds a channel and two buffers, together 25 kB, for as long as a response streams. Here a connection holds nothing
//! between two reads, and the exchange is a state of its caller.

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderValue, Method, Response};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::pool::PreparedRequest;
use super::request_writer::RequestWriter;
use super::response_parser::{NotHttp, ResponseParser};

/// Most bytes of one read. They are read to the stack, so that a connection that waits holds no buffer.
const READ_BYTES: usize = 16 << 10;

/// Counts an open connection until dropped.
#[derive(Debug)]
pub(super) struct EngineConnectionGuard {
    open: Arc<AtomicUsize>,
    _permit: OwnedSemaphorePermit,
}

impl EngineConnectionGuard {
    pub(super) fn new(open: &Arc<AtomicUsize>, permit: OwnedSemaphorePermit) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self { open: open.clone(), _permit: permit }
    }
}

impl Drop for EngineConnectionGuard {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// TCP, or TLS over it.
trait EngineStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> EngineStream for S {}

/// An open connection. Nothing reads or writes it but the exchange on it.
pub(super) struct EngineConnection {
    stream: Box<dyn EngineStream>,
    /// When it was returned to the pool.
    pub(super) idle_since: Instant,
    /// Whether an earlier exchange succeeded on it.
    pub(super) reused: bool,
    _open: EngineConnectionGuard,
}

impl EngineConnection {
    pub(super) fn new(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        open: EngineConnectionGuard,
    ) -> Self {
        Self { stream: Box::new(stream), idle_since: Instant::now(), reused: false, _open: open }
    }

    /// Whether another request may be sent: the peer has neither closed nor sent anything since the last response.
    pub(super) fn is_reusable(&mut self) -> bool {
        let mut byte = [0];
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut *self.stream).poll_read(&mut cx, &mut ReadBuf::new(&mut byte)).is_pending()
    }

    /// Sends `request` and waits for the head of the response.
    pub(super) async fn exchange(
        mut self,
        request: &PreparedRequest,
        host: Option<&HeaderValue>,
    ) -> Result<(Response<()>, EngineResponseBody), ExchangeError> {
        let mut sending = Some(RequestWriter::new(request, host));
        let mut parser = ResponseParser::new(request.method == Method::HEAD);
        let head = poll_fn(|cx| self.poll_head(cx, &mut sending, &mut parser)).await;
        let reused = self.reused;
        match head {
            Ok(head) => {
                Ok((head, EngineResponseBody { connection: self, sending, parser, has_buffered: true }))
            }
            Err(error) => Err(ExchangeError { error, is_stale: reused && parser.is_untouched() }),
        }
    }

    fn poll_head(
        &mut self,
        cx: &mut Context<'_>,
        sending: &mut Option<RequestWriter>,
        parser: &mut ResponseParser,
    ) -> Poll<Result<Response<()>, TransportError>> {
        // An engine may refuse a request before it has read all of it, and then close the connection: its response counts.
        let unsent = self.poll_send(cx, sending).err();
        loop {
            let received = ready!(self.poll_receive(cx, |bytes| match bytes {
                [] => Err(TransportError::Closed),
                bytes => Ok(parser.push_head(bytes)?),
            }));
            match received {
                Ok(Some(head)) => return Poll::Ready(Ok(head)),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(unsent.map_or(error, TransportError::Io))),
            }
        }
    }

    /// Sends what can be sent now.
    fn poll_send(&mut self, cx: &mut Context<'_>, sending: &mut Option<RequestWriter>) -> io::Result<()> {
        let Some(writer) = sending else { return Ok(()) };
        match writer.poll_write(cx, &mut self.stream) {
            Poll::Pending => Ok(()),
            Poll::Ready(Ok(())) => {
                *sending = None;
                Ok(())
            }
            // It stays unsent, so that the connection is not used again.
            Poll::Ready(Err(error)) => Err(error),
        }
    }

    /// Passes received bytes to `receive`; none at the end of the connection.
    fn poll_receive<T>(
        &mut self,
        cx: &mut Context<'_>,
        receive: impl FnOnce(&[u8]) -> Result<T, TransportError>,
    ) -> Poll<Result<T, TransportError>> {
        let mut bytes = [MaybeUninit::uninit(); READ_BYTES];
        let mut buffer = ReadBuf::uninit(&mut bytes);
        ready!(Pin::new(&mut *self.stream).poll_read(cx, &mut buffer))?;
        Poll::Ready(receive(buffer.filled()))
    }
}

impl std::fmt::Debug for EngineConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineConnection").field("reused", &self.reused).finish_non_exhaustive()
    }
}

/// Why an exchange failed on its connection.
#[derive(Debug)]
pub(crate) enum TransportError {
    /// The engine closed the connection before the response was complete.
    Closed,
    Io(io::Error),
    NotHttp(NotHttp),
}

impl From<io::Error> for TransportError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<NotHttp> for TransportError {
    fn from(error: NotHttp) -> Self {
        Self::NotHttp(error)
    }
}

impl TransportError {
    /// Whether the engine closed the connection.
    fn is_closed(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::NotConnected
                    | io::ErrorKind::UnexpectedEof
            ),
            Self::NotHttp(_) => false,
        }
    }
}

/// An exchange that ended before the head of the response.
#[derive(Debug)]
pub(super) struct ExchangeError {
    pub(super) error: TransportError,
    /// Whether it was the first on its connection since that was idle, and nothing was received.
    is_stale: bool,
}

impl ExchangeError {
    /// Whether the engine closed an idle connection before it got the request.
    pub(super) fn never_arrived(&self) -> bool {
        self.is_stale && self.error.is_closed()
    }
}

/// The body of a response, with its connection.
#[derive(Debug)]
pub(super) struct EngineResponseBody {
    connection: EngineConnection,
    /// The rest of the request, if the engine has responded before it has read that.
    sending: Option<RequestWriter>,
    parser: ResponseParser,
    /// Whether a part of the body may have been received with the head.
    has_buffered: bool,
}

impl EngineResponseBody {
    /// The next chunk of the body; `None` at its end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, TransportError>>> {
        if std::mem::take(&mut self.has_buffered) {
            match self.parser.take_buffered() {
                Ok(data) if data.is_empty() => {}
                data => return Poll::Ready(Some(data.map_err(TransportError::from))),
            }
        }
        // A response may be complete although the request could not be sent to its end.
        let _unsent = self.connection.poll_send(cx, &mut self.sending);
        while !self.parser.is_complete() {
            let parser = &mut self.parser;
            let received = ready!(self.connection.poll_receive(cx, |bytes| match bytes {
                [] if parser.end() => Ok(Bytes::new()),
                [] => Err(TransportError::Closed),
                bytes => Ok(parser.push_body(bytes)?),
            }));
            match received {
                Ok(data) if data.is_empty() => {}
                data => return Poll::Ready(Some(data)),
            }
        }
        Poll::Ready(None)
    }

    /// Returns the connection after the body's end, if it can be reused.
    pub(super) fn into_connection(self) -> Option<EngineConnection> {
        let Self { mut connection, sending, parser, .. } = self;
        if sending.is_some() || !parser.leaves_connection_usable() || !connection.is_reusable() {
            return None;
        }
        connection.reused = true;
        connection.idle_since = Instant::now();
        Some(connection)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::HeaderMap;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::request_body::SplicedBody;

    const COMPLETE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

    /// A connection, and its other end, through which at most `capacity` bytes pass at a time.
    fn connection(capacity: usize) -> (EngineConnection, DuplexStream) {
        let (near, far) = duplex(capacity);
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (EngineConnection::new(near, EngineConnectionGuard::new(&Arc::default(), permit)), far)
    }

    fn request(method: Method, body: Vec<u8>) -> PreparedRequest {
        PreparedRequest {
            method,
            uri: "/generate".parse().unwrap(),
            headers: Arc::new(HeaderMap::new()),
            extra_headers: Vec::new(),
            body: SplicedBody::verbatim(Bytes::from(body)),
        }
    }

    async fn body(mut body: EngineResponseBody) -> (Result<Vec<u8>, TransportError>, EngineResponseBody) {
        let mut all = Vec::new();
        loop {
            match poll_fn(|cx| body.poll_data(cx)).await {
                None => return (Ok(all), body),
                Some(Ok(data)) => all.extend_from_slice(&data),
                Some(Err(error)) => return (Err(error), body),
            }
        }
    }

    #[tokio::test]
    async fn connections_are_reused_after_complete_responses() {
        let (mut open, mut engine) = connection(1 << 16);
        for number in 0..3 {
            engine.write_all(COMPLETE).await.unwrap();
            let (head, response) = open.exchange(&request(Method::POST, b"{}".to_vec()), None).await.unwrap();
            assert_eq!(head.status(), 200);
            let (all, response) = body(response).await;
            assert_eq!(all.unwrap(), b"ok");
            open = response.into_connection().unwrap();
            assert!(open.reused, "{number}");
        }
        engine.write_all(b"more").await.unwrap();
        assert!(!open.is_reusable(), "nothing was requested");
    }

    #[tokio::test]
    async fn connections_are_closed_if_the_engine_closes_or_sends_more() {
        for response in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"[..],
            b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n",
        ] {
            let (open, mut engine) = connection(1 << 16);
            engine.write_all(response).await.unwrap();
            let (_, response) = open.exchange(&request(Method::POST, Vec::new()), None).await.unwrap();
            let (all, response) = body(response).await;
            assert_eq!(all.unwrap(), b"ok");
            assert!(response.into_connection().is_none());
        }
    }

    #[tokio::test]
    async fn a_response_before_the_request_was_read_counts() {
        let (open, mut engine) = connection(100);
        let large = request(Method::POST, vec![b'x'; 10_000]);
        engine.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
        let (head, response) = open.exchange(&large, None).await.unwrap();
        assert_eq!(head.status(), 413);
        let (all, response) = body(response).await;
        assert_eq!(all.unwrap(), b"no");
        assert!(response.into_connection().is_none(), "the request was not sent to its end");

        // The rest of the request is sent while the response is read.
        let (open, mut engine) = connection(100);
        let exchange = async {
            let (_, response) = open.exchange(&large, None).await.unwrap();
            let (all, response) = body(response).await;
            (all.unwrap(), response.into_connection().is_some())
        };
        let serve = async {
            engine.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n").await.unwrap();
            let mut received = vec![0; 9_000];
            engine.read_exact(&mut received).await.unwrap();
            let mut rest =
                vec![0; 10_000 - 9_000 + b"POST /generate HTTP/1.1\r\ncontent-length: 10000\r\n\r\n".len()];
            engine.read_exact(&mut rest).await.unwrap();
            engine.write_all(b"done").await.unwrap();
            engine
        };
        let ((all, is_reused), _engine) = tokio::join!(exchange, serve);
        assert_eq!((all.as_slice(), is_reused), (&b"done"[..], true));
    }

    #[tokio::test]
    async fn what_ends_early_is_an_error() {
        let (open, engine) = connection(1 << 16);
        drop(engine);
        let error = open.exchange(&request(Method::GET, Vec::new()), None).await.unwrap_err();
        assert!(!error.never_arrived(), "a new connection does not go stale");
        assert!(error.error.is_closed());

        let (mut open, engine) = connection(1 << 16);
        open.reused = true;
        drop(engine);
        assert!(open.exchange(&request(Method::GET, Vec::new()), None).await.unwrap_err().never_arrived());

        let (mut open, mut engine) = connection(1 << 16);
        open.reused = true;
        engine.write_all(b"HTTP/1.1 200").await.unwrap();
        drop(engine);
        let error = open.exchange(&request(Method::GET, Vec::new()), None).await.unwrap_err();
        assert!(!error.never_arrived(), "the engine got the request");

        for part in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"[..],
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        ] {
            let (open, mut engine) = connection(1 << 16);
            engine.write_all(part).await.unwrap();
            drop(engine);
            let (_, response) = open.exchange(&request(Method::GET, Vec::new()), None).await.unwrap();
            assert!(matches!(body(response).await.0, Err(TransportError::Closed)));
        }
        let (open, mut engine) = connection(1 << 16);
        engine.write_all(b"HTTP/1.1 200 OK\r\n\r\nall of it").await.unwrap();
        drop(engine);
        let (_, response) = open.exchange(&request(Method::GET, Vec::new()), None).await.unwrap();
        assert_eq!(body(response).await.0.unwrap(), b"all of it");
    }

    #[tokio::test]
    async fn a_response_to_head_has_no_body() {
        let (open, mut engine) = connection(1 << 16);
        engine.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n").await.unwrap();
        let (_, response) = open.exchange(&request(Method::HEAD, Vec::new()), None).await.unwrap();
        let (all, response) = body(response).await;
        assert_eq!(all.unwrap(), b"");
        assert!(response.into_connection().is_some());
    }
}

//! One HTTP/1.1 connection to an engine and one exchange on it.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::request_body::SplicedBody;

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

/// A connection with the future that drives it.
pub(super) struct EngineConnection {
    sender: http1::SendRequest<SplicedBody>,
    /// `None` once the connection has ended.
    driver: Option<ConnectionDriver>,
    /// When it was returned to the pool.
    pub(super) idle_since: Instant,
    /// Whether an earlier exchange succeeded on it.
    pub(super) reused: bool,
    _open: EngineConnectionGuard,
}

impl EngineConnection {
    pub(super) async fn handshake<S>(stream: S, open: EngineConnectionGuard) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, driver) = http1::Builder::new().handshake(TokioIo::new(stream)).await?;
        let driver: ConnectionDriver = Box::pin(driver);
        Ok(Self { sender, driver: Some(driver), idle_since: Instant::now(), reused: false, _open: open })
    }

    /// Moves bytes in both directions as far as possible now. Ready when the connection has ended.
    fn poll_driver(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Error>> {
        poll_driver(&mut self.driver, cx)
    }

    /// Whether another request may be sent: the last exchange is complete and the peer has not closed.
    pub(super) fn is_reusable(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        self.poll_driver(&mut cx).is_pending() && self.sender.is_ready()
    }

    /// Sends `request` and waits for the head of the response.
    pub(super) async fn exchange(
        mut self,
        request: Request<SplicedBody>,
    ) -> Result<(Response<()>, EngineResponseBody), ExchangeError> {
        let reused = self.reused;
        let mut head = pin!(self.sender.send_request(request));
        let response = poll_fn(|cx| {
            let ended = poll_driver(&mut self.driver, cx);
            match head.as_mut().poll(cx) {
                Poll::Ready(Ok(response)) => Poll::Ready(Ok(response)),
                Poll::Ready(Err(error)) => Poll::Ready(Err(ExchangeError { error: Some(error), reused })),
                Poll::Pending => ended.map(|error| Err(ExchangeError { error, reused })),
            }
        })
        .await?;
        let (parts, body) = response.into_parts();
        Ok((Response::from_parts(parts, ()), EngineResponseBody { body, connection: self }))
    }
}

/// The driver of a connection over TCP or TLS.
type ConnectionDriver = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// As [`EngineConnection::poll_driver`], on the field alone, so that the sender can be borrowed at the same time.
fn poll_driver(driver: &mut Option<ConnectionDriver>, cx: &mut Context<'_>) -> Poll<Option<hyper::Error>> {
    let Some(future) = driver.as_mut() else { return Poll::Ready(None) };
    match future.as_mut().poll(cx) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(outcome) => {
            *driver = None;
            Poll::Ready(outcome.err())
        }
    }
}

impl std::fmt::Debug for EngineConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineConnection").field("reused", &self.reused).finish_non_exhaustive()
    }
}

/// An exchange that ended before the head of the response.
#[derive(Debug)]
pub(super) struct ExchangeError {
    /// `None` if the peer closed without an error.
    pub(super) error: Option<hyper::Error>,
    /// On a reused connection, the peer may have closed it before it got the request.
    pub(super) reused: bool,
}

/// The body of a response, with its connection.
#[derive(Debug)]
pub(super) struct EngineResponseBody {
    body: Incoming,
    connection: EngineConnection,
}

impl EngineResponseBody {
    /// The next chunk of the body; `None` at its end.
    ///
    /// The body can only advance through the connection, which is polled here with the caller's waker. So the body itself is polled
    /// with a no-op waker: a real one would wake this task for its own work.
    pub(super) fn poll_data(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Option<hyper::Error>>>> {
        if let Some(next) = self.take_frame() {
            return Poll::Ready(next);
        }
        let ended = self.connection.poll_driver(cx);
        match (self.take_frame(), ended) {
            (Some(next), _) => Poll::Ready(next),
            (None, Poll::Pending) => Poll::Pending,
            (None, Poll::Ready(error)) => Poll::Ready(Some(Err(error))),
        }
    }

    /// A frame that has already arrived.
    fn take_frame(&mut self) -> Option<Option<Result<Bytes, Option<hyper::Error>>>> {
        let mut cx = Context::from_waker(Waker::noop());
        loop {
            return match Pin::new(&mut self.body).poll_frame(&mut cx) {
                Poll::Pending => None,
                Poll::Ready(None) => Some(None),
                Poll::Ready(Some(Err(error))) => Some(Some(Err(Some(error)))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => Some(Some(Ok(data))),
                    // Trailers are dropped: no client of the gateway uses them.
                    Err(_) => continue,
                },
            };
        }
    }

    /// Returns the connection after the body's end, if it can be reused.
    pub(super) fn into_connection(self) -> Option<EngineConnection> {
        let mut connection = self.connection;
        drop(self.body);
        connection.reused = true;
        connection.idle_since = Instant::now();
        connection.is_reusable().then_some(connection)
    }
}

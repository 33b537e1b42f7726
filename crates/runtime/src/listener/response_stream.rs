//! Writes the body of a long HTTP/1.1 response to its connection.
//!
//! hyper's connection holds two buffers of 8 KiB while a response streams, which is most of the memory of a stream that waits for its next
//! event. So the response to a request that has been read completely is taken out of hyper's connection, and written here, with a buffer
//! that exists only while bytes wait to be sent. Afterwards a new connection of hyper's continues with the next request.

use std::future::Future;
use std::io::{self, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use http::header::{CONNECTION, CONTENT_LENGTH, DATE, TRANSFER_ENCODING};
use http::{HeaderMap, Request, Response, Version};
use http_body::Body;
use hyper::body::{Buf, Incoming};
use parking_lot::Mutex;
use tokio::io::{AsyncWrite as _, ReadBuf};

use super::BoxError;
use super::connection::AsyncStream;
use super::prefixed_stream::PrefixedStream;

/// Bytes that wait to be sent before the body is no longer polled.
const MAX_OUTPUT: usize = 64 << 10;
/// Bytes of the next requests that are read while a response streams.
const MAX_PIPELINED: usize = 16 << 10;

/// In the extensions of a response: its request has been read to its end, so that nothing but the response needs the connection.
#[derive(Debug, Clone, Copy)]
pub struct RequestRead;

/// A response to be written without hyper.
pub(super) struct StreamedResponse<B> {
    response: Response<B>,
    /// Whether the client may send another request on the connection.
    pub(super) keep_alive: bool,
}

/// Where the service of a connection leaves the response that is to be written without hyper.
pub(super) struct StreamedResponseSlot<B>(Arc<Mutex<Option<StreamedResponse<B>>>>);

impl<B> StreamedResponseSlot<B> {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }

    pub(super) fn take(&self) -> Option<StreamedResponse<B>> {
        self.0.lock().take()
    }
}

/// A service whose long responses go to a [`StreamedResponseSlot`]; hyper sees them as pending.
pub(super) struct StreamingService<S, B> {
    service: S,
    slot: StreamedResponseSlot<B>,
}

impl<S, B> StreamingService<S, B> {
    pub(super) fn new(service: S, slot: &StreamedResponseSlot<B>) -> Self {
        Self { service, slot: StreamedResponseSlot(Arc::clone(&slot.0)) }
    }
}

impl<S, B> hyper::service::Service<Request<Incoming>> for StreamingService<S, B>
where
    S: hyper::service::Service<Request<Incoming>, Response = Response<B>>,
    B: Body,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = StreamingFuture<S::Future, B>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        StreamingFuture {
            // Chunks are unknown to HTTP/1.0.
            streams: request.version() == Version::HTTP_11,
            keep_alive: !requests_close(request.headers()),
            slot: StreamedResponseSlot(Arc::clone(&self.slot.0)),
            response: self.service.call(request),
        }
    }
}

pin_project_lite::pin_project! {
    /// The response of a [`StreamingService`].
    pub(super) struct StreamingFuture<F, B> {
        streams: bool,
        keep_alive: bool,
        slot: StreamedResponseSlot<B>,
        #[pin]
        response: F,
    }
}

impl<F, B, E> Future for StreamingFuture<F, B>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let response = ready!(this.response.poll(cx))?;
        let is_long = response.body().size_hint().exact().is_none();
        if !(*this.streams && is_long && response.extensions().get::<RequestRead>().is_some()) {
            return Poll::Ready(Ok(response));
        }
        let keep_alive = *this.keep_alive && !requests_close(response.headers());
        *this.slot.0.lock() = Some(StreamedResponse { response, keep_alive });
        // The connection finds the response in the slot at the end of this poll, and drops this future.
        Poll::Pending
    }
}

fn requests_close(headers: &HeaderMap) -> bool {
    headers.get_all(CONNECTION).iter().any(|value| {
        value
            .as_bytes()
            .split(|byte| *byte == b',')
            .any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"))
    })
}

/// A response could not be sent completely.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResponseStreamError {
    #[error("the client closed the connection before the end of the response")]
    Disconnected,
    #[error("connection failed: {0}")]
    Connection(#[from] io::Error),
    #[error("the response ended with an error: {0}")]
    Body(#[source] BoxError),
}

/// Sends one response. Poll it to its end before the stream is used for anything else.
pub(super) struct ResponseWriter<'a, I, B> {
    stream: &'a mut PrefixedStream<I>,
    body: Pin<&'a mut B>,
    /// Framed bytes that have not been sent; allocated only while there are some.
    output: Vec<u8>,
    sent: usize,
    flushed: bool,
    /// How the body ended.
    end: Option<Result<(), BoxError>>,
}

impl<'a, I, B> ResponseWriter<'a, I, B>
where
    I: AsyncStream,
    B: Body,
    B::Error: Into<BoxError>,
{
    pub(super) fn new(stream: &'a mut PrefixedStream<I>, head: Vec<u8>, body: Pin<&'a mut B>) -> Self {
        Self { stream, body, output: head, sent: 0, flushed: false, end: None }
    }

    /// Ready when all of the response has been sent.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ResponseStreamError>> {
        self.poll_input(cx)?;
        loop {
            let has_more = self.end.is_none() && self.fill(cx);
            // Also before an error: clients get all events up to it.
            ready!(self.poll_send(cx))?;
            if !has_more {
                return match self.end.take() {
                    Some(end) => Poll::Ready(end.map_err(ResponseStreamError::Body)),
                    None => Poll::Pending,
                };
            }
        }
    }

    /// Takes what the body has, up to a limit. Returns whether it may have more now.
    fn fill(&mut self, cx: &mut Context<'_>) -> bool {
        while self.output.len() < MAX_OUTPUT {
            let Poll::Ready(frame) = self.body.as_mut().poll_frame(cx) else { return false };
            match frame {
                Some(Ok(frame)) => {
                    // Trailers are not sent: no client has requested them.
                    if let Ok(data) = frame.into_data() {
                        append_chunk(&mut self.output, data);
                    }
                }
                Some(Err(error)) => {
                    self.end = Some(Err(error.into()));
                    return false;
                }
                None => {
                    self.output.extend_from_slice(b"0\r\n\r\n");
                    self.end = Some(Ok(()));
                    return false;
                }
            }
        }
        true
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.output.len() {
            self.flushed = false;
            let written = ready!(Pin::new(&mut *self.stream).poll_write(cx, &self.output[self.sent..]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += written;
        }
        if !self.flushed {
            self.output = Vec::new();
            self.sent = 0;
            ready!(Pin::new(&mut *self.stream).poll_flush(cx))?;
            self.flushed = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Detects a client that has closed its side, as hyper does, and keeps what it has sent of its next requests.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Result<(), ResponseStreamError> {
        while self.stream.prefix_length() < MAX_PIPELINED {
            let mut bytes = [0; 1024];
            let mut read = ReadBuf::new(&mut bytes);
            match self.stream.poll_read_behind_prefix(cx, &mut read) {
                Poll::Pending => break,
                Poll::Ready(Ok(())) if read.filled().is_empty() => {
                    return Err(ResponseStreamError::Disconnected);
                }
                Poll::Ready(Ok(())) => self.stream.append_to_prefix(read.filled()),
                Poll::Ready(Err(error)) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl<B> StreamedResponse<B> {
    /// The bytes of the head, and the body.
    pub(super) fn into_parts(self) -> (Vec<u8>, B) {
        let Self { response, keep_alive } = self;
        let (parts, body) = response.into_parts();
        let mut head = Vec::with_capacity(512);
        head.extend_from_slice(b"HTTP/1.1 ");
        head.extend_from_slice(parts.status.as_str().as_bytes());
        head.push(b' ');
        head.extend_from_slice(parts.status.canonical_reason().unwrap_or_default().as_bytes());
        head.extend_from_slice(b"\r\n");
        for (name, value) in &parts.headers {
            // These follow from the connection and the body.
            if ![CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING].contains(name) {
                append_header(&mut head, name.as_str(), value.as_bytes());
            }
        }
        if !parts.headers.contains_key(DATE) {
            append_header(&mut head, DATE.as_str(), httpdate::fmt_http_date(SystemTime::now()).as_bytes());
        }
        if !keep_alive {
            append_header(&mut head, CONNECTION.as_str(), b"close");
        }
        append_header(&mut head, TRANSFER_ENCODING.as_str(), b"chunked");
        head.extend_from_slice(b"\r\n");
        (head, body)
    }
}

fn append_header(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value);
    head.extend_from_slice(b"\r\n");
}

/// Appends data in the framing of a chunked body (RFC 9112, section 7.1). An empty chunk would end the body.
fn append_chunk(output: &mut Vec<u8>, mut data: impl Buf) {
    let length = data.remaining();
    if length == 0 {
        return;
    }
    output.reserve(length + 24);
    // Writing to memory cannot fail.
    let _ = write!(output, "{length:x}\r\n");
    while data.has_remaining() {
        let slice = data.chunk();
        output.extend_from_slice(slice);
        let read = slice.len();
        data.advance(read);
    }
    output.extend_from_slice(b"\r\n");
}

#[cfg(test)]
#[path = "response_stream_tests.rs"]
mod tests;

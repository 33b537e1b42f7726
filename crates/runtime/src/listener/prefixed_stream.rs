//! A connection of which some bytes have been read already.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection::AsyncStream;

/// Reads return the bytes that have been read before, then those of the stream.
pub(super) struct PrefixedStream<I> {
    prefix: Vec<u8>,
    stream: I,
}

impl<I: AsyncStream> PrefixedStream<I> {
    pub(super) fn new(stream: I) -> Self {
        Self { prefix: Vec::new(), stream }
    }

    /// Returns bytes to the stream that were read from it last.
    pub(super) fn put_back(&mut self, bytes: &[u8]) {
        self.prefix.splice(..0, bytes.iter().copied());
    }

    /// Adds bytes from [`PrefixedStream::poll_read_behind_prefix`].
    pub(super) fn append_to_prefix(&mut self, bytes: &[u8]) {
        self.prefix.extend_from_slice(bytes);
    }

    pub(super) fn prefix_length(&self) -> usize {
        self.prefix.len()
    }

    /// Reads from the stream itself.
    pub(super) fn poll_read_behind_prefix(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<I: AsyncStream> AsyncRead for PrefixedStream<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return self.poll_read_behind_prefix(cx, buffer);
        }
        let length = self.prefix.len().min(buffer.remaining());
        buffer.put_slice(&self.prefix[..length]);
        self.prefix.drain(..length);
        if self.prefix.is_empty() {
            self.prefix = Vec::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncStream> AsyncWrite for PrefixedStream<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

//! HTTP request body of an export.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body of several buffers, sent without copying.
#[derive(Debug, Clone, Default)]
pub(super) struct ExportBody {
    remaining: VecDeque<Bytes>,
    bytes: usize,
}

impl ExportBody {
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn push(&mut self, chunk: Bytes) {
        self.bytes += chunk.len();
        self.remaining.push_back(chunk);
    }

    pub(super) fn push_front(&mut self, chunk: Bytes) {
        self.bytes += chunk.len();
        self.remaining.push_front(chunk);
    }
}

impl Body for ExportBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = self.remaining.pop_front();
        self.bytes -= chunk.as_ref().map_or(0, Bytes::len);
        Poll::Ready(chunk.map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes as u64)
    }
}

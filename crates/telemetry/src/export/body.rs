//! The body of an export.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body in pieces, which are sent as they are.
#[derive(Debug, Clone, Default)]
pub(super) struct ExportBody {
    remaining: VecDeque<Bytes>,
    bytes: usize,
}

impl ExportBody {
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn push(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        self.remaining.push_back(piece);
    }

    pub(super) fn push_front(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        self.remaining.push_front(piece);
    }
}

impl Body for ExportBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = self.remaining.pop_front();
        self.bytes -= piece.as_ref().map_or(0, Bytes::len);
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes as u64)
    }
}

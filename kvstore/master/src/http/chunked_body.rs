//! Response bodies that are generated while they are sent, so that neither the state nor other requests wait for a slow reader.

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;

/// Minimum size of a chunk in bytes, except for the last one.
const CHUNK: usize = 64 * 1024;

/// A text that is generated in steps.
pub(super) trait ChunkedBody: Send + 'static {
    /// Appends the next piece. Returns false after the last one.
    fn next(&mut self, out: &mut Vec<u8>) -> bool;
}

/// A streaming response body from all pieces.
pub(super) fn body(pieces: impl ChunkedBody) -> Body {
    Body::from_stream(stream::unfold(Some(pieces), |remaining| async move {
        let mut pieces = remaining?;
        let mut out = Vec::with_capacity(CHUNK + CHUNK / 4);
        while out.len() < CHUNK {
            if !pieces.next(&mut out) {
                return (!out.is_empty())
                    .then(|| (Ok::<_, std::convert::Infallible>(Bytes::from(out)), None));
            }
            // A piece takes some microseconds: other tasks may run between two pieces.
            tokio::task::yield_now().await;
        }
        Some((Ok(Bytes::from(out)), Some(pieces)))
    }))
}

//! Long answers, made piece by piece while they are sent: neither the state nor other requests wait for a slow reader.

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;

/// Bytes that are sent at once.
const CHUNK: usize = 64 * 1024;

/// A text that is made in steps.
pub(super) trait ChunkedBody: Send + 'static {
    /// Appends the next piece. Returns whether there may be more.
    fn next(&mut self, out: &mut Vec<u8>) -> bool;
}

/// Sends all pieces.
pub(super) fn body(pieces: impl ChunkedBody) -> Body {
    Body::from_stream(stream::unfold(Some(pieces), |left| async move {
        let mut pieces = left?;
        let mut out = Vec::with_capacity(CHUNK + CHUNK / 4);
        while out.len() < CHUNK {
            if !pieces.next(&mut out) {
                return (!out.is_empty())
                    .then(|| (Ok::<_, std::convert::Infallible>(Bytes::from(out)), None));
            }
            // A piece is some microseconds of work: between two others have their turn.
            tokio::task::yield_now().await;
        }
        Some((Ok(Bytes::from(out)), Some(pieces)))
    }))
}

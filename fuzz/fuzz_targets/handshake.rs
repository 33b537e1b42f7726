//! A message of the handshake port is parsed identically for any chunking, never extends beyond its length, and uses no more memory than
//! was sent.
//!
//! The first byte is the size of a chunk.

#![no_main]

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use libfuzzer_sys::fuzz_target;
use moongate_transfer::handshake::{HandshakeKind, encode_message, read_message};
use tokio::io::{AsyncRead, ReadBuf};

/// A stream that delivers chunks of the given size.
struct ChunkedReader<'a> {
    rest: &'a [u8],
    piece: usize,
}

impl AsyncRead for ChunkedReader<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let count = self.piece.min(buffer.remaining()).min(self.rest.len());
        let (now, later) = self.rest.split_at(count);
        buffer.put_slice(now);
        self.rest = later;
        Poll::Ready(Ok(()))
    }
}

/// The message or the kind of error, and the number of consumed bytes.
fn read(bytes: &[u8], piece: usize) -> (Result<(HandshakeKind, Vec<u8>), io::ErrorKind>, usize) {
    let mut stream = ChunkedReader { rest: bytes, piece };
    let message = {
        let mut future = std::pin::pin!(read_message(&mut stream));
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(message) => message,
            Poll::Pending => panic!("there is nothing to wait for"),
        }
    };
    let message = message.map_err(|error| error.kind());
    (message, bytes.len() - stream.rest.len())
}

fuzz_target!(|input: &[u8]| {
    let Some((piece, bytes)) = input.split_first() else { return };
    let (whole, taken) = read(bytes, usize::MAX);
    assert_eq!(read(bytes, usize::from(*piece).max(1)), (whole.clone(), taken));
    if let Ok((kind, json)) = whole {
        assert!(json.capacity() <= 4 * bytes.len().max(64), "{} for {}", json.capacity(), bytes.len());
        assert_eq!(encode_message(kind, &json), bytes[..taken]);
    }
});

//! Memory that peers read and write.

use std::fmt;
use std::io::{self, Read, Write};

use super::DataSocket;

/// A range of addresses, as peers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub start: u64,
    /// How many bytes.
    pub size: u64,
}

impl Span {
    /// Whether a byte lies in both.
    #[cfg(not(feature = "simulation"))]
    pub(super) fn overlaps(self, other: Self) -> bool {
        self.start < other.start.saturating_add(other.size)
            && other.start < self.start.saturating_add(self.size)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.size, self.start)
    }
}

/// Memory that peers read and write. Several threads do so at once, also where ranges overlap.
///
/// Sockets are blocking ones with time limits for each call; a transfer that is too slow as a whole finds its socket
/// shut down.
pub trait Target: Send + Sync + 'static {
    /// Whether a range lies within the memory. The rest is only asked of ranges that do.
    fn contains(&self, span: Span) -> bool;

    /// Whether a range may be read: it holds what was written there.
    fn readable(&self, span: Span) -> bool;

    /// Receives a whole body, and then asks `whole` whether it is what the peer sent, telling its CRC-32C if it has
    /// been made, which it must be if `summed`. Returns what `whole` says, or that it is not if another peer is known to have
    /// written to the range meanwhile. Unless it is, what is there now must not be taken for an object.
    ///
    /// # Errors
    /// As the socket says, `UnexpectedEof`, and as `whole`. The connection ends.
    fn receive(
        &self,
        socket: &DataSocket,
        span: Span,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// Sends a whole body.
    ///
    /// # Errors
    /// As the socket says.
    fn send(&self, socket: &DataSocket, span: Span) -> io::Result<()>;

    /// The same, and returns the CRC-32C of what was sent. More is sent after it.
    ///
    /// # Errors
    /// As [`Target::send`].
    fn send_summed(&self, socket: &DataSocket, span: Span) -> io::Result<u32>;

    /// As [`Target::receive`], from a stream that is decrypted by the caller. A CRC-32C is always made.
    ///
    /// # Errors
    /// As [`Target::receive`].
    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: Span,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// As [`Target::send_summed`], to a stream that is encrypted by the caller.
    ///
    /// # Errors
    /// As the stream says.
    fn send_to(&self, sink: &mut dyn Write, span: Span) -> io::Result<u32>;

    /// The CRC-32C of `span` as it was when it was written, if that is known.
    fn checksum(&self, span: Span) -> Option<u32>;
}

//! Memory that peers read and write.

use std::fmt;
use std::io;
use std::net::TcpStream;

/// A range of addresses, as peers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub start: u64,
    /// How many bytes.
    pub size: u64,
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
    /// Whether a range may be read and written. Everything else here is only called for ranges within one of which
    /// this was true.
    fn contains(&self, span: Span) -> bool;

    /// A peer is about to write `span`.
    ///
    /// # Errors
    /// When it cannot be written now. The transfer fails.
    fn begin(&self, span: Span) -> io::Result<()>;

    /// Receives a whole body.
    ///
    /// # Errors
    /// As the socket says, and `UnexpectedEof`.
    fn receive(&self, socket: &TcpStream, span: Span) -> io::Result<()>;

    /// The same, and returns the CRC-32C of what was received.
    ///
    /// # Errors
    /// As [`Target::receive`].
    fn receive_summed(&self, socket: &TcpStream, span: Span) -> io::Result<u32>;

    /// All of `span` has been written. `crc` is there if [`Target::keeps_checksums`], or if the peer sent it.
    ///
    /// # Errors
    /// When this cannot be noted. The transfer fails.
    fn finish(&self, span: Span, crc: Option<u32>) -> io::Result<()>;

    /// Sends a whole body.
    ///
    /// # Errors
    /// As the socket says.
    fn send(&self, socket: &TcpStream, span: Span) -> io::Result<()>;

    /// The same, and returns the CRC-32C of what was sent. More is sent after it.
    ///
    /// # Errors
    /// As [`Target::send`].
    fn send_summed(&self, socket: &TcpStream, span: Span) -> io::Result<u32>;

    /// The CRC-32C of `span` as it was when it was written, if that is known.
    fn checksum(&self, span: Span) -> Option<u32>;

    /// Whether checksums of all that is written are wanted.
    fn keeps_checksums(&self) -> bool;
}

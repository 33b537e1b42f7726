//! Memory that peers read and write.

use std::fmt;
use std::io::{self, Read, Write};

use super::DataSocket;

/// A range of addresses, as peers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// The first byte.
    pub start: u64,
    /// How many bytes.
    pub size: u64,
}

impl AddressRange {
    /// Whether a byte lies in both.
    #[cfg(not(feature = "simulation"))]
    pub(super) fn overlaps(self, other: Self) -> bool {
        self.start < other.start.saturating_add(other.size)
            && other.start < self.start.saturating_add(self.size)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.size, self.start)
    }
}

/// Memory that peers read and write. Several threads do so at once, also where ranges overlap.
///
/// Sockets are blocking ones with time limits for each call; a transfer that is too slow as a whole finds its socket
/// shut down.
pub trait TransferTarget: Send + Sync + 'static {
    /// Whether a range lies within the memory. The rest is only asked of ranges that do.
    fn contains(&self, span: AddressRange) -> bool;

    /// Whether a range may be read: it holds what was written there.
    fn is_readable(&self, span: AddressRange) -> bool;

    /// Receives a whole body, and then asks `whole` whether it is what the peer sent, telling its CRC-32C if it has
    /// been made, which it must be if `summed`. Returns what `whole` says, or that it is not if another peer is known to have
    /// written to the range meanwhile. Unless it is, what is there now must not be taken for an object.
    ///
    /// # Errors
    /// As the socket says, `UnexpectedEof`, and as `whole`. The connection ends.
    fn receive(
        &self,
        socket: &DataSocket,
        span: AddressRange,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// Sends a whole body.
    ///
    /// # Errors
    /// As the socket says.
    fn send(&self, socket: &DataSocket, span: AddressRange) -> io::Result<()>;

    /// The same, and returns the CRC-32C of what was sent. More is sent after it.
    ///
    /// # Errors
    /// As [`TransferTarget::send`].
    fn send_summed(&self, socket: &DataSocket, span: AddressRange) -> io::Result<u32>;

    /// As [`TransferTarget::receive`], from a stream that is decrypted by the caller. A CRC-32C is always made.
    ///
    /// # Errors
    /// As [`TransferTarget::receive`].
    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: AddressRange,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// As [`TransferTarget::send_summed`], to a stream that is encrypted by the caller.
    ///
    /// # Errors
    /// As the stream says.
    fn send_to(&self, sink: &mut dyn Write, span: AddressRange) -> io::Result<u32>;

    /// The CRC-32C of `span` as it was when it was written, if that is known.
    fn checksum(&self, span: AddressRange) -> Option<u32>;
}

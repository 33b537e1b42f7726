//! The memory that the data plane serves.

use std::fmt;
use std::io::{self, Read, Write};

use super::DataSocket;
use crate::plane::MappingId;

/// A range of addresses as sent by peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// Address of the first byte.
    pub start: u64,
    /// Length in bytes of the range.
    pub size: u64,
}

impl AddressRange {
    /// Whether the ranges share at least one byte.
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

/// Memory that peers read and write, from several threads at once, including overlapping ranges.
///
/// Sockets are blocking, with a timeout per call; the socket of an overdue transfer is shut down.
pub trait TransferTarget: Send + Sync + 'static {
    /// Whether a range lies within the memory. The other methods are called only with such ranges.
    fn contains(&self, range: AddressRange) -> bool;

    /// Whether a range may be read: it holds completely written data.
    fn is_readable(&self, range: AddressRange) -> bool;

    /// Receives a whole body and calls `verify` with its CRC-32C, to check it against the peer's trailer. The CRC is mandatory if `summed`.
    /// Returns the result of `verify`, or false if another peer is known to have written to the range meanwhile. After false, the range
    /// must not be served as an object.
    ///
    /// # Errors
    /// Errors of the socket, `UnexpectedEof`, and errors of `verify`. The connection ends.
    fn receive(
        &self,
        socket: &DataSocket,
        range: AddressRange,
        summed: bool,
        verify: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// Sends the whole range as a body.
    ///
    /// # Errors
    /// Errors of the socket.
    fn send(&self, socket: &DataSocket, range: AddressRange) -> io::Result<()>;

    /// As [`TransferTarget::send`], and returns the CRC-32C of the sent bytes. More bytes follow.
    ///
    /// # Errors
    /// As [`TransferTarget::send`].
    fn send_summed(&self, socket: &DataSocket, range: AddressRange) -> io::Result<u32>;

    /// As [`TransferTarget::receive`], from a decrypted stream. The CRC-32C is always computed.
    ///
    /// # Errors
    /// As [`TransferTarget::receive`].
    fn receive_from(
        &self,
        source: &mut dyn Read,
        range: AddressRange,
        verify: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool>;

    /// As [`TransferTarget::send_summed`], to a stream that encrypts.
    ///
    /// # Errors
    /// Errors of the stream.
    fn send_to(&self, sink: &mut dyn Write, range: AddressRange) -> io::Result<u32>;

    /// Whether a range lies within memory that peers on this host map under this id, and its pages are allocated. The methods for mapped
    /// memory are called only with such ranges.
    fn admit_mapped(&self, _range: AddressRange, _mapping: MappingId) -> bool {
        false
    }

    /// Whether a write to mapped memory needs its checksum, because the range outlives this process.
    fn needs_mapped_checksum(&self, _range: AddressRange) -> bool {
        false
    }

    /// Calls `wait` while a peer writes to mapped memory. It returns the checksum of what the peer has written, if it sent one. As for
    /// [`TransferTarget::receive`], returns false if another peer is known to have written to the range meanwhile; the range is then not
    /// readable.
    ///
    /// # Errors
    /// When there is no memory for the range, and errors of `wait`. The connection ends.
    fn receive_mapped(
        &self,
        _range: AddressRange,
        _wait: &mut dyn FnMut() -> io::Result<Option<u32>>,
    ) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The CRC-32C of `range` as recorded at write time, if known.
    fn checksum(&self, range: AddressRange) -> Option<u32>;
}

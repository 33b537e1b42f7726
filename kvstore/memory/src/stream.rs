//! Bytes of a region from a socket and to it, with their checksum if that is wanted.

use std::io;
use std::os::fd::AsFd;

use crate::MappedRegion;
use crate::checksum::Crc32c;
use crate::region::pieces;
use crate::socket::{self, ReceiveMode, SendMode};

/// Bytes received or sent at a time when they are checked too: few enough to be in the processor's cache still.
const PIECE: usize = 256 << 10;

impl MappedRegion {
    /// Receives what is there, at most `len` bytes. 0 when the peer has ended its side. For callers that keep their own time.
    ///
    /// # Errors
    /// As the socket's `recv`, or [`OutOfRangeError`](crate::OutOfRange) inside `InvalidInput`.
    pub fn receive(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<usize> {
        socket::receive(socket.as_fd(), self.span(offset, len)?, ReceiveMode::Some)
    }

    /// Receives exactly `len` bytes from a blocking socket. What has come before an error has been written.
    ///
    /// # Errors
    /// `UnexpectedEof` when the peer ends its side before, `WouldBlock` when the socket has a time limit and nothing came within it,
    /// or as [`MappedRegion::receive`].
    pub fn receive_exact(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)?;
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let got = socket::receive(socket.as_fd(), self.span(at, end - at)?, ReceiveMode::All)?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += got as u64;
        }
        Ok(())
    }

    /// As [`MappedRegion::receive_exact`], and gives the CRC-32C of what lies there then, while it is in the processor's cache.
    ///
    /// # Errors
    /// As [`MappedRegion::receive_exact`].
    pub fn receive_exact_crc(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<u32> {
        self.check(offset, len)?;
        let mut crc = Crc32c::new();
        for piece in pieces(offset, len, PIECE) {
            self.receive_exact(&socket, piece.offset, piece.len as u64)?;
            self.update(&mut crc, piece.offset, piece.len as u64)?;
        }
        Ok(crc.value())
    }

    /// Sends what the socket takes at once, at most `len` bytes. For callers that keep their own time.
    ///
    /// # Errors
    /// As the socket's `send`, or [`OutOfRangeError`](crate::OutOfRange) inside `InvalidInput`.
    pub fn send(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<usize> {
        socket::send(socket.as_fd(), self.span(offset, len)?, SendMode::Last)
    }

    /// Sends `len` bytes over a blocking socket.
    ///
    /// # Errors
    /// `WouldBlock` when the socket has a time limit and took nothing within it, or as [`MappedRegion::send`].
    pub fn send_all(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
        self.send_part(socket, offset, len, SendMode::Last)
    }

    /// As [`MappedRegion::send_all`], and gives the CRC-32C of the bytes as they were just before they were sent. The last packet may wait
    /// for what is sent after it: the checksum.
    ///
    /// # Errors
    /// As [`MappedRegion::send_all`].
    pub fn send_all_crc(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<u32> {
        self.check(offset, len)?;
        let mut crc = Crc32c::new();
        for piece in pieces(offset, len, PIECE) {
            self.update(&mut crc, piece.offset, piece.len as u64)?;
            self.send_part(&socket, piece.offset, piece.len as u64, SendMode::Follows)?;
        }
        Ok(crc.value())
    }

    fn send_part(&self, socket: impl AsFd, offset: u64, len: u64, more: SendMode) -> io::Result<()> {
        self.check(offset, len)?;
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let sent = socket::send(socket.as_fd(), self.span(at, end - at)?, more)?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            at += sent as u64;
        }
        Ok(())
    }
}

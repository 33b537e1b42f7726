//! Transfers between a region and a socket, optionally with a checksum.

use std::io;
use std::os::fd::AsFd;

use crate::MappedRegion;
use crate::checksum::Crc32c;
use crate::region::chunks;
use crate::socket::{self, LowWaterMark, ReceiveMode, SendMode};

/// Chunk size of checksummed transfers, small enough to stay in the CPU cache.
const CHUNK: usize = 256 << 10;
/// Bytes that must have arrived before a thread that receives a large body is woken.
const LOW_WATER: u64 = 256 << 10;

impl MappedRegion {
    /// Receives available bytes, at most `len`. Returns 0 when the peer has closed its side. For callers with their own timeouts.
    ///
    /// # Errors
    /// Errors of `recv`, or [`OutOfRangeError`](crate::OutOfRangeError) inside `InvalidInput`.
    pub fn receive(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<usize> {
        socket::receive(socket.as_fd(), self.span(offset, len)?, ReceiveMode::Some)
    }

    /// Receives exactly `len` bytes from a blocking socket. Bytes that arrive before an error are written.
    ///
    /// # Errors
    /// `UnexpectedEof` when the peer closes its side early, `WouldBlock` when the socket's timeout expires, or as
    /// [`MappedRegion::receive`].
    pub fn receive_exact(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
        let mut low_water = LowWaterMark::new(socket.as_fd());
        self.receive_part(&socket, offset, len, len, &mut low_water)
    }

    /// Receives the next `len` of `remaining` bytes.
    fn receive_part(
        &self,
        socket: &impl AsFd,
        offset: u64,
        len: u64,
        remaining: u64,
        low_water: &mut LowWaterMark<'_>,
    ) -> io::Result<()> {
        self.check(offset, len)?;
        let (end, body_end) = (offset + len, offset + remaining);
        let mut position = offset;
        while position < end {
            // As many bytes as the mark must still arrive after those of this call, or it would wait for bytes of the next request.
            let marked = (body_end - position).saturating_sub(LOW_WATER).min(end - position);
            let part = if marked >= LOW_WATER { marked } else { end - position };
            low_water.set(if marked >= LOW_WATER { LOW_WATER } else { 1 })?;
            let received = socket::receive(socket.as_fd(), self.span(position, part)?, ReceiveMode::All)?;
            if received == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            position += received as u64;
        }
        Ok(())
    }

    /// As [`MappedRegion::receive_exact`], and returns the CRC-32C of the stored bytes, computed while they are in the CPU cache.
    ///
    /// # Errors
    /// As [`MappedRegion::receive_exact`].
    pub fn receive_exact_crc(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<u32> {
        self.check(offset, len)?;
        let mut crc = Crc32c::new();
        let mut low_water = LowWaterMark::new(socket.as_fd());
        for chunk in chunks(offset, len, CHUNK) {
            let remaining = offset + len - chunk.offset;
            self.receive_part(&socket, chunk.offset, chunk.len as u64, remaining, &mut low_water)?;
            self.update(&mut crc, chunk.offset, chunk.len as u64)?;
        }
        Ok(crc.value())
    }

    /// Sends as much as the socket accepts at once, at most `len` bytes. For callers with their own timeouts.
    ///
    /// # Errors
    /// Errors of `send`, or [`OutOfRangeError`](crate::OutOfRangeError) inside `InvalidInput`.
    pub fn send(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<usize> {
        socket::send(socket.as_fd(), self.span(offset, len)?, SendMode::Last)
    }

    /// Sends exactly `len` bytes over a blocking socket.
    ///
    /// # Errors
    /// `WouldBlock` when the socket's timeout expires, or as [`MappedRegion::send`].
    pub fn send_all(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
        self.send_part(socket, offset, len, SendMode::Last)
    }

    /// As [`MappedRegion::send_all`], and returns the CRC-32C of the bytes as read just before sending. The last packet may wait for the
    /// checksum that is sent next.
    ///
    /// # Errors
    /// As [`MappedRegion::send_all`].
    pub fn send_all_crc(&self, socket: impl AsFd, offset: u64, len: u64) -> io::Result<u32> {
        self.check(offset, len)?;
        let mut crc = Crc32c::new();
        for chunk in chunks(offset, len, CHUNK) {
            self.update(&mut crc, chunk.offset, chunk.len as u64)?;
            self.send_part(&socket, chunk.offset, chunk.len as u64, SendMode::Follows)?;
        }
        Ok(crc.value())
    }

    fn send_part(&self, socket: impl AsFd, offset: u64, len: u64, more: SendMode) -> io::Result<()> {
        self.check(offset, len)?;
        let end = offset + len;
        let mut position = offset;
        while position < end {
            let sent = socket::send(socket.as_fd(), self.span(position, end - position)?, more)?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            position += sent as u64;
        }
        Ok(())
    }
}

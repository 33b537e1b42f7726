//! Moves bytes between a socket and mapped memory without a copy in this process.
#![expect(unsafe_code, reason = "passes addresses of memory that is never exposed as a slice to the kernel")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use crate::mapping::MappedSpan;

/// When a receive call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceiveMode {
    /// As soon as some bytes are available.
    Some,
    /// When all bytes have arrived, or no more will.
    All,
}

/// Whether more bytes follow a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// More follows: a partial packet may wait for it.
    Follows,
    /// Nothing follows: send at once.
    Last,
}

/// Receives into `span`. Returns 0 when the peer has closed its side.
pub(crate) fn receive(socket: BorrowedFd<'_>, span: MappedSpan<'_>, wait: ReceiveMode) -> io::Result<usize> {
    let flags = if wait == ReceiveMode::All { libc::MSG_WAITALL } else { 0 };
    loop {
        // SAFETY: the span is mapped and writable for its length while it is borrowed; only the kernel writes to it here.
        let received = unsafe { libc::recv(socket.as_raw_fd(), span.start().cast(), span.len(), flags) };
        match usize::try_from(received) {
            Ok(received) => return Ok(received),
            Err(_) => interrupted_or(io::Error::last_os_error())?,
        }
    }
}

/// Sends from `span`. A closed connection is an error, not a signal.
pub(crate) fn send(socket: BorrowedFd<'_>, span: MappedSpan<'_>, more: SendMode) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | if more == SendMode::Follows { libc::MSG_MORE } else { 0 };
    loop {
        // SAFETY: the span is mapped and readable for its length while it is borrowed.
        let sent = unsafe { libc::send(socket.as_raw_fd(), span.start().cast(), span.len(), flags) };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => interrupted_or(io::Error::last_os_error())?,
        }
    }
}

/// The number of bytes that must have arrived before the kernel wakes a thread that waits on a socket (`SO_RCVLOWAT`). Reset to one on
/// drop.
#[derive(Debug)]
pub(crate) struct LowWaterMark<'a> {
    socket: BorrowedFd<'a>,
    bytes: u64,
}

impl<'a> LowWaterMark<'a> {
    /// A socket with the default of one byte.
    pub(crate) fn new(socket: BorrowedFd<'a>) -> Self {
        Self { socket, bytes: 1 }
    }

    pub(crate) fn set(&mut self, bytes: u64) -> io::Result<()> {
        if bytes == self.bytes {
            return Ok(());
        }
        let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        let length = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the pointer is to an integer of this length that lives until the call returns, and the kernel only reads it.
        let set = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                std::ptr::from_ref(&value).cast(),
                length,
            )
        };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for LowWaterMark<'_> {
    fn drop(&mut self) {
        // A socket that refuses this is broken, which its next use reports.
        let _ = self.set(1);
    }
}

fn interrupted_or(problem: io::Error) -> io::Result<()> {
    if problem.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(problem) }
}

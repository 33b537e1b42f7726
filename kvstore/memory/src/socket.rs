//! Bytes between a socket and mapped memory, without a copy in this process.
#![expect(unsafe_code, reason = "the kernel is given addresses of memory that is never lent as a slice")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use crate::mapping::MappedSpan;

/// Whether a call may return before all bytes have come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReceiveMode {
    /// With what is there.
    Some,
    /// Once all has come, or no more will.
    All,
}

/// Whether more is sent after this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendMode {
    /// Yes: a packet that is not full may wait for it.
    Follows,
    /// No.
    Last,
}

/// Receives into `span`. 0 when the peer has ended its side.
pub(crate) fn receive(socket: BorrowedFd<'_>, span: MappedSpan<'_>, wait: ReceiveMode) -> io::Result<usize> {
    let flags = if wait == ReceiveMode::All { libc::MSG_WAITALL } else { 0 };
    loop {
        // SAFETY: the span is mapped and writable for its length while it is borrowed, and only the kernel writes here.
        let got = unsafe { libc::recv(socket.as_raw_fd(), span.start().cast(), span.len(), flags) };
        match usize::try_from(got) {
            Ok(got) => return Ok(got),
            Err(_) => interrupted_or(io::Error::last_os_error())?,
        }
    }
}

/// Sends from `span`; the peer being gone is an error, not a signal.
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

fn interrupted_or(problem: io::Error) -> io::Result<()> {
    if problem.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(problem) }
}

//! One plaintext connection, from its first header to its close.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;

use super::TransferServerOptions;
use super::barrier::{
    BarrierOutcome, HeaderProgress, TrackedConnection, UnacknowledgedWrite, UnfinishedWriteError,
};
use super::counts::TransferCounters;
use super::listener::TransferAcceptor;
use super::registry::ConnectionGuard;
use super::transfer_target::{AddressRange, TransferTarget};
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// How long a rejected peer may continue to send.
pub(super) const REFUSED_LINGER: Duration = Duration::from_secs(1);

pub(super) struct PlainConnection {
    pub(super) stream: Arc<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) acceptor: Arc<TransferAcceptor>,
    pub(super) tracked: Arc<TrackedConnection>,
    pub(super) guard: ConnectionGuard,
}

/// A request, with its registration if it is an unacknowledged write.
struct PlainRequest {
    header: TransferHeader,
    write: Option<UnacknowledgedWrite>,
}

/// Why a connection ends; completes the log message "a peer …".
#[derive(Debug, thiserror::Error)]
enum PlainCloseReason {
    #[error("requested {0}, which is not within this node's memory")]
    Rejected(AddressRange),
    #[error("requested {range}: {reason}")]
    Unfinished { range: AddressRange, reason: UnfinishedWriteError },
    #[error("sent an invalid header: {0}")]
    Malformed(#[from] plane::UnknownOperationError),
    #[error("disconnected during the transfer of {range}: {error}")]
    Failed { range: AddressRange, error: io::Error },
    #[error("disconnected in the middle of a header")]
    TruncatedHeader,
    /// Regular close between two requests.
    #[error("closed")]
    Closed,
}

pub(super) fn set_options(stream: &TcpStream, options: &TransferServerOptions) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(options.stall))?;
    stream.set_write_timeout(Some(options.stall))?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(options.keepalive)
        .with_interval(options.keepalive / 3)
        .with_retries(3);
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    // The kernel sends no keepalive probes while sent bytes are unacknowledged; without this option it retransmits for 15 minutes.
    socket.set_tcp_user_timeout(Some(options.stall))
}

impl PlainConnection {
    /// Serves requests until the connection ends.
    pub(super) fn run(self) {
        let reason = match set_options(&self.stream, self.options()) {
            Ok(()) => self.transfers(),
            Err(error) => PlainCloseReason::Failed { range: AddressRange { start: 0, size: 0 }, error },
        };
        self.acceptor.barrier.untrack(&self.tracked);
        let counts = self.counts();
        let count = match &reason {
            PlainCloseReason::Rejected(_) => &counts.rejected,
            PlainCloseReason::Unfinished { .. } => &counts.unfinished,
            PlainCloseReason::Malformed(_) => &counts.malformed,
            PlainCloseReason::Failed { .. } | PlainCloseReason::TruncatedHeader => &counts.failed,
            PlainCloseReason::Closed => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(peer = %self.peer, "a peer {reason}; its connection is closed");
    }

    fn counts(&self) -> &TransferCounters {
        &self.acceptor.counts
    }

    fn target(&self) -> &dyn TransferTarget {
        &*self.acceptor.target
    }

    fn options(&self) -> &TransferServerOptions {
        &self.acceptor.options
    }

    fn transfers(&self) -> PlainCloseReason {
        let mut is_tracked = true;
        loop {
            self.guard.idle();
            if self.guard.is_draining() {
                return PlainCloseReason::Closed;
            }
            let request = if is_tracked { self.tracked_request() } else { self.request() };
            let request = match request {
                Ok(request) => request,
                Err(reason) => return reason,
            };
            self.guard.mark_requested();
            // A peer uses one protocol per connection.
            if is_tracked && request.header.protocol != TransferProtocol::V1 {
                is_tracked = false;
                self.acceptor.barrier.untrack(&self.tracked);
            }
            if let Err(reason) = self.transfer(request) {
                return reason;
            }
        }
    }

    /// Waits for the next request. There is no time limit between two requests.
    fn request(&self) -> Result<PlainRequest, PlainCloseReason> {
        let mut bytes = [0; HEADER];
        let mut filled = 0;
        while filled < HEADER {
            match (&*self.stream).read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Err(PlainCloseReason::Closed),
                Ok(0) => return Err(PlainCloseReason::TruncatedHeader),
                Ok(bytes_read) => {
                    if filled == 0 {
                        self.guard.busy_for(self.options().stall);
                    }
                    filled += bytes_read;
                }
                Err(error) => self.should_continue(&error, filled > 0)?,
            }
        }
        Ok(PlainRequest { header: TransferHeader::decode(&bytes)?, write: None })
    }

    /// As [`Self::request`] on a tracked connection: bytes leave the socket only where the barrier can see them.
    fn tracked_request(&self) -> Result<PlainRequest, PlainCloseReason> {
        self.acceptor.barrier.expect_header(&self.tracked);
        let mut within_header = false;
        loop {
            match self.stream.peek(&mut [0]) {
                Ok(_) => {}
                Err(error) => {
                    self.should_continue(&error, within_header)?;
                    continue;
                }
            }
            if !within_header {
                self.guard.busy_for(self.options().stall);
            }
            match self.acceptor.barrier.receive_header(&self.tracked) {
                Ok(HeaderProgress::Header(header, write)) => return Ok(PlainRequest { header, write }),
                Ok(HeaderProgress::Part) => within_header = true,
                Ok(HeaderProgress::End { within_header: false }) => return Err(PlainCloseReason::Closed),
                Ok(HeaderProgress::Malformed(error)) => return Err(error.into()),
                Ok(HeaderProgress::End { within_header: true }) | Err(_) => {
                    return Err(PlainCloseReason::TruncatedHeader);
                }
            }
        }
    }

    /// Whether to keep waiting for a header after a socket error.
    fn should_continue(&self, error: &io::Error, within_header: bool) -> Result<(), PlainCloseReason> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            _ if within_header => Err(PlainCloseReason::TruncatedHeader),
            io::ErrorKind::WouldBlock if !self.guard.is_draining() && !self.guard.is_silent() => Ok(()),
            _ => Err(PlainCloseReason::Closed),
        }
    }

    fn transfer(&self, request: PlainRequest) -> Result<(), PlainCloseReason> {
        let started = Instant::now();
        let PlainRequest { header, write } = request;
        let range = AddressRange { start: header.address, size: header.size };
        let slow = Duration::from_secs(range.size / self.options().slowest.max(1));
        self.guard.busy_for(self.options().stall + slow);
        if let Err(reason) = self.admit(&header, range) {
            if header.protocol != TransferProtocol::V1 {
                self.reject();
            }
            return Err(reason);
        }
        let is_mapped = matches!(header.protocol, TransferProtocol::Mapped(_));
        let moved = match header.operation {
            TransferOperation::Read if is_mapped => self.read_mapped(range),
            TransferOperation::Read => self.read(range, header.protocol),
            TransferOperation::Write if is_mapped => self.write_mapped(range),
            TransferOperation::Write => self.write(range, header.protocol),
        };
        drop(write);
        moved.map_err(|error| PlainCloseReason::Failed { range, error })?;
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts().record_transfer(header.operation, header.protocol, range.size, nanos);
        Ok(())
    }

    fn admit(&self, header: &TransferHeader, range: AddressRange) -> Result<(), PlainCloseReason> {
        if header.operation == TransferOperation::Read {
            self.order(range)?;
        }
        let is_admitted = |protocol| match protocol {
            TransferProtocol::Mapped(mapping) => self.target().admit_mapped(range, mapping),
            TransferProtocol::V1 | TransferProtocol::V2 | TransferProtocol::Checked => true,
        };
        if self.is_allowed(header.operation, range) && is_admitted(header.protocol) {
            Ok(())
        } else {
            Err(PlainCloseReason::Rejected(range))
        }
    }

    /// Waits for the writes that arrived before a read.
    fn order(&self, range: AddressRange) -> Result<(), PlainCloseReason> {
        let acceptor = &self.acceptor;
        let ordered = acceptor.barrier.order(range, self.options().write_wait, || acceptor.accept_queued());
        let ordered = ordered.map_err(|reason| {
            tracing::warn!(peer = %self.peer, "read of {range} rejected: {reason}");
            PlainCloseReason::Unfinished { range, reason }
        })?;
        if ordered == BarrierOutcome::Waited {
            self.counts().delayed_reads.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_allowed(&self, operation: TransferOperation, range: AddressRange) -> bool {
        let possible = range.size > 0 && range.start.checked_add(range.size).is_some();
        possible
            && self.target().contains(range)
            && (operation == TransferOperation::Write || self.target().is_readable(range))
    }

    /// Sends a rejection. Closing a connection with unread bytes discards the response, so the beginning of the body is read first.
    fn reject(&self) {
        let sent = (&*self.stream).write_all(&TransferStatus::Rejected.encode());
        let sent = sent.and_then(|()| self.stream.shutdown(Shutdown::Write));
        let sent = sent.and_then(|()| self.stream.set_read_timeout(Some(REFUSED_LINGER)));
        let deadline = Instant::now() + REFUSED_LINGER;
        let mut unread = [0; 16 << 10];
        while sent.is_ok() && Instant::now() < deadline {
            match (&*self.stream).read(&mut unread) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    /// Serves a read of the peer.
    fn read(&self, range: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        if protocol != TransferProtocol::V1 {
            self.send_before_more(&TransferStatus::Ok.encode())?;
        }
        if protocol != TransferProtocol::Checked {
            return self.target().send(&self.stream, range);
        }
        // The checksum recorded at write time also reveals later corruption.
        let crc = match self.target().checksum(range) {
            Some(recorded) => {
                self.target().send(&self.stream, range)?;
                recorded
            }
            None => self.target().send_summed(&self.stream, range)?,
        };
        (&*self.stream).write_all(&plane::trailer(crc))
    }

    /// Serves a write of the peer.
    fn write(&self, range: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        let checked = protocol == TransferProtocol::Checked;
        let mut is_intact = |crc: Option<u32>| {
            let mut trailer = [0; STATUS];
            if checked {
                (&*self.stream).read_exact(&mut trailer)?;
            }
            Ok(!checked || plane::checksum(trailer) == crc)
        };
        let intact = self.target().receive(&self.stream, range, checked, &mut is_intact)?;
        if !intact {
            self.counts().damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "checksum mismatch for {range}: corrupted in transit, or written by another peer at the same time");
        }
        match protocol {
            TransferProtocol::V1 => Ok(()),
            _ if intact => (&*self.stream).write_all(&TransferStatus::Ok.encode()),
            _ => (&*self.stream).write_all(&TransferStatus::Damaged.encode()),
        }
    }

    /// Serves a read of a peer that has mapped the range.
    fn read_mapped(&self, range: AddressRange) -> io::Result<()> {
        let mut response = [0; 2 * STATUS];
        response[..STATUS].copy_from_slice(&TransferStatus::Ok.encode());
        let recorded = self.target().checksum(range).map(plane::trailer);
        response[STATUS..].copy_from_slice(&recorded.unwrap_or(plane::NO_CHECKSUM));
        (&*self.stream).write_all(&response)
    }

    /// Serves a write of a peer that has mapped the range.
    fn write_mapped(&self, range: AddressRange) -> io::Result<()> {
        let has_receipt = self.target().needs_mapped_checksum(range);
        let ready = if has_receipt { TransferStatus::Ok } else { TransferStatus::OkWithoutReceipt };
        let mut wait = || {
            (&*self.stream).write_all(&ready.encode())?;
            let mut trailer = [0; STATUS];
            (&*self.stream).read_exact(&mut trailer)?;
            Ok(plane::checksum(trailer))
        };
        let intact = self.target().receive_mapped(range, &mut wait)?;
        if !intact {
            self.counts().damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "another peer wrote to {range} at the same time; it is not readable");
        }
        let receipt = if intact { TransferStatus::Ok } else { TransferStatus::Damaged };
        if has_receipt { (&*self.stream).write_all(&receipt.encode()) } else { Ok(()) }
    }

    /// Sends bytes that may share a packet with the following ones.
    fn send_before_more(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::net::send(&*self.stream, bytes, SendFlags::MORE | SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

//! One connection, from its first header to its end.

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
use super::counts::Counts;
use super::listener::TransferAcceptor;
use super::registry::ConnectionGuard;
use super::transfer_target::{AddressRange, TransferTarget};
use crate::plane::{
    self, HEADER, STATUS, TransferHeader, TransferOperation, TransferProtocol, TransferStatus,
};

/// How long a peer that was refused may go on sending.
pub(super) const REFUSED_LINGER: Duration = Duration::from_secs(1);

pub(super) struct PlainConnection {
    pub(super) stream: Arc<TcpStream>,
    pub(super) peer: SocketAddr,
    pub(super) acceptor: Arc<TransferAcceptor>,
    pub(super) tracked: Arc<TrackedConnection>,
    pub(super) guard: ConnectionGuard,
}

/// A request, and its write in progress if the protocol does not acknowledge it.
struct PlainRequest {
    header: TransferHeader,
    write: Option<UnacknowledgedWrite>,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum PlainCloseReason {
    #[error("asked for {0}, which is not within this node's memory")]
    Rejected(AddressRange),
    #[error("requested {span}: {reason}")]
    Unfinished { span: AddressRange, reason: UnfinishedWriteError },
    #[error("sent a header that is none: {0}")]
    Malformed(#[from] plane::UnknownOperationError),
    #[error("broke off in the middle of {span}: {error}")]
    Failed { span: AddressRange, error: io::Error },
    #[error("broke off in the middle of a header")]
    TruncatedHeader,
    /// In order.
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
    // The kernel sends no keepalive probes while sent bytes are unacknowledged, and waits for those 15 minutes.
    socket.set_tcp_user_timeout(Some(options.stall))
}

impl PlainConnection {
    /// Serves until the connection ends.
    pub(super) fn run(self) {
        let end = match set_options(&self.stream, self.options()) {
            Ok(()) => self.transfers(),
            Err(error) => PlainCloseReason::Failed { span: AddressRange { start: 0, size: 0 }, error },
        };
        self.acceptor.barrier.untrack(&self.tracked);
        let counts = self.counts();
        let count = match &end {
            PlainCloseReason::Rejected(_) => &counts.rejected,
            PlainCloseReason::Unfinished { .. } => &counts.unfinished,
            PlainCloseReason::Malformed(_) => &counts.malformed,
            PlainCloseReason::Failed { .. } | PlainCloseReason::TruncatedHeader => &counts.failed,
            PlainCloseReason::Closed => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(peer = %self.peer, "a peer {end}; its connection is closed");
    }

    fn counts(&self) -> &Counts {
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
                Err(end) => return end,
            };
            self.guard.mark_requested();
            // A peer uses one protocol per connection.
            if is_tracked && request.header.protocol != TransferProtocol::V1 {
                is_tracked = false;
                self.acceptor.barrier.untrack(&self.tracked);
            }
            if let Err(end) = self.transfer(request) {
                return end;
            }
        }
    }

    /// Waits for the next request. A peer may be silent between two for as long as it likes.
    fn request(&self) -> Result<PlainRequest, PlainCloseReason> {
        let mut bytes = [0; HEADER];
        let mut filled = 0;
        while filled < HEADER {
            match (&*self.stream).read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Err(PlainCloseReason::Closed),
                Ok(0) => return Err(PlainCloseReason::TruncatedHeader),
                Ok(more) => {
                    if filled == 0 {
                        self.guard.busy_for(self.options().stall);
                    }
                    filled += more;
                }
                Err(error) => self.should_continue(&error, filled > 0)?,
            }
        }
        Ok(PlainRequest { header: TransferHeader::decode(&bytes)?, write: None })
    }

    /// The same on a connection whose writes reads are ordered behind: nothing is taken from the socket before that can be seen
    /// by the barrier.
    fn tracked_request(&self) -> Result<PlainRequest, PlainCloseReason> {
        self.acceptor.barrier.expect_header(&self.tracked);
        let mut is_within = false;
        loop {
            match self.stream.peek(&mut [0]) {
                Ok(_) => {}
                Err(error) => {
                    self.should_continue(&error, is_within)?;
                    continue;
                }
            }
            if !is_within {
                self.guard.busy_for(self.options().stall);
            }
            match self.acceptor.barrier.receive_header(&self.tracked) {
                Ok(HeaderProgress::Header(header, write)) => return Ok(PlainRequest { header, write }),
                Ok(HeaderProgress::Part) => is_within = true,
                Ok(HeaderProgress::End { within_header: false }) => return Err(PlainCloseReason::Closed),
                Ok(HeaderProgress::Malformed(error)) => return Err(error.into()),
                Ok(HeaderProgress::End { within_header: true }) | Err(_) => {
                    return Err(PlainCloseReason::TruncatedHeader);
                }
            }
        }
    }

    /// Whether a header is waited for after an error of the socket.
    fn should_continue(&self, error: &io::Error, within_header: bool) -> Result<(), PlainCloseReason> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            _ if within_header => Err(PlainCloseReason::TruncatedHeader),
            io::ErrorKind::WouldBlock if !self.guard.is_draining() && !self.guard.is_silent() => Ok(()),
            _ => Err(PlainCloseReason::Closed),
        }
    }

    fn transfer(&self, request: PlainRequest) -> Result<(), PlainCloseReason> {
        let began = Instant::now();
        let PlainRequest { header, write } = request;
        let span = AddressRange { start: header.address, size: header.size };
        let slow = Duration::from_secs(span.size / self.options().slowest.max(1));
        self.guard.busy_for(self.options().stall + slow);
        if let Err(end) = self.admit(header.operation, span) {
            if header.protocol != TransferProtocol::V1 {
                self.reject();
            }
            return Err(end);
        }
        let moved = match header.operation {
            TransferOperation::Read => self.read(span, header.protocol),
            TransferOperation::Write => self.write(span, header.protocol),
        };
        drop(write);
        moved.map_err(|error| PlainCloseReason::Failed { span, error })?;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts().record_transfer(header.operation, header.protocol, span.size, nanos);
        Ok(())
    }

    fn admit(&self, operation: TransferOperation, span: AddressRange) -> Result<(), PlainCloseReason> {
        if operation == TransferOperation::Read {
            self.order(span)?;
        }
        if self.is_allowed(operation, span) { Ok(()) } else { Err(PlainCloseReason::Rejected(span)) }
    }

    /// Lets the writes end that came before a read.
    fn order(&self, span: AddressRange) -> Result<(), PlainCloseReason> {
        let acceptor = &self.acceptor;
        let ordered = acceptor.barrier.order(span, self.options().write_wait, || acceptor.accept_queued());
        let ordered = ordered.map_err(|reason| {
            tracing::warn!(peer = %self.peer, "a read of {span} is refused: {reason}");
            PlainCloseReason::Unfinished { span, reason }
        })?;
        if ordered == BarrierOutcome::Waited {
            self.counts().delayed_reads.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_allowed(&self, operation: TransferOperation, span: AddressRange) -> bool {
        let possible = span.size > 0 && span.start.checked_add(span.size).is_some();
        possible
            && self.target().contains(span)
            && (operation == TransferOperation::Write || self.target().is_readable(span))
    }

    /// Tells that a range is refused. A connection that is closed with bytes in it that nobody has read takes the
    /// answer with it, so the beginning of the body is read.
    fn reject(&self) {
        let told = (&*self.stream).write_all(&TransferStatus::Rejected.encode());
        let told = told.and_then(|()| self.stream.shutdown(Shutdown::Write));
        let told = told.and_then(|()| self.stream.set_read_timeout(Some(REFUSED_LINGER)));
        let until = Instant::now() + REFUSED_LINGER;
        let mut unread = [0; 16 << 10];
        while told.is_ok() && Instant::now() < until {
            match (&*self.stream).read(&mut unread) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    /// The peer reads.
    fn read(&self, span: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        if protocol != TransferProtocol::V1 {
            self.send_before_more(&TransferStatus::Ok.encode())?;
        }
        if protocol != TransferProtocol::Checked {
            return self.target().send(&self.stream, span);
        }
        // What was noted when the bytes were written also tells whether they have changed since.
        let crc = match self.target().checksum(span) {
            Some(known) => {
                self.target().send(&self.stream, span)?;
                known
            }
            None => self.target().send_summed(&self.stream, span)?,
        };
        (&*self.stream).write_all(&plane::trailer(crc))
    }

    /// The peer writes.
    fn write(&self, span: AddressRange, protocol: TransferProtocol) -> io::Result<()> {
        let checked = protocol == TransferProtocol::Checked;
        let mut whole = |crc: Option<u32>| {
            let mut trailer = [0; STATUS];
            if checked {
                (&*self.stream).read_exact(&mut trailer)?;
            }
            Ok(!checked || plane::checksum(trailer) == crc)
        };
        let is_whole = self.target().receive(&self.stream, span, checked, &mut whole)?;
        if !is_whole {
            self.counts().damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "{span} are not what was sent: they were damaged on their way, or written by another peer too");
        }
        match protocol {
            TransferProtocol::V1 => Ok(()),
            _ if is_whole => (&*self.stream).write_all(&TransferStatus::Ok.encode()),
            _ => (&*self.stream).write_all(&TransferStatus::Damaged.encode()),
        }
    }

    /// Sends bytes that may share a packet with those that follow.
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

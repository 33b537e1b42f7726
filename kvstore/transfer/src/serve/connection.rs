//! One connection, from its first header to its end.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;

use super::Options;
use super::counts::Counts;
use super::registry::Place;
use super::target::{Span, Target};
use crate::plane::{self, HEADER, Header, Operation, Protocol, STATUS, Status};

/// How long a peer that was refused may go on sending.
const LINGER: Duration = Duration::from_secs(1);

pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) target: Arc<dyn Target>,
    pub(super) options: Arc<Options>,
    pub(super) counts: Arc<Counts>,
    pub(super) place: Place,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("asked for {0}, which is not within this node's memory")]
    Rejected(Span),
    #[error("sent a header that is none: {0}")]
    Malformed(#[from] plane::UnknownOperation),
    #[error("broke off in the middle of {span}: {error}")]
    Failed { span: Span, error: io::Error },
    #[error("broke off in the middle of a header")]
    HalfHeader,
    /// In order.
    #[error("closed")]
    Closed,
}

impl Connection {
    /// Serves until the connection ends.
    pub(super) fn run(self) {
        let end = match self.set_options() {
            Ok(()) => self.transfers(),
            Err(error) => End::Failed { span: Span { start: 0, size: 0 }, error },
        };
        let count = match &end {
            End::Rejected(_) => &self.counts.rejected,
            End::Malformed(_) => &self.counts.malformed,
            End::Failed { .. } | End::HalfHeader => &self.counts.failed,
            End::Closed => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(peer = %self.peer, "a peer {end}; its connection is closed");
    }

    fn set_options(&self) -> io::Result<()> {
        self.stream.set_nonblocking(false)?;
        self.stream.set_nodelay(true)?;
        self.stream.set_read_timeout(Some(self.options.stall))?;
        self.stream.set_write_timeout(Some(self.options.stall))?;
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(self.options.keepalive)
            .with_interval(self.options.keepalive / 3)
            .with_retries(3);
        let socket = socket2::SockRef::from(&self.stream);
        socket.set_tcp_keepalive(&keepalive)?;
        // The kernel asks nobody who has yet to acknowledge what was sent, and waits for that a quarter of an hour.
        socket.set_tcp_user_timeout(Some(self.options.stall))
    }

    fn transfers(&self) -> End {
        loop {
            self.place.idle();
            if self.place.is_draining() {
                return End::Closed;
            }
            let header = match self.header() {
                Ok(header) => header,
                Err(end) => return end,
            };
            if let Err(end) = self.transfer(&header) {
                return end;
            }
        }
    }

    /// Waits for the next header. A peer may be silent between two for as long as it likes.
    fn header(&self) -> Result<Header, End> {
        let mut bytes = [0; HEADER];
        let mut filled = 0;
        while filled < HEADER {
            match (&self.stream).read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Err(End::Closed),
                Ok(0) => return Err(End::HalfHeader),
                Ok(more) => {
                    if filled == 0 {
                        self.place.busy_for(self.options.stall);
                    }
                    filled += more;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && filled == 0 => {
                    if self.place.is_draining() {
                        return Err(End::Closed);
                    }
                }
                Err(_) if filled == 0 => return Err(End::Closed),
                Err(_) => return Err(End::HalfHeader),
            }
        }
        Ok(Header::decode(&bytes)?)
    }

    fn transfer(&self, header: &Header) -> Result<(), End> {
        let began = Instant::now();
        let span = Span { start: header.address, size: header.size };
        if !self.may(header.operation, span) {
            if header.protocol != Protocol::V1 {
                self.reject();
            }
            return Err(End::Rejected(span));
        }
        let slow = Duration::from_secs(span.size / self.options.slowest.max(1));
        self.place.busy_for(self.options.stall + slow);
        let moved = match header.operation {
            Operation::Read => self.read(span, header.protocol),
            Operation::Write => self.write(span, header.protocol),
        };
        moved.map_err(|error| End::Failed { span, error })?;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counts.done(header.operation, header.protocol, span.size, nanos);
        Ok(())
    }

    fn may(&self, operation: Operation, span: Span) -> bool {
        let possible = span.size > 0 && span.start.checked_add(span.size).is_some();
        possible
            && self.target.contains(span)
            && (operation == Operation::Write || self.target.readable(span))
    }

    /// Tells that a range is refused. A connection that is closed with bytes in it that nobody has read takes the
    /// answer with it, so the beginning of the body is read.
    fn reject(&self) {
        let told = (&self.stream).write_all(&Status::Rejected.encode());
        let told = told.and_then(|()| self.stream.shutdown(Shutdown::Write));
        let told = told.and_then(|()| self.stream.set_read_timeout(Some(LINGER)));
        let until = Instant::now() + LINGER;
        let mut unread = [0; 16 << 10];
        while told.is_ok() && Instant::now() < until {
            match (&self.stream).read(&mut unread) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
        }
    }

    /// The peer reads.
    fn read(&self, span: Span, protocol: Protocol) -> io::Result<()> {
        if protocol != Protocol::V1 {
            self.send_before_more(&Status::Ok.encode())?;
        }
        if protocol != Protocol::Checked {
            return self.target.send(&self.stream, span);
        }
        // What was noted when the bytes were written also tells whether they have changed since.
        let crc = match self.target.checksum(span) {
            Some(known) => {
                self.target.send(&self.stream, span)?;
                known
            }
            None => self.target.send_summed(&self.stream, span)?,
        };
        (&self.stream).write_all(&plane::trailer(crc))
    }

    /// The peer writes.
    fn write(&self, span: Span, protocol: Protocol) -> io::Result<()> {
        let checked = protocol == Protocol::Checked;
        let mut whole = |crc: Option<u32>| {
            let mut trailer = [0; STATUS];
            if checked {
                (&self.stream).read_exact(&mut trailer)?;
            }
            Ok(!checked || plane::checksum(trailer) == crc)
        };
        let is_whole = self.target.receive(&self.stream, span, checked, &mut whole)?;
        if !is_whole {
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(peer = %self.peer, "{span} are not what was sent: they were damaged on their way, or written by another peer too");
        }
        match protocol {
            Protocol::V1 => Ok(()),
            _ if is_whole => (&self.stream).write_all(&Status::Ok.encode()),
            _ => (&self.stream).write_all(&Status::Damaged.encode()),
        }
    }

    /// Sends bytes that may share a packet with those that follow.
    fn send_before_more(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::net::send(&self.stream, bytes, SendFlags::MORE | SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}
